"""Helpers for the normalizations: checks and dtypes of weights and statistics, and gradients with absent results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ir import ANY, OPS, ProgramError, TensorType
from ...ir.decomposition import Decomposition
from ...ir.dtypes import HALVES
from ..shared.types import meet, need_float


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


def put(target: Any, value: Any) -> None:
    if target is not None:
        target[...] = value


def by_copy(xp: Any, body: Any, ins: Sequence[Any], outs: Sequence[Any], in_at: Sequence[int], out_at: Sequence[int]) -> None:
    """Run `body(ins, outs)` on contiguous copies of the inputs and outputs at the given positions."""
    ins, dense = list(ins), list(outs)
    for k in in_at:
        ins[k] = xp.ascontiguousarray(ins[k])
    for k in out_at:
        dense[k] = None if outs[k] is None else xp.empty(outs[k].shape, outs[k].dtype)
    body(ins, dense)
    for k in out_at:
        put(outs[k], dense[k]) if outs[k] is not None else None


def only_first_has_gradient(name: str, op: Any, g: Sequence[Any], stats: Sequence[str]) -> None:
    first, *others = (s.name for s in OPS[name].out_slots)
    for slot, part in zip(others, g[1:], strict=True):
        if part is not None:
            (n,) = op.op.output(slot)
            raise ProgramError(f"op {name} has a gradient through {first} only, not through {slot}, {n!r}: set stop_gradient on it")
    if any(op[s] is None for s in stats):
        raise ProgramError(f"op {name} needs its output{'s' * (len(stats) > 1)} {' and '.join(stats)} for its gradient")


def emit_norm_grad(b: Any, name: str, op: Any, g: Any, stats: tuple[str, str]) -> Any:
    scale, bias = op["Scale"], op["Bias"]
    skip = {f"{slot}@GRAD": None for slot in ("X", "Scale", "Bias") if not op.needs(slot)}
    return b.emit(name, op["X"], scale, bias, op[stats[0]], op[stats[1]], g, out=skip, **op.attrs)


def linear_in_weights(ins: Sequence[TensorType | None]) -> str:
    """The linear group of Scale and Bias, operands 1 and 2: without Scale, Y is not linear in Bias alone."""
    return "" if ins[1] is None else "L(1>0)" if ins[2] is None else "L(1,2>0)"


# -- normalized rows, in simpler operators -----------------------------------------------------------------------------------------------


class RowParts:
    """Parts of layer_norm, rms_norm and their gradients: values of rows are in the dtype of statistics."""

    def __init__(self, d: Decomposition):
        self.d, self.axis = d, d.attrs["begin_norm_axis"]
        x = d.type(d["X"])
        self.dtype, self.sizes, self.dims = stat_dtype(x), x.shape[self.axis :], tuple(range(self.axis, x.ndim))
        self.narrow = None if x.dtype == self.dtype else ("cast", {"dtype": x.dtype})
        self.possible = self.sizes.count(ANY) < 2

    def wide(self, slot: str) -> str:
        name = self.d[slot]
        return name if self.d.type(name).dtype == self.dtype else self.d("cast", name, dtype=self.dtype)

    def mean(self, value: str, slot: str = "") -> str:
        return self.d("reduce_mean", value, dim=self.dims, out=self.d.out(slot), word="mean")

    def by_row(self, op_type: str, value: str, row: str) -> str:
        return self.d(op_type, value, row, axis=0)

    def inverse(self, spread: str) -> str:
        return self.d("rsqrt", self.d("scale", spread, bias=self.d.attrs["epsilon"]))

    def weight(self, slot: str) -> str:
        """An operand of one element for each column, in the sizes of a row."""
        w = self.wide(slot)
        return w if len(self.sizes) == 1 else self.d("reshape", w, shape=self.sizes)

    def scaled(self, even: str, inverse: str) -> None:
        """Y: deviations times the inverse of the root, and the weights."""
        weights = [(op, self.weight(slot), {"axis": self.axis}) for op, slot in _WEIGHTS if self.d[slot]]
        self.d.chain(even, ("elementwise_mul", inverse, {"axis": 0}), *weights, self.narrow, out=self.d.out("Y"))

    def gradients(self, spread: str, mean: str = "") -> None:
        """Of rows divided by the root of operand `spread`, after subtracting operand `mean` if there is one."""
        d, g, inverse = self.d, self.wide("Y@GRAD"), self.inverse(self.d[spread])
        even = self.by_row("elementwise_sub", self.wide("X"), d[mean]) if mean else self.wide("X")
        normal = self.by_row("elementwise_mul", even, inverse)
        for slot in ("Scale@GRAD", "Bias@GRAD"):
            if d.out(slot):
                each = d("elementwise_mul", g, normal) if slot == "Scale@GRAD" else g
                flat = ("reshape", {"shape": (-1,)}) if len(self.sizes) > 1 else None
                of_weight = d.type(d[slot.removesuffix("@GRAD")]).dtype
                narrow = ("cast", {"dtype": of_weight}) if of_weight != self.dtype else None
                d.chain(each, ("reduce_sum", {"dim": tuple(range(self.axis))}), flat, narrow, out=d.out(slot))
        if d.out("X@GRAD"):
            t = d("elementwise_mul", g, self.weight("Scale"), axis=self.axis) if d["Scale"] else g
            along = self.by_row("elementwise_mul", normal, self.mean(d("elementwise_mul", t, normal)))
            t = self.by_row("elementwise_sub", t, self.mean(t)) if mean else t
            times = ("elementwise_mul", inverse, {"axis": 0})
            d.chain(t, ("elementwise_sub", along, {}), times, self.narrow, out=d.out("X@GRAD"))


_WEIGHTS = (("elementwise_mul", "Scale"), ("elementwise_add", "Bias"))
