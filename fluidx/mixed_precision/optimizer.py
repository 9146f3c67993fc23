"""`decorate`: an optimizer that trains in mixed precision, with a scaled loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf, isfinite
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from .._checks import number, whole, wrong
from ..ir import Block, Builder, Operator, Parameter, Program, Role, Variable, default_startup_program
from ..ir.dtypes import HALVES
from ..ir.errors import explains_arguments
from ..lr_scheduler import persistable, unused_name
from ..optimizer.base import GradientOptions, ParamsGrads
from ..optimizer.skip import skip_updates
from ..optimizer.wrapped import WrappedOptimizer
from ..rewrite.amp import WIDE, cast_program
from ..rewrite.amp_lists import AutoMixedPrecisionLists
from .gradients import finish_in_16_bits

_OWNER = "mixed_precision.decorate"
_LARGEST = (2 - 2.0**-23) * 2.0**127  # of float32


@explains_arguments
def decorate(
    optimizer: Any,
    amp_lists: AutoMixedPrecisionLists | None = None,
    init_loss_scaling: float = 2.0**15,
    incr_every_n_steps: int = 1000,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
    use_dynamic_loss_scaling: bool = True,
    dtype: str = "float16",
    reduce_dtype: str | None = None,
) -> OptimizerWithMixedPrecision:
    """An optimizer that trains in mixed precision: matrix products in `dtype`, operators that need range or precision in float32 (see the
    ops' page).

    `minimize` rewrites the forward operators of the program in place. Parameters and their state stay float32; a cast makes the 16-bit copy
    that products read. The loss is multiplied by a scale and the gradients are divided by it, so that small gradients do not become 0 in 16
    bits. With `use_dynamic_loss_scaling` a step with an infinite or NaN gradient changes no parameter and no optimizer state; the scale is
    multiplied by `decr_ratio` after `decr_every_n_nan_or_inf` such steps in a row, and by `incr_ratio` after `incr_every_n_steps` good
    steps. bfloat16 has the range of float32 and needs no scale: `init_loss_scaling=1.0, use_dynamic_loss_scaling=False`.

    `reduce_dtype` is the dtype in which ranks add gradients up: `dtype` itself, which halves the bytes, or float32. The default is float16
    for float16, and float32 for bfloat16, whose 8 binary digits lose terms in sums over many ranks.
    """
    return OptimizerWithMixedPrecision(
        optimizer, amp_lists, init_loss_scaling, incr_every_n_steps, decr_every_n_nan_or_inf, incr_ratio, decr_ratio,
        use_dynamic_loss_scaling, dtype, reduce_dtype,
    )  # fmt: skip


class OptimizerWithMixedPrecision(WrappedOptimizer):
    """The result of `decorate`, which explains the options."""

    def __init__(
        self,
        optimizer: Any,
        amp_lists: AutoMixedPrecisionLists | None,
        init_loss_scaling: float,
        incr_every_n_steps: int,
        decr_every_n_nan_or_inf: int,
        incr_ratio: float,
        decr_ratio: float,
        use_dynamic_loss_scaling: bool,
        dtype: str,
        reduce_dtype: str | None,
    ):
        super().__init__(optimizer)
        if _decorates(optimizer):
            raise wrong(f"{_OWNER}: {optimizer!r} trains in mixed precision already; decorate it once")
        self.dtype = _dtype("dtype", dtype, HALVES)
        wanted = reduce_dtype or ("float16" if dtype == "float16" else WIDE)
        self.reduce_dtype = _dtype("reduce_dtype", wanted, (dtype, WIDE))
        if amp_lists is not None and not isinstance(amp_lists, AutoMixedPrecisionLists):
            raise wrong(f"{_OWNER}: amp_lists must be AutoMixedPrecisionLists(...) or None, got {amp_lists!r}")
        self.amp_lists = amp_lists or AutoMixedPrecisionLists()
        self.init_loss_scaling = _positive("init_loss_scaling", init_loss_scaling, "above 0 that float32 has", most=_LARGEST)
        self.use_dynamic_loss_scaling = bool(use_dynamic_loss_scaling)
        self.rescales = self.use_dynamic_loss_scaling
        self.scales = self.use_dynamic_loss_scaling or self.init_loss_scaling != 1.0
        self._rule = {
            "incr_every_n_steps": whole(_OWNER, "incr_every_n_steps", incr_every_n_steps, 1),
            "decr_every_n_nan_or_inf": whole(_OWNER, "decr_every_n_nan_or_inf", decr_every_n_nan_or_inf, 1),
            "incr_ratio": _positive("incr_ratio", incr_ratio, "of 1 or more", least=1.0),
            "decr_ratio": _positive("decr_ratio", decr_ratio, "above 0 and at most 1", most=1.0),
        }
        self._scales: WeakKeyDictionary[Program, Variable] = WeakKeyDictionary()
        self._applied: WeakSet[Program] = WeakSet()
        self._loss_scaling: Variable | None = None
        self._scaled_loss: Variable | None = None

    # -- accessors ----------------------------------------------------------------------------------------------------------

    def get_loss_scaling(self) -> Variable:
        """The scale of the loss, a float32 variable of one element that can be fetched. It does not exist if the scale is a constant 1."""
        return self._known("get_loss_scaling", self._loss_scaling)

    def get_scaled_loss(self) -> Variable:
        """The loss times its scale, from which the gradients start."""
        return self._known("get_scaled_loss", self._scaled_loss)

    def _known(self, asked: str, value: Variable | None) -> Variable:
        if value is None:
            why = "yet; call minimize or backward first" if self.scales else "where the scale is 1 and not dynamic"
            raise wrong(f"{self.label}.{asked}: there is no scaled loss {why}")
        return value

    # -- implementation -----------------------------------------------------------------------------------------------------

    def _backward(self, asked: GradientOptions) -> ParamsGrads:
        """Rewrite the forward operators, scale the loss, and append the gradients of the result, which are scaled too."""
        loss = asked.loss
        program = loss.block.program
        block = program.global_block()
        clipped = next((d.name for d in block.descs.values() if d.attrs.get("error_clip")), None)
        if clipped is not None and self.scales:
            raise wrong(f"{_OWNER}: {clipped!r} has an ErrorClipByValue, which would limit scaled gradients; use grad_clip=... instead")
        with _as_it_was_on_errors(program):
            cast_program(program, self.amp_lists, self.dtype)
            if self.scales:
                self._loss_scaling = self._scale(program, asked.startup_program or default_startup_program())
                loss = self._scaled_loss = self._scaled(block, loss, self._loss_scaling)
            return self._optimizer._backward(asked._replace(loss=loss))

    def _scale(self, program: Program, startup: Program) -> Variable:
        known = self._scales.get(program)
        if known is None or not program.global_block().has_var(known.name):  # an earlier attempt failed and removed it
            known = self._scales[program] = _state(program, startup, "loss_scaling", "float32", self.init_loss_scaling)
        return known

    def _scaled(self, block: Block, loss: Variable, scale: Variable) -> Variable:
        """The float32 loss times the scale. The operator that makes `loss` gets the role of the loss."""
        at = max((k for k, op in enumerate(block.oplist) if loss.name in op.output_arg_names), default=None)
        if at is not None:
            block.oplist[at] = block.oplist[at].replace(role=Role.LOSS)
        b = Builder(block, role=Role.FORWARD)
        wide = b.cast(loss, dtype=WIDE) if loss.dtype in HALVES else loss
        factor = scale if wide.dtype == WIDE else b.cast(scale, dtype=wide.dtype)
        return b.elementwise_mul(wide, factor, name=unused_name(block, block.program, f"{loss.name}.scaled"))

    def _apply(self, params_grads: Sequence[tuple[Parameter, Variable]], startup: Program) -> list[Operator]:
        pairs = [(p, g) for p, g in params_grads if g is not None]
        if pairs and self.reduce_dtype != WIDE:
            finish_in_16_bits(pairs[0][1].block, pairs)
        if not self.scales:
            return self._optimizer._apply(pairs, startup)
        program = pairs[0][0].block.program if pairs else None
        if program is None or program not in self._scales:
            raise wrong(f"{_OWNER}: there are no scaled gradients to apply; call backward(loss) first")
        if program in self._applied:
            raise wrong(f"{_OWNER}: the scale in {program.label()} is updated once a step; add the losses up and minimize once")
        self._applied.add(program)
        block = pairs[0][1].block  # updates go into the block of the gradients, which may be a branch
        start = len(block.oplist)
        b, scale = Builder(block, role=Role.OPTIMIZE), self._scales[program]
        counted: dict[str, Any] = {} if self.use_dynamic_loss_scaling else {"Count": None}
        found = [b.check_finite_and_unscale(g, scale, name=f"{g.name}.unscaled", out=counted) for _, g in pairs]
        unscaled = [(p, g) for (p, _), (g, _) in zip(pairs, found, strict=True)]
        if not self.use_dynamic_loss_scaling:
            self._optimizer._apply(unscaled, startup)
            return block.oplist[start:]
        overflow = self._overflow(b, [count for _, count in found], startup)
        updates = len(block.oplist)
        self._optimizer._apply(unscaled, startup)
        skip_updates(block, updates, overflow, type(self._optimizer).__name__)
        return block.oplist[start:]

    def _overflow(self, b: Builder, counts: list[Variable], startup: Program) -> Variable:
        """Whether any gradient on any rank has an infinite or NaN element; also appends the update of the scale that follows from it."""
        program = b.block.program
        total = b.emit("sum", counts) if len(counts) > 1 else counts[0]
        if self.communicates:  # a bad value of one rank enters the updates of all ranks: they skip the step together
            total = b.replica_mean(total)
        none = b.fill_constant(shape=(1,), dtype="float32", value=0.0)
        overflow = b.greater_than(total, none, name=unused_name(b.block, program, "overflow"))
        scale = self._scales[program]
        good, bad = (_state(program, startup, f"num_{kind}_steps", "int32", 0) for kind in ("good", "bad"))
        out = {"LossScaling": scale, "OutGoodSteps": good, "OutBadSteps": bad}
        b.update_loss_scaling(overflow, scale, good, bad, **self._rule, out=out)
        return overflow


def _decorates(optimizer: Any) -> bool:
    """Is the optimizer, or one that it wraps, in mixed precision?"""
    while isinstance(optimizer, WrappedOptimizer):
        if isinstance(optimizer, OptimizerWithMixedPrecision):
            return True
        optimizer = optimizer._optimizer
    return False


@contextmanager
def _as_it_was_on_errors(program: Program) -> Iterator[None]:
    """Restore the blocks if an error is raised."""
    found = [(block, list(block.oplist), dict(block.descs)) for block in program.blocks]
    try:
        yield
    except BaseException:
        program.drop_blocks(len(found))
        for block, ops, descs in found:
            block.oplist = ops
            block.descs.clear()
            block.descs.update(descs)
        raise


def _state(program: Program, startup: Program, key: str, dtype: str, value: float) -> Variable:
    block = program.global_block()
    return persistable(block, startup, unused_name(block, startup, key), (1,), dtype, value)


def _dtype(name: str, given: Any, options: Sequence[str]) -> str:
    if not isinstance(given, str) or given not in options:
        way = "; without decorate all is computed in float32" if str(given) == WIDE else ""
        raise wrong(f"{_OWNER}: unknown {name} {given!r}; it is {' or '.join(map(repr, options))}{way}")
    return given


def _positive(name: str, given: float, wanted: str = "above 0", least: float = 0.0, most: float = inf) -> float:
    value = number(_OWNER, name, given)
    if not (0.0 < value and least <= value <= most and isfinite(value)):
        raise wrong(f"{_OWNER}: {name} must be a finite number {wanted}, got {value:g}")
    return value
