"""Attention and its gradients exported as basic nodes, which older runtimes support too."""

from __future__ import annotations

import numpy as np

from ...ir.dtypes import np_dtype
from ...ir.types import ANY
from ..export_graph import Op
from ..table import exports
from .gradient_formulas import number
from .product import swapped


@exports("scaled_dot_product_attention")
def attention(op: Op) -> str:
    return op.emit("MatMul", _weights(op), _for_heads(op, "V"))


@exports("scaled_dot_product_attention_grad")
def attention_grad(op: Op) -> dict[str, str]:
    """The weights are computed again, because the values that the forward operator keeps are not in ONNX."""
    ndim, g = op.type_of("Q").ndim, op["Out@GRAD"]
    weights, wanted = _weights(op), op.op.outputs
    found = {}
    if wanted.get("V@GRAD"):
        found["V@GRAD"] = _of_heads(op, op.emit("MatMul", op.emit("Transpose", weights, perm=swapped(ndim)), g), "V")
    inner = op.emit("MatMul", g, op.emit("Transpose", _for_heads(op, "V"), perm=swapped(ndim)))
    along = op.reduced("ReduceSum", op.emit("Mul", g, op["Out"]), [-1], True)
    scores = op.emit("Mul", weights, op.emit("Sub", inner, along))
    if wanted.get("Scores@GRAD"):
        found["Scores@GRAD"] = scores
    scaled = op.emit("Mul", scores, number(op, op.attrs["scale"], "Q"))
    if wanted.get("Q@GRAD"):
        found["Q@GRAD"] = op.emit("MatMul", scaled, _for_heads(op, "K"))
    if wanted.get("K@GRAD"):
        found["K@GRAD"] = _of_heads(op, op.emit("MatMul", op.emit("Transpose", scaled, perm=swapped(ndim)), op["Q"]), "K")
    return found


def _weights(op: Op) -> str:
    """The attention weights: [rows of Q, rows of V]."""
    ndim, dtype = op.type_of("Q").ndim, np_dtype(op.dtype("Q"))
    scores = op.emit("MatMul", op["Q"], op.emit("Transpose", _for_heads(op, "K"), perm=swapped(ndim)))
    scores = op.emit("Mul", scores, number(op, op.attrs["scale"], "Q"))
    by_bools = op.has("Mask") and op.dtype("Mask") == "bool"
    if op.has("Mask") and not by_bools:
        scores = op.emit("Add", scores, op["Mask"])
    seen = [*([op["Mask"]] if by_bools else []), *([_causal(op)] if op.attrs["causal"] else [])]
    for places in seen:
        scores = op.emit("Where", places, scores, op.const(np.array(np.finfo(dtype).min, dtype)))
    weights = op.emit("Softmax", scores, axis=-1)
    for places in seen:  # a row without visible positions gives zeros
        weights = op.emit("Where", places, weights, number(op, 0, "Q"))
    return weights


def _causal(op: Op) -> str:
    """Row i of Q sees the first i + 1 rows of K."""
    places = []
    for slot, axis in (("Q", 1), ("K", 0)):
        count = op.emit("Squeeze", op.sizes(op[slot], -2, -1), op.ints([0]))
        zero, one = (op.const(np.array(n, np.int64)) for n in (0, 1))
        places.append(op.emit("Unsqueeze", op.emit("Range", zero, count, one), op.ints([axis])))
    return op.emit("GreaterOrEqual", *places)


def _heads(op: Op, slot: str) -> tuple[int, int]:
    """The number of heads of Q, and of K or V. Neighbouring heads of Q share one of K or V."""
    q, x = op.type_of("Q").shape, op.type_of(slot).shape
    many, few = (q[-3], x[-3]) if len(q) > 2 else (1, 1)
    if many != few and ANY in (many, few):
        raise op.wrong("the number of its heads is open")
    return many, few


def _for_heads(op: Op, slot: str) -> str:
    """K or V with its heads repeated for those of Q."""
    many, few = _heads(op, slot)
    if many == few:
        return op[slot]
    return op.emit("Gather", op[slot], op.ints(np.repeat(np.arange(few), many // few)), axis=op.type_of(slot).ndim - 3)


def _of_heads(op: Op, g: str, slot: str) -> str:
    """The gradient of `_for_heads`: the gradients of repeated heads added up."""
    (many, few), shape = _heads(op, slot), op.type_of(slot).shape
    if many == few:
        return g
    if shape[-2:].count(ANY) > 1:
        raise op.wrong("its heads are shared, and more than one of their sizes is open")
    apart = op.emit("Reshape", g, op.ints([*[0] * (len(shape) - 3), few, many // few, *shape[-2:]]))
    return op.reduced("ReduceSum", apart, [len(shape) - 2], False)
