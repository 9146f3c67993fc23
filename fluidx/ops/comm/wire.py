"""Conversions for communication in a wire dtype: narrow before a collective, widen after it.

In exact arithmetic they change nothing, so the proof treats them as exact; its report counts the rounded values. A cast that a user wrote
is different: it is part of the computation of one device.
"""

from __future__ import annotations

from typing import Any

from ...ir.dtypes import HALVES, as_dtype
from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Autocast, Native, Rewrite
from ...ir.opdef import OpDef, Required, Sample
from ...ir.types import TensorType
from ..shared.native import copy_calls
from ..shared.samples import counting


class _Rounded(OpDef):
    """Base of the changes of dtype that are exact in exact arithmetic."""

    arithmetic = Arithmetic(flops=0)
    # they stay where a strategy puts them
    autocast = Autocast(mixed="float32")
    inputs = ("X",)
    attrs = {"dtype": Required(str)}
    pattern = "* -> * | L(0) U(0)"  # rounded partial values are partial values, up to rounding
    rewrite = Rewrite(meaning=lambda a, ins, outs, *, dtype: [a.rounded(ins[0], dtype)])

    @staticmethod
    def kernel(xp: Any, x: Any, *, out: Any, dtype: str) -> None:
        xp.copyto(out, x, casting="unsafe")

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, dry: bool = False) -> Any:
        return copy_calls(outs[0], ins[0], dry)

    native = Native(calls=_calls, any_size=True)


class Narrow(_Rounded):
    """X as 16-bit floats, rounded to nearest, for sending."""

    name = "narrow"
    autocast = Autocast(rounds=lambda attrs: f"travel as {attrs['dtype']}")

    @staticmethod
    def infer(x: TensorType, *, dtype: str) -> TensorType:
        if not x.is_float or x.dtype in HALVES or as_dtype(dtype) not in HALVES:
            raise ProgramError(f"narrow converts wider floats to {' or '.join(HALVES)}, not {x} to {dtype}")
        return x.with_dtype(as_dtype(dtype))

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), dtype="float16", grad=(), why="only used next to communication")
        yield Sample.of(counting(5), dtype="bfloat16", grad=(), why="only used next to communication")


class Widen(_Rounded):
    """16-bit floats as wider floats, after they were sent."""

    name = "widen"

    @staticmethod
    def infer(x: TensorType, *, dtype: str) -> TensorType:
        if x.dtype not in HALVES or as_dtype(dtype) not in ("float32", "float64"):
            raise ProgramError(f"widen converts 16-bit floats to float32 or float64, not {x} to {dtype}")
        return x.with_dtype(as_dtype(dtype))

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3).astype("float16"), dtype="float32", grad=(), why="only used next to communication")
