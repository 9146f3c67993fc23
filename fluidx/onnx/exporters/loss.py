"""Export of classification losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...ir.dtypes import np_dtype
from . import exports

if TYPE_CHECKING:
    from ..export_graph import Op


@exports("softmax_with_cross_entropy")
def softmax_with_cross_entropy(op: Op) -> dict[str, str]:
    axis = op.attrs["axis"] % op.type_of("Logits").ndim
    made = {"Softmax": lambda: op.emit("Softmax", op["Logits"], axis=axis), "Loss": lambda: _loss(op, axis)}
    return {slot: make() for slot, make in made.items() if op.is_used(slot)}


def _loss(op: Op, axis: int) -> str:
    return _entropy(op, op.emit("LogSoftmax", op["Logits"], axis=axis), "Logits", axis)


@exports("cross_entropy")
def cross_entropy(op: Op) -> str:
    return _entropy(op, op.emit("Log", op["X"]), "X", op.type_of("X").ndim - 1)


@exports("square_error_cost")
def square_error_cost(op: Op) -> str:
    difference = op.emit("Sub", op["X"], op["Y"])
    return op.emit("Mul", difference, difference)


@exports("sigmoid_cross_entropy_with_logits")
def sigmoid_cross_entropy(op: Op) -> str:
    """max(x, 0) - x * label + log(1 + exp(-|x|))."""
    low = op.emit("Softplus", op.emit("Neg", op.emit("Abs", op["X"])))
    loss = op.emit("Add", op.emit("Sub", op.emit("Relu", op["X"]), op.emit("Mul", op["X"], op["Label"])), low)
    return _where_labelled(op, loss)


@exports("sigmoid_cross_entropy_with_logits_grad")
def sigmoid_cross_entropy_grad(op: Op) -> str:
    return _where_labelled(op, op.emit("Mul", op.emit("Sub", op.emit("Sigmoid", op["X"]), op["Label"]), op["Out@GRAD"]))


def _where_labelled(op: Op, value: str) -> str:
    if op.attrs["normalize"]:
        raise op.wrong("normalize divides by the number of labels, which fluidx cannot export")
    ignored = op.emit("Equal", op["Label"], op.const(np.array(op.attrs["ignore_index"], np_dtype(op.dtype("Label")))))
    return op.emit("Where", ignored, op.const(np.array(0, np_dtype(op.dtype("X")))), value)


def _entropy(op: Op, logarithms: str, slot: str, axis: int) -> str:
    """Minus the logarithms at the labels; 0 for ignored labels."""
    if op.attrs["soft_label"]:
        return op.emit("Neg", op.emit("ReduceSum", op.emit("Mul", op["Label"], logarithms), op.ints([axis]), keepdims=1))
    number, label = np_dtype(op.dtype("Label")).type, op["Label"]
    ignored = op.emit("Equal", label, op.const(np.array(op.attrs["ignore_index"], number)))
    zero = op.const(np.array(0, number))
    chosen = op.emit("GatherElements", logarithms, op.emit("Where", ignored, zero, label), axis=axis)
    return op.emit("Where", ignored, op.const(np.array(0, np_dtype(op.dtype(slot)))), op.emit("Neg", chosen))
