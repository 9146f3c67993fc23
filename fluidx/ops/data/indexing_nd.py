"""Ops that read or add elements and slices at positions along several axes: gather_nd, scatter_nd_add."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ...ir.axis_letters import letters
from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Autocast, Control, Storage
from ...ir.opdef import OpDef, Sample
from ...ir.types import TensorType
from ..shared.arrays import add_rows, take
from ..shared.samples import f32, i64
from ..shared.types import check_range, need_dtype, need_ids, need_ndim


def _nd_rows(op: str, x: TensorType, index: TensorType) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(the leading shape of a [..., k] index, the sizes of X after its first k axes)."""
    need_ids(op, "Index", index)
    need_ndim(op, "Index", index, 1, 99)
    k = index.shape[-1]
    if not 1 <= k <= x.ndim:
        raise ProgramError(f"op {op}: the last axis of Index {index} must have size 1 to {x.ndim}, the axes of X {x}; found {k}")
    return index.shape[:-1], x.shape[k:]


def _nd_words(x: TensorType, index: TensorType) -> tuple[str, str, str]:
    """The axis words for X, whose first axes are whole, for the ids, and for the selected elements."""
    k = index.shape[-1]
    lead, rest = letters(index.ndim - 1, "n"), letters(x.ndim - k, "d")
    return f"{'. ' * k}{rest}", f"{lead} .", f"{lead} {rest}"


def _flat_ids(xp: Any, op: str, index: Any, shape: Sequence[int]) -> Any:
    """Ids [..., k] into the first k axes as flat ids into these axes. Raises ExecutionError if one is out of range."""
    k = index.shape[-1]
    flat = xp.zeros(index.shape[:-1], xp.int64)
    for a in range(k):
        part = xp.ascontiguousarray(index[..., a])
        check_range(xp, op, part, shape[a], f"axis {a} of X")
        flat *= shape[a]
        flat += part
    return flat.reshape(-1)


def _nd_matrix(x: Any, k: int) -> Any:
    return x.reshape(prod(x.shape[:k]), prod(x.shape[k:]))


class GatherNd(OpDef):
    """The elements or slices of X at Index: its last axis holds ids into the first axes of X.

    Raises ExecutionError if an id is out of range.
    """

    name = "gather_nd"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    inputs = ("X", "Index")

    @staticmethod
    def pattern(ins, outs, attrs):
        x, ids, y = _nd_words(*ins)
        return f"{x}, {ids} -> {y} | L(0)"

    @staticmethod
    def infer(x, index):
        lead, rest = _nd_rows("gather_nd", x, index)
        return x.with_shape((*lead, *rest))

    @staticmethod
    def grad(b, op, g):
        return b.gather_nd_grad(op["X"], op["Index"], g), None

    @staticmethod
    def kernel(xp, x, index, *, out):
        k = index.shape[-1]
        flat = _flat_ids(xp, "gather_nd", index, x.shape)
        if flat.size and x.size:
            take(xp, _nd_matrix(x, k), flat, 0, out.reshape(flat.size, prod(x.shape[k:])))

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 4, 2), i64((0, 1), (2, 3), (0, 1)))
        yield Sample.of(f32(3, 4), i64(((0, 1),), ((2, 3),)))
        yield Sample.of(f32(3, 2), np.array([[2]], "int32"))
        yield Sample.of(f32(3, 2, 5), i64([[0, 1], [2, 0], [2, 1], [0, 1]]))


class GatherNdGrad(OpDef):
    """Zeros in the shape of X with the gradient added at the positions that gather_nd read; only X's shape is read."""

    name = "gather_nd_grad"
    inputs, outputs = ("X", "Index", "Out@GRAD"), ("X@GRAD",)

    @staticmethod
    def pattern(ins, outs, attrs):
        x, ids, y = _nd_words(*ins[:2])
        return f"~{x}, {ids}, {y} -> {x} | n?:+ L(2)"

    @staticmethod
    def infer(x, index, g):
        return x

    @staticmethod
    def kernel(xp, x, index, g, *, out):
        out.fill(0)
        flat = _flat_ids(xp, "gather_nd_grad", index, x.shape)
        if flat.size and x.size:
            add_rows(xp, _nd_matrix(out, index.shape[-1]), flat, g.reshape(flat.size, -1))

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 2), i64((2,), (2,)), f32(2, 2), grad=(), why="a gradient op")
        yield Sample.of(f32(3, 2, 5), i64([0, 1], [2, 0], [2, 1], [0, 1]), f32(4, 5, seed=1), grad=(), why="a gradient op")


class ScatterNdAdd(OpDef):
    """X with Updates added to the elements or slices at Index; ids may repeat.

    Raises ExecutionError if an id is out of range.
    """

    name = "scatter_nd_add"
    inputs = ("X", "Index", "Updates")

    @staticmethod
    def pattern(ins, outs, attrs):
        x, ids, y = _nd_words(*ins[:2])
        return f"{x}, {ids}, {y} -> {x} | n?! L(0,2)"

    storage = Storage(inplace=(("X", "Out"),))

    @staticmethod
    def infer(x, index, updates):
        lead, rest = _nd_rows("scatter_nd_add", x, index)
        need_dtype("scatter_nd_add", "Updates", updates, x, "X")
        if not x.with_shape((*lead, *rest)).accepts(updates):
            raise ProgramError(f"op scatter_nd_add: expected Updates {x.with_shape((*lead, *rest))}, found {updates}")
        return x

    @staticmethod
    def grad(b, op, g):
        return g, None, b.gather_nd(g, op["Index"])

    @staticmethod
    def kernel(xp, x, index, updates, *, out):
        flat = _flat_ids(xp, "scatter_nd_add", index, x.shape)
        if out is not x:
            out[...] = x
        if flat.size and x.size:
            add_rows(xp, _nd_matrix(out, index.shape[-1]), flat, updates.reshape(flat.size, -1))

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 3), i64((2,), (2,)), f32(2, 3, seed=1))
        yield Sample.of(f32(2, 3), i64((0, 1), (1, 2), (0, 1)), f32(3, seed=1))
        yield Sample.of(f32(2, 3, 5), i64((0, 1), (1, 2), (0, 1), (1, 0)), f32(4, 5, seed=1))
