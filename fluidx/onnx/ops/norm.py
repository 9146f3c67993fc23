"""Normalizations and softmax. Exported normalizations compute in the dtype of their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...ir import ANY
from ...ir.dtypes import HALVES, np_dtype
from ..export_graph import Op
from ..node import Node
from ..table import OneToOne, entry, exports, imports
from ..values import dtype_code
from .conv import channels_first
from .gradient_formulas import number


def _softmax(made: OneToOne, n: Node) -> Any:
    return n.by_body() if _rounds_each_step(n) else made.read(n)


def _rounds_each_step(n: Node) -> bool:
    """Must the result be that of the operator's definition, which rounds each step to 16 bits? A program of `load` has the operator, which
    rounds once."""
    return n.dtype() in HALVES and n.importer.evaluate is not None


entry("Softmax", "softmax", read=_softmax, axis=-1)
entry("LogSoftmax", "log_softmax", read=_softmax, axis=-1)


@imports("BatchNormalization", statistics={3: "running_mean", 4: "running_var"})
def batch_norm(n: Node) -> object:
    training = bool(n.attr("training_mode", 0))
    weights = [_in_dtype(n, k) for k in range(1, 5)]
    y, mean, variance, *_ = n.b.batch_norm(n.x(), *weights, epsilon=n.attr("epsilon", 1e-5), momentum=n.attr("momentum", 0.9),
                                           is_test=not training)  # fmt: skip
    return (y, n.cast(mean, n.dtype(3)), n.cast(variance, n.dtype(4))) if training else y


@imports("InstanceNormalization")
def instance_norm(n: Node) -> object:
    return n.b.instance_norm(n.x(), _in_dtype(n, 1), _in_dtype(n, 2), epsilon=n.attr("epsilon", 1e-5))[0]


@imports("LayerNormalization")
def layer_norm(n: Node) -> object:
    x, rank, epsilon = n.x(), n.rank(), n.attr("epsilon", 1e-5)
    axis = n.attr("axis", -1) % rank
    rows = n.shape(0)[axis:]
    if axis == 0 or ANY in rows or not _in_one_dtype(n) or any(n.has(k) and n.shape(k) != rows for k in (1, 2)):
        return n.by_body()
    scale, bias = (n.b.reshape(n.x(k), shape=(-1,)) if n.has(k) and len(rows) > 1 else n.x(k) for k in (1, 2))
    y, mean, variance = n.b.layer_norm(x, scale, bias, begin_norm_axis=axis, epsilon=epsilon)
    ones = tuple(range(axis, rank))
    mean = n.b.unsqueeze(mean, axes=ones) if n.wants(1) else None
    inverse = n.b.unsqueeze(n.b.rsqrt(n.b.scale(variance, bias=epsilon)), axes=ones) if n.wants(2) else None
    return y, mean, inverse


@imports("RMSNormalization")
def rms_norm(n: Node) -> object:
    axis = n.attr("axis", -1) % n.rank()
    rows = n.shape(0)[axis:]
    if axis == 0 or ANY in rows or not _in_one_dtype(n) or n.shape(1) != rows:
        return n.by_body()
    scale = n.b.reshape(n.x(1), shape=(-1,)) if len(rows) > 1 else n.x(1)
    return n.b.rms_norm(n.x(), scale, begin_norm_axis=axis, epsilon=n.attr("epsilon", 1e-5))[0]


@imports("GroupNormalization")
def group_norm(n: Node) -> object:
    if not _in_one_dtype(n):
        return n.by_body()
    return n.b.group_norm(n.x(0), n.x(1), n.x(2), groups=n.attr("num_groups"), epsilon=n.attr("epsilon", 1e-5))[0]


def _in_one_dtype(n: Node) -> bool:
    """Do all operands have the dtype of the computation?"""
    work = None if _rounds_each_step(n) else dtype_code(np_dtype("float32" if n.dtype(0) in HALVES else n.dtype(0)))
    return n.attr("stash_type", 1) == work and all(n.dtype(k) == n.dtype(0) for k in range(len(n.operands)) if n.has(k))


def _in_dtype(n: Node, k: int) -> Any:
    """Weight k in the dtype of X, or in float32 if X has 16 bits. Other weights are cast."""
    fits = (n.dtype(0), "float32" if n.dtype(0) in HALVES else n.dtype(0))
    return n.x(k) if n.dtype(k) in fits else n.cast(n.x(k), fits[-1])


@imports("LRN")
def lrn(n: Node) -> object:
    size = n.attr("size")
    return n.b.lrn(n.x(), n=size, k=n.attr("bias", 1.0), alpha=n.attr("alpha", 1e-4) / size, beta=n.attr("beta", 0.75))[0]


@imports("LpNormalization")
def lp_norm(n: Node) -> object:
    x, p, axis = n.x(), n.attr("p", 2), n.attr("axis", -1)
    size = n.b.reduce_sum(n.b.square(x) if p == 2 else n.b.abs(x), dim=(axis,), keep_dim=True)
    nothing = n.b.equal(size, n.const(0, np_dtype(n.dtype(0))))  # zeros stay zeros
    size = n.b.where(nothing, n.const(1, np_dtype(n.dtype(0))), size)
    return n.b.elementwise_div(x, n.b.sqrt(size) if p == 2 else size)


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("batch_norm")
def export_batch_norm(op: Op) -> str | dict[str, str]:
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
def export_layer_norm(op: Op) -> dict[str, str]:
    if op.lacks("LayerNormalization") or _has_open_row(op):
        return op.by_parts()
    bias = [_by_element(op, "Bias")] if op.has("Bias") else []
    found = {"Y": _rows_normalized(op, "LayerNormalization", *bias)}
    return {**found, **op.by_parts("Mean", "Variance")} if op.is_used("Mean") or op.is_used("Variance") else found


@exports("rms_norm")
def export_rms_norm(op: Op) -> dict[str, str]:
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
def export_instance_norm(op: Op) -> str:
    weights = _by_channel(op, op.type_of("X").shape[1])
    return _as_weights(op, op["X"], lambda a: op.emit("InstanceNormalization", a, *weights, epsilon=op.attrs["epsilon"]))


@exports("group_norm")
def export_group_norm(op: Op) -> str | dict[str, str]:
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
def export_lrn(op: Op) -> dict[str, str]:
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
