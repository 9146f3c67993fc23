"""Operators that search, sort and select: ArgMax, TopK, OneHot, Compress, NonZero and Unique."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir import Variable
from ...ir.dtypes import np_dtype
from ...ops.data.selection import unique
from ...ops.shared.types import mul_sizes
from ..export_graph import Op
from ..limits import checked_shape
from ..node import Node
from ..table import dynamic, entry, exports, imports, on_numpy
from .shape import as_int64, known_sizes, reshaped

entry("TopK", "top_k_by", computed=(1,), operands={"K": as_int64}, axis=-1, largest=True)


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


# -- selection --------------------------------------------------------------------------------------------------------------------


@imports("Compress")
def compress(n: Node) -> object:
    axis, chosen = n.attr("axis"), np.flatnonzero(n.value(1))
    x = reshaped(n, n.x(), (mul_sizes(n.shape()),)) if axis is None else n.x()
    return n.b.index_select(x, n.const(chosen, np.int64), dim=axis or 0)


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


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("one_hot", "one_hot_v2")
def export_one_hot(op: Op) -> str:
    """In ONNX a negative id counts from the end, and one that is too large gives zeros."""
    x, number = op.emit("Squeeze", op["X"], op.ints([-1])) if op.type == "one_hot" else op["X"], np_dtype(op.dtype("X")).type
    depth, both = op.attrs["depth"], op.const(np.array([0, 1], np_dtype(op.attrs["dtype"])))
    if op.attrs["allow_out_of_range"]:
        x = op.emit("Where", op.emit("Less", x, op.const(np.array(0, number))), op.const(np.array(depth, number)), x)
    return op.emit("OneHot", x, op.const(np.array(depth, np.int64)), both, axis=-1)


@exports("arg_max", "arg_min")
def arg(op: Op) -> str:
    kind = {"arg_max": "ArgMax", "arg_min": "ArgMin"}[op.type]
    found = op.emit(kind, op["X"], axis=op.attrs["axis"], keepdims=int(op.attrs["keepdims"]))
    return found if op.attrs["dtype"] == "int64" else op.emit("Cast", found, to=op.code(op.attrs["dtype"]))


@exports("top_k")
def export_top_k(op: Op) -> dict[str, Any]:
    return top_k_nodes(op, op.ints([op.attrs["k"]]))


def top_k_nodes(op: Op, k: str) -> dict[str, Any]:
    """The k largest or smallest elements along an axis, and their positions."""
    values, places = op.emit_many("TopK", 2, op["X"], k, axis=op.attrs["axis"], largest=int(op.attrs["largest"]))
    return {"Out": values, "Indices": places}


@exports("argsort")
def argsort(op: Op) -> dict[str, Any]:
    axis = op.attrs["axis"] % op.type_of("X").ndim
    count = op.sizes(op["X"], axis, axis + 1)
    values, places = op.emit_many("TopK", 2, op["X"], count, axis=axis, largest=int(op.attrs["descending"]))
    return {"Out": values, "Indices": places}


@exports("where_index")
def where_index(op: Op) -> str:
    return op.emit("Transpose", op.emit("NonZero", op["X"]), perm=[1, 0])


@exports("masked_select")
def masked_select(op: Op) -> str:
    return op.emit("Compress", *(op.emit("Reshape", op[slot], op.ints([-1])) for slot in ("X", "Mask")))


@exports("unique")
def export_unique(op: Op) -> dict[str, Any]:
    attrs = {"sorted": int(op.attrs["sorted"])} | ({} if op.attrs["flatten"] else {"axis": op.attrs["axis"] % op.type_of("X").ndim})
    made = op.emit_many("Unique", 4, op["X"], **attrs)
    if op.attrs["dtype"] != "int64":
        made[1:] = [op.emit("Cast", v, to=op.code(op.attrs["dtype"])) for v in made[1:]]
    return dict(zip(("Out", "First", "Index", "Count"), made, strict=True))
