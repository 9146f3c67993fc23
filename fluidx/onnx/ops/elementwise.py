"""Elementwise operators. One that an older opset lacks is exported from its scalar expression."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import numpy as np

from ...ir import Variable
from ...ir.dtypes import FLOATS, TINY, np_dtype
from ..export_graph import Op
from ..expression_nodes import aligned, by_expression
from ..node import Node
from ..table import EXPORT, IMPORT, OneToOne, entry, exports, imports

_SELU = 1.67326319217681884765625, 1.05070102214813232421875


def _written(made: OneToOne, op: Op) -> Any:
    """The node; by the expression if the opset lacks it, or if the operator has other attributes than ONNX's."""
    if op.lacks(made.onnx) or any(op.attrs[name] != value for name, value in made.ours.items()):
        return by_expression(op)
    return made.node(op, aligned(op))


_BIASED = frozenset({"Conv", "ConvTranspose", "Gemm"})


def _added(made: OneToOne, op: Op) -> Any:
    """A bias for each channel becomes an operand of the convolution before it, and a bias for each column one of the product before it."""
    by_axis_1 = op.type_of("Y").ndim == 1 and op.attrs["axis"] % op.type_of("X").ndim == 1
    return (op.fuse_operand("X", _BIASED, op["Y"]) if by_axis_1 else None) or _written(made, op)


_elementwise = partial(entry, write=_written)

for _onnx, _op in {
    "Relu": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh", "Exp": "exp", "Log": "log", "Sqrt": "sqrt", "Abs": "abs", "Floor": "floor",
    "Ceil": "ceil", "Erf": "erf", "Sign": "sign", "Softsign": "softsign", "Softplus": "softplus", "Mish": "mish",
    "Reciprocal": "reciprocal", "Sin": "sin", "Cos": "cos", "Tan": "tan", "Sinh": "sinh", "Cosh": "cosh", "Asin": "asin", "Acos": "acos",
    "Atan": "atan", "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh", "Not": "logical_not", "BitwiseNot": "bitwise_not",
}.items():  # fmt: skip
    _elementwise(_onnx, _op)

for _onnx, _op in {
    "Sub": "elementwise_sub", "Mul": "elementwise_mul", "Div": "elementwise_div", "Less": "less_than", "LessOrEqual": "less_equal",
    "Greater": "greater_than", "GreaterOrEqual": "greater_equal", "And": "logical_and", "Or": "logical_or", "Xor": "logical_xor",
    "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor",
}.items():  # fmt: skip
    _elementwise(_onnx, _op, factors=True)

entry("Add", "elementwise_add", factors=True, write=_added)
entry("Where", "where", factors=True)
_elementwise("Round", "round", ours={"ties_to_even": True})
_elementwise("LeakyRelu", "leaky_relu", alpha=0.01)
_elementwise("Elu", "elu", alpha=1.0)
_elementwise("Selu", "selu", alpha=_SELU[0], gamma=("scale", _SELU[1]))
_elementwise("ThresholdedRelu", "thresholded_relu", alpha=("threshold", 1.0))
_elementwise("HardSigmoid", "hard_sigmoid", alpha=("slope", 0.2), beta=("offset", 0.5))
_elementwise("HardSwish", "hard_swish", ours={"threshold": 6.0, "scale": 6.0, "offset": 3.0})
_elementwise("Swish", "swish", alpha=("beta", 1.0))
_elementwise("Gelu", "gelu", approximate=("approximate", "none", {"none": False, "tanh": True}))
_elementwise("BitShift", "shift_left", theirs={"direction": "LEFT"})
_elementwise("BitShift", "shift_right", theirs={"direction": "RIGHT"})
_elementwise("Mod", "elementwise_fmod", theirs={"fmod": 1}, factors=True)
entry("Mod", "elementwise_mod", way=IMPORT, theirs={"fmod": 0}, factors=True)  # exported from its expression: the sign is the divisor's
_elementwise("IsNaN", "isnan", read=lambda made, n: made.read(n, [_comparable(n, 0)]))
_EXPORTED = {"IsInf": "isinf", "Equal": "equal", "Pow": "elementwise_pow", "Max": "elementwise_max", "Min": "elementwise_min"}
for _onnx, _op in _EXPORTED.items():
    _elementwise(_onnx, _op, way=EXPORT)


def _comparable(n: Node, k: int) -> Variable:
    """Operand k. Types of less than 16 bits, which fluidx only stores, are converted to float32."""
    return n.cast(n.x(k), "float32") if n.dtype(k) in TINY else n.x(k)


@imports("Equal", factors=True)
def equal(n: Node) -> object:
    return n.b.string_equal(n.x(0), n.x(1)) if n.dtype() == "string" else n.b.equal(_comparable(n, 0), _comparable(n, 1))


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


@imports("Pow", factors=True)
def power(n: Node) -> object:
    of, to = n.dtype(0), n.dtype(1)
    if of in FLOATS and not isinstance(n.operands[1], Variable) and n.value(1).size == 1 and n.rank(1) <= n.rank(0):
        return n.b.pow(n.x(0), factor=float(n.value(1).reshape(())))
    if of not in FLOATS and to in FLOATS:  # integers to a float power are computed in floats and truncated
        return n.b.cast(n.b.elementwise_pow(n.b.cast(n.x(0), dtype="float64"), n.b.cast(n.x(1), dtype="float64")), dtype=of)
    return n.b.elementwise_pow(n.x(0), n.x(1) if of == to else n.b.cast(n.x(1), dtype=of))


# -- choices ----------------------------------------------------------------------------------------------------------------------


@imports("IsInf")
def is_infinite(n: Node) -> object:
    x, up, down = _comparable(n, 0), n.attr("detect_positive", 1), n.attr("detect_negative", 1)
    if up and down:
        return n.b.isinf(x)
    if not up and not down:
        return n.b.fill_any_like(x, value=0.0, dtype="bool")
    return n.b.equal(x, n.b.fill_any_like(x, value=np.inf if up else -np.inf))


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("assign", "shard")
def same(op: Op) -> str:
    return op.emit("Identity", op["X"])


@exports("sum")
def total(op: Op) -> str:
    if op.type_of("X").is_float:
        return op.emit("Sum", *op.many("X"))
    return reduce(lambda a, b: op.emit("Add", a, b), op.many("X"))


@exports("clip")
def export_clip(op: Op) -> str:
    dtype = np_dtype(op.dtype("X"))
    return op.emit("Clip", op["X"], op.const(np.array(op.attrs["min"], dtype)), op.const(np.array(op.attrs["max"], dtype)))
