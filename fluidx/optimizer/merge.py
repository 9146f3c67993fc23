"""`GradientMergeOptimizer`: the gradients of several runs are added up, and the parameters are updated once with their sum or mean."""

from __future__ import annotations

from typing import Any

from .._checks import whole
from ..ir import Role
from ..layers.control_flow import when
from .base import ParamsGrads
from .rewritten import Rewriting, RewritingOptimizer


class GradientMergeOptimizer(RewritingOptimizer):
    """One update in `k_steps` runs, with the mean (`avg=True`) or the sum of their gradients: a batch k times as large, in k runs.

    Each run adds its gradients to accumulators. Each k-th run also runs the inner optimizer, with its clips and decays, and resets them.
    After transpiling, accumulators are partial over the ranks, so ranks communicate only in each k-th run. A learning-rate schedule counts
    runs, not updates.

    >>> import fluidx as fx
    >>> fx.optimizer.GradientMergeOptimizer(fx.optimizer.Adam(0.001), k_steps=4)
    GradientMergeOptimizer(Adam(learning_rate=0.001), k_steps=4)
    """

    def __init__(self, inner_optimizer: Any, k_steps: int = 1, avg: bool = True):
        super().__init__(inner_optimizer)
        self.k_steps = whole(self.label, "k_steps", k_steps, 1)
        self.avg = bool(avg)

    def rewrite(self, step: Rewriting, pairs: ParamsGrads) -> None:
        step.unmark_finished(pairs)
        totals = [step.state(p, "merged") for p, _ in pairs]
        for (_, g), total in zip(pairs, totals, strict=True):
            step.b.elementwise_add(total, g if g.dtype == total.dtype else step.b.cast(g, dtype=total.dtype), out={"Out": total})
        with when(step.every(self.k_steps, "gradient_merge_runs"), step.block, Role.OPTIMIZE) as block:
            merged: ParamsGrads = []
            for (p, g), total in zip(pairs, totals, strict=True):
                name, weight = f"{g.name}.merged", 1.0 / self.k_steps if self.avg else 1.0
                last = step.finisher(block, p, name)
                if g.dtype == total.dtype:
                    merged.append((p, last.scale(total, scale=weight, name=name)))
                else:
                    merged.append((p, last.cast(step.builder(block).scale(total, scale=weight), dtype=g.dtype, name=name)))
            step.update(merged)
            for total in totals:
                step.builder(block).fill_zeros_like(total, out={"Out": total})

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, k_steps={self.k_steps}{'' if self.avg else ', avg=False'})"
