"""Normalization."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ...ir.dtypes import np_dtype
from ...ir.types import ANY
from . import nodes
from .window import channels_first

if TYPE_CHECKING:
    from ..export import Op


@nodes("batch_norm")
def batch_norm(op: Op) -> str:
    """As it is in inference."""
    layout = op.attrs["data_layout"] if op.type_of("X").ndim > 2 else "NCHW"
    weights = [op[s] for s in ("Scale", "Bias", "Mean", "Variance")]
    return channels_first(op, "X", layout, lambda x: op.emit(
        "BatchNormalization", x, *weights, epsilon=op.attrs["epsilon"], momentum=op.attrs["momentum"]))  # fmt: skip


@nodes("layer_norm")
def layer_norm(op: Op) -> str:
    x, axis = op.type_of("X"), op.attrs["begin_norm_axis"]
    sizes = x.shape[axis:]
    if ANY in sizes:
        raise op.wrong("an axis that it normalizes is open")
    scale = _by_element(op, "Scale", sizes) if op.has("Scale") else _ones(op, sizes)
    bias = [_by_element(op, "Bias", sizes)] if op.has("Bias") else []
    return _as_weights(op, op["X"], lambda a: op.emit("LayerNormalization", a, scale, *bias, axis=axis, epsilon=op.attrs["epsilon"]))


def _by_element(op: Op, slot: str, sizes: tuple[int, ...]) -> str:
    return op[slot] if len(sizes) == 1 else op.emit("Reshape", op[slot], op.ints(sizes))


def _weight_dtype(op: Op) -> str:
    return next((op.dtype(s) for s in ("Scale", "Bias") if op.has(s)), op.dtype("X"))


def _as_weights(op: Op, x: str, emit: Callable[[str], str]) -> str:
    """What `emit` makes of x in the dtype of the weights, which are float32 beside 16-bit values."""
    if (wide := _weight_dtype(op)) == op.dtype("X"):
        return emit(x)
    return op.emit("Cast", emit(op.emit("Cast", x, to=op.code(wide))), to=op.code(op.dtype("X")))


def _ones(op: Op, sizes: tuple[int, ...], value: float = 1.0) -> str:
    return op.const(np.full(sizes, value, np_dtype(_weight_dtype(op))))


@nodes("instance_norm")
def instance_norm(op: Op) -> str:
    weights = _by_channel(op, op.type_of("X").shape[1])
    return _as_weights(op, op["X"], lambda a: op.emit("InstanceNormalization", a, *weights, epsilon=op.attrs["epsilon"]))


@nodes("group_norm")
def group_norm(op: Op) -> str:
    layout, x = op.attrs["data_layout"], op.type_of("X")
    weights = _by_channel(op, x.shape[-1] if layout == "NHWC" else x.shape[1])
    attrs = {"num_groups": op.attrs["groups"], "epsilon": op.attrs["epsilon"]}
    return channels_first(op, "X", layout, lambda x: _as_weights(op, x, lambda a: op.emit("GroupNormalization", a, *weights, **attrs)))


def _by_channel(op: Op, channels: int) -> list[str]:
    if channels == ANY and not (op.has("Scale") and op.has("Bias")):
        raise op.wrong("the number of channels is open")
    return [op[s] if op.has(s) else _ones(op, (channels,), value) for s, value in (("Scale", 1.0), ("Bias", 0.0))]


@nodes("lrn")
def lrn(op: Op) -> str:
    """ONNX takes the mean of squares where fluid takes their sum."""
    a = op.attrs
    return op.emit("LRN", op["X"], size=a["n"], bias=a["k"], alpha=a["alpha"] * a["n"], beta=a["beta"])


@nodes("norm")
def norm(op: Op) -> dict[str, str]:
    squares = op.emit("ReduceSumSquare", op["X"], op.ints([op.attrs["axis"]]), keepdims=1)
    length = op.emit("Sqrt", op.emit("Add", squares, op.const(np.array(op.attrs["epsilon"], np_dtype(op.dtype("X"))))))
    return {"Out": op.emit("Div", op["X"], length), "Norm": length}
