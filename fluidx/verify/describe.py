"""Short texts of expressions, for messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .normal_form import ExpressionTable


def show(table: ExpressionTable, e: int, depth: int) -> str:
    """A short text of an expression, to a depth."""
    key = table.keys[e]
    if depth == 0:
        return "..."
    if key[0] == "op":
        return f"{key[1]}({', '.join(show(table, x, depth - 1) for x in key[3][:4] if x is not None)})"
    if key[0] == "lin":
        text = " + ".join(_weighted(table, a, w, depth - 1) for a, w in key[1][:4])
        return (text + (" + ..." if len(key[1]) > 4 else "")) or "0"
    if key[0] == "slice":
        return f"{show(table, key[1], depth)}[{key[2]}:{key[2] + key[3]}]"
    if key[0] == "view":
        return show(table, key[1], depth)
    if key[0] == "strided":
        return f"{show(table, key[1], depth)}[{key[2]}, {' by '.join(f'{n} {s} apart' for n, s in zip(key[4], key[3], strict=True))}]"
    if key[0] == "rows":
        return "[" + "; ".join(show(table, x, depth - 1) for x in key[1][:4]) + (" ...]" if len(key[1]) > 4 else "]")
    if key[0] == "terms":
        at = [k for k in range(key[3].bit_length()) if key[3] >> k & 1]
        listed = ", ".join(map(str, at[:6])) + (", ..." if len(at) > 6 else "")
        return f"the term{'s' * (len(at) > 1)} of index {listed}"
    if key[0] == "one":
        return "1"
    if key[0] == "adaptive":
        return f"replica_adasum({show(table, key[1], depth - 1)})"
    if key[0] == "met":
        return f"the adaptive sum of {show(table, key[1][0], depth - 1)} on ranks {key[3]} to {key[4] - 1}"
    if key[0] == "part":
        return f"the part of {show(table, key[1][0], depth - 1)} at {', '.join(f'{g} {k}' for g, k in key[2])}"
    if key[0] == "products":
        return f"the products of elements {key[4]} to {key[5]} of {show(table, key[1], depth - 1)} and {show(table, key[2], depth - 1)}"
    return f"%{key[1]}" if key[0] in ("data", "state") else f"{key[0]} {key[1]}"


def _weighted(table: ExpressionTable, e: int, weight: float, depth: int) -> str:
    if table.keys[e][0] == "one":
        return f"{weight:g}"
    return show(table, e, depth) if weight == 1 else f"{weight:g} {show(table, e, depth)}"
