"""`DGCMomentum`, deep gradient compression: ranks send only the largest elements of their accumulated gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from weakref import WeakKeyDictionary

from .._checks import number, whole, wrong
from ..clip import GradientClipByNorm
from ..ir import Builder, Operator, Parameter, Program, Role, Variable
from ..ir.source_location import warn
from ..lr_scheduler import persistable, unused_name
from ..regularizer import Regularizer
from .base import UpdateStep
from .gradient import Momentum


class DGCMomentum(Momentum):
    """Momentum where each rank sends only its largest elements, under `strategies.replicas()`.

    Each rank computes U = momentum * U + G and V = V + U from its own gradient. It sends the elements of V with the largest |V|, and resets
    U and V to 0 there; the parameter changes by the mean of the sent values. From run `rampup_begin_step` on (counted from 0), the share of
    elements that is not sent is the first of `sparsity`, and the next one after each 1/len(sparsity) of `rampup_step` runs. Before that run
    everything is sent, which is plain momentum, and so it is in all runs for parameters of fewer than `least` elements.

    Results change: each rank selects its own elements, which depends on its rows. On one device, and under strategies that add up gradients
    first, elements are selected from the whole gradient, and communication is not reduced. `grad_clip` may only be GradientClipByNorm and
    needs `num_trainers`: a rank clips its gradient at clip_norm / sqrt(num_trainers). Source: Lin et al., "Deep Gradient Compression"
    (2018), algorithm 1 with momentum correction, factor masking and warm-up; fluid 1.8.
    """

    communicates = True

    def __init__(
        self,
        learning_rate: float | Variable,
        momentum: float,
        rampup_begin_step: int,
        rampup_step: int = 1,
        sparsity: Sequence[float] = (0.999,),
        parameter_list: Sequence[Parameter | str] | None = None,
        use_nesterov: bool = False,
        num_trainers: int | None = None,
        regularization: Regularizer | None = None,
        grad_clip: GradientClipByNorm | None = None,
        name: str | None = None,
        least: int = 16384,
    ):
        super().__init__(learning_rate, momentum, parameter_list, use_nesterov, regularization, None, name)
        self.rampup_begin_step = whole(self.label, "rampup_begin_step", rampup_begin_step, 0)
        self.rampup_step = whole(self.label, "rampup_step", rampup_step, 1)
        self.sparsity = [number(self.label, "sparsity", s) for s in sparsity]
        if not self.sparsity or not all(0.0 <= s < 1.0 for s in self.sparsity):
            raise wrong(f"{self.label}: sparsity must be numbers of at least 0 and below 1; got {list(sparsity)}")
        self.least = whole(self.label, "least", least, 0)
        self._clips: tuple[GradientClipByNorm, ...] = ()
        if grad_clip is not None:
            if not isinstance(grad_clip, GradientClipByNorm):
                raise wrong(f"{self.label}: grad_clip must be a GradientClipByNorm: a rank has only its own gradient; got {grad_clip!r}")
            if num_trainers is None:
                raise wrong(f"{self.label}: grad_clip needs num_trainers, the number of ranks")
            norm = grad_clip.clip_norm
            own = norm / whole(self.label, "num_trainers", num_trainers, 1) ** 0.5
            self._clips = GradientClipByNorm(own, self.compresses), GradientClipByNorm(norm, lambda p: not self.compresses(p))
        self._phases: WeakKeyDictionary[UpdateStep, tuple[Variable, Variable]] = WeakKeyDictionary()

    def compresses(self, p: Variable) -> bool:
        """Is the parameter large enough, and does it not have 16 bits?"""
        return prod(p.shape) >= self.least and p.dtype in ("float32", "float64")

    def _apply(self, params_grads: Sequence[tuple[Parameter, Variable]], startup: Program) -> list[Operator]:
        pairs = [(p, g) for p, g in params_grads if g is not None]
        if not pairs:
            return super()._apply(pairs, startup)  # raises the error
        if not any(self.compresses(p) for p, _ in pairs):
            warn(f"{self.label}: no parameter has {self.least} elements of 32 or 64 bits, so all are updated by plain momentum")
        block = pairs[0][1].block
        start, b = len(block.oplist), Builder(block, role=Role.OPTIMIZE)
        pairs = [(p, g if self.compresses(p) else b.replica_mean(g)) for p, g in pairs]
        for clip in self._clips:
            pairs = clip(pairs)
        super()._apply(pairs, startup)
        return block.oplist[start:]

    def update(self, step: UpdateStep, p: Parameter, g: Variable, lr: Variable) -> None:
        if not self.compresses(p):
            super().update(step, p, g, lr)
            return
        b, u, v = step.b, step.state(p, "dgc_u"), step.state(p, "dgc_v")
        share, sparse = self._phase(step)
        if self.use_nesterov:
            b.scale(b.elementwise_add(u, g), scale=self.momentum, out={"Out": u})
            total = b.elementwise_add(b.elementwise_add(v, u), g)
        else:
            b.elementwise_add(b.scale(u, scale=self.momentum), g, out={"Out": u})
            total = b.elementwise_add(v, u)
        chosen, zero = b.top_share(total, share), b.fill_zeros_like(total)
        behind = round(1.0 - self.sparsity[-1], 12)  # the share that is sent after the warm-up
        sent = b.replica_sparse_mean(b.where(chosen, total, zero), share=behind)
        b.where(chosen, zero, total, out={"Out": v})
        b.where(b.logical_and(chosen, sparse), zero, u, out={"Out": u})
        b.sgd(p, sent, lr, out={"ParamOut": p})

    def _phase(self, step: UpdateStep) -> tuple[Variable, Variable]:
        """The share of elements that this run sends, and whether it sends less than all."""
        known = self._phases.get(step)
        if known is not None:
            return known
        b = step.b
        runs = persistable(step.block, step.startup, unused_name(step.block, step.startup, "dgc_runs"), (1,), "int64", -1)
        b.increment(runs, step=1.0, out={"Out": runs})
        share = b.fill_constant(shape=(1,), dtype="float64", value=1.0)
        begun = []
        for i, s in enumerate(self.sparsity):
            begin = self.rampup_begin_step + ceil(i * self.rampup_step / len(self.sparsity))
            begun.append(b.greater_equal(runs, b.fill_constant(shape=(1,), dtype="int64", value=float(begin))))
            share = b.where(begun[-1], b.fill_constant(shape=(1,), dtype="float64", value=1.0 - s), share)
        self._phases[step] = share, begun[0]
        return share, begun[0]
