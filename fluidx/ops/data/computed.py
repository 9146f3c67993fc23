"""Ops whose result sizes come from input values: range_between, reshape_by, expand_by, tile_by, slice_by, fill_by.

The corresponding ops without `_by` have these sizes as attributes, which are known when a program is planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ir.dtypes import as_dtype, np_dtype
from ...ir.errors import ExecutionError, ProgramError
from ...ir.op_facets import Arithmetic, Control
from ...ir.opdef import OpDef, Sample
from ...ir.types import ANY, TensorType
from ..shared.samples import f32, i64
from ..shared.types import need_ids, need_ndim, norm_axes, same_dtype


def _length(op: str, slot: str, sizes: TensorType) -> int:
    """The length of a vector of sizes, which must be known: it is the number of axes of the result."""
    need_ids(op, slot, sizes)
    need_ndim(op, slot, sizes, 1)
    if sizes.shape[0] == ANY:
        raise ProgramError(f"op {op}: the number of sizes in {slot} must be known, found {sizes}, whose length is open")
    return sizes.shape[0]


class RangeBetween(OpDef):
    """Start, Start + Step, ... up to but not including End, three numbers of one dtype, as a vector."""

    name = "range_between"
    arithmetic = Arithmetic(flops=0)
    inputs = ("Start", "End", "Step")
    control = Control(sized_by_values=("n",))

    @staticmethod
    def infer(start, end, step):
        dtype = same_dtype("range_between", Start=start, End=end, Step=step)
        for slot, t in (("Start", start), ("End", end), ("Step", step)):
            if t.numel not in (1, ANY) or dtype == "bool":
                raise ProgramError(f"op range_between: {slot} must be one number, found {t}")
        return TensorType(dtype, (ANY,))

    @staticmethod
    def kernel(xp, start, end, step):
        first, last, by = (v.reshape(-1)[0] for v in (start, end, step))
        if by == 0:
            raise ExecutionError("op range_between: Step is 0")
        span = int(last) - int(first) if start.dtype.kind in "iu" else last - first  # may exceed the range of the dtype
        count = max(int(np.ceil(span / by)), 0)
        return (first + np.arange(count).astype(start.dtype) * by).astype(start.dtype)

    @staticmethod
    def samples():
        why = "the number of elements has no gradient"
        yield Sample.of(i64(3), i64(9), i64(2))
        yield Sample.of(np.array(1, "float32"), np.array(-2, "float32"), np.array(-0.5, "float32"), grad=(), why=why)


class ReshapeBy(OpDef):
    """The elements of X in the shape of the vector Shape: -1 is computed from the other sizes, and 0 is the size of X there, or 0 if
    `zeros`.

    `known` holds the sizes of the result that are known in advance, -1 for others.
    """

    name = "reshape_by"
    arithmetic = Arithmetic(flops=0)
    inputs = ("X", "Shape")
    attrs = {"zeros": False, "known": ()}
    control = Control(sized_by_values=("",))

    @staticmethod
    def infer(x, shape, *, zeros, known):
        axes = _length("reshape_by", "Shape", shape)
        if len(known) not in (0, axes) or min(known, default=0) < ANY:
            raise ProgramError(f"op reshape_by: known must have a size or -1 for each size of Shape {shape}, found {list(known)}")
        return x.with_shape(known or (ANY,) * axes)

    @staticmethod
    def grad(b, op, g):
        return b.reshape_grad(g, op["X"]), None

    @staticmethod
    def kernel(xp, x, shape, *, zeros, known):
        target = [x.shape[k] if d == 0 and not zeros and k < x.ndim else d for k, d in enumerate(shape.tolist())]
        return x.reshape(target)

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 3), i64(2, -1))
        yield Sample.of(f32(2, 3, 5), i64(0, 15), known=(-1, 15))


class ExpandBy(OpDef):
    """X repeated to the sizes in the vector Shape; a 1 there, or an axis that Shape lacks, keeps the size of X."""

    name = "expand_by"
    arithmetic = Arithmetic(flops=0)
    inputs = ("X", "Shape")
    control = Control(sized_by_values=("",))

    @staticmethod
    def infer(x, shape):
        axes = max(x.ndim, _length("expand_by", "Shape", shape))
        own = (1,) * (axes - x.ndim) + x.shape
        return x.with_shape(d if d > 1 else ANY for d in own)  # an open size may be 1

    @staticmethod
    def grad(b, op, g):
        return b.reduce_to(g, op["X"]), None

    @staticmethod
    def kernel(xp, x, shape):
        return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape.tolist()))).copy()

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 1), i64(2, 1, 4))
        yield Sample.of(f32(2, 3), i64(1))


class TileBy(OpDef):
    """X repeated along each axis as often as the vector Times says."""

    name = "tile_by"
    arithmetic = Arithmetic(flops=0)
    inputs = ("X", "Times")
    control = Control(sized_by_values=("",))

    @staticmethod
    def infer(x, times):
        if _length("tile_by", "Times", times) != x.ndim:
            raise ProgramError(f"op tile_by: Times must have a number for each of the {x.ndim} axes of X {x}, found {times}")
        return x.with_shape((ANY,) * x.ndim)

    @staticmethod
    def grad(b, op, g):
        return b.tile_by_grad(op["X"], g), None

    @staticmethod
    def kernel(xp, x, times):
        return np.tile(x, times.tolist())

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3), i64(3, 2))
        yield Sample.of(f32(4), i64(2))


class TileByGrad(OpDef):
    """The sum of the gradients of all repeats, in the shape of X; only the shape of X is read."""

    name = "tile_by_grad"
    inputs, outputs = ("X", "Out@GRAD"), ("X@GRAD",)

    @staticmethod
    def infer(x, g):
        return x

    @staticmethod
    def kernel(xp, x, g, *, out):
        pairs = [n for d, whole in zip(x.shape, g.shape, strict=True) for n in (whole // d if d else 0, d)]
        out[...] = g.reshape(pairs).sum(axis=tuple(range(0, 2 * x.ndim, 2)))

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3), f32(6, 6, seed=1), grad=(), why="a gradient op")


def _window(x: Any, starts: Any, ends: Any, axes: Sequence[int], steps: Sequence[int]) -> tuple[slice, ...]:
    """The slices; with a negative step, a start before the first element means the first element."""
    window = [slice(None)] * x.ndim
    steps = steps or (1,) * len(axes)
    for axis, start, end, step in zip(axes, starts.reshape(-1).tolist(), ends.reshape(-1).tolist(), steps, strict=True):
        window[axis] = slice(max(start, -x.shape[axis]) if step < 0 else start, end, step)
    return tuple(window)


def _check_window(op: str, x: TensorType, starts: TensorType, ends: TensorType, axes: Sequence[int], steps: Sequence[int]) -> list[int]:
    if _length(op, "Starts", starts) != len(axes) or _length(op, "Ends", ends) != len(axes) or len(steps) not in (0, len(axes)):
        given = f"Starts {starts}, Ends {ends}, steps {list(steps)}"
        raise ProgramError(f"op {op}: expected a start, an end and a step for each of axes {list(axes)}, found {given}")
    if 0 in steps:
        raise ProgramError(f"op {op}: a step must not be 0, found {list(steps)}")
    return list(norm_axes(op, axes, x.ndim))


class SliceBy(OpDef):
    """The part of X along each of `axes` from Starts to Ends, as in Python slices; `steps` are 1 if left out."""

    name = "slice_by"
    arithmetic = Arithmetic(flops=0)
    inputs = ("X", "Starts", "Ends")
    attrs = {"axes": (), "steps": ()}
    control = Control(sized_by_values=("",))

    @staticmethod
    def infer(x, starts, ends, *, axes, steps):
        cut = _check_window("slice_by", x, starts, ends, axes, steps)
        return x.with_shape(ANY if k in cut else d for k, d in enumerate(x.shape))

    @staticmethod
    def grad(b, op, g):
        return b.slice_by_grad(op["X"], op["Starts"], op["Ends"], g, **op.attrs), None, None

    @staticmethod
    def kernel(xp, x, starts, ends, *, axes, steps):
        return x[_window(x, starts, ends, axes, steps)]

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 3), i64(1), i64(-1), axes=(0,))
        yield Sample.of(f32(5, 4), i64(-1, 0), i64(-9, 3), axes=(0, 1), steps=(-2, 1))


class SliceByGrad(OpDef):
    """Zeros in the shape of X with the gradient at the positions that `slice_by` read; only the shape of X is read."""

    name = "slice_by_grad"
    arithmetic = Arithmetic(flops=0)
    inputs, outputs = ("X", "Starts", "Ends", "Out@GRAD"), ("X@GRAD",)
    attrs = {"axes": (), "steps": ()}

    @staticmethod
    def infer(x, starts, ends, g, *, axes, steps):
        _check_window("slice_by_grad", x, starts, ends, axes, steps)
        return x

    @staticmethod
    def kernel(xp, x, starts, ends, g, *, out, axes, steps):
        out.fill(0)
        out[_window(x, starts, ends, axes, steps)] = g

    @staticmethod
    def samples():
        yield Sample.of(f32(5, 4), i64(-1, 0), i64(-9, 3), f32(3, 3, seed=1), axes=(0, 1), steps=(-2, 1), grad=(), why="a gradient op")


class FillBy(OpDef):
    """A tensor filled with `value`, as `dtype`, in the shape of the vector Shape."""

    name = "fill_by"
    arithmetic = Arithmetic(flops=0)
    inputs = ("Shape",)
    attrs = {"value": 0.0, "dtype": "float32"}
    control = Control(sized_by_values=("",))

    @staticmethod
    def infer(shape, *, value, dtype):
        return TensorType(as_dtype(dtype), (ANY,) * _length("fill_by", "Shape", shape))

    @staticmethod
    def kernel(xp, shape, *, value, dtype):
        return np.full(shape.tolist(), value, np_dtype(dtype))

    @staticmethod
    def samples():
        yield Sample.of(i64(2, 3), value=1.5)
        yield Sample.of(np.array([4], "int32"), value=2.0, dtype="int64")
