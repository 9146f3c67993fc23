"""`LocalSGDOptimizer`: ranks train separately, and their parameters are averaged every few runs."""

from __future__ import annotations

from typing import Any

from .._checks import whole
from ..ir import Role
from ..layers.control_flow import when
from .base import ParamsGrads
from .rewritten import Rewriting, RewritingOptimizer


class LocalSGDOptimizer(RewritingOptimizer):
    """After every `k_steps`-th update, parameters become their mean over ranks that train separately (`strategies.replicas`).

    Each rank keeps its own state of the inner optimizer. On one device, and if ranks have equal parameters, the mean is the parameter.
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
