"""Helpers for the normalizations: checks and dtypes of weights and statistics, and gradients with absent results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ir import OPS, ProgramError, TensorType
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
    """Run `body(ins, outs)`, which returns a call, on contiguous copies of the inputs and outputs at the given positions."""
    ins, dense = list(ins), list(outs)
    for k in in_at:
        ins[k] = xp.ascontiguousarray(ins[k])
    for k in out_at:
        dense[k] = None if outs[k] is None else xp.empty(outs[k].shape, outs[k].dtype)
    body(ins, dense)()
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
