"""The product with a weight that is stored as 8-bit integers."""

from __future__ import annotations

from ...ir import Arithmetic, OpDef, ProgramError, Sample, TensorType
from ...ir.axis_letters import letters
from ..shared.samples import f32, ints
from ..shared.types import meet

_BLOCK = 1 << 20  # elements of Y that are converted at a time


class MatMulInt8(OpDef):
    """The product of the rows of X, floats, with a matrix Y of int8, which is never converted as a whole.

    With a scale for each column behind it, `elementwise_mul(matmul_int8(x, y), scale)` is the product with a quantized weight, which takes
    a quarter of the memory of float32. Y has no gradient.
    """

    name = "matmul_int8"
    inputs = ("X", "Y")
    attrs = {"transpose_y": False}
    arithmetic = Arithmetic(sums_products="matrix")

    @staticmethod
    def infer(x, y, *, transpose_y):
        if x.dtype not in ("float32", "float64") or x.ndim < 2 or y.dtype != "int8" or y.ndim != 2:
            raise ProgramError(f"op matmul_int8: X must be float32 or float64 with two or more axes and Y int8 with two, got {x} and {y}")
        rows, columns = y.shape[::-1] if transpose_y else y.shape
        if not meet(x.shape[-1], rows):
            raise ProgramError(f"op matmul_int8: rows of X {x} have {x.shape[-1]} elements, and columns of Y {y} have {rows}")
        return TensorType(x.dtype, (*x.shape[:-1], columns))

    @staticmethod
    def pattern(ins, outs, attrs):
        a = letters(ins[0].ndim - 1, "a")
        return f"{a} k, {'m k' if attrs['transpose_y'] else 'k m'} -> {a} m | k:+ L(0)"

    @staticmethod
    def grad(b, op, g):
        return b.matmul_int8(g, op["Y"], transpose_y=not op.attrs["transpose_y"]), None

    @staticmethod
    def kernel(xp, x, y, *, out, transpose_y):
        y = y.T if transpose_y else y
        step = max(1, _BLOCK // max(1, y.shape[0]))
        for k in range(0, y.shape[1], step):
            out[..., k : k + step] = xp.matmul(x, y[:, k : k + step].astype(x.dtype))

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 4), ints(4, 5, low=-9, high=9, seed=1).astype("int8"))
        yield Sample.of(f32(2, 3, 4, seed=2), ints(5, 4, low=-9, high=9, seed=3).astype("int8"), transpose_y=True)
