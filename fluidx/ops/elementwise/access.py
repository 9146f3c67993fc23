"""Access patterns of elementwise ops, derived from their scalar expressions: where the op is linear, and where it rises or falls.

Every operand is read at the position that is written, so the axes in the pattern only say how operands broadcast. The expression decides
what the op can do with partial sums or partial maxima. An operand that does not occur in the expression is read for its shape only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations
from math import isfinite
from typing import Any

from ...ir.axis_letters import letters
from ...ir.pattern import Types
from ..expr.nodes import Expr, is_const, lift, nodes, number_of, substitute, symbols

# Functions that never fall, for every argument including the infinities: the terms of a partial maximum may be far below it, so sqrt and
# log, which are not defined everywhere, do not count.
_RISING = {"exp", "tanh", "sinh", "asinh", "atan", "sigmoid", "softplus", "erf", "floor", "ceil", "round", "sign"}


def elementwise_pattern(expr: Expr, inputs: Sequence[str], names: Sequence[str], axis: bool) -> Callable[..., str]:
    """The `pattern` of an op with operands `inputs` (symbols of `expr`, in slot order) and attributes `names`; `axis`: it has fluid's
    attribute `axis`.
    """

    @lru_cache(maxsize=256)
    def exceptions(values: tuple[Expr, ...], is_float: tuple[bool, ...]) -> tuple[tuple[str, ...], str]:
        e = substitute(expr, dict(zip(names, values, strict=True)))
        read = symbols(e)
        floats = [s for s, f in zip(inputs, is_float, strict=True) if f]
        exceptions_text = [f"L({_places(group, inputs)})" for group in linear_groups(e, [s for s in floats if s in read])]
        for k, s in enumerate(inputs):
            way = direction(e, s, is_float[k])
            exceptions_text += [f"{'U' if way > 0 else 'D'}({k})"] if way else []
        return tuple("" if s in read else "~" for s in inputs), " ".join(exceptions_text)

    def pattern(ins: Types, outs: Types, attrs: Any) -> str:
        marks, exceptions_text = exceptions(tuple([lift(attrs[n]) for n in names]), tuple(t is not None and t.is_float for t in ins))
        words, out = _words(inputs, ins, outs, attrs["axis"] if axis else -1)
        return f"{', '.join(m + w for m, w in zip(marks, words, strict=True))} -> {out} | {exceptions_text}"

    return pattern


def _places(group: Sequence[str], inputs: Sequence[str]) -> str:
    return ",".join(str(inputs.index(s)) for s in group)


def _words(inputs: Sequence[str], ins: Types, outs: Types, axis: int) -> tuple[list[str], str]:
    """The axis words of operands and result. With fluid's `axis`, axis 0 of y meets that axis of the result, in whichever slot y is."""
    y, out = (ins[inputs.index("y")] if "y" in inputs else None), outs[0]
    assert out is not None
    if axis == -1 or y is None or y.ndim == out.ndim or all(d == 1 for d in y.shape):
        return ["*"] * len(inputs), "*"
    e = letters(out.ndim, "e").split()
    beside = [*e[axis : axis + y.ndim], *["."] * (axis + y.ndim - out.ndim)]  # trailing sizes of 1 may be beyond the last axis
    return [" ".join(beside if s == "y" else e) for s in inputs], " ".join(e)


# -- linearity and monotonicity of expressions -------------------------------------------------------------------------------------


def linear_groups(e: Expr, operands: Sequence[str]) -> list[tuple[str, ...]]:
    """The groups of operands in which an expression is linear: if all operands of a group are partial sums and the others are whole, so is
    the result a partial sum.

    >>> from fluidx.ops.expr import trace
    >>> linear_groups(trace(lambda x, y: 2 * x - y), ("x", "y")), linear_groups(trace(lambda x, y: x * y), ("x", "y"))
    ([('x', 'y')], [('x',), ('y',)])
    """
    if any(n.fn == "const" and not isfinite(n.args[0]) for n in nodes(e)):
        return []  # an infinite coefficient turns terms of both signs into NaN
    groups = [g for size in range(1, len(operands) + 1) for g in combinations(operands, size)]
    return [g for g in groups if _degree(e, g) == 1]


def _degree(e: Expr, group: Sequence[str]) -> int | None:
    """1: linear in the group, without a constant term; 0: independent of the group; None: neither."""
    of: dict[Expr, int | None] = {}
    for n in nodes(e):
        if n.fn in ("const", "sym"):
            of[n] = int(n.fn == "sym" and n.args[0] in group)
            continue
        degrees = [of[a] for a in n.args]
        if not any(d != 0 for d in degrees):
            of[n] = 0
        elif n.fn == "neg":
            of[n] = degrees[0]
        elif n.fn == "mul":
            of[n] = 1 if degrees in ([0, 1], [1, 0]) else None
        elif n.fn == "div":
            of[n] = 1 if degrees == [1, 0] and not is_const(n.args[1], 0) else None
        elif n.fn in ("add", "sub") or (n.fn == "where" and degrees[0] == 0):
            terms = zip(n.args, degrees, strict=True)
            of[n] = 1 if all(d == 1 or is_const(a, 0) for a, d in list(terms)[n.fn == "where" :]) else None
        else:
            of[n] = None
    return of[e]


def direction(e: Expr, operand: str, is_float: bool = True) -> int:
    """1: the expression never falls as the operand grows; -1: it never rises; 0: it does not depend on the operand, or the answer is not
    known.

    The other operands are whole and can have any value, so the answer must hold for all of their values. Integers are excluded because
    their arithmetic overflows.

    >>> from fluidx.ops.expr import exp, trace
    >>> direction(trace(lambda x: 1 - exp(x)), "x"), direction(trace(lambda x: x * x), "x")
    (-1, 0)
    """
    ways: dict[Expr, int | None] = {}
    for n in nodes(e):
        if n.fn in ("const", "sym"):
            ways[n] = int(n.fn == "sym" and n.args[0] == operand)
        else:
            ways[n] = _direction(n, [ways[a] for a in n.args], is_float)
    return ways[e] or 0


def _direction(n: Expr, found: list[int | None], is_float: bool) -> int | None:
    ways = [w for w in found if w is not None]
    if len(ways) < len(found):
        return None
    if not any(ways):
        return 0
    if n.fn in _RISING:
        return ways[0]
    if n.fn == "not":
        return -ways[0]
    if n.fn in ("max", "min", "and", "or"):
        return _common(ways)
    if not is_float:
        return None
    fixed = [number_of(a) for a in n.args]
    if any(w == 0 and (c is None or not isfinite(c)) for w, c in zip(ways, fixed, strict=True)):
        return None
    if n.fn == "neg":
        return -ways[0]
    if n.fn in ("add", "sub"):
        return _common([ways[0], ways[1] if n.fn == "add" else -ways[1]])
    for k, c in enumerate(fixed):
        if c and (n.fn == "mul" or (n.fn == "div" and k == 1)):
            return ways[1 - k] if c > 0 else -ways[1 - k]
    return None


def _common(ways: Sequence[int]) -> int | None:
    both = {w for w in ways if w}
    return both.pop() if len(both) == 1 else None
