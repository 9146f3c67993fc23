"""Ops whose result sizes are sizes of another value, of which only the shape is read: range_like, slice_like; and axis_size, which gives
one size as a number.

They serve programs with open axes. Their result sizes are known when a program is planned, and a part of the result needs only the part of
the other value, so ranks can split them.
"""

from __future__ import annotations

from typing import Any

from ...ir.axis_letters import along
from ...ir.dtypes import as_dtype
from ...ir.errors import ExecutionError, ProgramError
from ...ir.op_facets import Arithmetic, Control, Rewrite
from ...ir.opdef import OpDef, Sample
from ...ir.types import ANY, TensorType
from ..shared.samples import f32, i64
from ..shared.types import need_ids, norm_axis


class RangeLike(OpDef):
    """The numbers `start`, `start + step`, ... as a vector of `dtype`, as many as axis `axis` of Input has elements."""

    name = "range_like"
    arithmetic = Arithmetic(flops=0)
    rewrite = Rewrite(constant=True)
    inputs = ("Input",)
    attrs = {"axis": 0, "start": 0.0, "step": 1.0, "dtype": "int64"}

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"~{along(attrs['axis'], ins[0].ndim, 'n', 'x')} -> n | n@"

    @staticmethod
    def infer(x, *, axis, start, step, dtype):
        return TensorType(as_dtype(dtype), (x.shape[norm_axis("range_like", axis, x.ndim)],))

    @staticmethod
    def kernel(xp, x, *, out, axis, start, step, dtype, part=None):
        first = part.start if part is not None else 0
        work = "int64" if out.dtype.kind in "iu" and float(start).is_integer() and float(step).is_integer() else "float64"
        numbers = xp.arange(first, first + out.shape[0], dtype=work)
        out[...] = (numbers * numbers.dtype.type(step) + numbers.dtype.type(start)).astype(out.dtype)

    @staticmethod
    def samples():
        why = "the numbers do not depend on Input"
        yield Sample.of(f32(2, 5), axis=1, grad=(), why=why)
        yield Sample.of(f32(3), start=1, step=-0.5, dtype="float32", grad=(), why=why)
        yield Sample.of(f32(4, 0), axis=-1, start=3, step=2, grad=(), why=why)


class AxisSize(OpDef):
    """The number of elements of axis `axis` of Input, as one number of `dtype`, int32 or int64. On ranks, it is that of the whole value."""

    name = "axis_size"
    control = Control(beyond_tensors=("string",))
    arithmetic = Arithmetic(flops=0)
    rewrite = Rewrite(constant=True)
    inputs = ("Input",)
    attrs = {"axis": 0, "dtype": "int64"}

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"~{along(attrs['axis'], ins[0].ndim, 'n', 'x')} -> | n:= #n"

    @staticmethod
    def infer(x, *, axis, dtype):
        need_ids("axis_size", "dtype", TensorType(dtype, ()))
        norm_axis("axis_size", axis, x.ndim)
        return TensorType(dtype, ())

    @staticmethod
    def kernel(xp, x, *, out, axis, dtype, part=None):
        out[...] = x.shape[axis] if part is None else part.count

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 5), axis=1, grad=(), why="a size has no gradient")
        yield Sample.of(f32(3, 0, 2), axis=-2, dtype="int32", grad=(), why="a size has no gradient")


_MOST = 1 << 32  # a larger number stands for an open size (ir/sizes.py), which is not compared


def _window(op: str, x: Any, start: Any, size: int, axis: int, offset: int = 0) -> tuple[slice, ...]:
    """The slices of X from the number `start` on, and `offset` further."""
    first = offset if start is None else offset + int(start.reshape(-1)[0])
    if first < offset or first + size > x.shape[axis]:
        raise ExecutionError(f"op {op}: axis {axis} of X has {x.shape[axis]} elements, and {size} from position {first} on are asked for")
    return (*[slice(None)] * axis, slice(first, first + size))


class SliceLike(OpDef):
    """As many elements of X along `axis` as axis `like_axis` of Like has, from position 0 or from the number Start on.

    Only the shape of Like is read. An X with too few elements raises ProgramError, and with Start ExecutionError.
    """

    name = "slice_like"
    arithmetic = Arithmetic(flops=0)
    inputs = ("X", "Like", "Start?")
    attrs = {"axis": 0, "like_axis": 0}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, like, start = ins
        axis = attrs["axis"]
        said = f"{along(axis, x.ndim, '.')}, ~{along(attrs['like_axis'], like.ndim, 'n', 'x')}, {'' if start is None else '.' * start.ndim}"
        return f"{said} -> {along(axis, x.ndim, 'n')} | n@ L(0) U(0)"

    @staticmethod
    def infer(x, like, start, *, axis, like_axis):
        at = norm_axis("slice_like", axis, x.ndim)
        have = x.shape[at]
        want = like.shape[norm_axis("slice_like", like_axis, like.ndim)]
        if start is not None:
            need_ids("slice_like", "Start", start)
            if start.numel != 1:
                raise ProgramError(f"op slice_like: Start must be one number, found {start}")
        if ANY != have < want < _MOST:
            asked = f"axis {like_axis} of Like {like} asks for {want}"
            raise ProgramError(f"op slice_like: axis {at} of X {x} has {have} elements, and {asked}")
        return x.with_shape(want if k == at else d for k, d in enumerate(x.shape))

    @staticmethod
    def grad(b, op, g):
        return b.slice_like_grad(op["X"], g, op["Start"], axis=op.attrs["axis"]), None, None

    @staticmethod
    def kernel(xp, x, like, start, *, out, axis, like_axis, part=None):
        axis %= x.ndim
        first = part.start if part is not None else 0
        out[...] = x[_window("slice_like", x, start, out.shape[axis], axis, first)]

    @staticmethod
    def samples():
        yield Sample.of(f32(5, 3), f32(2, 4, seed=1), None, like_axis=1)
        yield Sample.of(f32(2, 5), f32(3, seed=1), i64(2).reshape(()), axis=-1)


class SliceLikeGrad(OpDef):
    """Zeros in the shape of X with the gradient at the positions that `slice_like` read; only the shape of X is read."""

    name = "slice_like_grad"
    arithmetic = Arithmetic(flops=0)
    inputs, outputs = ("X", "Out@GRAD", "Start?"), ("X@GRAD",)
    attrs = {"axis": 0}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, _, start = ins
        axis = attrs["axis"]
        said = f"~{along(axis, x.ndim, '.')}, {along(axis, x.ndim, '.')}, {'' if start is None else '.' * start.ndim}"
        return f"{said} -> {along(axis, x.ndim, '.')} | L(1)"

    @staticmethod
    def infer(x, g, start, *, axis):
        return x

    @staticmethod
    def kernel(xp, x, g, start, *, out, axis):
        axis %= x.ndim
        out.fill(0)
        out[_window("slice_like_grad", x, start, g.shape[axis], axis)] = g

    @staticmethod
    def samples():
        yield Sample.of(f32(5, 3), f32(4, 3, seed=1), None, grad=(), why="a gradient op")
        yield Sample.of(f32(2, 5), f32(2, 3, seed=1), i64(2).reshape(()), axis=-1, grad=(), why="a gradient op")
