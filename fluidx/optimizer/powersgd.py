"""`PowerSGDOptimizer`: ranks exchange two thin factors of a gradient instead of the gradient."""

from __future__ import annotations

from math import prod
from typing import Any

from .._checks import whole, wrong
from ..ir import Parameter, Variable
from ..ir.source_location import warn
from .base import ParamsGrads
from .rewritten import Rewriting, RewritingOptimizer, state_dtype


class PowerSGDOptimizer(RewritingOptimizer):
    """Updates matrices with approximations of rank `rank` to their gradients. The approximation error is added to the next gradient.

    A gradient is a matrix G [a, b] of its first axis and the others. With the error E of the last step: M = G + E; P = M Q, made
    orthonormal; Q = M^T P; the update's gradient is P Q^T, and E = M - P Q^T. Q is kept for the next step and made orthonormal too: this
    does not change P, and turns a column of Q that is only rounding error into a direction that all ranks agree on. It is one step of a
    power iteration towards the best approximation. Everything except the two bases is linear in M, so M and E are partial over the ranks,
    and only P and Q are summed: r(a + b) numbers instead of ab. Gradients that are not larger than their factors are not approximated.

    Results change: they are those of PowerSGD on one device, not those of the inner optimizer alone. Source: Vogels, Karimireddy and Jaggi,
    "PowerSGD" (2019), algorithm 1, warm start and error feedback.

    >>> import fluidx as fx
    >>> fx.optimizer.PowerSGDOptimizer(fx.optimizer.Momentum(0.1, 0.9), rank=4)
    PowerSGDOptimizer(Momentum(learning_rate=0.1), rank=4)
    """

    def __init__(self, inner_optimizer: Any, rank: int = 2):
        super().__init__(inner_optimizer)
        if self.rescales:
            raise wrong(
                f"{self.label} keeps an error from step to step, but the scale of {inner_optimizer!r} changes; make the scaling one "
                "the outer one: mixed_precision.decorate(PowerSGDOptimizer(...))"
            )
        self.rank = whole(self.label, "rank", rank, 1)

    def compresses(self, p: Variable) -> bool:
        """Are the factors of a gradient smaller than the gradient?"""
        a, b = _matrix(p)
        return self.rank * (a + b) < a * b

    def rewrite(self, step: Rewriting, pairs: ParamsGrads) -> None:
        chosen = [(p, g) for p, g in pairs if self.compresses(p)]
        if not chosen:
            warn(f"{self.label}: no gradient is larger than its factors of rank {self.rank}, so none is approximated; leave it out")
        step.unmark_finished(chosen)
        made = {p.name: self._approximated(step, p, g) for p, g in chosen}
        step.update([(p, made.get(p.name, g)) for p, g in pairs])

    def _approximated(self, step: Rewriting, p: Parameter, g: Variable) -> Variable:
        b, shape, dtype = step.b, _matrix(p), state_dtype(p)
        error, kept = step.state(p, "powersgd_error", shape), step.random_state(p, "powersgd_q", (shape[1], self.rank))
        wider = g if g.dtype == dtype else b.cast(g, dtype=dtype)
        m = b.elementwise_add(error, wider if wider.shape == shape else b.reshape(wider, shape=shape))
        left = b.orthonormalize(b.matmul(m, kept, name=f"{g.name}.p"))
        right = b.matmul(m, left, transpose_x=True)
        # `right` is partial here, so each rank subtracts its own term from its own term of m; subtracting the sum on one rank would
        # accumulate
        b.elementwise_sub(m, b.matmul(left, right, transpose_y=True), out={"Out": error})
        b.assign(right, out={"Out": kept})
        name = f"{g.name}.approximated"
        last = step.finisher(step.block, p, name)
        if wider.shape == shape and g.dtype == dtype:
            made = last.matmul(left, kept, transpose_y=True, name=name)
        else:
            found = b.matmul(left, kept, transpose_y=True)
            made = last.reshape(found if g.dtype == dtype else b.cast(found, dtype=g.dtype), shape=g.shape, name=name)
        b.orthonormalize(kept, out={"Out": kept})
        return made

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, rank={self.rank})"


def _matrix(p: Variable) -> tuple[int, int]:
    """The shape of a parameter as a matrix: its first axis, and all others."""
    return (p.shape[0], prod(p.shape[1:])) if len(p.shape) > 1 else (1, prod(p.shape))
