"""Reading along one axis with an id for each element of the result: take_along_axis and its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir.axis_letters import along
from ...ir.op_facets import Arithmetic, Autocast, Control
from ...ir.opdef import OpDef, Sample
from ...ir.types import TensorType
from ..shared.arrays import add_rows
from ..shared.samples import f32, ints
from ..shared.types import check_range, merge_size, need_ids, need_ndim, norm_axis


def _words(x: TensorType, axis: int) -> tuple[str, str]:
    """The axis words for X, whole along the axis, and for the ids."""
    return along(axis, x.ndim, "."), along(axis, x.ndim, "n")


class TakeAlongAxis(OpDef):
    """The elements of X at the positions Index along `axis`; along all other axes X and Index have equal sizes.

    Raises ExecutionError if an id is negative or not below the size of X there.
    """

    name = "take_along_axis"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    inputs = ("X", "Index")
    attrs = {"axis": -1}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, k = _words(ins[0], attrs["axis"])
        return f"{x}, {k} -> {k} | L(0)"

    @staticmethod
    def infer(x, index, *, axis):
        need_ids("take_along_axis", "Index", index)
        need_ndim("take_along_axis", "Index", index, x.ndim)
        axis = norm_axis("take_along_axis", axis, x.ndim)
        shape = [
            b if k == axis else merge_size("take_along_axis", f"axis {k} of X and Index", a, b)
            for k, (a, b) in enumerate(zip(x.shape, index.shape, strict=True))
        ]
        return x.with_shape(shape)

    @staticmethod
    def grad(b, op, g):
        return b.take_along_axis_grad(op["X"], op["Index"], g, axis=op.attrs["axis"]), None

    @staticmethod
    def kernel(xp, x, index, *, out, axis):
        check_range(xp, "take_along_axis", xp.ascontiguousarray(index), x.shape[axis], f"axis {axis} of X")
        out[...] = xp.take_along_axis(x, index, axis=axis)

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 4), ints(3, 2, high=4), axis=1)
        yield Sample.of(f32(3, 4), ints(5, 4, high=3, seed=1).astype("int32"), axis=0)
        yield Sample.of(f32(5, 3, 4), ints(5, 2, 4, high=3, seed=2), axis=-2)
        yield Sample.of(f32(3), ints(1, high=3))


class TakeAlongAxisGrad(OpDef):
    """Zeros in the shape of X with each gradient added at the position that take_along_axis read; only X's shape is read."""

    name = "take_along_axis_grad"
    inputs, outputs = ("X", "Index", "Out@GRAD"), ("X@GRAD",)
    attrs = {"axis": -1}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, k = _words(ins[0], attrs["axis"])
        return f"~{x}, {k}, {k} -> {x} | n:+ L(2)"

    @staticmethod
    def infer(x, index, g, *, axis):
        return x

    @staticmethod
    def kernel(xp: Any, x: Any, index: Any, g: Any, *, out: Any, axis: int) -> None:
        made = xp.zeros(xp.moveaxis(out, axis, -1).shape, out.dtype)
        ids, rows = xp.moveaxis(index, axis, -1), xp.moveaxis(g, axis, -1)
        if g.size:
            starts = xp.arange(made.size // made.shape[-1], dtype=xp.int64)[:, None] * made.shape[-1]
            flat = starts + ids.reshape(len(starts), -1)
            add_rows(xp, made.reshape(-1, 1), flat.reshape(-1), rows.reshape(-1, 1))
        out[...] = xp.moveaxis(made, -1, axis)

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 4), np.array([[1, 1], [0, 3], [2, 2]]), f32(3, 2, seed=1), axis=1, grad=(), why="a gradient op")
        yield Sample.of(f32(5, 3, 4), ints(5, 2, 4, high=3), f32(5, 2, 4, seed=1), axis=1, grad=(), why="a gradient op")
