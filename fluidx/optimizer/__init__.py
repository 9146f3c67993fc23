"""Optimizers: `minimize(loss)` appends the backward pass and one update per parameter, under fluid's names."""

from .adam import Adam, Adamax, AdamW, Lamb
from .adasum import AdasumOptimizer
from .average import ExponentialMovingAverage
from .base import Optimizer
from .dgc import DGCMomentum
from .gradient import SGD, Adadelta, Adagrad, DecayedAdagrad, Ftrl, LarsMomentum, Momentum, RMSProp
from .local_sgd import LocalSGDOptimizer
from .merge import GradientMergeOptimizer
from .powersgd import PowerSGDOptimizer
from .recompute import RecomputeOptimizer

SGDOptimizer = SGD
MomentumOptimizer = Momentum
DGCMomentumOptimizer = DGCMomentum
LarsMomentumOptimizer = LarsMomentum
AdagradOptimizer = Adagrad
DecayedAdagradOptimizer = DecayedAdagrad
AdamOptimizer = Adam
AdamWOptimizer = AdamW
AdamaxOptimizer = Adamax
LambOptimizer = Lamb
AdadeltaOptimizer = Adadelta
RMSPropOptimizer = RMSProp
FtrlOptimizer = Ftrl

__all__ = [
    "Adadelta", "AdadeltaOptimizer", "Adagrad", "AdagradOptimizer", "Adam", "AdamOptimizer", "AdamW", "AdamWOptimizer", "Adamax",
    "AdamaxOptimizer", "AdasumOptimizer", "DGCMomentum", "DGCMomentumOptimizer", "DecayedAdagrad", "DecayedAdagradOptimizer",
    "ExponentialMovingAverage", "Ftrl", "FtrlOptimizer", "GradientMergeOptimizer", "Lamb", "LambOptimizer", "LarsMomentum",
    "LarsMomentumOptimizer", "LocalSGDOptimizer", "Momentum", "MomentumOptimizer", "Optimizer", "PowerSGDOptimizer", "RMSProp",
    "RMSPropOptimizer",
    "RecomputeOptimizer", "SGD", "SGDOptimizer",
]  # fmt: skip
