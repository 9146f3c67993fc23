"""Normalization as it is in training, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...ir.types import ANY
from . import nodes
from .grad import count, number

if TYPE_CHECKING:
    from ..export import Op


def channel_axes(op: Op) -> tuple[int, list[int]]:
    """The axis of the channels, and all others."""
    ndim = op.type_of("X").ndim
    axis = ndim - 1 if op.attrs["data_layout"] == "NHWC" and ndim > 2 else 1
    return axis, [k for k in range(ndim) if k != axis]


def _seen(op: Op, value: str, axes: Sequence[int]) -> str:
    return op.emit("Unsqueeze", value, op.ints(axes))


def in_training(op: Op) -> dict[str, str]:
    """batch_norm with the statistics of the batch, which also move the running ones."""
    if op.dtype("X") != op.dtype("Scale"):
        raise op.wrong("its weights are wider than what it normalizes")
    _, axes = channel_axes(op)
    mean = op.reduced("ReduceMean", op["X"], axes, False)
    centered = op.emit("Sub", op["X"], _seen(op, mean, axes))
    variance = op.reduced("ReduceMean", op.emit("Mul", centered, centered), axes, False)
    inverse = op.emit("Reciprocal", op.emit("Sqrt", op.emit("Add", variance, number(op, op.attrs["epsilon"], "Scale"))))
    y = op.emit("Mul", centered, _seen(op, op.emit("Mul", inverse, op["Scale"]), axes))
    found = {"Y": op.emit("Add", y, _seen(op, op["Bias"], axes)), "SavedMean": mean, "SavedVariance": inverse}
    keep, move = (number(op, v, "Scale") for v in (op.attrs["momentum"], 1 - op.attrs["momentum"]))
    for slot, of_batch in (("Mean", mean), ("Variance", variance)):
        found[f"{slot}Out"] = op.emit("Add", op.emit("Mul", op[slot], keep), op.emit("Mul", of_batch, move))
    return found


@nodes("batch_norm_grad")
def batch_norm_grad(op: Op) -> dict[str, str]:
    _, axes = channel_axes(op)
    g, inverse = op["Y@GRAD"], op["SavedVariance"]
    normal = op.emit("Mul", op.emit("Sub", op["X"], _seen(op, op["SavedMean"], axes)), _seen(op, inverse, axes))
    bias = op.reduced("ReduceSum", g, axes, False)
    scale = op.reduced("ReduceSum", op.emit("Mul", g, normal), axes, False)
    inner = g
    if not op.attrs["use_global_stats"]:
        many = count(op, "X", axes, op.dtype("X"))
        along = op.emit("Mul", normal, _seen(op, op.emit("Div", scale, many), axes))
        inner = op.emit("Sub", op.emit("Sub", g, _seen(op, op.emit("Div", bias, many), axes)), along)
    dx = op.emit("Mul", inner, _seen(op, op.emit("Mul", op["Scale"], inverse), axes))
    return {"X@GRAD": dx, "Scale@GRAD": scale, "Bias@GRAD": bias}


def row_statistics(op: Op) -> dict[str, str]:
    """Mean and variance of layer_norm, for its gradient."""
    axes = range(op.attrs["begin_norm_axis"], op.type_of("X").ndim)
    mean = op.reduced("ReduceMean", op["X"], axes, True)
    centered = op.emit("Sub", op["X"], mean)
    variance = op.reduced("ReduceMean", op.emit("Mul", centered, centered), axes, False)
    return {"Mean": op.emit("Squeeze", mean, op.ints(axes)), "Variance": variance}


@nodes("layer_norm_grad")
def layer_norm_grad(op: Op) -> dict[str, str]:
    return _rows_grad(op, "Variance", "Mean")


@nodes("rms_norm_grad")
def rms_norm_grad(op: Op) -> dict[str, str]:
    return _rows_grad(op, "MeanSquare")


def _rows_grad(op: Op, spread: str, mean: str = "") -> dict[str, str]:
    """The gradients of rows divided by the root of the operand `spread`, less the operand `mean` if there is one."""
    x, first = op.type_of("X"), op.attrs["begin_norm_axis"]
    rows, sizes = range(first, x.ndim), x.shape[first:]
    if ANY in sizes or x.dtype != op.dtype(spread):
        raise op.wrong("an axis that it normalizes is open, or its weights are wider than what it normalizes")
    g = op["Y@GRAD"]
    root = op.emit("Sqrt", op.emit("Add", op[spread], number(op, op.attrs["epsilon"], spread)))
    inverse = _seen(op, op.emit("Reciprocal", root), rows)
    normal = op.emit("Mul", op.emit("Sub", op["X"], _seen(op, op[mean], rows)) if mean else op["X"], inverse)
    flat = op.ints([int(np.prod(sizes))])
    found = {
        "Scale@GRAD": lambda: op.emit("Reshape", op.reduced("ReduceSum", op.emit("Mul", g, normal), range(first), False), flat),
        "Bias@GRAD": lambda: op.emit("Reshape", op.reduced("ReduceSum", g, range(first), False), flat),
        "X@GRAD": lambda: _row_grad(op, normal, inverse, rows, sizes, bool(mean)),
    }
    return {slot: make() for slot, make in found.items() if op.op.outputs.get(slot)}


def _row_grad(op: Op, normal: str, inverse: str, rows: Sequence[int], sizes: Sequence[int], centered: bool) -> str:
    g = op["Y@GRAD"]
    if op.has("Scale"):
        g = op.emit("Mul", g, op.emit("Reshape", op["Scale"], op.ints(sizes)))
    along = op.emit("Mul", normal, op.reduced("ReduceMean", op.emit("Mul", g, normal), rows, True))
    if centered:
        g = op.emit("Sub", g, op.reduced("ReduceMean", g, rows, True))
    return op.emit("Mul", op.emit("Sub", g, along), inverse)
