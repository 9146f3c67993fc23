"""Gradients of products, reductions, softmax, losses and data movement exported as basic nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ir.dtypes import np_dtype
from ...ir.types import ANY
from ..export_graph import Op
from ..table import exports


def number(op: Op, value: float, slot: str) -> str:
    """A constant in the dtype of an operand."""
    return op.const(np.array(value, np_dtype(op.dtype(slot))))


def shaped_as(op: Op, value: str, slot: str) -> str:
    """A value in the shape of an operand."""
    return op.emit("Reshape", value, op.emit("Shape", op[slot]))


# -- reductions ---------------------------------------------------------------------------------------------------------------


def _reduced_axes(op: Op) -> list[int]:
    ndim = op.type_of("X").ndim
    return sorted(d % ndim for d in op.attrs["dim"]) or [*range(ndim)]


def _with_reduced_axes(op: Op, slot: str) -> str:
    """A result of the reduction, with its reduced axes back as axes of size 1."""
    axes, ndim = _reduced_axes(op), op.type_of("X").ndim
    if op.attrs["keep_dim"]:
        return op[slot]
    return op.emit("Reshape", op[slot], op.ints([1] * ndim)) if len(axes) == ndim else op.emit("Unsqueeze", op[slot], op.ints(axes))


@exports("reduce_sum_grad")
def reduce_sum_grad(op: Op) -> str:
    return op.emit("Expand", _with_reduced_axes(op, "Out@GRAD"), op.emit("Shape", op["X"]))


@exports("reduce_mean_grad")
def reduce_mean_grad(op: Op) -> str:
    share = op.emit("Div", _with_reduced_axes(op, "Out@GRAD"), count(op, "X", _reduced_axes(op), op.dtype("Out@GRAD")))
    return op.emit("Expand", share, op.emit("Shape", op["X"]))


def count(op: Op, slot: str, axes: Sequence[int], dtype: str) -> str:
    """The number of elements along some axes of an operand."""
    sizes = [op.type_of(slot).shape[a] for a in axes]
    if ANY not in sizes:
        return op.const(np.array(np.prod(sizes), np_dtype(dtype)))
    found = op.emit("Gather", op.emit("Shape", op[slot]), op.ints(axes))
    return op.emit("Cast", op.emit("ReduceProd", found, keepdims=0), to=op.code(dtype))


@exports("reduce_max_grad")
def reduce_max_grad(op: Op) -> str:
    chosen = op.emit("Equal", op["X"], _with_reduced_axes(op, "Out"))
    return op.emit("Mul", _with_reduced_axes(op, "Out@GRAD"), op.emit("Cast", chosen, to=op.code(op.dtype("X"))))


@exports("logsumexp_grad")
def logsumexp_grad(op: Op) -> str:
    return op.emit("Mul", op.emit("Exp", op.emit("Sub", op["X"], _with_reduced_axes(op, "Out"))), _with_reduced_axes(op, "Out@GRAD"))


@exports("reduce_to")
def reduce_to(op: Op) -> str:
    """The sum over the axes that `Like` lacks or has with size 1."""
    x, like, axis = op.type_of("X").shape, op.type_of("Like").shape, op.attrs["axis"]
    if x == like:
        return op["X"]
    first = len(x) - len(like) if axis == -1 or all(d == 1 for d in like) else axis
    meets = [1] * first + [*like] + [1] * (len(x) - first - len(like))
    down = [k for k, (a, b) in enumerate(zip(x, meets, strict=True)) if b == 1 and a != 1]
    total = op.reduced("ReduceSum", op["X"], down, True) if down else op["X"]
    return shaped_as(op, total, "Like")


# -- products -----------------------------------------------------------------------------------------------------------------


def _rows(op: Op, slot: str, axis: int) -> str:
    return op[slot] if op.type_of(slot).ndim == 2 and axis == 1 else op.emit("Flatten", op[slot], axis=axis)


@exports("mul_grad_x")
def mul_grad_x(op: Op) -> str:
    g, y = _rows(op, "Out@GRAD", op.attrs["x_num_col_dims"]), _rows(op, "Y", op.attrs["y_num_col_dims"])
    return shaped_as(op, op.emit("Gemm", g, y, transB=1), "X")


@exports("mul_grad_y")
def mul_grad_y(op: Op) -> str:
    axis = op.attrs["x_num_col_dims"]
    return shaped_as(op, op.emit("Gemm", _rows(op, "X", axis), _rows(op, "Out@GRAD", axis), transA=1), "Y")


# -- softmax, losses ----------------------------------------------------------------------------------------------------------


def _one_hot(op: Op, slot: str, axis: int) -> str:
    """1 at the class of each label, else 0, in the shape and dtype of `slot`."""
    t, label = op.type_of(slot), np_dtype(op.dtype("Label"))
    if t.shape[axis] == ANY:
        raise op.wrong("the number of classes is open")
    classes = np.arange(t.shape[axis], dtype=label).reshape([-1 if k == axis else 1 for k in range(t.ndim)])
    return op.emit("Cast", op.emit("Equal", op["Label"], op.const(classes)), to=op.code(t.dtype))


def _unless_ignored(op: Op, value: str, slot: str) -> str:
    ignored = op.emit("Equal", op["Label"], number(op, op.attrs["ignore_index"], "Label"))
    return op.emit("Where", ignored, number(op, 0, slot), value)


@exports("softmax_with_cross_entropy_grad")
def softmax_with_cross_entropy_grad(op: Op) -> str | dict[str, str]:
    if op.attrs["soft_label"]:
        return op.by_parts()
    axis = op.attrs["axis"] % op.type_of("Softmax").ndim
    return _unless_ignored(op, op.emit("Mul", op.emit("Sub", op["Softmax"], _one_hot(op, "Softmax", axis)), op["Loss@GRAD"]), "Softmax")


@exports("cross_entropy_grad")
def cross_entropy_grad(op: Op) -> str:
    share = op.emit("Neg", op.emit("Div", op["Y@GRAD"], op["X"]))
    if op.attrs["soft_label"]:
        return op.emit("Mul", op["Label"], share)
    chosen = op.emit("Cast", _one_hot(op, "X", op.type_of("X").ndim - 1), to=op.code("bool"))
    return _unless_ignored(op, op.emit("Where", chosen, share, number(op, 0, "X")), "X")


# -- data movement ----------------------------------------------------------------------------------------------------------------


@exports("reshape_grad")
def reshape_grad(op: Op) -> str:
    return shaped_as(op, op["Out@GRAD"], "X")


@exports("concat_grad")
def concat_grad(op: Op) -> dict[str, Any]:
    xs, axis = op.op.inputs["X"], op.attrs["axis"] % op.type_of("Out@GRAD").ndim
    sizes = [op.block.desc(n).type.shape[axis] for n in xs]
    if ANY in sizes:
        parts = op.emit("Concat", *(op.sizes(x, axis, axis + 1) for x in op.many("X")), axis=0)
    else:
        parts = op.ints(sizes)
    return {"X@GRAD": op.emit_many("Split", len(xs), op["Out@GRAD"], parts, axis=axis)}


@exports("slice_grad")
def slice_grad(op: Op) -> str:
    """The gradient with zeros around it."""
    x, a = op.type_of("Input"), op.attrs
    before, behind = [0] * x.ndim, [0] * x.ndim
    for axis, start, end, step in zip(a["axes"], a["starts"], a["ends"], a["strides"], strict=True):
        size = x.shape[axis]
        if step != 1 or (size == ANY and (start, end) != (0, ANY)):
            raise op.wrong("it has strides" if step != 1 else f"axis {axis}, which it cuts, is open")
        if size != ANY:
            low, high, _ = slice(start, end).indices(size)
            before[axis], behind[axis] = low, size - max(low, high)
    return op.emit("Pad", op["Out@GRAD"], op.ints([*before, *behind]))


@exports("pad2d_grad")
def pad2d_grad(op: Op) -> str:
    """The part of the gradient inside of the padding."""
    if op.attrs["mode"] != "constant":
        raise op.wrong(f"mode {op.attrs['mode']!r} repeats elements, so gradients add up at the border, which fluidx cannot export")
    (top, bottom, left, right), first = op.attrs["paddings"], 1 if op.attrs["data_format"] == "NHWC" else 2
    ends = [-n or np.iinfo(np.int64).max for n in (bottom, right)]
    return op.emit("Slice", op["Out@GRAD"], op.ints([top, left]), op.ints(ends), op.ints([first, first + 1]))


@exports("diag_grad")
def diag_grad(op: Op) -> str:
    g, size = op["Out@GRAD"], op.type_of("Out@GRAD").shape[0]
    if size == ANY:
        raise op.wrong("the size of the matrix is open")
    return op.reduced("ReduceSum", op.emit("Where", op.const(np.eye(size, dtype=bool)), g, number(op, 0, "Out@GRAD")), [1], False)


@exports("expand_grad")
def expand_grad(op: Op) -> str:
    x, g = op.type_of("X").shape, op.type_of("Out@GRAD").shape
    times = op.attrs["expand_times"] or [1 if a == b else ANY if ANY in (a, b) else b // a for a, b in zip(x, g, strict=True)]
    paired = [d for pair in zip(times, x, strict=True) for d in pair]
    if paired.count(ANY) > 1:
        raise op.wrong("more than one of its sizes is open")
    return op.reduced("ReduceSum", op.emit("Reshape", op["Out@GRAD"], op.ints(paired)), range(0, len(paired), 2), False)
