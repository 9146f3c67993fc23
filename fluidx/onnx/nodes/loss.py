"""Losses of classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...ir.dtypes import np_dtype
from . import nodes

if TYPE_CHECKING:
    from ..export import Op


@nodes("softmax_with_cross_entropy")
def softmax_with_cross_entropy(op: Op) -> dict[str, str]:
    axis = op.attrs["axis"] % op.type_of("Logits").ndim
    logarithms = op.emit("LogSoftmax", op["Logits"], axis=axis)
    return {"Softmax": op.emit("Softmax", op["Logits"], axis=axis), "Loss": _entropy(op, logarithms, "Logits", axis)}


@nodes("cross_entropy")
def cross_entropy(op: Op) -> str:
    return _entropy(op, op.emit("Log", op["X"]), "X", op.type_of("X").ndim - 1)


@nodes("square_error_cost")
def square_error_cost(op: Op) -> str:
    difference = op.emit("Sub", op["X"], op["Y"])
    return op.emit("Mul", difference, difference)


def _entropy(op: Op, logarithms: str, slot: str, axis: int) -> str:
    """Minus the logarithms that labels choose; 0 where one is to be ignored."""
    if op.attrs["soft_label"]:
        return op.emit("Neg", op.emit("ReduceSum", op.emit("Mul", op["Label"], logarithms), op.ints([axis]), keepdims=1))
    number, label = np_dtype(op.dtype("Label")).type, op["Label"]
    ignored = op.emit("Equal", label, op.const(np.array(op.attrs["ignore_index"], number)))
    zero = op.const(np.array(0, number))
    chosen = op.emit("GatherElements", logarithms, op.emit("Where", ignored, zero, label), axis=axis)
    return op.emit("Where", ignored, op.const(np.array(0, np_dtype(op.dtype(slot)))), op.emit("Neg", chosen))
