"""Helpers for the normalizations: checks and dtypes of weights and statistics, and gradients with absent results."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ...ir import ANY, OPS, ProgramError, TensorType
from ...ir.decomposition import Decomposition
from ...ir.dtypes import HALVES
from ..shared.mean_parts import per_element
from ..shared.types import meet, mul_sizes, need_float


def check_weight(op: str, slot: str, w: TensorType | None, size: int, x: TensorType) -> None:
    if w is not None and (w.ndim != 1 or not meet(w.shape[0], size)):
        raise ProgramError(f"op {op}: {slot} must have shape [{size}] for X {x}, got {w}")


def stat_dtype(x: TensorType) -> str:
    """The dtype of statistics: float32 for 16-bit floats."""
    return "float32" if x.dtype in HALVES else x.dtype


def weight_dtype(op: str, x: TensorType, **weights: TensorType | None) -> None:
    for slot, w in weights.items():
        if w is not None and w.dtype not in (x.dtype, stat_dtype(x)):
            raise ProgramError(f"op {op}: {slot} must be {stat_dtype(x)} for X {x}, got {w}")


def channel_count(op: str, x: TensorType, layout: str) -> int:
    if layout not in ("NCHW", "NHWC"):
        raise ProgramError(f"op {op}: data_layout must be NCHW or NHWC, got {layout!r}")
    if x.ndim < 2:
        raise ProgramError(f"op {op} needs X with at least 2 axes, got {x}")
    need_float(op, "X", x)
    return x.shape[1] if layout == "NCHW" or x.ndim == 2 else x.shape[-1]


def only_first_has_gradient(name: str, op: Any, g: Sequence[Any], stats: Sequence[str]) -> None:
    first, *others = (s.name for s in OPS[name].out_slots)
    for slot, part in zip(others, g[1:], strict=True):
        if part is not None:
            (n,) = op.op.output(slot)
            raise ProgramError(f"op {name} has a gradient through {first} only, not through {slot}, {n!r}: set stop_gradient on it")
    if any(op[s] is None for s in stats):
        raise ProgramError(f"op {name} needs its output{'s' * (len(stats) > 1)} {' and '.join(stats)} for its gradient")


def emit_norm_grad(b: Any, name: str, op: Any, g: Sequence[Any], stats: Sequence[str]) -> Any:
    """The gradient operator of a normalization, which reads the operands, the results `stats` and the gradient of the first result."""
    only_first_has_gradient(name, op, g, stats)
    slots = [s.name for s in OPS[name].in_slots]
    skip = {f"{slot}@GRAD": None for slot in slots if not op.needs(slot)}
    return b.emit(f"{name}_grad", *(op[s] for s in (*slots, *stats)), g[0], out=skip, **op.attrs)


def row_statistic(op: str, x: TensorType, axis: int, **weights: TensorType | None) -> TensorType:
    """The type of a statistic of each row, the axes from `axis` on, after checks of X and of weights with one element for each column."""
    need_float(op, "X", x)
    if not 0 < axis < x.ndim:
        raise ProgramError(f"op {op}: begin_norm_axis must be between 1 and {x.ndim - 1} for X {x}, got {axis}")
    for slot, w in weights.items():
        check_weight(op, slot, w, mul_sizes(x.shape[axis:]), x)
    weight_dtype(op, x, **weights)
    return TensorType(stat_dtype(x), x.shape[:axis])


def linear_in_weights(ins: Sequence[TensorType | None]) -> str:
    """The linear group of Scale and Bias, operands 1 and 2: without Scale, Y is not linear in Bias alone."""
    return "" if ins[1] is None else "L(1>0)" if ins[2] is None else "L(1,2>0)"


# -- normalized rows, in simpler operators -----------------------------------------------------------------------------------------------

_WEIGHTS = (("elementwise_mul", "Scale"), ("elementwise_add", "Bias"))


class _NormParts:
    """Parts that compute in the dtype of statistics; `narrow` is the step back to the dtype of X."""

    def __init__(self, d: Decomposition):
        x = d.type(d["X"])
        self.d, self.dtype = d, stat_dtype(x)
        self.narrow = None if x.dtype == self.dtype else ("cast", {"dtype": x.dtype})

    def wide(self, slot: str) -> str:
        name = self.d[slot]
        return name if self.d.type(name).dtype == self.dtype else self.d("cast", name, dtype=self.dtype)


class RowParts(_NormParts):
    """Parts of layer_norm, rms_norm and their gradients: rows are the axes from `axis` on, and their values are in the dtype of statistics.

    `back` are the steps from rows to the axes on which weights work, and `last` those from there to X's axes. `weighted` is the first axis
    that weights have, and `summed` are the axes that they lack.
    """

    back: tuple[Any, ...] = ()
    last: tuple[Any, ...] = ()

    def __init__(self, d: Decomposition, axis: int | None = None):
        super().__init__(d)
        self.axis = d.attrs["begin_norm_axis"] if axis is None else axis
        self.weighted, self.summed, self.sizes = self.axis, tuple(range(self.axis)), d.type(d["X"]).shape[self.axis :]
        self.flat = ("reshape", {"shape": (-1,)}) if len(self.sizes) > 1 else None
        self.possible = self.sizes.count(ANY) < (1 if 0 in self.sizes else 2)

    def rows(self, value: str) -> str:
        return value

    def mean(self, value: str, slot: str = "") -> str:
        dims = tuple(range(self.axis, self.d.type(value).ndim))
        return self.d("reduce_mean", value, dim=dims, out=self.d.out(slot), word="mean")

    def by_row(self, op_type: str, value: str, row: str) -> str:
        return self.d(op_type, value, row, axis=0)

    def inverse(self, spread: str) -> str:
        return self.d("rsqrt", self.d("scale", spread, bias=self.d.attrs["epsilon"]))

    def weight(self, slot: str) -> str:
        """An operand of one element for each column, in the sizes of a row."""
        w = self.wide(slot)
        return self.reshaped(w, self.sizes) if self.flat else w

    def reshaped(self, value: str, sizes: Sequence[int]) -> str:
        """A new value in place of an empty one: in a `reshape` a size of 0 would copy that of `value`."""
        empty = 0 in sizes
        return self.d("fill_constant", shape=sizes, dtype=self.dtype, value=0.0) if empty else self.d("reshape", value, shape=sizes)

    def centered(self, slots: tuple[str, str]) -> tuple[str, str, str]:
        """The deviations of X's rows from their means, with the means and the variances, which are results in these slots."""
        x = self.rows(self.wide("X"))
        mean = self.mean(x, slots[0])
        even = self.by_row("elementwise_sub", x, mean)
        return even, mean, self.mean(self.d("square", even), slots[1])

    def scaled(self, even: str, inverse: str) -> None:
        """Y: deviations times the inverse of the root, and the weights."""
        weights = [(op, self.weight(slot), {"axis": self.weighted}) for op, slot in _WEIGHTS if self.d[slot]]
        steps = ("elementwise_mul", inverse, {"axis": 0}), *self.back, *weights, self.narrow, *self.last
        self.d.chain(even, *steps, out=self.d.out("Y"))

    def gradients(self, inverse: str, mean: str = "") -> None:
        """Of rows that were multiplied by `inverse`, after subtracting `mean` if there is one."""
        d, x, g = self.d, self.rows(self.wide("X")), self.wide("Y@GRAD")
        normal = self.by_row("elementwise_mul", self.by_row("elementwise_sub", x, mean) if mean else x, inverse)
        for slot in ("Scale@GRAD", "Bias@GRAD"):
            if d.out(slot):
                each = d.chain(normal, *self.back, ("elementwise_mul", g, {})) if slot == "Scale@GRAD" else g
                of_weight = d.type(d[slot.removesuffix("@GRAD")]).dtype
                narrow = ("cast", {"dtype": of_weight}) if of_weight != self.dtype else None
                d.chain(each, ("reduce_sum", {"dim": self.summed}), self.flat, narrow, out=d.out(slot))
        if d.out("X@GRAD"):
            t = self.rows(d("elementwise_mul", g, self.weight("Scale"), axis=self.weighted) if d["Scale"] else g)
            along = self.by_row("elementwise_mul", normal, self.mean(d("elementwise_mul", t, normal)))
            t = self.by_row("elementwise_sub", t, self.mean(t)) if mean else t
            times = ("elementwise_mul", inverse, {"axis": 0})
            d.chain(t, ("elementwise_sub", along, {}), times, *self.back, self.narrow, *self.last, out=d.out("X@GRAD"))


class GroupParts(RowParts):
    """The same for group_norm and instance_norm (`groups` 0: one for each channel): rows are [N, groups, ...], weights work on channels."""

    def __init__(self, d: Decomposition, groups: int = 0):
        super().__init__(d, axis=2)
        x = d.type(d["X"])
        self.turned = d.attrs.get("data_layout") == "NHWC" and x.ndim > 2
        image = (x.shape[-1], *x.shape[1:-1]) if self.turned else x.shape[1:]
        self.groups, self.weighted, self.summed, self.flat = groups, 1, (0, *range(2, x.ndim)), None
        inside = (image[0] if image[0] == ANY else image[0] // max(groups, 1), *image[1:])
        self.empty = bool(groups) and 0 in inside
        self.possible = not self.empty or ANY not in x.shape
        first = x.shape[0] if self.empty else 0
        self.shape = (first, groups, *(inside if inside.count(ANY) < 2 else (ANY,))) if groups else (0, 0, *(image[1:] or (1,)))
        back = 0, *image
        plain = back.count(ANY) < 2 and not self.empty
        self.back = (("reshape", {"shape": back}) if plain else ("reshape_grad", self.wide("X"), {}),)
        self.last = (("transpose", {"axis": (0, *range(2, x.ndim), 1)}),) if self.turned else ()

    def wide(self, slot: str) -> str:
        name = super().wide(slot)
        ndim = self.d.type(name).ndim
        return self.d("transpose", name, axis=(0, ndim - 1, *range(1, ndim - 1))) if self.turned and ndim > 2 else name

    def rows(self, value: str) -> str:
        return self.reshaped(value, self.shape) if self.empty else self.d("reshape", value, shape=self.shape)


class ChannelParts(_NormParts):
    """Parts of batch_norm and its gradient: values of channels work on axis `axis` of X, and `rest` are all other axes."""

    def __init__(self, d: Decomposition):
        super().__init__(d)
        x = d.type(d["X"])
        self.axis = x.ndim - 1 if d.attrs["data_layout"] == "NHWC" else 1
        self.rest = tuple(k for k in range(x.ndim) if k != self.axis)
        sizes = [x.shape[k] for k in self.rest]
        self.count = d.part.count if d.part is not None else ANY if ANY in sizes else prod(sizes)

    def by_channel(self, op_type: str, value: str, channel: str) -> str:
        return self.d(op_type, value, channel, axis=self.axis)

    def centered(self, mean: str) -> str:
        return self.by_channel("elementwise_sub", self.wide("X"), self.wide(mean))

    def total(self, value: str, slot: str) -> None:
        """The sum of each channel, in the dtype of Scale."""
        dtype = self.d.type(self.d["Scale"]).dtype
        self.d.chain(
            value, ("reduce_sum", {"dim": self.rest}), ("cast", {"dtype": dtype}) if dtype != self.dtype else None, out=self.d.out(slot)
        )

    def mean(self, value: str, slot: str) -> None:
        """The mean of each channel over the whole batch, of which `value` may be a part."""
        if not self.count:
            raise ProgramError("op batch_norm cannot take statistics over an empty batch")
        if self.d.part is None:
            self.d("reduce_mean", value, dim=self.rest, out=self.d.out(slot))
        else:
            self.d.chain(value, ("reduce_sum", {"dim": self.rest}), ("scale", {"scale": 1 / self.count}), out=self.d.out(slot))

    def share(self, value: str) -> str:
        """A sum over a channel divided by the number of its elements."""
        return per_element(self.d, value, self.d["X"], self.rest)

    def inverse(self, spread: str, slot: str) -> str:
        return self.d("rsqrt", self.d("scale", self.wide(spread), bias=self.d.attrs["epsilon"]), out=self.d.out(slot))

    def finish(self, value: str, *steps: tuple[str, str], slot: str) -> None:
        """The result in slot `slot`: operators with values of channels, in the dtype of X."""
        self.d.chain(value, *((op, channel, {"axis": self.axis}) for op, channel in steps), self.narrow, out=self.d.out(slot))
