"""Gather, Scatter and their variants. At import, a negative index counts from the end of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ...ir import Variable
from ...ir.dtypes import np_dtype
from ...ir.types import ANY
from ...ops.shared.types import mul_sizes
from ..export_graph import Op
from ..node import Node
from ..table import EXPORT, entry, exports, imports
from .shape import as_int64, known_sizes, reshaped

entry("GatherElements", "take_along_axis", way=EXPORT, axis=0)
entry("GatherND", "gather_nd", way=EXPORT, operands={"Index": as_int64})


def _positions(n: Node, k: int, sizes: int | Sequence[int], axis: int | None = None) -> Variable:
    """Operand k with negative indices made positive.

    They are indices along an axis of size `sizes`, or along as many axes as `sizes` has. `axis` is the axis of operand 0, or the first of
    them; their sizes may be open then.
    """
    known = n.importer.array(n.operands[k])
    opened = axis is not None and ANY in np.ravel(sizes)
    if isinstance(known, np.ndarray) and not (opened and (known < 0).any()):
        if (known < 0).any():
            known_sizes(n, np.ravel(sizes).tolist())
        return n.const(np.where(known < 0, known + np.asarray(sizes, known.dtype), known))
    if n.importer.from_front:
        return n.x(k)
    ids = n.x(k)
    shape = (1,) * (len(ids.shape) - np.ndim(sizes)) + np.shape(sizes)
    if opened:
        own = [n.b.reshape(n.b.axis_size(n.x(), axis=(axis or 0) + k, dtype=ids.dtype), shape=(1,)) for k in range(np.size(sizes))]
        whole = reshaped(n, n.b.concat(own, axis=0) if len(own) > 1 else own[0], shape)
    else:
        whole = n.const(np.reshape(known_sizes(n, np.ravel(sizes).tolist()), shape), ids.dtype)
    zero = n.const(np.zeros(shape), ids.dtype)
    return n.b.where(n.b.less_than(ids, zero), n.b.elementwise_add(ids, whole), ids)


def _flat_index(n: Node, ids: Variable, sizes: Sequence[int]) -> Variable:
    """Indices along several axes, in the last axis of `ids`, as a vector of indices into these axes flattened."""
    if len(sizes) == 1:
        return reshaped(n, ids, (mul_sizes(ids.shape),))
    strides = np.reshape([prod(sizes[k + 1 :]) for k in range(len(sizes))], (1,) * (len(ids.shape) - 1) + (len(sizes),))
    flat = n.b.reduce_sum(n.b.elementwise_mul(ids, n.const(strides, ids.dtype)), dim=(-1,))
    return reshaped(n, flat, (mul_sizes(ids.shape[:-1]),))


# -- reading --------------------------------------------------------------------------------------------------------------------------


@imports("Gather")
def gather(n: Node) -> object:
    axis, old, ids = n.attr("axis", 0) % n.rank(), n.shape(), n.shape(1)
    known = n.importer.array(n.operands[1])
    if isinstance(known, np.ndarray) and known.size == 1 and known.ndim < 2:
        return _single_index(n, axis, int(known.flat[0]), known.ndim == 0)
    places = _positions(n, 1, old[axis], axis)
    if axis == 0 and len(old) == 2 and n.dtype() != "string":
        return n.b.lookup_table_v2(n.x(), places)
    found = n.b.index_select(n.x(), reshaped(n, places, (mul_sizes(ids),)), dim=axis)
    return found if len(ids) == 1 else reshaped(n, found, (*old[:axis], *ids, *old[axis + 1 :]))


def _single_index(n: Node, axis: int, place: int, drop: bool) -> Variable:
    """The element at one position of an axis, which may be open."""
    size = n.shape()[axis]
    if size != ANY and not -size <= place < size:
        raise n.wrong(f"it reads position {place} of axis {axis}, which has size {size}")
    end = np.iinfo(np.int32).max if place == -1 else place + 1
    return n.b.slice(n.x(), axes=(axis,), starts=(place,), ends=(int(end),), decrease_axis=(axis,) if drop else ())


def _longer_axes(n: Node, axis: int) -> tuple[list[int], list[int]]:
    """The axes along which operand 0 of GatherElements is longer than the ids, and the sizes that are read."""
    long = [k for k, (d, size) in enumerate(zip(n.shape(), n.shape(1), strict=True)) if k != axis and ANY != size < d]
    return long, [n.shape(1)[k] for k in long]


@imports("GatherElements")
def gather_elements(n: Node) -> object:
    axis, x = n.attr("axis", 0) % n.rank(), n.x()
    long, ends = _longer_axes(n, axis)
    if long:
        x = n.b.slice(x, axes=tuple(long), starts=(0,) * len(long), ends=tuple(ends))
    return n.b.take_along_axis(x, _positions(n, 1, n.shape()[axis], axis), axis=axis)


@imports("GatherND")
def gather_nd(n: Node) -> object:
    shared, old, ids = n.attr("batch_dims", 0), n.shape(), n.shape(1)
    depth = ids[-1]
    at = _positions(n, 1, old[shared : shared + depth], None if shared else 0)
    if not shared and ANY in old[:depth]:
        return n.b.gather_nd(n.x(), at)
    known_sizes(n, old[: shared + depth])
    if shared:  # an entry's own position in the shared axes comes before the ids
        grid = np.moveaxis(np.indices(old[:shared]), 0, -1).reshape(*old[:shared], *(1,) * (len(ids) - 1 - shared), shared)
        at = n.b.concat([n.const(np.broadcast_to(grid, (*known_sizes(n, ids[:-1]), shared)).copy(), at.dtype), at], axis=len(ids) - 1)
    sizes, rest = old[: shared + depth], old[shared + depth :]
    found = n.b.index_select(reshaped(n, n.x(), (prod(sizes), *rest)), _flat_index(n, at, sizes), dim=0)
    return reshaped(n, found, (*ids[:-1], *rest))


# -- writing --------------------------------------------------------------------------------------------------------------------------

_FOLDS = {"mul": "prod", "max": "max", "min": "min"}


def _scattered(n: Node, table: Variable, ids: Variable, rows: Variable) -> Variable:
    """The table with rows replaced, or combined with the old ones by `reduction`."""
    how = n.attr("reduction", "none")
    if how == "none":
        return n.b.scatter(table, ids, rows)
    if how == "add":
        return n.b.scatter_nd_add(table, n.b.unsqueeze(ids, axes=(1,)), rows)
    if how not in _FOLDS:
        raise n.wrong(f"there is no reduction {how!r}; it has: none, add, {', '.join(_FOLDS)}")
    return n.b.scatter_fold(table, ids, rows, op=_FOLDS[how])


@imports("ScatterElements", "Scatter")
def scatter_elements(n: Node) -> object:
    axis, old, ids = n.attr("axis", 0) % n.rank(), known_sizes(n, n.shape()), known_sizes(n, n.shape(1))
    if 0 in ids:
        return n.x()
    stride = prod(old[axis + 1 :])
    base = sum(prod(old[k + 1 :]) * i for k, i in enumerate(np.indices(ids)) if k != axis)
    along = n.b.elementwise_mul(at := _positions(n, 1, old[axis]), n.const(np.full((1,) * len(ids), stride), at.dtype))
    flat = n.b.elementwise_add(along, n.const(np.broadcast_to(base, ids).copy(), at.dtype))
    count = (prod(ids),)
    made = _scattered(n, reshaped(n, n.x(), (prod(old),)), reshaped(n, flat, count), reshaped(n, n.x(2), count))
    return reshaped(n, made, old)


@imports("ScatterND")
def scatter_nd(n: Node) -> object:
    old, ids = n.shape(), n.shape(1)
    if ids[-1] == 1 and old[0] == ANY and ANY not in ids:  # rows of a value with any number of rows
        places, count = _positions(n, 1, old[:1], 0), prod(ids)
        return _scattered(n, n.x(), reshaped(n, places, (count,)), reshaped(n, n.x(2), (count, *old[1:])))
    sizes, rest = known_sizes(n, old[: ids[-1]]), old[ids[-1] :]
    if 0 in ids or 0 in old:
        return n.x()
    flat = _flat_index(n, _positions(n, 1, sizes), sizes)
    rows = reshaped(n, n.x(2), (mul_sizes(ids[:-1]), *rest))
    return reshaped(n, _scattered(n, reshaped(n, n.x(), (prod(sizes), *rest)), flat, rows), old)


@imports("TensorScatter")
def tensor_scatter(n: Node) -> object:
    axis = n.attr("axis", -2) % n.rank()
    order = (0, axis, *(k for k in range(1, n.rank()) if k != axis))  # samples, steps, all others
    cache, update = (n.b.transpose(n.x(k), axis=order) for k in (0, 1))
    (samples, room, *rest), steps = known_sizes(n, cache.shape), update.shape[1]
    at = n.const(np.arange(steps)[None].repeat(samples, 0), np.int64)
    if n.has(2):
        at = n.b.elementwise_add(at, n.b.unsqueeze(n.x(2), axes=(1,)))
    if n.attr("mode", "linear") == "circular":
        at = n.b.elementwise_mod(at, n.const([[room]], np.int64))
    flat = n.b.elementwise_add(at, n.const(np.arange(samples)[:, None] * room, np.int64))
    rows = reshaped(n, update, (samples * steps, *rest))
    made = n.b.scatter(reshaped(n, cache, (samples * room, *rest)), reshaped(n, flat, (samples * steps,)), rows)
    return n.b.transpose(reshaped(n, made, cache.shape), axis=tuple(int(k) for k in np.argsort(order)))


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("index_select")
def index_select(op: Op) -> str:
    return op.emit("Gather", op["X"], op["Index"], axis=op.attrs["dim"])


@exports("lookup_table", "lookup_table_v2")
def lookup(op: Op) -> str:
    ids, pad = op["Ids"], op.attrs["padding_idx"]
    if op.type == "lookup_table":
        ids = op.emit("Squeeze", ids, op.ints([-1]))
    rows = op.emit("Gather", op["W"], ids, axis=0)
    if pad == -1:
        return rows
    kept = op.emit("Not", op.emit("Equal", ids, op.const(np.array(pad, np_dtype(op.dtype("Ids"))))))
    return op.emit("Mul", rows, op.emit("Unsqueeze", op.emit("Cast", kept, to=op.code(op.dtype("W"))), op.ints([-1])))


@exports("gather")
def export_gather(op: Op) -> str:
    flat = op.type_of("Index").ndim == 1
    return op.emit("Gather", op["X"], op["Index"] if flat else op.emit("Reshape", op["Index"], op.ints([-1])), axis=0)
