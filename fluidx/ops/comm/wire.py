"""Values that travel in fewer bits: narrowed in front of a collective, widened behind it.

In exact arithmetic nothing changes, and so the proof takes them; how many values are rounded, its report says. A cast that a user wrote is
another thing: it is part of what one device computes.
"""

from __future__ import annotations

from typing import Any

from ...ir.dtypes import HALVES, as_dtype
from ...ir.errors import ProgramError
from ...ir.opdef import OpDef, Required, Sample
from ...ir.types import TensorType
from ..shared.native import copy_calls
from ..shared.samples import counting


class _Rounded(OpDef):
    """Base of the changes of dtype that are none in exact arithmetic."""

    flops = 0
    precision = "float32"  # they stand where a strategy puts them
    inputs = ("X",)
    attrs = {"dtype": Required(str)}
    pattern = "* -> * | L(0) U(0)"  # terms that are rounded are terms, up to rounding
    meaning = staticmethod(lambda a, ins, outs, *, dtype: [a.rounded(ins[0], dtype)])
    native_any_size = True

    @staticmethod
    def kernel(xp: Any, x: Any, *, out: Any, dtype: str) -> None:
        xp.copyto(out, x, casting="unsafe")

    @staticmethod
    def native(ins: list, outs: list, attrs: Any, dry: bool = False) -> Any:
        return copy_calls(outs[0], ins[0], dry)


class Narrow(_Rounded):
    """X as 16-bit floats, rounded to the nearest: what is to be sent."""

    name = "narrow"
    rounds = staticmethod(lambda attrs: f"travel as {attrs['dtype']}")

    @staticmethod
    def infer(x: TensorType, *, dtype: str) -> TensorType:
        if not x.is_float or x.dtype in HALVES or as_dtype(dtype) not in HALVES:
            raise ProgramError(f"narrow makes {' or '.join(HALVES)} of wider floats, not {dtype} of {x}")
        return x.with_dtype(as_dtype(dtype))

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), dtype="float16", grad=(), why="stands beside communication only")
        yield Sample.of(counting(5), dtype="bfloat16", grad=(), why="stands beside communication only")


class Widen(_Rounded):
    """16-bit floats as wider ones: what has been sent narrow."""

    name = "widen"

    @staticmethod
    def infer(x: TensorType, *, dtype: str) -> TensorType:
        if x.dtype not in HALVES or as_dtype(dtype) not in ("float32", "float64"):
            raise ProgramError(f"widen makes float32 or float64 of 16-bit floats, not {dtype} of {x}")
        return x.with_dtype(as_dtype(dtype))

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3).astype("float16"), dtype="float32", grad=(), why="stands beside communication only")
