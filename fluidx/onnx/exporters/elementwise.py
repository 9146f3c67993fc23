"""Export of elementwise operators: one node if ONNX has the operator, else the nodes of its scalar expression."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from ...ir.dtypes import np_dtype
from ...ir.opdef import opdef
from ...ops.expr.nodes import Expr, lift, substitute, symbols
from ...ops.expr.nodes import nodes as parts
from ..elementwise_names import UNARY
from . import exports

if TYPE_CHECKING:
    from ..export_graph import Op

_SAME = {**UNARY, "isinf": "IsInf", "assign": "Identity", "shard": "Identity"}


@exports(*_SAME)
def same(op: Op) -> str:
    return by_expression(op) if op.lacks(_SAME[op.type]) else op.emit(_SAME[op.type], op["X"])


@exports("round")
def rounded(op: Op) -> str:
    return op.emit("Round", op["X"]) if op.attrs["ties_to_even"] and not op.lacks("Round") else by_expression(op)


@exports("sum")
def total(op: Op) -> str:
    if op.type_of("X").is_float:
        return op.emit("Sum", *op.many("X"))
    return reduce(lambda a, b: op.emit("Add", a, b), op.many("X"))


@exports("elementwise_add")
def add(op: Op) -> str:
    """A bias for each channel becomes an operand of the convolution before it, and a bias for each column one of the product before it."""
    by_axis_1 = op.type_of("Y").ndim == 1 and op.attrs["axis"] % op.type_of("X").ndim == 1
    return (op.fuse_operand("X", _BIASED, op["Y"]) if by_axis_1 else None) or by_expression(op)


_BIASED = frozenset({"Conv", "ConvTranspose", "Gemm"})


@exports("cast")
def cast(op: Op) -> str:
    said = {} if op.attrs["saturate"] else {"saturate": 0}
    if op.attrs["round_mode"] != "up":
        said["round_mode"] = op.attrs["round_mode"]
    return op.emit("Cast", op["X"], to=op.code(op.attrs["dtype"]), **said)


@exports("where")
def where(op: Op) -> str:
    return op.emit("Where", op["Condition"], op["X"], op["Y"])


@exports("leaky_relu", "elu")
def with_alpha(op: Op) -> str:
    return op.emit({"leaky_relu": "LeakyRelu", "elu": "Elu"}[op.type], op["X"], alpha=op.attrs["alpha"])


@exports("gelu")
def gelu(op: Op) -> str:
    if op.lacks("Gelu"):
        return by_expression(op)
    return op.emit("Gelu", op["X"], approximate="tanh" if op.attrs["approximate"] else "none")


@exports("clip")
def clip(op: Op) -> str:
    dtype = np_dtype(op.dtype("X"))
    return op.emit("Clip", op["X"], op.const(np.array(op.attrs["min"], dtype)), op.const(np.array(op.attrs["max"], dtype)))


@exports("dropout")
def dropout(op: Op) -> str | dict[str, str]:
    """In inference, a Dropout node without effect, so that a program that trains the model again knows the rate."""
    rate, upscale = op.attrs["dropout_prob"], op.attrs["dropout_implementation"] == "upscale_in_train"
    if not op.attrs["is_test"]:
        return _training_dropout(op, rate, upscale)
    if upscale:
        return op.emit("Dropout", op["X"], op.const(np.array(rate, np.float32))) if rate < 1 else op.emit("Identity", op["X"])
    return op.emit("Mul", op["X"], op.const(np.array(1.0 - rate, np_dtype(op.dtype("X")))))


def _training_dropout(op: Op, rate: float, upscale: bool) -> dict[str, str]:
    if rate >= 1:
        raise op.wrong("it drops everything, which a Dropout node cannot do")
    y, kept = op.emit_many("Dropout", 2, op["X"], op.const(np.array(rate, np.float32)), op.const(np.array(True)), seed=op.attrs["seed"])
    if not upscale:
        y = op.emit("Mul", op["X"], op.emit("Cast", kept, to=op.code(op.dtype("X"))))
    return {"Out": y, "Mask": op.emit("Cast", kept, to=op.code("uint8"))}


@exports("dropout_grad")
def dropout_grad(op: Op) -> str:
    rate, kept = op.attrs["dropout_prob"], op.emit("Cast", op["Mask"], to=op.code(op.dtype("Out@GRAD")))
    g = op.emit("Mul", op["Out@GRAD"], kept)
    if op.attrs["dropout_implementation"] != "upscale_in_train":
        return g
    return op.emit("Mul", g, op.const(np.array(1 / (1 - rate), np_dtype(op.dtype("Out@GRAD")))))


# -- any expression -----------------------------------------------------------------------------------------------------------

_NODES = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "neg": "Neg", "pow": "Pow", "exp": "Exp", "log": "Log", "sqrt": "Sqrt",
    "tanh": "Tanh", "sin": "Sin", "cos": "Cos", "abs": "Abs", "sign": "Sign", "floor": "Floor", "ceil": "Ceil", "round": "Round",
    "min": "Min", "max": "Max", "gt": "Greater", "ge": "GreaterOrEqual", "lt": "Less", "le": "LessOrEqual", "eq": "Equal", "and": "And",
    "or": "Or", "xor": "Xor", "not": "Not", "isnan": "IsNaN", "isinf": "IsInf", "sigmoid": "Sigmoid", "softplus": "Softplus", "erf": "Erf",
    "where": "Where", "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh", "cosh": "Cosh", "asinh": "Asinh",
    "acosh": "Acosh", "atanh": "Atanh", "bit_and": "BitwiseAnd", "bit_or": "BitwiseOr", "bit_xor": "BitwiseXor", "bit_not": "BitwiseNot",
}  # fmt: skip


def _mod(op: Op, x: str, y: str) -> str:
    """The remainder has the sign of the divisor. ONNX's Mod does so only for integers."""
    if np_dtype(op.dtype("X")).kind in "iu":
        return op.emit("Mod", x, y)
    return op.emit("Sub", x, op.emit("Mul", op.emit("Floor", op.emit("Div", x, y)), y))


def _floordiv(op: Op, x: str, y: str) -> str:
    if np_dtype(op.dtype("X")).kind in "iu":
        return op.emit("Div", op.emit("Sub", x, op.emit("Mod", x, y)), y)
    return op.emit("Floor", op.emit("Div", x, y))


_COMPOSED: dict[str, Callable[..., str]] = {
    "ne": lambda op, x, y: op.emit("Not", op.emit("Equal", x, y)),
    "log1p": lambda op, x: op.emit("Log", op.emit("Add", x, op.const(np.array(1, np_dtype(op.dtype("X")))))),
    "rsqrt": lambda op, x: op.emit("Reciprocal", op.emit("Sqrt", x)),
    "isfinite": lambda op, x: op.emit("Not", op.emit("Or", op.emit("IsNaN", x), op.emit("IsInf", x))),
    "fmod": lambda op, x, y: op.emit("Mod", x, y, fmod=1),
    "shift_left": lambda op, x, y: op.emit("BitShift", x, y, direction="LEFT"),
    "shift_right": lambda op, x, y: op.emit("BitShift", x, y, direction="RIGHT"),
    "mod": _mod,
    "floordiv": _floordiv,
}


_SYMBOLS = {"Out": "Out", "Out@GRAD": "g"}  # names of gradient slots in expressions


def by_expression(op: Op) -> str:
    """The nodes of an elementwise operator's expression. A repeated value is computed once."""
    definition = opdef(op.type)
    slots = definition.inputs
    expr: Expr = definition.expr  # type: ignore[attr-defined]
    axis = op.attrs.get("axis", -1)
    values: dict[str, str] = {_SYMBOLS.get(s, s.lower()): _aligned(op, s, axis if s == "Y" else -1) for s in slots}
    expr = substitute(expr, {n: lift(v) for n, v in op.attrs.items() if n != "axis"})
    found = written_out(op, expr, values)
    return found if symbols(expr) else op.emit("Expand", found, op.emit("Shape", op[slots[0]]))


def has_expression(op_type: str) -> bool:
    """Whether an operator is elementwise, and ONNX has all functions of its expression."""
    expr = getattr(opdef(op_type), "expr", None)
    return isinstance(expr, Expr) and all(e.fn in _NODES or e.fn in _COMPOSED or e.fn in ("const", "sym") for e in parts(expr))


def _aligned(op: Op, slot: str, axis: int) -> str:
    """An operand with axes of size 1 added, so that its first axis aligns with axis `axis` of the result; for -1 the last axes align."""
    behind = op.out_type(opdef(op.type).out_slots[0].name).ndim - axis - op.type_of(slot).ndim
    if axis == -1 or behind <= 0:
        return op[slot]
    ndim = op.type_of(slot).ndim
    return op.emit("Unsqueeze", op[slot], op.ints(range(ndim, ndim + behind)))


def written_out(op: Op, e: Expr, values: Mapping[str, str]) -> str:
    """The nodes of an expression, with `values` for its symbols. Its numbers have the dtype of the first operand."""
    return _written(op, e, values, {})


def _written(op: Op, e: Expr, values: Mapping[str, str], seen: dict[Expr, str]) -> str:
    if e.fn == "sym":
        return values[e.args[0]]
    if e.fn == "const":
        return op.const(_number(op, e.args[0]))
    if e not in seen:
        args = [_written(op, a, values, seen) for a in e.args]
        seen[e] = _COMPOSED[e.fn](op, *args) if e.fn in _COMPOSED else op.emit(_NODES[e.fn], *args)
    return seen[e]


def _number(op: Op, value: Any) -> np.ndarray:
    return np.array(value, bool if isinstance(value, bool) else np_dtype(op.dtype(opdef(op.type).inputs[0])))
