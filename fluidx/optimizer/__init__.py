"""Optimizers under fluid's names: `minimize(loss)` appends the backward pass and an update of each parameter."""

from ..fluid_names import module_getattr
from .adam import Adam, Adamax, AdamW, Lamb
from .adasum import AdasumOptimizer
from .average import ExponentialMovingAverage, ModelAverage
from .base import Optimizer
from .dgc import DGCMomentum
from .dpsgd import Dpsgd
from .gradient import SGD, Adadelta, Adagrad, DecayedAdagrad, Ftrl, LarsMomentum, Momentum, RMSProp
from .local_sgd import LocalSGDOptimizer
from .lookahead import LookaheadOptimizer
from .merge import GradientMergeOptimizer
from .pipeline import PipelineOptimizer
from .powersgd import PowerSGDOptimizer
from .recompute import RecomputeOptimizer

SGDOptimizer = SGD
MomentumOptimizer = Momentum
DGCMomentumOptimizer = DGCMomentum
DpsgdOptimizer = Dpsgd
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
    "Dpsgd", "DpsgdOptimizer", "ExponentialMovingAverage", "Ftrl", "FtrlOptimizer", "GradientMergeOptimizer", "Lamb", "LambOptimizer",
    "LarsMomentum", "LarsMomentumOptimizer", "LocalSGDOptimizer", "LookaheadOptimizer", "ModelAverage", "Momentum", "MomentumOptimizer",
    "Optimizer", "PipelineOptimizer", "PowerSGDOptimizer", "RMSProp", "RMSPropOptimizer", "RecomputeOptimizer", "SGD", "SGDOptimizer",
]  # fmt: skip
__getattr__ = module_getattr("optimizer", __all__)
