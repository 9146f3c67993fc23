"""Losses by integer labels, elementwise losses and their gradients, exported as basic nodes."""

from __future__ import annotations

import numpy as np

from ...ir.dtypes import np_dtype
from ..export_graph import Op
from ..expression_nodes import by_kernel
from ..table import exports

exports("huber_loss", "huber_loss_grad", "margin_rank_loss")(by_kernel)


@exports("sigmoid_cross_entropy_with_logits", "sigmoid_cross_entropy_with_logits_grad")
def sigmoid_cross_entropy(op: Op) -> dict[str, str]:
    if op.attrs["normalize"]:
        raise op.wrong("normalize divides by the number of labels, which fluidx cannot export")
    return by_kernel(op)


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


def _entropy(op: Op, logarithms: str, slot: str, axis: int) -> str:
    """Minus the logarithms at the labels; 0 for ignored labels."""
    if op.attrs["soft_label"]:
        return op.emit("Neg", op.emit("ReduceSum", op.emit("Mul", op["Label"], logarithms), op.ints([axis]), keepdims=1))
    number, label = np_dtype(op.dtype("Label")).type, op["Label"]
    ignored = op.emit("Equal", label, op.const(np.array(op.attrs["ignore_index"], number)))
    zero = op.const(np.array(0, number))
    chosen = op.emit("GatherElements", logarithms, op.emit("Where", ignored, zero, label), axis=axis)
    return op.emit("Where", ignored, op.const(np.array(0, np_dtype(op.dtype(slot)))), op.emit("Neg", chosen))


@exports("accuracy")
def accuracy(op: Op) -> dict[str, str]:
    labels = op["Label"] if op.type_of("Label").ndim == 2 else op.emit("Unsqueeze", op["Label"], op.ints([1]))
    if op.dtype("Label") != op.dtype("Indices"):
        labels = op.emit("Cast", labels, to=op.code(op.dtype("Indices")))
    found = op.emit("Cast", op.emit("Equal", op["Indices"], labels), to=op.code("int32"))
    hits = op.emit("ReduceSum", op.reduced("ReduceMax", found, [1], False), keepdims=1)
    return {"Correct": hits, **_of_rows(op, hits)}


def _of_rows(op: Op, hits: str) -> dict[str, str]:
    if not (op.is_used("Accuracy") or op.is_used("Total")):
        return {}
    rows = op.emit("Cast", op.sizes(op["Indices"], 0, 1), to=op.code("int32"))
    share = [op.emit("Cast", v, to=op.code("float32")) for v in (hits, op.emit("Max", rows, op.const(np.array(1, np.int32))))]
    return {"Total": rows, "Accuracy": op.emit("Div", *share)}
