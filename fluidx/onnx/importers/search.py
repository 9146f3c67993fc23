"""Import of operators that search: ArgMax, TopK, OneHot, Compress, NonZero and Unique."""

from __future__ import annotations

import numpy as np

from ...ir import Variable
from ...ops.data.selection import unique
from ...ops.shared.types import mul_sizes
from ..import_tables import dynamic, imports, on_numpy
from ..limits import checked_shape
from ..node import Node
from .shape import known_sizes, reshaped

# -- the largest ----------------------------------------------------------------------------------------------------------------------


@imports("ArgMax", "ArgMin")
def arg_of(n: Node) -> object:
    op = {"ArgMax": "arg_max", "ArgMin": "arg_min"}[n.op_type]
    axis, x, keep = n.attr("axis", 0) % n.rank(), n.x(), bool(n.attr("keepdims", 1))
    if not n.attr("select_last_index", 0):
        return n.b.emit(op, x, axis=axis, keepdims=keep)
    found = n.b.emit(op, n.b.reverse(x, axis=(axis,)), axis=axis, keepdims=keep)
    (size,) = known_sizes(n, n.shape()[axis : axis + 1])
    return n.b.elementwise_sub(n.const(np.full((1,) * len(found.shape), size - 1), np.int64), found)


@imports("Hardmax")
def hardmax(n: Node) -> object:
    axis = n.attr("axis", -1) % n.rank()
    found = n.b.arg_max(n.x(), axis=axis, keepdims=True)
    return n.b.cast(n.b.equal(found, _along(n, n.shape()[axis], axis, n.rank())), dtype=n.dtype())


def _along(n: Node, size: int, axis: int, ndim: int, dtype: str = "int64") -> Variable:
    """0, 1, 2, ... along one of `ndim` axes."""
    return n.const(np.arange(*known_sizes(n, (size,))).reshape([size if k == axis else 1 for k in range(ndim)]), dtype)


@imports("TopK")
def top_k(n: Node) -> object:
    (k,) = n.ints(1) or [1]
    return n.b.top_k(n.x(), k=k, axis=n.attr("axis", -1), largest=bool(n.attr("largest", 1)))


# -- classes --------------------------------------------------------------------------------------------------------------------------


def _one_hot_axis(n: Node) -> tuple[int, int]:
    """(the new axis, its size) of OneHot."""
    axis = n.attr("axis", -1)
    return axis + n.rank() + 1 if axis < 0 else axis, int(np.ravel(n.value(1))[0])


@imports("OneHot")
def one_hot(n: Node) -> object:
    axis, depth = _one_hot_axis(n)
    ids = n.b.unsqueeze(n.cast(n.x(), "int64"), axes=(axis,))
    checked_shape([depth])
    at = _along(n, depth, axis, n.rank() + 1)
    # matches ids that count from the end
    less = n.b.elementwise_sub(at, n.b.fill_constant(shape=at.shape, dtype="int64", value=float(depth)))
    off, on = n.b.split(n.x(2), num=2, n_out=2)
    shape = (1,) * (n.rank() + 1)
    hit = n.b.logical_or(n.b.equal(ids, at), n.b.equal(ids, less))
    return n.b.where(hit, reshaped(n, on, shape), reshaped(n, off, shape))


@on_numpy("OneHot", pure=True)
def host_one_hot(n: Node) -> object:
    axis, depth = _one_hot_axis(n)
    ids, values = np.expand_dims(n.value(0).astype(np.int64), axis), n.value(2)
    checked_shape([depth, ids.size], values.itemsize)
    at = np.arange(depth).reshape([depth if k == axis else 1 for k in range(ids.ndim)])
    return values[((ids == at) | (ids == at - depth)).astype(np.int64)]


# -- selection --------------------------------------------------------------------------------------------------------------------


@imports("Compress")
def compress(n: Node) -> object:
    axis, chosen = n.attr("axis"), np.flatnonzero(n.value(1))
    x = reshaped(n, n.x(), (mul_sizes(n.shape()),)) if axis is None else n.x()
    return n.b.index_select(x, n.const(chosen, np.int64), dim=axis or 0)


@on_numpy("Compress", pure=True)
def host_compress(n: Node) -> object:
    return np.compress(n.value(1), n.value(0), axis=n.attr("axis"))


@on_numpy("NonZero", pure=True)
def non_zero(n: Node) -> object:
    return np.array(np.nonzero(np.atleast_1d(n.value(0))), np.int64)


@dynamic("NonZero", 0)
def computed_non_zero(n: Node) -> object:
    x = n.x() if n.rank() else n.b.reshape(n.x(), shape=(1,))
    return n.b.transpose(n.b.where_index(x), axis=(1, 0))


@dynamic("Compress", 1)
def computed_compress(n: Node) -> object:
    axis, x = n.attr("axis"), n.x()
    if axis is None:
        x = n.b.reshape(x, shape=(mul_sizes(n.shape()),)) if n.rank() != 1 else x
    return n.b.index_select(x, n.b.squeeze(n.b.where_index(n.x(1)), axes=(1,)), dim=axis or 0)


@on_numpy("Unique", pure=True)
def host_unique(n: Node) -> object:
    return unique(n.value(0), n.attr("axis"), bool(n.attr("sorted", 1)))


@dynamic("Unique", 0)
def computed_unique(n: Node) -> object:
    axis = n.attr("axis")
    return n.b.unique(n.x(), axis=axis or 0, flatten=axis is None, sorted=bool(n.attr("sorted", 1)))
