"""Import of elementwise operators."""

from __future__ import annotations

from functools import partial, reduce

import numpy as np

from ...ir import Variable
from ...ir.dtypes import FLOATS
from ..elementwise_names import UNARY
from ..import_tables import imports, on_numpy
from ..node import Node

_UNARY = {theirs: ours for ours, theirs in UNARY.items()}
_BINARY = {
    "Add": "elementwise_add", "Sub": "elementwise_sub", "Mul": "elementwise_mul", "Div": "elementwise_div",
    "Less": "less_than", "LessOrEqual": "less_equal", "Greater": "greater_than", "GreaterOrEqual": "greater_equal",
    "And": "logical_and", "Or": "logical_or", "Xor": "logical_xor",
    "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor",
}  # fmt: skip
_SELU = 1.67326319217681884765625, 1.05070102214813232421875
# ONNX operator -> (operator of fluidx, attributes as (name in ONNX, its default, name in fluidx))
_WITH_ATTRIBUTES: dict[str, tuple[str, tuple[tuple[str, float, str], ...]]] = {
    "LeakyRelu": ("leaky_relu", (("alpha", 0.01, "alpha"),)),
    "Elu": ("elu", (("alpha", 1.0, "alpha"),)),
    "Selu": ("selu", (("alpha", _SELU[0], "alpha"), ("gamma", _SELU[1], "scale"))),
    "ThresholdedRelu": ("thresholded_relu", (("alpha", 1.0, "threshold"),)),
    "HardSigmoid": ("hard_sigmoid", (("alpha", 0.2, "slope"), ("beta", 0.5, "offset"))),
    "Swish": ("swish", (("alpha", 1.0, "beta"),)),
    "HardSwish": ("hard_swish", ()),
}


@imports(*_UNARY)
def unary(n: Node) -> object:
    return n.b.emit(_UNARY[n.op_type], n.x())


@imports("Round")
def rounded(n: Node) -> object:
    return n.b.round(n.x(), ties_to_even=True)


@imports(*_BINARY, factors=True)
def binary(n: Node) -> object:
    return n.b.emit(_BINARY[n.op_type], n.x(0), n.x(1))


@imports("Equal", factors=True)
def equal(n: Node) -> object:
    return n.b.emit("string_equal" if n.dtype() == "string" else "equal", n.x(0), n.x(1))


@imports(*_WITH_ATTRIBUTES)
def with_attributes(n: Node) -> object:
    op, attributes = _WITH_ATTRIBUTES[n.op_type]
    return n.b.emit(op, n.x(), **{ours: n.attr(theirs, default) for theirs, default, ours in attributes})


@imports("Gelu")
def gelu(n: Node) -> object:
    return n.b.gelu(n.x(), approximate=n.attr("approximate", "none") == "tanh")


@imports("PRelu")
def prelu(n: Node) -> object:
    x, slope = n.x(0), n.x(1)
    sizes, wanted = n.shape(1), n.shape(0)
    if len(sizes) == 1 and sizes[0] not in (1, wanted[-1]) and sizes[0] == wanted[min(1, len(wanted) - 1)]:
        slope = n.b.reshape(slope, shape=(sizes[0], *[1] * (len(wanted) - 2)))  # one slope for each channel
    return n.b.where(n.b.less_than(x, n.b.fill_zeros_like(x)), n.b.elementwise_mul(x, slope), x)


# -- of several operands ----------------------------------------------------------------------------------------------------------


@imports("Sum", "Max", "Min", "Mean", factors=True)
def folded(n: Node) -> object:
    op = {"Max": "elementwise_max", "Min": "elementwise_min"}.get(n.op_type, "elementwise_add")
    xs = n.xs()
    out = reduce(partial(n.b.emit, op), xs)
    return n.b.scale(out, scale=1 / len(xs)) if n.op_type == "Mean" and len(xs) > 1 else out


@imports("Clip", factors=True)
def clip(n: Node) -> object:
    low, high = (n.operands[k] if n.has(k) else None for k in (1, 2))
    if low is not None and high is not None and n.dtype() in FLOATS and not any(isinstance(v, Variable) for v in (low, high)):
        return n.b.clip(n.x(), min=float(n.value(1)), max=float(n.value(2)))
    out = n.x()
    out = out if low is None else n.b.elementwise_max(out, n.x(1))
    return out if high is None else n.b.elementwise_min(out, n.x(2))


# -- arithmetic -------------------------------------------------------------------------------------------------------------------


@imports("Neg")
def negative(n: Node) -> object:
    return n.b.scale(n.x(), scale=-1.0)


@imports("Mod", factors=True)
def remainder(n: Node) -> object:
    return n.b.emit("elementwise_fmod" if n.attr("fmod", 0) else "elementwise_mod", n.x(0), n.x(1))


@imports("Pow", factors=True)
def power(n: Node) -> object:
    of, to = n.dtype(0), n.dtype(1)
    if of in FLOATS and not isinstance(n.operands[1], Variable) and n.value(1).size == 1 and n.rank(1) <= n.rank(0):
        return n.b.pow(n.x(0), factor=float(n.value(1).reshape(())))
    if of not in FLOATS and to in FLOATS:  # integers to a float power are computed in floats and truncated
        return n.b.cast(n.b.elementwise_pow(n.b.cast(n.x(0), dtype="float64"), n.b.cast(n.x(1), dtype="float64")), dtype=of)
    return n.b.elementwise_pow(n.x(0), n.x(1) if of == to else n.b.cast(n.x(1), dtype=of))


@imports("BitShift")
def shift(n: Node) -> object:
    return n.b.emit("shift_left" if n.attr("direction") == "LEFT" else "shift_right", n.x(0), n.x(1))


# -- choices ----------------------------------------------------------------------------------------------------------------------


@imports("Where", factors=True)
def where(n: Node) -> object:
    return n.b.where(n.x(0), n.x(1), n.x(2))


@imports("IsInf")
def is_infinite(n: Node) -> object:
    x, up, down = n.x(), n.attr("detect_positive", 1), n.attr("detect_negative", 1)
    if up and down:
        return n.b.isinf(x)
    if not up and not down:
        return n.b.fill_any_like(x, value=0.0, dtype="bool")
    return n.b.equal(x, n.b.fill_any_like(x, value=np.inf if up else -np.inf))


# -- on the host ------------------------------------------------------------------------------------------------------------------


@on_numpy("Equal", pure=True)
def equal_on_host(n: Node) -> object:
    return np.asarray(n.value(0) == n.value(1), bool)


@on_numpy("Where", pure=True)
def where_on_host(n: Node) -> object:
    return np.where(n.value(0), n.value(1), n.value(2))


@on_numpy("IsNaN", pure=True)
def is_nan_on_host(n: Node) -> object:
    return np.isnan(n.value(0).astype(np.float32))


@on_numpy("IsInf", pure=True)
def is_infinite_on_host(n: Node) -> object:
    x = n.value(0).astype(np.float32)
    return (np.isposinf(x) & bool(n.attr("detect_positive", 1))) | (np.isneginf(x) & bool(n.attr("detect_negative", 1)))
