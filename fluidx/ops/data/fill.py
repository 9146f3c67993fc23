"""Ops that create values from attributes alone: constants, ranges, identity and one-hot matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil, prod
from typing import Any

import numpy as np

from ... import native
from ...ir.axis_letters import along
from ...ir.constants import Array
from ...ir.dtypes import as_dtype, dtype_name, np_dtype
from ...ir.errors import ProgramError
from ...ir.mapped_file import FileRange
from ...ir.op_facets import Arithmetic, Autocast, Native, Rewrite, Storage
from ...ir.opdef import OpDef, Required, Sample
from ...ir.parts import Part
from ...ir.pattern import Types
from ...ir.types import ANY, TensorType
from ..shared.native import copy_calls, fill_calls, text_of
from ..shared.types import check_range, need_fit, need_ids, need_ndim, need_size, norm_axis


def fixed_shape(op: str, shape: Sequence[int]) -> tuple[int, ...]:
    """`shape`, of which every size must be known. Raises ProgramError otherwise."""
    if any(not isinstance(d, int) or isinstance(d, bool) or d < 0 for d in shape):
        like = "" if op.endswith("_like") else f"; {op}_batch_size_like takes the batch from another variable"
        raise ProgramError(f"op {op}: shape {list(shape)} must hold sizes of 0 or more{like}")
    return tuple(shape)


def batch_shape(op: str, x: TensorType, shape: Sequence[int], input_dim_idx: int, output_dim_idx: int) -> tuple[int, ...]:
    """`shape` with the size at `output_dim_idx` taken from axis `input_dim_idx` of `x`."""
    source = norm_axis(op, input_dim_idx, x.ndim)
    target = norm_axis(op, output_dim_idx, len(shape))
    full = [x.shape[source] if i == target else d for i, d in enumerate(shape)]
    fixed_shape(op, [d for i, d in enumerate(full) if i != target])
    return tuple(full)


def batch_words(ins: Types, outs: Types, attrs: Mapping[str, Any]) -> str:
    """The access pattern of an op whose result has the batch size of Input, of which only the shape is read."""
    (x,), (y,) = ins, outs
    assert x is not None and y is not None
    return f"~{along(attrs['input_dim_idx'], x.ndim, 'b', 'x')} -> {along(attrs['output_dim_idx'], y.ndim, 'b')}"


class _Filled(OpDef):
    """Base of the ops that fill the result with one number: the attribute `value`, or 0."""

    arithmetic = Arithmetic(flops=0)

    @staticmethod
    def kernel(xp, *ins, out, **attrs):
        out.fill(attrs.get("value", 0))

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        return fill_calls(outs[0], attrs.get("value", 0), dry)

    native = Native(calls=_calls)


class FillConstant(_Filled):
    """A tensor of `shape` and `dtype` filled with `value`."""

    name = "fill_constant"
    attrs = {"shape": Required(tuple), "dtype": "float32", "value": 0.0}
    pattern = staticmethod(lambda ins, outs, attrs: "-> *" if attrs["value"] else "-> * | L()")
    rewrite = Rewrite(meaning=lambda a, ins, outs, *, value, **_: [a.constant(value, outs[0])])

    @staticmethod
    def infer(*, shape, dtype, value):
        need_fit("fill_constant", "value", value, as_dtype(dtype), cut=True)
        return TensorType(as_dtype(dtype), fixed_shape("fill_constant", shape))

    @staticmethod
    def samples():
        yield Sample.of(shape=(5, 3, 4), value=1.5)
        yield Sample.of(shape=(1,), dtype="int64", value=-3)
        yield Sample.of(shape=(), dtype="bool", value=1)


class FillConstantBatchSizeLike(_Filled):
    """`fill_constant` whose size at `output_dim_idx` is Input's at `input_dim_idx`, read at run time."""

    name = "fill_constant_batch_size_like"
    inputs = ("Input",)
    attrs = {"shape": Required(tuple), "dtype": "float32", "value": 0.0, "input_dim_idx": 0, "output_dim_idx": 0}
    rewrite = Rewrite(constant=True)
    pattern = staticmethod(batch_words)

    @staticmethod
    def infer(x, *, shape, dtype, value, input_dim_idx, output_dim_idx):
        need_fit("fill_constant_batch_size_like", "value", value, as_dtype(dtype), cut=True)
        return TensorType(as_dtype(dtype), batch_shape("fill_constant_batch_size_like", x, shape, input_dim_idx, output_dim_idx))

    @staticmethod
    def samples():
        yield Sample.of(np.zeros((4, 2), "float32"), shape=(-1, 3), value=2.0, grad=(), why="the values do not depend on Input")
        yield Sample.of(np.zeros((4, 2), "int64"), shape=(3, 1), input_dim_idx=1, output_dim_idx=-1, dtype="int32", value=7)


class FillZerosLike(_Filled):
    """Zeros with the shape and dtype of X."""

    name = "fill_zeros_like"
    inputs = ("X",)
    rewrite = Rewrite(constant=True)
    pattern = "~* -> * | L()"

    @staticmethod
    def infer(x):
        return x

    @staticmethod
    def samples():
        yield Sample.of(np.ones((5, 3), "float32"), grad=(), why="the values do not depend on X")


class FillAnyLike(_Filled):
    """A tensor with the shape of X filled with `value`; without `dtype`, in X's dtype."""

    name = "fill_any_like"
    inputs = ("X",)
    attrs = {"value": 0.0, "dtype": None}
    rewrite = Rewrite(constant=True)
    pattern = "~* -> *"

    @staticmethod
    def infer(x, *, value, dtype):
        y = x if dtype is None else x.with_dtype(as_dtype(dtype))
        need_fit("fill_any_like", "value", value, y.dtype, cut=True)
        return y

    @staticmethod
    def samples():
        yield Sample.of(np.zeros((5, 3), "float32"), value=2.5, grad=(), why="the values do not depend on X")
        yield Sample.of(np.zeros(3, "float32"), value=2, dtype="int32", grad=(), why="the values do not depend on X")


def _in_file(attrs: Mapping[str, Any]) -> FileRange | None:
    """The place of an array attribute in a file."""
    return attrs["values"].in_file if isinstance(attrs["values"], Array) else None


def _read_part(source: FileRange, out: np.ndarray, shape: Sequence[int], box: Sequence[tuple[int, int]]) -> None:
    """Fill `out` with the ranges `box` of the axes of an array in a file; with all of it if there are none."""
    if out.flags.c_contiguous and all((a, b) == (0, n) for (a, b), n in zip(box[1:], shape[1:])):
        source.read_into(out, box[0][0] * prod(shape[1:]) if box else 0)
        return
    rows = source.array.reshape(shape)[tuple(slice(a, b) for a, b in box)]
    out[...] = rows
    source.release()


class AssignValue(OpDef):
    """The numbers `values`, in order, with `shape` and `dtype`. Raises ProgramError if their count does not match the shape."""

    name = "assign_value"
    arithmetic = Arithmetic(flops=0)
    attrs = {"shape": Required(tuple), "dtype": "float32", "values": Required(Array)}
    pattern = "-> * | K"

    @staticmethod
    def infer(*, shape, dtype, values):
        out = TensorType(as_dtype(dtype), fixed_shape("assign_value", shape))
        found = values.type.numel if isinstance(values, Array) else len(values)
        if found != out.numel:
            raise ProgramError(f"op assign_value: shape {list(shape)} holds {out.numel} values, found {found}")
        return out

    @staticmethod
    def kernel(xp, *, out, part=None, **attrs):
        out[...] = xp.asarray(AssignValue._array(attrs, part))

    @staticmethod
    def _bind(ins, outs, attrs, ctx, part=None):
        if (source := _in_file(attrs)) is not None:
            return partial(_read_part, source, outs[0], attrs["shape"] if part is None else part.shape, () if part is None else part.box)
        return partial(outs[0].__setitem__, ..., AssignValue._array(attrs, part))

    @staticmethod
    def _array(attrs, part):
        array = np.asarray(attrs["values"]).astype(np_dtype(as_dtype(attrs["dtype"])), copy=False)
        return array.reshape(attrs["shape"]) if part is None else array.reshape(part.shape)[tuple(slice(a, b) for a, b in part.box)]

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        if _in_file(attrs) is not None:
            return None
        return copy_calls(outs[0], outs[0] if dry else AssignValue._array(attrs, part), dry)

    @staticmethod
    def _held_in_file(attrs):
        source = _in_file(attrs)
        return source if source is not None and dtype_name(source.array.dtype) == as_dtype(attrs["dtype"]) else None

    native = Native(calls=_calls, bind=_bind)
    storage = Storage(held_in_file=_held_in_file)

    @staticmethod
    def samples():
        yield Sample.of(shape=(3, 4), values=tuple(range(12)))
        yield Sample.of(shape=(2, 2), values=(1.0, 2.0, 3.0, -4.5))
        yield Sample.of(shape=(1,), dtype="int64", values=(9007199254740993,))
        yield Sample.of(shape=(5, 17), values=Array(np.arange(85).reshape(5, 17) % 7 - 2.5, "float32"))


# -- ranges -----------------------------------------------------------------------------------------------------------------


class Range(OpDef):
    """The numbers `start`, `start + step`, ... before `end`, as a vector of `dtype`."""

    name = "range"
    arithmetic = Arithmetic(flops=0)
    attrs = {"start": 0.0, "end": Required(float), "step": 1.0, "dtype": "float32"}
    pattern = "-> n | n@"

    @staticmethod
    def infer(*, start, end, step, dtype):
        if step == 0:
            raise ProgramError("op range: step is 0; expected another number")
        return TensorType(as_dtype(dtype), (max(0, ceil((end - start) / step)),))

    @staticmethod
    def kernel(xp, *, out, start, end, step, dtype, part=None):
        first = part.start if part is not None else 0
        out[...] = (xp.arange(first, first + out.shape[0], dtype="float64") * step + start).astype(out.dtype)

    @staticmethod
    def samples():
        yield Sample.of(end=5)
        yield Sample.of(start=3, end=-2, step=-2, dtype="int64")
        yield Sample.of(start=1, end=0)


class Linspace(OpDef):
    """`num` numbers spaced evenly from `start` to `stop`, both included."""

    name = "linspace"
    arithmetic = Arithmetic(flops=0)
    attrs = {"start": Required(float), "stop": Required(float), "num": Required(int), "dtype": "float32"}
    pattern = "-> n | n@"

    @staticmethod
    def infer(*, start, stop, num, dtype):
        need_size("linspace", "num", num, 1)
        return TensorType(as_dtype(dtype), (num,))

    @staticmethod
    def kernel(xp, *, out, start, stop, num, dtype, part=None):
        first = part.start if part is not None else 0
        out[...] = xp.linspace(start, stop, num)[first : first + out.size].astype(out.dtype)

    @staticmethod
    def samples():
        yield Sample.of(start=0, stop=1, num=5)
        yield Sample.of(start=2, stop=7, num=1, dtype="float64")


class Eye(OpDef):
    """The identity matrix with `num_rows` rows and `num_columns` columns (-1: `num_rows`)."""

    name = "eye"
    arithmetic = Arithmetic(flops=0)
    attrs = {"num_rows": Required(int), "num_columns": -1, "dtype": "float32"}
    pattern = "-> r c | K"

    @staticmethod
    def infer(*, num_rows, num_columns, dtype):
        need_size("eye", "num_rows", num_rows, 0)
        need_size("eye", "num_columns", num_columns, -1)
        return TensorType(as_dtype(dtype), (num_rows, num_rows if num_columns == -1 else num_columns))

    @staticmethod
    def kernel(xp, *, out, num_rows, num_columns, dtype, part=None):
        (row, _), (column, _) = part.box if part is not None else ((0, 0), (0, 0))
        out[...] = xp.eye(*out.shape, row - column, dtype=out.dtype)

    @staticmethod
    def samples():
        yield Sample.of(num_rows=3)
        yield Sample.of(num_rows=4, num_columns=5, dtype="int32")


class Diag(OpDef):
    """A square matrix with the vector Diagonal on its diagonal, zero elsewhere."""

    name = "diag"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    inputs = ("Diagonal",)
    pattern = ". -> . . | L(0)"

    @staticmethod
    def infer(x):
        need_ndim("diag", "Diagonal", x, 1)
        return x.with_shape(x.shape * 2)

    @staticmethod
    def grad(b, op, g):
        return b.diag_grad(g)

    @staticmethod
    def kernel(xp, x, *, out):
        out.fill(0)
        out.reshape(-1)[:: x.shape[0] + 1] = x

    @staticmethod
    def samples():
        yield Sample.of(np.array([1, -2, 3], "float32"))


class DiagGrad(OpDef):
    """The diagonal of the gradient."""

    name = "diag_grad"
    arithmetic = Arithmetic(flops=0)
    inputs, outputs = ("Out@GRAD",), ("Diagonal@GRAD",)
    pattern = ". . -> . | L(0)"

    @staticmethod
    def infer(g):
        return g.with_shape(g.shape[:1])

    @staticmethod
    def kernel(xp, g, *, out):
        out[...] = xp.diagonal(g)

    @staticmethod
    def samples():
        yield Sample.of(np.arange(4, dtype="float32").reshape(2, 2), grad=(), why="a gradient op")


# -- one-hot ----------------------------------------------------------------------------------------------------------------


def _one_hot(xp: Any, op: str, ids: Any, out: Any, depth: int, allow: bool, part: Part | None) -> None:
    """Write a 1 into each row of `out`, at the column of its id; with `allow` an id out of range leaves its row zero.

    `out` may be a part of the columns.
    """
    ids = xp.ascontiguousarray(ids).reshape(-1)
    rows = xp.arange(ids.size)
    if not allow:
        check_range(xp, op, ids, depth, "the one-hot depth")
    if part is not None:
        ids = ids - part.start
    if allow or out.shape[-1] != depth:
        inside = (ids >= 0) & (ids < out.shape[-1])
        ids, rows = ids[inside], rows[inside]
    out.fill(0)
    if ids.size:
        out.reshape(-1, out.shape[-1])[rows, ids] = 1


def _one_hot_calls(op: str, ids: Any, out: Any, depth: int, allow: bool, part: Part | None, dry: bool) -> Any:
    """Calls of the C kernel for `_one_hot`: each id copies the bytes of a 1 into its row."""
    if dtype_name(ids.dtype) not in ("int32", "int64") or not (ids.flags.c_contiguous and out.flags.c_contiguous):
        return None
    if dry:
        return []
    one, start = np.ones(1, out.dtype), 0 if part is None else part.start
    message = text_of(f"op {op}: id # is out of range; the one-hot depth has {depth} rows, ids go from 0 to {depth - 1}")
    words = [native.address(ids), ids.itemsize, ids.size, start, out.shape[-1], depth, native.address(message)]
    words += [native.address(one), native.address(out), 0, out.itemsize, 0, int(allow)]
    return [native.NativeCall("one_hot", tuple(words), (ids, one, out, message))]


class OneHot(OpDef):
    """For ids X [..., 1], rows [..., depth] that are 1 at the id and 0 elsewhere.

    Raises ExecutionError for an id outside [0, depth), unless `allow_out_of_range`, which leaves such a row zero.
    """

    name = "one_hot"
    arithmetic = Arithmetic(flops=0)
    inputs = ("X",)
    attrs = {"depth": Required(int), "dtype": "float32", "allow_out_of_range": False}
    pattern = "* . -> * c | c@"

    @staticmethod
    def infer(x, *, depth, dtype, allow_out_of_range):
        need_ids("one_hot", "X", x)
        need_size("one_hot", "depth", depth, 1)
        need_ndim("one_hot", "X", x, 1, 99)
        if x.shape[-1] not in (1, ANY):
            raise ProgramError(f"op one_hot: the last axis of X must have size 1, found {x}; one_hot_v2 takes ids without it")
        return TensorType(as_dtype(dtype), (*x.shape[:-1], depth))

    @staticmethod
    def kernel(xp, x, *, out, depth, dtype, allow_out_of_range, part=None):
        _one_hot(xp, "one_hot", x, out, depth, allow_out_of_range, part)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        return _one_hot_calls("one_hot", ins[0], outs[0], attrs["depth"], attrs["allow_out_of_range"], part, dry)

    native = Native(calls=_calls)

    @staticmethod
    def samples():
        yield Sample.of(np.array([[1], [0], [3]], "int64"), depth=4)
        yield Sample.of(np.array([[1], [7]], "int32"), depth=2, allow_out_of_range=True, dtype="float64")
        yield Sample.of(np.arange(6).reshape(2, 3, 1), depth=7)


class OneHotV2(OpDef):
    """For ids X, rows along a new last axis of size `depth` that are 1 at the id and 0 elsewhere.

    Raises ExecutionError for an id outside [0, depth), unless `allow_out_of_range`, which leaves such a row zero.
    """

    name = "one_hot_v2"
    arithmetic = Arithmetic(flops=0)
    inputs = ("X",)
    attrs = OneHot.attrs
    pattern = "* -> * c | c@"

    @staticmethod
    def infer(x, *, depth, dtype, allow_out_of_range):
        need_ids("one_hot_v2", "X", x)
        need_size("one_hot_v2", "depth", depth, 1)
        return TensorType(as_dtype(dtype), (*x.shape, depth))

    @staticmethod
    def kernel(xp, x, *, out, depth, dtype, allow_out_of_range, part=None):
        _one_hot(xp, "one_hot_v2", x, out, depth, allow_out_of_range, part)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        return _one_hot_calls("one_hot_v2", ins[0], outs[0], attrs["depth"], attrs["allow_out_of_range"], part, dry)

    native = Native(calls=_calls)

    @staticmethod
    def samples():
        yield Sample.of(np.array([1, 0, 3], "int64"), depth=4)
        yield Sample.of(np.array([[1, -1]], "int32"), depth=2, allow_out_of_range=True)
        yield Sample.of(np.array([[0, 6, -1], [3, 9, 2]]), depth=5, allow_out_of_range=True)
