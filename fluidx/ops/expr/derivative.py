"""Derivatives of scalar expressions, and their form in terms of the op's saved result.

>>> x = sym("x")
>>> in_terms_of(derivative(sigmoid(x), x), sigmoid(x))
Out * (1 - Out)
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...ir.errors import ProgramError
from .nodes import (
    BOOLEAN,
    Expr,
    abs,
    apply,
    const,
    cos,
    cosh,
    div,
    eq,
    exp,
    floor,
    is_mask,
    lift,
    log,
    nodes,
    power,
    rebuild,
    rsqrt,
    sigmoid,
    sign,
    sin,
    sinh,
    sym,
    where,
)

_BITS = {"bit_and", "bit_or", "bit_xor", "bit_not", "shift_left", "shift_right"}
_STEP = {"sign", "floor", "ceil", "round", "floordiv", *_BITS, *BOOLEAN}  # constant almost everywhere, or on integers


# function -> its derivatives with respect to the arguments a and b; n is its value
_RULES: dict[str, Callable[[Expr, Expr, Expr], list[Expr | float]]] = {
    "add": lambda a, b, n: [1.0, 1.0],
    "sub": lambda a, b, n: [1.0, -1.0],
    "mul": lambda a, b, n: [b, a],
    "div": lambda a, b, n: [div(1.0, b), -(n * n) / a if a.fn == "const" else -div(n, b)],
    "neg": lambda a, b, n: [-1.0],
    "pow": lambda a, b, n: [b * power(a, b - 1.0), n * log(where(eq(a, 0.0), 1.0, a))],
    "mod": lambda a, b, n: [1.0, -apply("floordiv", a, b)],
    "fmod": lambda a, b, n: [1.0, -(sign(a / b) * floor(abs(a / b)))],  # a - trunc(a / b) * b
    "exp": lambda a, b, n: [n],
    "log": lambda a, b, n: [1.0 / a],
    "log1p": lambda a, b, n: [1.0 / (1.0 + a)],
    "sqrt": lambda a, b, n: [0.5 / n],
    "rsqrt": lambda a, b, n: [-0.5 * (n * (n * n))],
    "tanh": lambda a, b, n: [1.0 - n * n],
    "sigmoid": lambda a, b, n: [n * (1.0 - n)],
    "softplus": lambda a, b, n: [sigmoid(a)],
    "erf": lambda a, b, n: [2.0 / math.sqrt(math.pi) * exp(-(a * a))],
    "sin": lambda a, b, n: [cos(a)],
    "cos": lambda a, b, n: [-sin(a)],
    "tan": lambda a, b, n: [1.0 + n * n],
    "sinh": lambda a, b, n: [cosh(a)],
    "cosh": lambda a, b, n: [sinh(a)],
    "asin": lambda a, b, n: [rsqrt(1.0 - a * a)],
    "acos": lambda a, b, n: [-rsqrt(1.0 - a * a)],
    "atan": lambda a, b, n: [1.0 / (1.0 + a * a)],
    "asinh": lambda a, b, n: [rsqrt(a * a + 1.0)],
    "acosh": lambda a, b, n: [rsqrt(a * a - 1.0)],
    "atanh": lambda a, b, n: [1.0 / (1.0 - a * a)],
    "abs": lambda a, b, n: [sign(a)],
    # at a tie the second operand gets the gradient: relu has gradient 0 at 0, as in fluid
    "max": lambda a, b, n: [where(a > b, 1.0, 0.0), where(a > b, 0.0, 1.0)],
    "min": lambda a, b, n: [where(a < b, 1.0, 0.0), where(a < b, 0.0, 1.0)],
}


def _partials(function: Expr, n: Expr) -> list[Expr]:
    """The derivatives of a function with respect to its arguments; `n` stands for its value."""
    if function.fn in _STEP:
        return [const(0.0)] * len(function.args)
    rule = _RULES.get(function.fn)
    if rule is None:
        raise ProgramError(f"there is no derivative rule for the function {function.fn} in expressions")
    return [lift(p) for p in rule(function.args[0], function.args[-1], n)]


def derivative(e: Expr, by: Expr, result: Expr | None = None) -> Expr:
    """The derivative of `e` with respect to a symbol, simplified; 0 where `e` is flat. It may use `result` for the value of `e`.

    >>> x = sym("x")
    >>> derivative(x * x + 3 * x, x)
    2 * x + 3
    """
    zero = const(0.0)
    d: dict[Expr, Expr] = {}
    for n in nodes(e):
        if n is by:
            d[n] = const(1.0)
        elif n.fn in ("const", "sym"):
            d[n] = zero
        elif n.fn == "where":
            d[n] = where(n.args[0], d[n.args[1]], d[n.args[2]])
        elif n.fn in _STEP or all(d[a] is zero for a in n.args):
            d[n] = zero
        else:
            total = zero
            for a, p in zip(n.args, _partials(n, result if n is e and result is not None else n), strict=True):
                if d[a] is not zero:
                    total = total + p * d[a]
            d[n] = total
    return d[e]


def selected(e: Expr) -> Expr:
    """`e` with `where` in place of a product with a condition: the other factor may be infinite where the condition is false, and 0 times
    infinity is NaN.

    >>> x = sym("x")
    >>> selected(where(x < 0, 1.0, 0.0) * exp(x))
    where(x < 0, exp(x), 0)
    """

    def change(n: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if n.fn in ("mul", "div"):
            for mask, other in (args, args[::-1]) if n.fn == "mul" else (args,):
                if is_mask(mask):
                    return where(mask.args[0], other if n.fn == "mul" else div(1.0, other), 0.0)
        return None

    return rebuild(e, change)


def in_terms_of(e: Expr, result: Expr, name: str = "Out") -> Expr:
    """`e` with the op's result written as the symbol `name`: the result is saved anyway, so the gradient does not need the input.

    Besides the expression itself, comparisons with a bound that clips the result are replaced: x > 0 becomes Out > 0 where Out is max(x,
    0), and also where it is min(max(x, 0), 6). In the second case the derivative always tests Out < 6 too, so bounds in the wrong order,
    which make Out constant, also give 0.
    """
    out = sym(name)
    bounds: dict[Expr, Expr] = {}
    if result.fn in ("max", "min"):
        inner, limit = result.args
        outer = "gt" if result.fn == "max" else "lt"
        bounds[apply(outer, inner, limit)] = apply(outer, out, limit)
        if inner.fn in ("max", "min") and inner.fn != result.fn and inner.args[1].fn in ("const", "sym"):
            second = "gt" if inner.fn == "max" else "lt"
            bounds[apply(second, *inner.args)] = apply(second, out, inner.args[1])
    # top down: a comparison must be recognized before its parts are rebuilt
    memo: dict[Expr, Expr] = {}

    def walk(n: Expr) -> Expr:
        if n in memo:
            return memo[n]
        if n is result and n.fn not in ("const", "sym"):
            r = out
        elif n in bounds:
            r = bounds[n]
        elif n.fn in ("const", "sym"):
            r = n
        else:
            r = apply(n.fn, *(walk(a) for a in n.args))
        memo[n] = r
        return r

    return walk(e)
