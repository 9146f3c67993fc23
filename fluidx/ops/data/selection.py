"""Ops that select elements by value, so that the size of the result depends on values: where_index, masked_select, unique."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...ir.dtypes import np_dtype
from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Control
from ...ir.opdef import OpDef, Sample
from ...ir.types import ANY, TensorType
from ..shared.samples import f32, i64
from ..shared.types import meet, mul_sizes, need_ids, need_ndim, norm_axis


class WhereIndex(OpDef):
    """The positions of the nonzero elements of X: a row for each, in their order, with its int64 position along every axis."""

    name = "where_index"
    arithmetic = Arithmetic(flops=0)
    inputs = ("X",)
    control = Control(sized_by_values=("n",))

    @staticmethod
    def infer(x):
        need_ndim("where_index", "X", x, 1, 99)
        return TensorType("int64", (ANY, x.ndim))

    @staticmethod
    def kernel(xp, x):
        return np.argwhere(x).astype("int64", copy=False)

    @staticmethod
    def samples():
        yield Sample.of(np.array([[True, False, True], [False, True, True]]), grad=(), why="positions have no gradient")
        yield Sample.of(np.array([0, 2, 0, -1, np.nan], "float32"), grad=(), why="positions have no gradient")
        yield Sample.of(np.zeros((2, 3, 2), "int32"))


class MaskedSelect(OpDef):
    """The elements of X where Mask, a bool of the same shape, is true, in their order, as a vector."""

    name = "masked_select"
    arithmetic = Arithmetic(flops=0)
    inputs = ("X", "Mask")
    control = Control(sized_by_values=("n",))

    @staticmethod
    def infer(x, mask):
        _need_mask("masked_select", x, mask)
        return x.with_shape((ANY,))

    @staticmethod
    def grad(b, op, g):
        return b.masked_select_grad(op["X"], op["Mask"], g), None

    @staticmethod
    def kernel(xp, x, mask):
        return x[mask]

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 3), np.arange(12).reshape(4, 3) % 3 > 0)
        yield Sample.of(f32(5), np.zeros(5, bool))
        yield Sample.of(i64(3, 1, 2), np.array([True, False, True]))


class MaskedSelectGrad(OpDef):
    """Zeros in the shape of X with the elements of the gradient, in order, where Mask is true; only the shape of X is read."""

    name = "masked_select_grad"
    arithmetic = Arithmetic(flops=0)
    inputs, outputs = ("X", "Mask", "Out@GRAD"), ("X@GRAD",)

    @staticmethod
    def infer(x, mask, g):
        _need_mask("masked_select_grad", x, mask)
        return x

    @staticmethod
    def kernel(xp, x, mask, g, *, out):
        # the position of each element among the selected ones; an element that is not selected reads the first
        place = xp.cumsum(mask.reshape(-1), dtype=xp.int64) - 1
        if g.size:
            out[...] = xp.where(mask, xp.take(g, xp.maximum(place, 0)).reshape(mask.shape), xp.zeros((), out.dtype))
        else:
            out.fill(0)

    @staticmethod
    def samples():
        mask = np.arange(12).reshape(4, 3) % 3 > 0
        yield Sample.of(f32(4, 3), mask, f32(8, seed=1), grad=(), why="a gradient op")
        yield Sample.of(f32(5), np.zeros(5, bool), f32(0), grad=(), why="a gradient op")


def _need_mask(op: str, x: TensorType, mask: TensorType) -> None:
    if mask.dtype != "bool" or mask.ndim != x.ndim or not all(map(meet, x.shape, mask.shape)):
        raise ProgramError(f"op {op}: Mask must be a bool of the shape of X {x}, found {mask}")


class Unique(OpDef):
    """The distinct elements of X, or its distinct slices along `axis`, with the position of the first of each in X, for each element of X
    its position in the result, and the number of occurrences.

    They are in the order of first occurrence, or sorted if `sorted`; with `flatten` X is a vector. Positions and counts are of `dtype`.
    """

    name = "unique"
    arithmetic = Arithmetic(flops=0)
    inputs, outputs = ("X",), ("Out", "First?", "Index?", "Count?")
    attrs = {"axis": 0, "flatten": False, "sorted": False, "dtype": "int64"}
    control = Control(sized_by_values=("n", "n", "", "n"))

    @staticmethod
    def infer(x, *, axis, flatten, sorted, dtype):
        need_ndim("unique", "X", x, 0 if flatten else 1, 99)
        need_ids("unique", "dtype", TensorType(dtype, ()))
        found, axis = TensorType(dtype, (ANY,)), 0 if flatten else norm_axis("unique", axis, x.ndim)
        size = mul_sizes(x.shape) if flatten else x.shape[axis]
        made = x.with_shape((ANY,) if flatten else (*x.shape[:axis], ANY, *x.shape[axis + 1 :]))
        return made, found, TensorType(dtype, (size,)), found

    @staticmethod
    def kernel(xp, x, *, axis, flatten, sorted, dtype):
        line = x.reshape(-1) if flatten else np.moveaxis(x, axis, 0)
        first, index, count = _different(line, sorted)
        made = line[first] if flatten else np.moveaxis(line[first], 0, axis)
        return (made, *(v.reshape(-1).astype(np_dtype(dtype)) for v in (first, index, count)))

    @staticmethod
    def samples():
        yield Sample.of(i64(2, 3, 3, 1, 5, 3))
        yield Sample.of(np.array([[2, 1, 2], [0, 1, 0]], "float32"), axis=1, sorted=True, grad=(), why="the selection has no gradient")
        yield Sample.of(np.array([[2, 1], [1, 2], [0, 0]], "int32"), flatten=True, dtype="int32")


def _different(line: np.ndarray, sort: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For the rows of an array: the first row of each kind, the kind of each row, the number of rows of each kind."""
    numbers = _ranks(line.reshape(len(line), prod(line.shape[1:])))
    _, first, index, count = np.unique(numbers, return_index=True, return_inverse=True, return_counts=True)
    if not sort:
        order = np.argsort(first)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        first, index, count = first[order], place[index], count[order]
    return first, index, count


def _ranks(rows: np.ndarray) -> np.ndarray:
    """A number for each row, in their order; equal rows have equal numbers."""
    if not rows.size:
        return np.zeros(len(rows), np.int64)
    order = np.lexsort([np.unique(column, return_inverse=True)[1] for column in rows.T[::-1]])
    changed = (rows[order[1:]] != rows[order[:-1]]).any(axis=1)
    numbers = np.empty(len(rows), np.int64)
    numbers[order] = np.concatenate([[0], np.cumsum(changed)])
    return numbers


def unique(x: Any, axis: int | None, sort: bool) -> tuple[np.ndarray, ...]:
    """The results of the op `unique` for an array, also for strings."""
    return Unique.kernel(np, x, axis=axis or 0, flatten=axis is None, sorted=sort, dtype="int64")
