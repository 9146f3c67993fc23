"""LocalSGD: ranks train by themselves, and every few runs their parameters become the mean of all."""

from __future__ import annotations

from typing import Any

from .._checks import whole
from ..ir import Role
from ..layers.control_flow import when
from .base import ParamsGrads
from .rewritten import Rewriting, RewritingOptimizer


class LocalSGDOptimizer(RewritingOptimizer):
    """Behind every `k_steps`-th update, parameters become their mean over the ranks that train by themselves (`strategies.replicas`).

    The inner optimizer's state stays each rank's own. On one device, and where ranks share their parameters, the mean is the parameter.
    Source: Stich, "Local SGD Converges Fast and Communicates Little" (2019); fluid's `LocalSGD` transpiler.

    >>> import fluidx as fx
    >>> fx.optimizer.LocalSGDOptimizer(fx.optimizer.SGD(0.1), k_steps=4)
    LocalSGDOptimizer(SGD(learning_rate=0.1), k_steps=4)
    """

    def __init__(self, inner_optimizer: Any, k_steps: int = 1):
        super().__init__(inner_optimizer)
        self.k_steps = whole(self.label, "k_steps", k_steps, 1)

    def rewrite(self, step: Rewriting, pairs: ParamsGrads) -> None:
        step.update(pairs)
        with when(step.every(self.k_steps, "local_sgd_runs"), step.block, Role.OPTIMIZE) as block:
            for p, _ in pairs:
                step.builder(block).replica_mean(p, out={"Out": p})

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, k_steps={self.k_steps})"
