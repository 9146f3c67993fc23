"""Losses, and gradients of elementwise ones, exported as basic nodes."""

from __future__ import annotations

import numpy as np

from ...ir.dtypes import np_dtype
from ...ir.opdef import OPS
from ...ops.expr import nodes as f
from ...ops.expr.nodes import sym
from ..export_graph import Op
from ..expression_nodes import by_kernel, written_out
from ..table import exports
from .gradient_formulas import count, number
from .reduction import single

_X, _Y, _G = sym("x"), sym("y"), sym("g")

for _name in ("square_error_cost", "huber_loss", "log_loss", "bce_loss", "hinge_loss", "margin_rank_loss"):
    exports(_name, *([f"{_name}_grad"] if f"{_name}_grad" in OPS else []))(by_kernel)


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


@exports("smooth_l1_loss")
def smooth_l1_loss(op: Op) -> dict[str, str]:
    s, d = op.attrs["sigma"] ** 2, op.emit("Sub", op["X"], op["Y"])
    d = op.emit("Mul", d, op["InsideWeight"]) if op.has("InsideWeight") else d
    if not op.is_used("Out"):
        return {"Diff": d}
    size = abs(_X)
    e = f.where(size < 1 / s, _X * _X * (s / 2), size - 0.5 / s)
    each = written_out(op, e, {"x": d})
    each = op.emit("Mul", each, op["OutsideWeight"]) if op.has("OutsideWeight") else each
    return {"Diff": d, "Out": op.reduced("ReduceSum", op.emit("Flatten", each, axis=1), [1], True)}


@exports("smooth_l1_loss_grad")
def smooth_l1_loss_grad(op: Op) -> str:
    slope = written_out(op, f.min(f.max(_X * op.attrs["sigma"] ** 2, -1.0), 1.0), {"x": op["Diff"]})
    for slot in ("InsideWeight", "OutsideWeight"):
        slope = op.emit("Mul", slope, op[slot]) if op.has(slot) else slope
    more = range(2, op.type_of("Diff").ndim)
    return op.emit("Mul", slope, op.emit("Unsqueeze", op["Out@GRAD"], op.ints(more)) if more else op["Out@GRAD"])


# -- distributions ------------------------------------------------------------------------------------------------------------


@exports("kldiv_loss")
def kldiv_loss(op: Op) -> str:
    known = _Y > 0.0
    e = f.where(known, _Y * (f.log(f.where(known, _Y, 1.0)) - _X), 0.0)
    each = written_out(op, e, {"x": op["X"], "y": op["Target"]})
    if op.attrs["reduction"] == "none":
        return each
    return _averaged(op, single(op, "ReduceSum", each))


@exports("kldiv_loss_grad")
def kldiv_loss_grad(op: Op) -> str:
    g = op["Loss@GRAD"] if op.attrs["reduction"] == "none" else _averaged(op, op["Loss@GRAD"])
    return written_out(op, f.where(_Y > 0.0, -_Y * _G, 0.0), {"y": op["Target"], "g": g})


def _averaged(op: Op, total: str) -> str:
    """The value divided by the divisor of the reduction: the number of elements or of rows."""
    axes = {"mean": range(op.type_of("X").ndim), "batchmean": [0], "sum": []}[op.attrs["reduction"]]
    return op.emit("Div", total, count(op, "X", axes, op.dtype("X"))) if axes else total


@exports("label_smooth")
def label_smooth(op: Op) -> str:
    keep, classes = op.emit("Mul", op["X"], number(op, 1 - op.attrs["epsilon"], "X")), op.type_of("X").ndim - 1
    if op.has("PriorDist"):
        prior = op.emit("Reshape", op["PriorDist"], op.ints([-1]))
    else:
        prior = op.emit("Reciprocal", count(op, "X", [classes], op.dtype("X")))
    return op.emit("Add", keep, op.emit("Mul", prior, number(op, op.attrs["epsilon"], "X")))


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
