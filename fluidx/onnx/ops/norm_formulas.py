"""Normalizations exported as nodes, in the dtype of their weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...ir.dtypes import np_dtype
from ...ir.types import ANY
from ..export_graph import Op
from ..table import exports
from .conv import channels_first
from .gradient_formulas import number


@exports("batch_norm")
def batch_norm(op: Op) -> str | dict[str, str]:
    """The inference form, unless the operator uses the statistics of the batch."""
    if not (op.attrs["is_test"] or op.attrs["use_global_stats"]):
        return op.by_parts()
    return _by_running_statistics(op, momentum=op.attrs["momentum"])


@exports("ghost_batch_norm")
def ghost_batch_norm(op: Op) -> str:
    """The inference form, which is that of batch_norm."""
    if not op.attrs["is_test"]:
        raise op.wrong("it uses the statistics of parts of the batch")
    return _by_running_statistics(op)


def _by_running_statistics(op: Op, **attrs: float) -> str:
    layout = op.attrs["data_layout"] if op.type_of("X").ndim > 2 else "NCHW"
    weights = [op[s] for s in ("Scale", "Bias", "Mean", "Variance")]

    def emit(x: str) -> str:
        return op.emit("BatchNormalization", x, *weights, epsilon=op.attrs["epsilon"], **attrs)

    return channels_first(op, "X", layout, emit if op.opset >= 15 else lambda x: _as_weights(op, x, emit))


@exports("layer_norm")
def layer_norm(op: Op) -> dict[str, str]:
    if op.lacks("LayerNormalization") or _has_open_row(op):
        return op.by_parts()
    bias = [_by_element(op, "Bias")] if op.has("Bias") else []
    found = {"Y": _rows_normalized(op, "LayerNormalization", *bias)}
    return {**found, **op.by_parts("Mean", "Variance")} if op.is_used("Mean") or op.is_used("Variance") else found


@exports("rms_norm")
def rms_norm(op: Op) -> dict[str, str]:
    if op.lacks("RMSNormalization") or _has_open_row(op):
        return op.by_parts()
    return {"Y": _rows_normalized(op, "RMSNormalization"), **(op.by_parts("MeanSquare") if op.is_used("MeanSquare") else {})}


def _has_open_row(op: Op) -> bool:
    """Is an axis open that it normalizes?"""
    return ANY in op.type_of("X").shape[op.attrs["begin_norm_axis"] :]


def _rows_normalized(op: Op, node: str, *bias: str) -> str:
    axis = op.attrs["begin_norm_axis"]
    scale = _by_element(op, "Scale") if op.has("Scale") else _ones(op, op.type_of("X").shape[axis:])
    return _as_weights(op, op["X"], lambda a: op.emit(node, a, scale, *bias, axis=axis, epsilon=op.attrs["epsilon"]))


def _by_element(op: Op, slot: str) -> str:
    sizes = op.type_of("X").shape[op.attrs["begin_norm_axis"] :]
    return op[slot] if len(sizes) == 1 else op.emit("Reshape", op[slot], op.ints(sizes))


def _weight_dtype(op: Op) -> str:
    return next((op.dtype(s) for s in ("Scale", "Bias") if op.has(s)), op.dtype("X"))


def _as_weights(op: Op, x: str, emit: Callable[[str], str]) -> str:
    """The result of `emit` for x, computed in the dtype of the weights, which is float32 for 16-bit values."""
    if (wide := _weight_dtype(op)) == op.dtype("X"):
        return emit(x)
    return op.emit("Cast", emit(op.emit("Cast", x, to=op.code(wide))), to=op.code(op.dtype("X")))


def _ones(op: Op, sizes: tuple[int, ...], value: float = 1.0) -> str:
    return op.const(np.full(sizes, value, np_dtype(_weight_dtype(op))))


@exports("instance_norm")
def instance_norm(op: Op) -> str:
    weights = _by_channel(op, op.type_of("X").shape[1])
    return _as_weights(op, op["X"], lambda a: op.emit("InstanceNormalization", a, *weights, epsilon=op.attrs["epsilon"]))


@exports("group_norm")
def group_norm(op: Op) -> str | dict[str, str]:
    if op.opset < 21:  # GroupNormalization has one weight for each group
        return op.by_parts()
    layout, x = op.attrs["data_layout"], op.type_of("X")
    weights = _by_channel(op, x.shape[-1] if layout == "NHWC" else x.shape[1])
    attrs = {"num_groups": op.attrs["groups"], "epsilon": op.attrs["epsilon"]}

    def emit(x: str) -> str:
        return op.emit("GroupNormalization", x, *weights, **attrs)

    return channels_first(op, "X", layout, lambda x: _as_weights(op, x, emit))


def _by_channel(op: Op, channels: int) -> list[str]:
    if channels == ANY and not (op.has("Scale") and op.has("Bias")):
        raise op.wrong("the number of channels is open")
    return [op[s] if op.has(s) else _ones(op, (channels,), value) for s, value in (("Scale", 1.0), ("Bias", 0.0))]


@exports("lrn")
def lrn(op: Op) -> dict[str, str]:
    """ONNX uses the mean of squares where fluid uses their sum, and does not output the bracket."""
    a, x = op.attrs, op["X"]
    found = {"Out": op.emit("LRN", x, size=a["n"], bias=a["k"], alpha=a["alpha"] * a["n"], beta=a["beta"])}
    if op.is_used("MidOut"):
        squares = neighbours(op, op.emit("Mul", x, x))
        found["MidOut"] = op.emit("Add", op.emit("Mul", squares, number(op, a["alpha"], "X")), number(op, a["k"], "X"))
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
