"""`AdasumOptimizer`: the steps of ranks that train separately are combined by adaptive summation."""

from __future__ import annotations

from .base import ParamsGrads
from .rewritten import Rewriting, RewritingOptimizer


class AdasumOptimizer(RewritingOptimizer):
    """Each rank computes a step from its own gradients, with its own state. Parameters then change by the adaptive sum of all steps.

    For programs under `strategies.replicas()`. Orthogonal steps are added, parallel steps are averaged: see `replica_adasum`. Results
    change: they depend on which rank has which rows. On one device, and under strategies that add up gradients first, parameters are those
    of the inner optimizer. Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2021); Horovod's `op=Adasum`,
    which sums steps too.

    >>> import fluidx as fx
    >>> fx.optimizer.AdasumOptimizer(fx.optimizer.Momentum(0.1, 0.9))
    AdasumOptimizer(Momentum(learning_rate=0.1))
    """

    communicates = True

    def rewrite(self, step: Rewriting, pairs: ParamsGrads) -> None:
        b = step.b
        before = [b.assign(p) for p, _ in pairs]
        step.update(pairs)
        steps = [b.elementwise_sub(p, old) for (p, _), old in zip(pairs, before, strict=True)]
        moved = [b.replica_adasum(step) for step in steps]  # adjacent collectives share messages
        for (p, _), old, by in zip(pairs, before, moved, strict=True):
            b.elementwise_add(old, by, out={"Out": p})
