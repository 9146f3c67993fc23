"""Ops that sort values or select them by order: top_k, top_k_by, argsort, arg_max, arg_min, cumsum, top_share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ...ir.axis_letters import along, but
from ...ir.dtypes import as_dtype
from ...ir.errors import ExecutionError, ProgramError
from ...ir.op_facets import Control
from ...ir.opdef import OpDef, Sample
from ...ir.pattern import Types
from ...ir.types import ANY, TensorType
from ..shared.samples import apart, f32, i64
from ..shared.types import need_ids, need_size, norm_axis


def _order(xp: Any, x: Any, axis: int, descending: bool) -> Any:
    """The stable order of `x` along `axis`: of equal elements the first comes first, in both directions; NaN comes last."""
    if descending:
        # ~i is -i - 1: it reverses the order of integers without overflow, signed or not
        x = ~x if x.dtype.kind in "biu" else -x
    return xp.argsort(x, axis=axis, kind="stable")


def _put_along(xp: Any, out: Any, ids: Any, values: Any, axis: int) -> None:
    """Fill `out` with zeros, except for `out[..., ids[k], ...] = values[k]` along `axis`."""
    out.fill(0)
    front, ids, values = xp.moveaxis(out, axis, -1), xp.moveaxis(ids, axis, -1), xp.moveaxis(values, axis, -1)
    grid = tuple(xp.arange(n).reshape((-1,) + (1,) * (ids.ndim - 1 - i)) for i, n in enumerate(ids.shape[:-1]))
    front[(*grid, ids)] = values


def _along(words: str, roles: str) -> Any:
    """The pattern of an op along `axis`: `X` is a value with the whole axis, `K` a selection along it."""

    def pattern(ins, outs, attrs):
        x, k = (along(attrs.get("axis", -1), ins[0].ndim, word) for word in "ck")
        return f"{words.replace('X', x).replace('K', k)} | {roles}"

    return staticmethod(pattern)


def _best(xp: Any, x: Any, k: int, axis: int, largest: bool) -> Any:
    """The positions along `axis` of the k largest elements, largest first, or of the k smallest; of equal elements the first."""
    if k == 1 and largest:
        return xp.expand_dims(xp.argmax(x, axis=axis), axis)
    return _order(xp, x, axis, largest)[(slice(None),) * (axis % x.ndim) + (slice(k),)]


def _picked_grad(b: Any, op: Any, g: Any) -> Any:
    """The gradient of a selection from X along `axis`, from the gradients of Out and Indices."""
    g = g[0] if isinstance(g, (tuple, list)) else g
    return None if g is None else b.argsort_grad(op["X"], op["Indices"], g, axis=op.attrs["axis"])


class TopK(OpDef):
    """The `k` largest elements along `axis` of X, largest first, and their int64 positions; of equal elements the first. Without `largest`:
    the k smallest, smallest first.

    Raises ProgramError unless k is from 0 to the number of elements there.
    """

    name = "top_k"
    inputs, outputs = ("X",), ("Out", "Indices")
    attrs = {"k": 1, "axis": -1, "largest": True}
    pattern = _along("X -> K, K", "c! k!")
    grad = staticmethod(_picked_grad)

    @staticmethod
    def infer(x, *, k, axis, largest):
        axis = norm_axis("top_k", axis, x.ndim)
        need_size("top_k", "k", k, 0)
        if x.shape[axis] != ANY and k > x.shape[axis]:
            raise ProgramError(f"op top_k: k is {k}; axis {axis} of X {x} has {x.shape[axis]} elements")
        out = x.with_shape((*x.shape[:axis], k, *x.shape[axis + 1 :]))
        return out, out.with_dtype("int64")

    @staticmethod
    def kernel(xp, x, *, out, k, axis, largest):
        values, ids = out
        found = _best(xp, x, k, axis, largest)
        if ids is not None:
            ids[...] = found
        if values is not None:
            values[...] = xp.take_along_axis(x, found, axis=axis)

    @staticmethod
    def samples():
        yield Sample.of(apart(3, 5))
        yield Sample.of(apart(5, 3, 4), k=2)
        yield Sample.of(apart(5, 3, 4), k=2, axis=0, largest=False)
        yield Sample.of(np.array([3, 1, 3, 2], "int32"), k=4)


class TopKBy(OpDef):
    """`top_k` with the number of elements in K.

    Raises ExecutionError unless K is from 0 to the number of elements along `axis`.
    """

    name = "top_k_by"
    inputs, outputs = ("X", "K"), ("Out", "Indices")
    attrs = {"axis": -1, "largest": True}
    control = Control(sized_by_values=("k", "k"))

    @staticmethod
    def infer(x, k, *, axis, largest):
        axis = norm_axis("top_k_by", axis, x.ndim)
        need_ids("top_k_by", "K", k)
        if k.shape not in ((1,), (ANY,)):
            raise ProgramError(f"op top_k_by: K must be a vector of one number, found {k}")
        out = x.with_shape((*x.shape[:axis], ANY, *x.shape[axis + 1 :]))
        return out, out.with_dtype("int64")

    @staticmethod
    def grad(b, op, g):
        return _picked_grad(b, op, g), None

    @staticmethod
    def kernel(xp, x, k, *, axis, largest):
        count, most = int(k.item()), x.shape[axis]
        if not 0 <= count <= most:
            raise ExecutionError(f"op top_k_by: K is {count}; it must be from 0 to {most}, the size of axis {axis % x.ndim} of X")
        found = _best(xp, x, count, axis, largest)
        return xp.take_along_axis(x, found, axis=axis), found

    @staticmethod
    def samples():
        yield Sample.of(apart(3, 5), i64(2))
        yield Sample.of(apart(5, 3, 4), np.array([3], "int32"), axis=0, largest=False)


class Argsort(OpDef):
    """X sorted along `axis`, smallest first unless `descending`, and the int64 positions of its elements; equal ones keep their order."""

    name = "argsort"
    inputs, outputs = ("X",), ("Out", "Indices")
    attrs = {"axis": -1, "descending": False}
    pattern = _along("X -> X, X", "c!")
    grad = staticmethod(_picked_grad)

    @staticmethod
    def infer(x, *, axis, descending):
        norm_axis("argsort", axis, x.ndim)
        return x, x.with_dtype("int64")

    @staticmethod
    def kernel(xp, x, *, out, axis, descending):
        values, ids = out
        found = _order(xp, x, axis, descending)
        if ids is not None:
            ids[...] = found
        if values is not None:
            values[...] = xp.take_along_axis(x, found, axis=axis)

    @staticmethod
    def samples():
        yield Sample.of(apart(3, 5))
        yield Sample.of(apart(3, 2), axis=0, descending=True)
        yield Sample.of(apart(5, 4, 3), axis=1)
        yield Sample.of(np.array([2, 1, 2, -128], "int8"), descending=True)


class ArgsortGrad(OpDef):
    """Zeros in the shape of X with each gradient at the position of its element; only the shape of X is read."""

    name = "argsort_grad"
    inputs, outputs = ("X", "Indices", "Out@GRAD"), ("X@GRAD",)
    attrs = {"axis": -1}
    pattern = _along("~X, K, K -> X", "c! k:+ L(2)")

    @staticmethod
    def infer(x, ids, g, *, axis):
        return x

    @staticmethod
    def kernel(xp, x, ids, g, *, out, axis):
        _put_along(xp, out, ids, g, axis)

    @staticmethod
    def samples():
        yield Sample.of(apart(2, 3), np.array([[2, 0], [1, 2]]), apart(2, 2), grad=(), why="a gradient op")
        ids = np.argsort(apart(5, 4, 3), axis=1)[:, :2]
        yield Sample.of(apart(5, 4, 3), ids, apart(5, 2, 3, seed=1), axis=1, grad=(), why="a gradient op")


def _arg_shape(op: str, x: TensorType, axis: int, keepdims: bool, dtype: str) -> TensorType:
    axis = norm_axis(op, axis, x.ndim)
    if x.shape[axis] == 0:
        raise ProgramError(f"op {op}: axis {axis} of {x} is empty")
    need_ids(op, "dtype", TensorType(as_dtype(dtype), ()))
    return TensorType(as_dtype(dtype), (*x.shape[:axis], *((1,) if keepdims else ()), *x.shape[axis + 1 :]))


def _arg_words(ins: Types, outs: Types, attrs: Mapping[str, Any]) -> str:
    (x,), axis = ins, attrs["axis"]
    assert x is not None
    kept = along(axis, x.ndim, "." if attrs["keepdims"] else "")
    return f"{along(axis, x.ndim, 'c')} -> {kept} | c!"


class _ArgExtreme(OpDef):
    """Base of arg_max and arg_min; `function` is the name of the function of the array module."""

    inputs = ("X",)
    attrs = {"axis": -1, "keepdims": False, "dtype": "int64"}
    pattern = staticmethod(_arg_words)
    function: ClassVar[str] = ""

    @classmethod
    def infer(cls, x, *, axis, keepdims, dtype):
        return _arg_shape(cls.name, x, axis, keepdims, dtype)

    @classmethod
    def kernel(cls, xp, x, *, out, axis, keepdims, dtype):
        out[...] = getattr(xp, cls.function)(x, axis=axis).reshape(out.shape)


class ArgMax(_ArgExtreme):
    """The position of the largest element of X along `axis`, the first of equal ones, as `dtype`."""

    name, function = "arg_max", "argmax"

    @staticmethod
    def samples():
        yield Sample.of(apart(3, 4))
        yield Sample.of(np.array([[1, 1], [0, 2]], "int64"), axis=0, keepdims=True, dtype="int32")


class ArgMin(_ArgExtreme):
    """The position of the smallest element of X along `axis`, the first of equal ones, as `dtype`."""

    name, function = "arg_min", "argmin"

    @staticmethod
    def samples():
        yield Sample.of(apart(3, 4), axis=0)
        yield Sample.of(apart(5, 3), axis=-1, keepdims=True)
        yield Sample.of(apart(4), keepdims=True)
        yield Sample.of(apart(5, 4, 3), axis=1)


class Cumsum(OpDef):
    """The running sum of X along `axis`, or of all its elements in order with `flatten`.

    `exclusive` excludes the element itself from its sum; `reverse` sums from the end.
    """

    name = "cumsum"
    inputs = ("X",)
    attrs = {"axis": -1, "flatten": False, "exclusive": False, "reverse": False}

    @staticmethod
    def pattern(ins, outs, attrs):
        ndim = ins[0].ndim
        if attrs["flatten"]:
            return f"{but(range(ndim), ndim)} -> . | L(0)"
        x = along(attrs["axis"], ndim, "c")
        return f"{x} -> {x} | c! L(0)"

    @staticmethod
    def infer(x, *, axis, flatten, exclusive, reverse):
        if flatten:
            return x.with_shape((x.numel,))
        norm_axis("cumsum", axis, x.ndim)
        return x

    @staticmethod
    def grad(b, op, g):
        a = op.attrs
        back = b.cumsum(g, axis=0 if a["flatten"] else a["axis"], exclusive=a["exclusive"], reverse=not a["reverse"])
        return b.reshape_grad(back, op["X"]) if a["flatten"] else back

    @staticmethod
    def kernel(xp, x, *, out, axis, flatten, exclusive, reverse):
        if flatten:
            x, axis = x.reshape(-1), 0
        front, result = xp.moveaxis(x, axis, 0), xp.moveaxis(out, axis, 0)
        if reverse:
            front, result = front[::-1], result[::-1]
        if not exclusive:
            xp.cumsum(front, axis=0, dtype=out.dtype, out=result)
        elif len(result):
            result[0] = 0
            xp.cumsum(front[:-1], axis=0, dtype=out.dtype, out=result[1:])

    @staticmethod
    def samples():
        yield Sample.of(apart(2, 3))
        yield Sample.of(apart(3, 2), axis=0, exclusive=True)
        yield Sample.of(apart(2, 3), axis=1, reverse=True)
        yield Sample.of(apart(5, 4, 3), axis=1)
        yield Sample.of(apart(2, 3), flatten=True, exclusive=True, reverse=True)
        yield Sample.of(np.array([1, 2, 3], "int32"))


def share_of(n: int, share: float) -> int:
    """A fraction `share` of n elements: rounded to the nearest integer, and at least one."""
    return min(n, max(1, int(share * n + 0.5)))


class TopShare(OpDef):
    """True at the elements of X with the largest absolute values: Share * n of n elements, rounded to the nearest integer, and at least
    one.

    Share, one float, is read at run time. Of equal elements the first are selected; NaN counts as largest, so that it is not hidden.
    """

    name = "top_share"
    inputs = ("X", "Share")

    @staticmethod
    def infer(x: Any, share: Any) -> Any:
        if not x.is_float or not share.is_float or share.numel != 1:
            raise ProgramError(f"op top_share: expected floats as X and one as Share, found {x} and {share}")
        return x.with_dtype("bool")

    @staticmethod
    def kernel(xp: Any, x: Any, share: Any, *, out: Any) -> None:
        n = x.size
        k = share_of(n, float(share.reshape(())))
        if k == n:
            out.fill(True)
            return
        size = xp.abs(x.reshape(-1))
        size[xp.isnan(size)] = np.inf
        least = xp.partition(size, n - k)[n - k]
        chosen = size > least
        chosen[xp.flatnonzero(size == least)[: k - int(chosen.sum())]] = True
        out[...] = chosen.reshape(x.shape)

    @staticmethod
    def samples():
        yield Sample.of(apart(5, 3), np.array([0.2], "float32"), grad=(), why="a mask has no gradient")
        yield Sample.of(f32(4, 3, 2), np.array([0.9]), grad=(), why="a mask has no gradient")
        yield Sample.of(np.ones(5), np.array([0.5]), grad=(), why="a mask has no gradient")
