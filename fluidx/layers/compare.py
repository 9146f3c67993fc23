"""Comparison and logic layers. Their bool results may be written into an existing variable given as `cond=` or `out=`."""

from __future__ import annotations

from functools import partial

from .layer_from_signature import row

_compare = partial(row, stop_gradient=True)

# fmt: off
less_equal = _compare("less_equal(x, y, cond=None)", "x <= y, broadcast; `cond`, when given, receives it.")
greater_than = _compare("greater_than(x, y, cond=None)", "x > y, broadcast; `cond`, when given, receives it.")
greater_equal = _compare("greater_equal(x, y, cond=None)", "x >= y, broadcast; `cond`, when given, receives it.")
equal = _compare("equal(x, y, cond=None)", "x == y, broadcast; `cond`, when given, receives it.")
not_equal = _compare("not_equal(x, y, cond=None)", "x != y, broadcast; `cond`, when given, receives it.")
logical_and = _compare(
    "logical_and(x, y, out=None, name=None)", "Both of two bool variables; `out`, when given, receives it.", unused=["name"]
)
logical_or = _compare(
    "logical_or(x, y, out=None, name=None)", "Either of two bool variables; `out`, when given, receives it.", unused=["name"]
)
logical_xor = _compare(
    "logical_xor(x, y, out=None, name=None)", "Exactly one of two bool variables; `out`, when given, receives it.", unused=["name"]
)
logical_not = row("logical_not(x, out=None, name=None)", "The opposite of a bool variable; `out`, when given, receives it.")

less_than = _compare("less_than(x, y, force_cpu: Any = None, cond=None)", """
    x < y, broadcast; `cond`, when given, receives it. `force_cpu` has no effect.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     i, n = (fx.layers.fill_constant([1], "int64", v) for v in (0, 10))
    ...     fx.layers.less_than(i, n)
    <Variable less_than_0.tmp_0: bool[1]>
    """, unused=["force_cpu"])
# fmt: on

__all__ = [
    "equal", "greater_equal", "greater_than", "less_equal", "less_than", "logical_and", "logical_not", "logical_or", "logical_xor",
    "not_equal",
]  # fmt: skip
