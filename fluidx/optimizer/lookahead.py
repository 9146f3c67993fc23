"""`LookaheadOptimizer`: an optimizer updates fast weights, and slow weights follow them every few runs."""

from __future__ import annotations

from typing import Any

from .._checks import number, whole, wrong
from ..ir import Role
from ..layers.control_flow import when
from .base import ParamsGrads
from .rewritten import Rewriting, RewritingOptimizer


class LookaheadOptimizer(RewritingOptimizer):
    """Every `k` runs the slow weights move by a share `alpha` of the distance to the parameters, and the parameters are set to them.

    Source: Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back" (2019).

    >>> import fluidx as fx
    >>> fx.optimizer.LookaheadOptimizer(fx.optimizer.SGD(0.1), alpha=0.5, k=5)
    LookaheadOptimizer(SGD(learning_rate=0.1), alpha=0.5, k=5)
    """

    def __init__(self, inner_optimizer: Any, alpha: float = 0.5, k: int = 5):
        super().__init__(inner_optimizer)
        self.alpha, self.k = number(self.label, "alpha", alpha), whole(self.label, "k", k, 1)
        if not 0.0 <= self.alpha <= 1.0:
            raise wrong(f"{self.label}: alpha must be from 0 to 1, got {self.alpha}")

    def rewrite(self, step: Rewriting, pairs: ParamsGrads) -> None:
        slow = [step.copied_state(p, "slow") for p, _ in pairs]
        step.update(pairs)
        with when(step.every(self.k, "lookahead_runs"), step.block, Role.OPTIMIZE) as block:
            b = step.builder(block)
            for (p, _), s in zip(pairs, slow, strict=True):
                fast = p if p.dtype == s.dtype else b.cast(p, dtype=s.dtype)
                b.elementwise_add(b.scale(s, scale=1.0 - self.alpha), b.scale(fast, scale=self.alpha), out={"Out": s})
                if p.dtype == s.dtype:
                    b.assign(s, out={"Out": p})
                else:
                    b.cast(s, dtype=p.dtype, out={"Out": p})

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, alpha={self.alpha}, k={self.k})"
