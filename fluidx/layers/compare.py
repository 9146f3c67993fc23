"""Comparison and logic layers. Their bool results may be written into an existing variable given as `cond=` or `out=`."""

from __future__ import annotations

from typing import Any

from ..ir import Variable
from .helper import LayerWriter


def _compare(op_type: str, x: Variable, y: Variable, out: Variable | None) -> Variable:
    helper = LayerWriter(op_type)
    result = helper.op(op_type, helper.variable(x, "x"), helper.variable(y, "y"), out={} if out is None else {"Out": out})
    result.stop_gradient = True
    return result


def less_than(x: Variable, y: Variable, force_cpu: Any = None, cond: Variable | None = None) -> Variable:
    """x < y, broadcast; `cond`, when given, receives it. `force_cpu` has no effect.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     i, n = (fx.layers.fill_constant([1], "int64", v) for v in (0, 10))
    ...     fx.layers.less_than(i, n)
    <Variable less_than_0.tmp_0: bool[1]>
    """
    return _compare("less_than", x, y, cond)


def less_equal(x: Variable, y: Variable, cond: Variable | None = None) -> Variable:
    """x <= y, broadcast; `cond`, when given, receives it."""
    return _compare("less_equal", x, y, cond)


def greater_than(x: Variable, y: Variable, cond: Variable | None = None) -> Variable:
    """x > y, broadcast; `cond`, when given, receives it."""
    return _compare("greater_than", x, y, cond)


def greater_equal(x: Variable, y: Variable, cond: Variable | None = None) -> Variable:
    """x >= y, broadcast; `cond`, when given, receives it."""
    return _compare("greater_equal", x, y, cond)


def equal(x: Variable, y: Variable, cond: Variable | None = None) -> Variable:
    """x == y, broadcast; `cond`, when given, receives it."""
    return _compare("equal", x, y, cond)


def not_equal(x: Variable, y: Variable, cond: Variable | None = None) -> Variable:
    """x != y, broadcast; `cond`, when given, receives it."""
    return _compare("not_equal", x, y, cond)


def logical_and(x: Variable, y: Variable, out: Variable | None = None, name: str | None = None) -> Variable:
    """Both of two bool variables; `out`, when given, receives it."""
    return _compare("logical_and", x, y, out)


def logical_or(x: Variable, y: Variable, out: Variable | None = None, name: str | None = None) -> Variable:
    """Either of two bool variables; `out`, when given, receives it."""
    return _compare("logical_or", x, y, out)


def logical_xor(x: Variable, y: Variable, out: Variable | None = None, name: str | None = None) -> Variable:
    """Exactly one of two bool variables; `out`, when given, receives it."""
    return _compare("logical_xor", x, y, out)


def logical_not(x: Variable, out: Variable | None = None, name: str | None = None) -> Variable:
    """The opposite of a bool variable; `out`, when given, receives it."""
    helper = LayerWriter("logical_not", name)
    return helper.op("logical_not", helper.variable(x, "x"), out={} if out is None else {"Out": out})


__all__ = [
    "equal", "greater_equal", "greater_than", "less_equal", "less_than", "logical_and", "logical_not", "logical_or", "logical_xor",
    "not_equal",
]  # fmt: skip
