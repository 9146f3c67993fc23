"""The coefficients of ops that are weighted sums of their operands, derived from their scalar expressions (`OpDef.expr`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from ..ir.opdef import OpDef

Affine = dict[int | None, float]  # operand -> coefficient; the key None is the constant term


def coefficients(definition: type[OpDef], attrs: Mapping[str, Any], constants: Sequence[float | None]) -> list[tuple[int, float]] | None:
    """[(operand, coefficient)] of an op that is a weighted sum of its operands; None for other ops.

    `constants` has a number for each operand whose elements all equal that number; these operands do not appear in the result.
    """
    if definition.expr is None:
        return None
    expr = definition.expr.body
    operands = {name: k for k, slot in enumerate(definition.in_slots) for name in (slot.name, slot.name.lower())}
    if definition.in_slots and definition.in_slots[-1].name.endswith("@GRAD"):
        operands["g"] = len(definition.in_slots) - 1
    found: dict[int, Affine | None] = {}
    order = [(expr, False)]
    while order:
        node, ready = order.pop()
        if id(node) in found:
            continue
        if node.fn in ("const", "sym"):
            found[id(node)] = _leaf(node, operands, attrs, constants)
        elif ready:
            found[id(node)] = _apply(node.fn, [found[id(a)] for a in node.args])
        else:
            order.append((node, True))
            order += [(a, False) for a in node.args]
    form = found[id(expr)]
    if form is None or form.pop(None, 0.0) != 0.0:
        return None
    return [(k, w) for k, w in form.items() if k is not None]


def _leaf(node: Any, operands: Mapping[str, int], attrs: Mapping[str, Any], constants: Sequence[float | None]) -> Affine | None:
    name = node.args[0]
    if node.fn == "const":
        return _number(name)
    if name in attrs:
        return _number(attrs[name])
    k = operands.get(name)
    if k is None:
        return None
    value = constants[k]
    return {k: 1.0} if value is None else _number(value)


def _number(value: Any) -> Affine | None:
    if not isinstance(value, (bool, int, float)):
        return None
    return {None: float(value)} if isfinite(value) else None


def _apply(fn: str, args: Sequence[Affine | None]) -> Affine | None:
    if fn == "where":
        chosen = _constant(args[0])
        return None if chosen is None else args[1] if chosen else args[2]
    if any(a is None for a in args):
        return None
    a = args[0]
    b = args[1] if len(args) > 1 else None
    assert a is not None
    if fn == "neg":
        return _times(a, -1.0)
    if b is None:
        return None
    if fn in ("add", "sub"):
        out = dict(a)
        for k, w in (b if fn == "add" else _times(b, -1.0) or {}).items():
            out[k] = out.get(k, 0.0) + w
        return out
    if fn == "mul":
        for x, y in ((a, b), (b, a)):
            if (c := _constant(y)) is not None:
                return _times(x, c)
    if fn == "div" and (c := _constant(b)):
        inverse = {k: w / c for k, w in a.items()}
        return inverse if all(isfinite(w) and (w != 0.0 or a[k] == 0.0) for k, w in inverse.items()) else None
    return None


def _constant(form: Affine | None) -> float | None:
    if form is None or any(k is not None for k in form):
        return None
    return form.get(None, 0.0)


def _times(form: Affine, c: float) -> Affine | None:
    out = {k: w * c for k, w in form.items()}
    kept = all(isfinite(v) and (v != 0.0 or c == 0.0 or form[k] == 0.0) for k, v in out.items())
    return out if kept else None
