"""Ops that read or write rows by id, and `where`: gather, index_select, scatter.

Ids come from data, so they are checked at run time; an id out of range raises ExecutionError. The gradient of reading rows is `add_rows`,
which adds repeated rows in order: the result is bitwise equal in every run.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...ir.axis_letters import along
from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Autocast, Control, Native, Storage
from ...ir.opdef import OpDef, Sample
from ...ir.parts import Part
from ...ir.types import TensorType
from ..expr.native import expression_calls
from ..expr.nodes import make_node, sym
from ..shared.arrays import add_rows, take
from ..shared.broadcast import broadcast_sizes, reduced
from ..shared.native import add_row_calls, copy_calls, id_calls, take_calls
from ..shared.samples import bits, f32, i64
from ..shared.types import check_range, merge_size, need_dtype, need_ids, need_ndim, norm_axis


def local_ids(ids: Any, rows: int, part: Part | None) -> tuple[Any, Any]:
    """Ids relative to the start of a part of `rows` rows, and a mask of those in the part (None: all are)."""
    if part is None or part.size == rows:
        return ids, None
    ids = ids - part.start
    return ids, (ids >= 0) & (ids < rows)


def take_local_rows(xp: Any, op: str, what: str, table: Any, ids: Any, out: Any, part: Part | None) -> None:
    """`out[k] = table[ids[k]]`, zeros for a row in another part. Raises ExecutionError for an id in no part."""
    check_range(xp, op, ids, part.size if part is not None else table.shape[0], what)
    ids, here = local_ids(ids, table.shape[0], part)
    take(xp, table, ids, 0, out)
    if here is not None:
        out[~here] = 0


def add_local_rows(xp: Any, table: Any, ids: Any, rows: Any, part: Part | None) -> None:
    """`add_rows` for the rows in this part."""
    ids, here = local_ids(ids, table.shape[0], part)
    add_rows(xp, table, *((ids, rows) if here is None else (ids[here], rows[here])))


# -- gather and scatter -----------------------------------------------------------------------------------------------------


def _row_ids(op: str, slot: str, ids: TensorType) -> int:
    """The number of rows that ids of shape [n] or [n, 1] select."""
    need_ids(op, slot, ids)
    need_ndim(op, slot, ids, 1, 2)
    if ids.ndim == 2 and ids.shape[1] != 1:
        raise ProgramError(f"op {op}: {slot} must be [n] or [n, 1], found {ids}")
    return ids.shape[0]


def _id_words(ids: TensorType) -> str:
    return "n" if ids.ndim == 1 else "n ."


def _matrix(x: Any) -> Any:
    return x.reshape(x.shape[0], prod(x.shape[1:]))


class Gather(OpDef):
    """The rows of X at Index: row k of the result is row Index[k] of X. Index is [n] or [n, 1].

    Raises ExecutionError if an id is negative or not below the number of rows of X.
    """

    name = "gather"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    inputs = ("X", "Index")

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"v *, {_id_words(ins[1])} -> n * | v@ v:+ L(0)"

    @staticmethod
    def infer(x, index):
        need_ndim("gather", "X", x, 1, 99)
        return x.with_shape((_row_ids("gather", "Index", index), *x.shape[1:]))

    @staticmethod
    def grad(b, op, g):
        return b.gather_grad(op["X"], op["Index"], g), None

    @staticmethod
    def kernel(xp, x, index, *, out, part=None):
        take_local_rows(xp, "gather", "X", x, xp.ascontiguousarray(index).reshape(-1), out, part)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        x, index = ins
        return take_calls("gather", "X", x, index, outs[0], part, dry=dry)

    native = Native(calls=_calls)

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 3), i64(3, 0, 3))
        yield Sample.of(f32(3, 2, 2), np.array([[1], [2]], "int32"))
        yield Sample.of(f32(3), i64(2))
        yield Sample.of(f32(5, 3, 2), i64(4, 0, 2, 4))


class GatherGrad(OpDef):
    """Zeros in the shape of X with row k of the gradient added to row Index[k]; only X's shape is read."""

    name = "gather_grad"
    inputs, outputs = ("X", "Index", "Out@GRAD"), ("X@GRAD",)

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"~v *, {_id_words(ins[1])}, n * -> v * | v@ n:+ L(2)"

    @staticmethod
    def infer(x, index, g):
        return x

    @staticmethod
    def kernel(xp, x, index, g, *, out, part=None):
        out.fill(0)
        if g.size:
            add_local_rows(xp, _matrix(out), index.reshape(-1), _matrix(g), part)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        _, index, g = ins
        return add_row_calls("gather_grad", "X", outs[0], index, g, part, dry=dry)

    native = Native(calls=_calls, halves=True)

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 3), i64(3, 0, 3), f32(3, 3), grad=(), why="a gradient op")
        yield Sample.of(f32(5, 3, 2), np.array([[4], [0], [2], [4]]), f32(4, 3, 2, seed=1), grad=(), why="a gradient op")


class IndexSelect(OpDef):
    """The slices of X along `dim` at the positions in the vector Index.

    Raises ExecutionError if an id is negative or not below the size of X there.
    """

    name = "index_select"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    inputs = ("X", "Index")
    attrs = {"dim": 0}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, y = (along(attrs["dim"], ins[0].ndim, w) for w in "vn")
        return f"{x}, n -> {y} | v@ v:+ L(0)"

    @staticmethod
    def infer(x, index, *, dim):
        need_ids("index_select", "Index", index)
        need_ndim("index_select", "Index", index, 1)
        dim = norm_axis("index_select", dim, x.ndim)
        return x.with_shape((*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]))

    @staticmethod
    def grad(b, op, g):
        return b.index_select_grad(op["X"], op["Index"], g, dim=op.attrs["dim"]), None

    @staticmethod
    def kernel(xp, x, index, *, out, dim, part=None):
        index = xp.ascontiguousarray(index)
        check_range(xp, "index_select", index, part.size if part is not None else x.shape[dim], f"axis {dim} of X")
        index, here = local_ids(index, x.shape[dim], part)
        take(xp, x, index, dim, out)
        if here is not None:
            xp.moveaxis(out, dim, 0)[~here] = 0

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        (x, index), dim = ins, attrs["dim"] % ins[0].ndim
        return take_calls("index_select", f"axis {dim} of X", x, index, outs[0], part, dry=dry, axis=dim)

    native = Native(calls=_calls)

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 3), i64(3, 0, 3))
        yield Sample.of(f32(2, 3, 2), np.array([2, 2], "int32"), dim=-2)
        yield Sample.of(f32(3, 5, 2), i64(4, 0, 4, 2), dim=1)


class IndexSelectGrad(OpDef):
    """Zeros in the shape of X with slice k of the gradient added to slice Index[k] along `dim`; only X's shape is read."""

    name = "index_select_grad"
    inputs, outputs = ("X", "Index", "Out@GRAD"), ("X@GRAD",)
    attrs = {"dim": 0}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, y = (along(attrs["dim"], ins[0].ndim, w) for w in "vn")
        return f"~{x}, n, {y} -> {x} | v@ n:+ L(2)"

    @staticmethod
    def infer(x, index, g, *, dim):
        return x

    @staticmethod
    def kernel(xp, x, index, g, *, out, dim, part=None):
        if x.size == 0 or g.size == 0:
            out.fill(0)
            return
        front = xp.moveaxis(out, dim, 0)
        table = xp.zeros(front.shape, out.dtype)
        add_local_rows(xp, _matrix(table), index, _matrix(xp.ascontiguousarray(xp.moveaxis(g, dim, 0))), part)
        front[...] = table

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        x, index, g = ins
        if attrs["dim"] % x.ndim:
            return None
        return add_row_calls("index_select_grad", "axis 0 of X", outs[0], index, g, part, dry=dry)

    native = Native(calls=_calls)

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3), i64(2, 2), f32(2, 2), dim=1, grad=(), why="a gradient op")
        yield Sample.of(f32(3, 5, 2), i64(4, 0, 4, 2), f32(3, 4, 2, seed=1), dim=1, grad=(), why="a gradient op")


class Scatter(OpDef):
    """X with the rows at Ids replaced by the rows of Updates; the last update of a repeated row counts.

    With `overwrite=False` the rows at Ids are set to 0 and then all their updates are added. Raises ExecutionError if an id is out of
    range.
    """

    name = "scatter"
    arithmetic = Arithmetic(flops=0)
    # updates of one row are added
    autocast = Autocast(takes_16_bit=False, takes_low_bit=True)
    inputs = ("X", "Ids", "Updates")
    attrs = {"overwrite": True}
    storage = Storage(inplace=(("X", "Out"),))

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"v *, {_id_words(ins[1])}, n * -> v * | v@ n! L(0,2)"

    @staticmethod
    def infer(x, ids, updates, *, overwrite):
        n = _row_ids("scatter", "Ids", ids)
        need_dtype("scatter", "Updates", updates, x, "X")
        need_ndim("scatter", "Updates", updates, x.ndim)
        merge_size("scatter", "the numbers of Ids and of rows of Updates", n, updates.shape[0])
        for i in range(1, x.ndim):
            merge_size("scatter", f"axis {i} of X and Updates", x.shape[i], updates.shape[i])
        return x

    @staticmethod
    def grad(b, op, g):
        dx, du = b.scatter_grad(op["Ids"], g, overwrite=op.attrs["overwrite"])
        return dx, None, du

    @staticmethod
    def kernel(xp, x, ids, updates, *, out, overwrite, part=None):
        ids = xp.ascontiguousarray(ids).reshape(-1)
        check_range(xp, "scatter", ids, part.size if part is not None else x.shape[0], "X")
        ids, here = local_ids(ids, x.shape[0], part)
        if here is not None:
            ids, updates = ids[here], updates[here]
        if out is not x:
            out[...] = x
        if overwrite:
            out[ids] = updates
        elif ids.size:
            out[ids] = 0
            add_rows(xp, _matrix(out), ids, _matrix(updates))

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        (x, ids, updates), out = ins, outs[0]
        copied = copy_calls(out, x, dry)
        if attrs["overwrite"]:
            put = id_calls("put_rows", "scatter", "X", out, ids, updates, part, dry=dry)
        else:
            put = add_row_calls("scatter", "X", out, ids, updates, part, clear=2, dry=dry)
        return None if copied is None or put is None else [*copied, *put]

    native = Native(calls=_calls, halves=True)

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 3), i64(2, 0), f32(2, 3, seed=1))
        yield Sample.of(f32(4, 3), np.array([[2], [0], [2]], "int32"), f32(3, 3, seed=1))
        yield Sample.of(f32(4, 2), i64(1, 1, 3), f32(3, 2, seed=1), overwrite=False)
        yield Sample.of(f32(5, 2, 3), i64(4, 1, 4, 0), f32(4, 2, 3, seed=1))


class ScatterGrad(OpDef):
    """The gradients of scatter: 0 in the replaced rows of X, and for each update the gradient of the row that it was written to."""

    name = "scatter_grad"
    inputs, outputs = ("Ids", "Out@GRAD"), ("X@GRAD", "Updates@GRAD")
    attrs = {"overwrite": True}

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"{_id_words(ins[0])}, v * -> v *, n * | v! n! L(1)"

    @staticmethod
    def infer(ids, g, *, overwrite):
        _row_ids("scatter_grad", "Ids", ids)
        return g, g.with_shape((ids.shape[0], *g.shape[1:]))

    @staticmethod
    def kernel(xp, ids, g, *, out, overwrite):
        dx, du = out
        ids = ids.reshape(-1)
        if du is not None:
            du[...] = g[ids]
            if overwrite:  # an update that was overwritten has no effect
                last = xp.zeros(g.shape[0], xp.int64)
                order = xp.arange(ids.size)
                last[ids] = order
                du[last[ids] != order] = 0
        if dx is not None:
            dx[...] = g
            dx[ids] = 0

    @staticmethod
    def samples():
        yield Sample.of(i64(2, 2), f32(3, 2), grad=(), why="a gradient op")
        yield Sample.of(np.array([[4], [1], [4]]), f32(5, 2, 3), overwrite=False, grad=(), why="a gradient op")


# -- selecting --------------------------------------------------------------------------------------------------------------


class Where(OpDef):
    """X where Condition is true, Y elsewhere; the three broadcast as in NumPy."""

    name = "where"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    inputs = ("Condition", "X", "Y")
    pattern = "*, *, * -> * | L(1,2)"

    @staticmethod
    def infer(condition, x, y):
        if condition.dtype != "bool":
            raise ProgramError(f"op where: Condition must be bool, found {condition.dtype}")
        need_dtype("where", "Y", y, x, "X")
        return x.with_shape(broadcast_sizes("where", condition.shape, x.shape, y.shape))

    @staticmethod
    def grad(b, op, g):
        zeros = b.fill_zeros_like(g)
        condition, x, y, out = op["Condition"], op["X"], op["Y"], op["Out"]
        dx, dy = b.where(condition, g, zeros), b.where(condition, zeros, g)
        return None, reduced(b, dx, x, out, condition, y), reduced(b, dy, y, out, condition, x)

    @staticmethod
    def kernel(xp, condition, x, y, *, out):
        out[...] = xp.where(condition, x, y)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        values = dict(zip("cxy", ins, strict=True))
        if outs[0].dtype == bool:
            return None
        return expression_calls(make_node("where", *map(sym, values)), values, outs[0], dry)

    native = Native(calls=_calls)

    @staticmethod
    def samples():
        yield Sample.of(bits(5, 3) > 0, f32(5, 3), f32(5, 3, seed=1))
        yield Sample.of(bits(2, 1, 3) > 0, f32(5, 3), f32(2, 5, 1, seed=1))
        yield Sample.of(np.array([[True], [False]]), f32(2, 3), f32(1, seed=1))
