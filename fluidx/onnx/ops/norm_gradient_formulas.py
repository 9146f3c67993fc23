"""batch_norm in training, and gradients of normalizations, exported as basic nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...ir.dtypes import np_dtype
from ...ir.types import ANY
from ..export_graph import Op
from ..table import exports
from .conv import channels_first, first
from .gradient_formulas import count, number


def channel_axes(op: Op) -> tuple[int, list[int]]:
    """The channel axis, and all other axes."""
    ndim = op.type_of("X").ndim
    axis = ndim - 1 if op.attrs["data_layout"] == "NHWC" and ndim > 2 else 1
    return axis, [k for k in range(ndim) if k != axis]


def _expanded(op: Op, value: str, axes: Sequence[int]) -> str:
    return op.emit("Unsqueeze", value, op.ints(axes))


def in_training(op: Op) -> dict[str, str]:
    """batch_norm with the statistics of the batch, which also update the running ones."""
    if op.dtype("X") != op.dtype("Scale"):
        raise op.wrong("its weights have a wider dtype than its input")
    _, axes = channel_axes(op)
    mean = op.reduced("ReduceMean", op["X"], axes, False)
    centered = op.emit("Sub", op["X"], _expanded(op, mean, axes))
    variance = op.reduced("ReduceMean", op.emit("Mul", centered, centered), axes, False)
    inverse = op.emit("Reciprocal", op.emit("Sqrt", op.emit("Add", variance, number(op, op.attrs["epsilon"], "Scale"))))
    y = op.emit("Mul", centered, _expanded(op, op.emit("Mul", inverse, op["Scale"]), axes))
    found = {"Y": op.emit("Add", y, _expanded(op, op["Bias"], axes)), "SavedMean": mean, "SavedVariance": inverse}
    keep, move = (number(op, v, "Scale") for v in (op.attrs["momentum"], 1 - op.attrs["momentum"]))
    for slot, of_batch in (("Mean", mean), ("Variance", variance)):
        found[f"{slot}Out"] = op.emit("Add", op.emit("Mul", op[slot], keep), op.emit("Mul", of_batch, move))
    return found


@exports("batch_norm_grad")
def batch_norm_grad(op: Op) -> dict[str, str]:
    _, axes = channel_axes(op)
    g, inverse = op["Y@GRAD"], op["SavedVariance"]
    normal = op.emit("Mul", op.emit("Sub", op["X"], _expanded(op, op["SavedMean"], axes)), _expanded(op, inverse, axes))
    bias = op.reduced("ReduceSum", g, axes, False)
    scale = op.reduced("ReduceSum", op.emit("Mul", g, normal), axes, False)
    inner = g
    if not op.attrs["use_global_stats"]:
        many = count(op, "X", axes, op.dtype("X"))
        along = op.emit("Mul", normal, _expanded(op, op.emit("Div", scale, many), axes))
        inner = op.emit("Sub", op.emit("Sub", g, _expanded(op, op.emit("Div", bias, many), axes)), along)
    dx = op.emit("Mul", inner, _expanded(op, op.emit("Mul", op["Scale"], inverse), axes))
    return {"X@GRAD": dx, "Scale@GRAD": scale, "Bias@GRAD": bias}


# -- groups of channels, and rows of any axis -----------------------------------------------------------------------------------


@exports("group_norm_grad")
def group_norm_grad(op: Op) -> dict[str, str]:
    root = op.emit("Sqrt", op.emit("Add", op["Variance"], number(op, op.attrs["epsilon"], "Variance")))
    return _groups_grad(op, op.attrs["groups"], op["Mean"], op.emit("Reciprocal", root), op.attrs["data_layout"])


@exports("instance_norm_grad")
def instance_norm_grad(op: Op) -> dict[str, str]:
    channels = op.type_of("X").shape[1]
    if channels == ANY:
        raise op.wrong("the number of channels is open")
    by_image = op.ints([-1, channels])
    mean, inverse = (op.emit("Reshape", op[slot], by_image) for slot in ("SavedMean", "SavedVariance"))
    return _groups_grad(op, channels, mean, inverse, "NCHW")


def _groups_grad(op: Op, groups: int, mean: str, inverse: str, layout: str) -> dict[str, str]:
    """The gradients of normalization by groups. `mean` and `inverse` are [N, groups]; a normalized row is a group's channels and their
    pixels."""
    if op.has("Scale") and op.dtype("Scale") != op.dtype("X"):
        raise op.wrong("its weights have a wider dtype than its input")
    ndim, found = op.type_of("X").ndim, {}
    rows, mean, inverse = op.ints([0, groups, -1]), _expanded(op, mean, [2]), _expanded(op, inverse, [2])

    def grad(x: str) -> str:
        g = first(op, "Y@GRAD", layout)
        normal = op.emit("Mul", op.emit("Sub", op.emit("Reshape", x, rows), mean), inverse)
        others = [k for k in range(ndim) if k != 1]
        if op.op.outputs.get("Scale@GRAD"):
            each = op.emit("Mul", g, op.emit("Reshape", normal, op.emit("Shape", x)))
            found["Scale@GRAD"] = op.reduced("ReduceSum", each, others, False)
        if op.op.outputs.get("Bias@GRAD"):
            found["Bias@GRAD"] = op.reduced("ReduceSum", g, others, False)
        if op.has("Scale"):
            g = op.emit("Mul", g, op.emit("Unsqueeze", op["Scale"], op.ints(range(1, ndim - 1))) if ndim > 2 else op["Scale"])
        g = op.emit("Reshape", g, rows)
        along = op.emit("Mul", normal, op.reduced("ReduceMean", op.emit("Mul", g, normal), [2], True))
        even = op.emit("Sub", op.emit("Sub", g, op.reduced("ReduceMean", g, [2], True)), along)
        return op.emit("Reshape", op.emit("Mul", even, inverse), op.emit("Shape", x))

    found["X@GRAD"] = channels_first(op, "X", layout, grad)
    return found


def neighbours(op: Op, value: str, back: bool = False) -> str:
    """The sums of the channels that each channel of lrn sees, or with `back` of those that see it: a product with a matrix of ones and
    zeros."""
    n, channels = op.attrs["n"], op.type_of("X").shape[1]
    if channels == ANY:
        raise op.wrong("the number of channels is open")
    distance = np.arange(channels) - np.arange(channels)[:, None]  # from the channel of a row to the channel of a column
    sees = ((distance >= -((n - 1) // 2)) & (distance < n - (n - 1) // 2)).astype(np_dtype(op.dtype("X")))
    rows = op.emit("Reshape", value, op.ints([0, channels, -1]))
    return op.emit("Reshape", op.emit("MatMul", op.const(np.ascontiguousarray(sees.T) if back else sees), rows), op.emit("Shape", value))


@exports("lrn_grad")
def lrn_grad(op: Op) -> str:
    x, mid, alpha, beta = op["X"], op["MidOut"], op.attrs["alpha"], op.attrs["beta"]
    share = op.emit("Mul", op["Out@GRAD"], op.emit("Pow", mid, number(op, -beta, "X")))
    back = neighbours(op, op.emit("Div", op.emit("Mul", share, x), mid), back=True)
    return op.emit("Sub", share, op.emit("Mul", op.emit("Mul", x, back), number(op, 2 * alpha * beta, "X")))
