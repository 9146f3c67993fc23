"""Nodes for the scalar expression of an elementwise operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.dtypes import np_dtype
from ..ir.opdef import opdef
from ..ops.expr.nodes import Expr, lift, substitute, symbols
from ..ops.expr.nodes import nodes as parts
from ..ops.update.trace import kernel_expressions
from .table import ENTRIES, load_all

if TYPE_CHECKING:
    from .export_graph import Op


@cache
def _nodes() -> dict[str, str]:
    """Function of expressions -> ONNX operator: that of the entry whose operator is this function of its operands, and three others."""
    load_all()
    found = {"neg": "Neg", "round": "Round", "where": "Where"}
    for e in ENTRIES:
        scalar = opdef(e.op).expr
        expr: Any = None if scalar is None else scalar.body
        if expr is not None and expr.args and all(isinstance(a, Expr) and a.fn == "sym" for a in expr.args):
            found[expr.fn] = e.onnx
    return found


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


def _symbol(slot: str) -> str:
    """The name of an operand in expressions."""
    return slot if slot == "Out" else "g" if slot.endswith("@GRAD") else slot.lower()


def by_expression(op: Op) -> str:
    """The nodes of an elementwise operator's expression. A repeated value is computed once."""
    definition = opdef(op.type)
    slots = definition.inputs
    expr: Expr = definition.expr.body
    values = {_symbol(s): v for s, v in zip(slots, aligned(op), strict=True)}
    expr = substitute(expr, {n: lift(v) for n, v in op.attrs.items() if n != "axis"})
    found = written_out(op, expr, values)
    return found if symbols(expr) else op.emit("Expand", found, op.emit("Shape", op[slots[0]]))


def by_kernel(op: Op) -> dict[str, str]:
    """The nodes of a kernel that computes element by element, for the outputs that are used."""
    definition: Any = opdef(op.type)
    seen, found = dict[Expr, str](), dict[str, str]()
    values = {slot: op[slot] for slot in definition.inputs}
    for (slot, *_), e in zip(definition.out_slots, kernel_expressions(definition, tuple(op.attrs.items())), strict=True):
        if op.is_used(slot):
            made = written_out(op, e, values, seen)
            found[slot] = op.emit("Cast", made, to=op.code(op.out_type(slot).dtype)) if e.fn in _CONDITIONS else made
    return found


_CONDITIONS = frozenset({"gt", "ge", "lt", "le", "eq", "ne", "and", "or", "not"})


def has_expression(op_type: str) -> bool:
    """Whether an operator is elementwise, and ONNX has all functions of its expression."""
    expr = opdef(op_type).expr
    return expr is not None and all(e.fn in _nodes() or e.fn in _COMPOSED or e.fn in ("const", "sym") for e in parts(expr.body))


def aligned(op: Op) -> list[str]:
    """The operands of an elementwise operator. Y has axes of size 1 added, so that its first axis is axis `axis` of the result."""
    axis, slots = op.attrs.get("axis", -1), opdef(op.type).inputs
    ndim = op.out_type(opdef(op.type).out_slots[0].name).ndim
    values = [op[s] for s in slots]
    for k, slot in enumerate(slots):
        own = op.type_of(slot).ndim
        if slot == "Y" and axis != -1 and ndim - axis > own:
            values[k] = op.emit("Unsqueeze", values[k], op.ints(range(own, ndim - axis)))
    return values


def written_out(op: Op, e: Expr, values: Mapping[str, str], seen: dict[Expr, str] | None = None) -> str:
    """The nodes of an expression, with `values` for its symbols. Its numbers have the dtype of the first operand. `seen` has the values of
    expressions that are written already."""
    seen = {} if seen is None else seen
    if e.fn == "sym":
        return values[e.args[0]]
    if e.fn == "const":
        return op.const(_number(op, e.args[0]))
    if e not in seen:
        args = [written_out(op, a, values, seen) for a in e.args]
        seen[e] = _COMPOSED[e.fn](op, *args) if e.fn in _COMPOSED else op.emit(_nodes()[e.fn], *args)
    return seen[e]


def _number(op: Op, value: Any) -> np.ndarray:
    return np.array(value, bool if isinstance(value, bool) else np_dtype(op.dtype(opdef(op.type).inputs[0])))
