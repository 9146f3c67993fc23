"""The derivative of a scalar expression, and the derivative written over the value that the op has saved.

>>> x = sym("x")
>>> in_terms_of(derivative(sigmoid(x), x), sigmoid(x))
Out * (1 - Out)
"""

from __future__ import annotations

import math

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
_STEP = {"sign", "floor", "ceil", "round", "floordiv", *_BITS, *BOOLEAN}  # constant almost everywhere, or of whole numbers


def _partials(function: Expr, n: Expr) -> list[Expr]:
    """The derivative of one function by each of its arguments; `n` stands for its value."""
    a = function.args[0]
    b = function.args[1] if len(function.args) > 1 else a
    one, zero = const(1.0), const(0.0)
    match function.fn:
        case "add":
            return [one, one]
        case "sub":
            return [one, const(-1.0)]
        case "mul":
            return [b, a]
        case "div":
            return [div(1.0, b), -(n * n) / a if a.fn == "const" else -div(n, b)]
        case "neg":
            return [const(-1.0)]
        case "pow":
            return [b * power(a, b - 1.0), n * log(where(eq(a, 0.0), 1.0, a))]
        case "mod":
            return [one, -apply("floordiv", a, b)]
        case "fmod":  # a - trunc(a / b) * b
            return [one, -(sign(a / b) * floor(abs(a / b)))]
        case "exp":
            return [n]
        case "log":
            return [1.0 / a]
        case "log1p":
            return [1.0 / (1.0 + a)]
        case "sqrt":
            return [0.5 / n]
        case "rsqrt":
            return [-0.5 * (n * (n * n))]
        case "tanh":
            return [1.0 - n * n]
        case "sigmoid":
            return [n * (1.0 - n)]
        case "softplus":
            return [sigmoid(a)]
        case "erf":
            return [2.0 / math.sqrt(math.pi) * exp(-(a * a))]
        case "sin":
            return [cos(a)]
        case "cos":
            return [-sin(a)]
        case "tan":
            return [1.0 + n * n]
        case "sinh":
            return [cosh(a)]
        case "cosh":
            return [sinh(a)]
        case "asin":
            return [rsqrt(1.0 - a * a)]
        case "acos":
            return [-rsqrt(1.0 - a * a)]
        case "atan":
            return [1.0 / (1.0 + a * a)]
        case "asinh":
            return [rsqrt(a * a + 1.0)]
        case "acosh":
            return [rsqrt(a * a - 1.0)]
        case "atanh":
            return [1.0 / (1.0 - a * a)]
        case "abs":
            return [sign(a)]
        case "max":  # at a tie the second takes the gradient: relu is flat at 0, as in fluid
            return [where(a > b, 1.0, 0.0), where(a > b, 0.0, 1.0)]
        case "min":
            return [where(a < b, 1.0, 0.0), where(a < b, 0.0, 1.0)]
        case fn if fn in _STEP:
            return [zero] * len(function.args)
    raise ProgramError(f"expressions have no derivative rule for {function.fn}")


def derivative(e: Expr, by: Expr, result: Expr | None = None) -> Expr:
    """The derivative of `e` by a symbol, simplified; 0 where `e` is flat. It may use `result` for the value of `e`.

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
    """`e` with a choice where it multiplies by a condition: what the condition drops may be infinite, and times 0 that is NaN.

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
    """`e` with the op's own result written as the symbol `name`: it is saved anyway, so the gradient need not keep the input.

    Beside the expression itself, comparisons against a bound that the result was cut off at carry over: x > 0 is Out > 0
    where Out is max(x, 0), and also where it is min(max(x, 0), 6): there the derivative asks Out < 6 in any case, so that bounds in
    the wrong order, which make Out constant, give 0 as well.
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
    # top down: a comparison of the result's parts must be met before the parts are rebuilt
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
