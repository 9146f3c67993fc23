"""Adaptive summation: the steps of ranks that train by themselves are added up by how much they agree."""

from __future__ import annotations

from .base import ParamsGrads
from .rewritten import Rewriting, RewritingOptimizer


class AdasumOptimizer(RewritingOptimizer):
    """Each rank steps by itself, by its own gradients and with state of its own; parameters then move by the ranks' adaptive sum.

    For programs under `strategies.replicas()`. Orthogonal steps are added up, steps in one direction averaged: see `replica_adasum`. It
    changes the answers: they depend on how rows are dealt to ranks. On one device, and under strategies that add gradients up first, the
    parameters are those of the inner optimizer.
    Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2021); Horovod's `op=Adasum`, which sums steps too.

    >>> import fluidx as fx
    >>> fx.optimizer.AdasumOptimizer(fx.optimizer.Momentum(0.1, 0.9))
    AdasumOptimizer(Momentum(learning_rate=0.1))
    """

    meets = True

    def rewrite(self, step: Rewriting, pairs: ParamsGrads) -> None:
        b = step.b
        before = [b.assign(p) for p, _ in pairs]
        step.update(pairs)
        steps = [b.elementwise_sub(p, old) for (p, _), old in zip(pairs, before, strict=True)]
        moved = [b.replica_adasum(step) for step in steps]  # neighbours travel together
        for (p, _), old, by in zip(pairs, before, moved, strict=True):
            b.elementwise_add(old, by, out={"Out": p})
