"""Scalar expressions: an elementwise op is written once over symbolic scalars, and its kernel, its C code and its gradient come from that.

`trace` runs a body such as `lambda x, *, alpha: where(x > 0, x, alpha * x)` over symbols and gives an `Expr`. From an expression come

- `bind_ufuncs`: a prebound sequence of NumPy ufunc calls that writes into one output, scratch reused, large tensors cut into blocks
  that stay in cache; an expression of one ufunc is that ufunc and nothing around it;
- `derivative`: the symbolic derivative, simplified; `in_terms_of` puts the op's saved result into it (tanh needs Out, not X);
- `to_c`: C or CUDA statements for one element.

Expressions are hash-consed: equal ones are the same object, so common subexpressions are computed once without a search.

>>> e = trace(lambda x: tanh(x))
>>> in_terms_of(derivative(e, sym("x")), e)
1 - Out * Out
"""

from __future__ import annotations

import builtins
import inspect
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ..ir.dtypes import np_dtype
from ..ir.errors import ProgramError

# -- the nodes --------------------------------------------------------------------------------------------------------------

_TABLE: weakref.WeakValueDictionary[tuple, Expr] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


class Expr:
    """A scalar expression: a constant, a symbol or a function of expressions. Equal expressions are one object."""

    __slots__ = ("fn", "args", "__weakref__")
    fn: str
    args: tuple[Any, ...]

    def __add__(self, o: Any) -> Expr:
        return add(self, o)

    def __radd__(self, o: Any) -> Expr:
        return add(o, self)

    def __sub__(self, o: Any) -> Expr:
        return sub(self, o)

    def __rsub__(self, o: Any) -> Expr:
        return sub(o, self)

    def __mul__(self, o: Any) -> Expr:
        return mul(self, o)

    def __rmul__(self, o: Any) -> Expr:
        return mul(o, self)

    def __truediv__(self, o: Any) -> Expr:
        return div(self, o)

    def __rtruediv__(self, o: Any) -> Expr:
        return div(o, self)

    def __floordiv__(self, o: Any) -> Expr:
        return _call("floordiv", self, o)

    def __mod__(self, o: Any) -> Expr:
        return _call("mod", self, o)

    def __pow__(self, o: Any) -> Expr:
        return power(self, o)

    def __rpow__(self, o: Any) -> Expr:
        return power(o, self)

    def __neg__(self) -> Expr:
        return neg(self)

    def __abs__(self) -> Expr:
        return abs(self)

    def __gt__(self, o: Any) -> Expr:
        return _call("gt", self, o)

    def __ge__(self, o: Any) -> Expr:
        return _call("ge", self, o)

    def __lt__(self, o: Any) -> Expr:
        return _call("lt", self, o)

    def __le__(self, o: Any) -> Expr:
        return _call("le", self, o)

    def __and__(self, o: Any) -> Expr:
        return _call("and", self, o)

    def __or__(self, o: Any) -> Expr:
        return _call("or", self, o)

    def __xor__(self, o: Any) -> Expr:
        return _call("xor", self, o)

    def __invert__(self) -> Expr:
        return _call("not", self)

    def __bool__(self) -> bool:
        raise TypeError(f"the value of {self!r} is not known while a body is traced; use where(condition, a, b)")

    def __repr__(self) -> str:
        return _show(self, 0)


def _node(fn: str, *args: Any) -> Expr:
    """The one node of that function and arguments, without simplification."""
    key = (fn, *args) if fn != "const" else (fn, type(args[0]), repr(args[0]))
    with _LOCK:
        e = _TABLE.get(key)
        if e is None:
            e = object.__new__(Expr)
            e.fn, e.args = fn, args
            _TABLE[key] = e
        return e


def const(value: bool | int | float) -> Expr:
    """A number as an expression."""
    return _node("const", value)


def sym(name: str) -> Expr:
    """A named scalar: an input, an attribute, or `Out`, the op's own result."""
    return _node("sym", name)


def lift(value: Any) -> Expr:
    """An expression as it is; a number as a constant; TypeError for anything else."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, (bool, int, float)):
        return const(value)
    if isinstance(value, np.generic):
        return const(value.item())
    raise TypeError(f"an elementwise body works on scalars, got {type(value).__name__}: {value!r}")


def is_const(e: Expr, value: float | None = None) -> bool:
    return e.fn == "const" and (value is None or (e.args[0] == value and not isinstance(e.args[0], bool)))


def symbols(e: Expr) -> list[str]:
    """Names of the symbols in `e`, each once, in order of first use."""
    return list(dict.fromkeys(n.args[0] for n in nodes(e) if n.fn == "sym"))


def nodes(e: Expr) -> Iterator[Expr]:
    """Every node once, arguments before the functions of them."""
    seen: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(e, False)]
    while stack:
        n, done = stack.pop()
        if done:
            yield n
        elif id(n) not in seen:
            seen.add(id(n))
            stack.append((n, True))
            if n.fn not in ("const", "sym"):
                stack += [(a, False) for a in reversed(n.args)]


def rebuild(e: Expr, change: Callable[[Expr, tuple[Expr, ...]], Expr | None]) -> Expr:
    """`e` with every node replaced by `change(node, new arguments)`; None keeps it, over its new arguments and simplified."""
    new: dict[Expr, Expr] = {}
    for n in nodes(e):
        args = () if n.fn in ("const", "sym") else tuple(new[a] for a in n.args)
        r = change(n, args)
        new[n] = (n if not args else _call(n.fn, *args)) if r is None else r
    return new[e]


def substitute(e: Expr, values: Mapping[str, Any]) -> Expr:
    """`e` with symbols replaced by expressions or numbers, simplified."""
    return rebuild(e, lambda n, args: lift(values[n.args[0]]) if n.fn == "sym" and n.args[0] in values else None)


def trace(body: Callable[..., Any]) -> Expr:
    """Run a body over symbols named like its parameters."""
    names = inspect.signature(body).parameters
    positional = [sym(n) for n, p in names.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return lift(body(*positional, **{n: sym(n) for n, p in names.items() if p.kind is p.KEYWORD_ONLY}))


# -- the functions of a body, which simplify as they build -------------------------------------------------------------------

_COMPARE = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
_BOOL = {*_COMPARE, "and", "or", "xor", "not", "isnan", "isinf", "isfinite"}


def _number(e: Expr) -> Any:
    return e.args[0] if e.fn == "const" and not isinstance(e.args[0], bool) else None


def _fold(fn: str, values: Sequence[Any]) -> Any:
    """The value of a function of constants, or None where it has none worth folding (1/0, log(-1))."""
    try:
        result = _SCALAR[fn](*values)
    except (ArithmeticError, ValueError):
        return None
    return None if isinstance(result, complex) else result


def _call(fn: str, *args: Any) -> Expr:
    """The function of the arguments, simplified."""
    exprs = tuple(lift(a) for a in args)
    if all(a.fn == "const" for a in exprs):
        value = _fold(fn, [a.args[0] for a in exprs])
        if value is not None:
            return const(value)
    rule = _RULES.get(fn)
    return rule(*exprs) if rule else _node(fn, *exprs)


def _add(a: Expr, b: Expr) -> Expr:
    if is_const(a, 0):
        return b
    if is_const(b, 0):
        return a
    if b.fn == "neg":
        return _call("sub", a, b.args[0])
    if a.fn == "neg":
        return _call("sub", b, a.args[0])
    if a is b:
        return _call("mul", 2.0, a)
    if a.fn == "const" and b.fn == "sub" and b.args[1].fn == "const":
        return _call("add", _call("sub", a, b.args[1]), b.args[0])
    return _node("add", a, b)


def _sub(a: Expr, b: Expr) -> Expr:
    if is_const(b, 0):
        return a
    if is_const(a, 0):
        return _call("neg", b)
    if b.fn == "neg":
        return _call("add", a, b.args[0])
    return _node("sub", a, b)


def _mul(a: Expr, b: Expr) -> Expr:
    if b.fn == "const" and a.fn != "const":
        a, b = b, a
    if is_const(a, 0):
        return a
    if is_const(a, 1):
        return b
    if is_const(a, -1):
        return _call("neg", b)
    if a.fn == "const" and b.fn == "mul" and b.args[0].fn == "const":
        return _call("mul", _call("mul", a, b.args[0]), b.args[1])
    if a.fn == "neg":
        return _call("neg", _call("mul", a.args[0], b))
    if b.fn == "neg":
        return _call("neg", _call("mul", a, b.args[0]))
    if _is_mask(a) and _is_mask(b):
        return _call("where", _call("and", a.args[0], b.args[0]), 1.0, 0.0)
    if _is_mask(a) and b.fn == "mul" and any(_is_mask(v) for v in b.args):
        mask, other = b.args if _is_mask(b.args[0]) else b.args[::-1]
        return _call("mul", _call("mul", a, mask), other)
    for x, y in ((a, b), (b, a)):
        if x.fn == "div" and is_const(x.args[0], 1):
            return _call("div", y, x.args[1])
        if x.fn == "where" and not _is_mask(x):
            c, t, f = x.args
            if any(is_const(v, 0) or is_const(v, 1) for v in (t, f)) or (t.fn == "const" and f.fn == "const"):
                return _call("where", c, _call("mul", y, t), _call("mul", y, f))
    return _node("mul", a, b)


def _div(a: Expr, b: Expr) -> Expr:
    if is_const(b, 1):
        return a
    if is_const(a, 0):
        return a
    if a.fn == "neg":
        return _call("neg", _call("div", a.args[0], b))
    k = _number(b)
    if k and math.frexp(k)[0] in (0.5, -0.5) and builtins.abs(k) < 1e30 and builtins.abs(k) > 1e-30:
        return _call("mul", 1.0 / k, a)  # a power of two: the same value, and a multiplication is faster
    return _node("div", a, b)


def _neg(a: Expr) -> Expr:
    if a.fn == "neg":
        return a.args[0]
    if a.fn == "sub":
        return _node("sub", a.args[1], a.args[0])
    if a.fn == "mul" and a.args[0].fn == "const":
        return _call("mul", _call("neg", a.args[0]), a.args[1])
    return _node("neg", a)


def _pow(a: Expr, b: Expr) -> Expr:
    k = _number(b)
    if k == 0:
        return const(1.0)
    if k == 1:
        return a
    if k == 2:
        return _call("mul", a, a)
    if k == 3:
        return _call("mul", _call("mul", a, a), a)
    if k == -1:
        return _call("div", 1.0, a)
    if k == 0.5:
        return _call("sqrt", a)
    if k == -0.5:
        return _call("rsqrt", a)
    return _node("pow", a, b)


def _where(c: Expr, a: Expr, b: Expr) -> Expr:
    if c.fn == "const":
        return a if c.args[0] else b
    if a is b:
        return a
    if c.fn == "not":
        return _call("where", c.args[0], b, a)
    if is_const(a, 0) and is_const(b, 1):
        return _node("where", _node("not", c), b, a)
    return _node("where", c, a, b)


def _is_mask(e: Expr) -> bool:
    """where(c, 1, 0): a condition as a number; a product with it is a product with the bool."""
    return e.fn == "where" and is_const(e.args[1], 1) and is_const(e.args[2], 0)


_RULES: dict[str, Callable[..., Expr]] = {
    "add": _add, "sub": _sub, "mul": _mul, "div": _div, "neg": _neg, "pow": _pow, "where": _where,
    "abs": lambda a: a if a.fn == "abs" else _call("abs", a.args[0]) if a.fn == "neg" else _node("abs", a),
    "not": lambda a: a.args[0] if a.fn == "not" else _node("not", a),
    "max": lambda a, b: a if a is b else _node("max", a, b),
    "min": lambda a, b: a if a is b else _node("min", a, b),
}  # fmt: skip

_SCALAR: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b, "neg": lambda a: -a,
    "pow": lambda a, b: a**b, "mod": lambda a, b: a % b, "floordiv": lambda a, b: a // b,
    "exp": math.exp, "log": math.log, "log1p": math.log1p, "sqrt": math.sqrt, "rsqrt": lambda a: 1 / math.sqrt(a), "tanh": math.tanh,
    "sigmoid": lambda a: 0.5 * math.tanh(0.5 * a) + 0.5,
    "softplus": lambda a: builtins.max(a, 0.0) + math.log1p(math.exp(-builtins.abs(a))),
    "erf": math.erf, "sin": math.sin, "cos": math.cos, "abs": builtins.abs, "sign": lambda a: float((a > 0) - (a < 0)),
    "floor": lambda a: float(math.floor(a)), "ceil": lambda a: float(math.ceil(a)), "round": lambda a: float(np.rint(a)),
    "min": lambda a, b: a if a < b else b, "max": lambda a, b: a if a > b else b, "where": lambda c, a, b: a if c else b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
    "and": lambda a, b: bool(a) and bool(b), "or": lambda a, b: bool(a) or bool(b), "xor": lambda a, b: bool(a) != bool(b),
    "not": lambda a: not a, "isnan": math.isnan, "isinf": math.isinf, "isfinite": math.isfinite,
}  # fmt: skip


def _function(fn: str, arity: int, doc: str) -> Callable[..., Expr]:
    def call(*args: Any) -> Expr:
        if len(args) != arity:
            raise TypeError(f"{fn} takes {arity} argument{'s' if arity > 1 else ''}, got {len(args)}")
        return _call(fn, *args)

    call.__name__ = call.__qualname__ = fn
    call.__doc__ = doc
    return call


add = _function("add", 2, "a + b")
sub = _function("sub", 2, "a - b")
mul = _function("mul", 2, "a * b")
div = _function("div", 2, "a / b")
power = _function("pow", 2, "a to the power of b; small constant powers become products and roots.")
neg = _function("neg", 1, "-a")
exp = _function("exp", 1, "e to the power of a")
log = _function("log", 1, "Natural logarithm.")
log1p = _function("log1p", 1, "log(1 + a), accurate near 0.")
sqrt = _function("sqrt", 1, "Square root.")
rsqrt = _function("rsqrt", 1, "1 / sqrt(a)")
tanh = _function("tanh", 1, "Hyperbolic tangent.")
sigmoid = _function("sigmoid", 1, "1 / (1 + exp(-a)), without overflow.")
softplus = _function("softplus", 1, "log(1 + exp(a)), without overflow.")
erf = _function("erf", 1, "The error function.")
sin = _function("sin", 1, "Sine of radians.")
cos = _function("cos", 1, "Cosine of radians.")
abs = _function("abs", 1, "Absolute value.")  # noqa: A001 - the bodies read better with it
sign = _function("sign", 1, "-1, 0 or 1")
floor = _function("floor", 1, "Largest whole number not above a.")
ceil = _function("ceil", 1, "Smallest whole number not below a.")
round = _function("round", 1, "Nearest whole number, ties to the even one.")  # noqa: A001
min = _function("min", 2, "The smaller; a NaN wins.")  # noqa: A001
max = _function("max", 2, "The larger; a NaN wins.")  # noqa: A001
where = _function("where", 3, "where(condition, a, b)")
eq = _function("eq", 2, "a == b")
ne = _function("ne", 2, "a != b")
isnan = _function("isnan", 1, "True for NaN.")
isinf = _function("isinf", 1, "True for either infinity.")
isfinite = _function("isfinite", 1, "True unless NaN or infinite.")


# -- printing -----------------------------------------------------------------------------------------------------------------

_INFIX = {
    "or": ("|", 1), "xor": ("^", 2), "and": ("&", 3), **{fn: (s, 4) for fn, s in _COMPARE.items()},
    "add": ("+", 5), "sub": ("-", 5), "mul": ("*", 6), "div": ("/", 6), "floordiv": ("//", 6), "mod": ("%", 6),
}  # fmt: skip


def _show(e: Expr, level: int) -> str:
    if e.fn == "const":
        v = e.args[0]
        return str(int(v)) if isinstance(v, float) and v.is_integer() and builtins.abs(v) < 1e15 else repr(v)
    if e.fn == "sym":
        return str(e.args[0])
    if e.fn in _INFIX:
        sign_, own = _INFIX[e.fn]
        text = f"{_show(e.args[0], own)} {sign_} {_show(e.args[1], own + 1)}"
        return f"({text})" if own < level else text
    if e.fn in ("neg", "not"):
        return f"{'-' if e.fn == 'neg' else '~'}{_show(e.args[0], 7)}"
    return f"{e.fn}({', '.join(_show(a, 0) for a in e.args)})"


# -- derivatives --------------------------------------------------------------------------------------------------------------

_STEP = {"sign", "floor", "ceil", "round", "floordiv", *_BOOL}  # constant almost everywhere


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
            return [one, -_call("floordiv", a, b)]
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
        bounds[_call(outer, inner, limit)] = _call(outer, out, limit)
        if inner.fn in ("max", "min") and inner.fn != result.fn and inner.args[1].fn in ("const", "sym"):
            second = "gt" if inner.fn == "max" else "lt"
            bounds[_call(second, *inner.args)] = _call(second, out, inner.args[1])
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
            r = _call(n.fn, *(walk(a) for a in n.args))
        memo[n] = r
        return r

    return walk(e)


# -- plain evaluation: the meaning of an expression, on NumPy or CuPy arrays ---------------------------------------------------

_UFUNC = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "neg": "negative", "pow": "power", "mod": "remainder",
    "floordiv": "floor_divide", "exp": "exp", "log": "log", "log1p": "log1p", "sqrt": "sqrt", "tanh": "tanh", "sin": "sin",
    "cos": "cos", "abs": "absolute", "sign": "sign", "floor": "floor", "ceil": "ceil", "round": "rint", "min": "minimum",
    "max": "maximum", "gt": "greater", "ge": "greater_equal", "lt": "less", "le": "less_equal", "eq": "equal", "ne": "not_equal",
    "and": "logical_and", "or": "logical_or", "xor": "logical_xor", "not": "logical_not", "isnan": "isnan", "isinf": "isinf",
    "isfinite": "isfinite", "_xor": "bitwise_xor", "_and": "bitwise_and", "_mulb": "multiply",
}  # fmt: skip


def evaluate(e: Expr, xp: Any, values: Mapping[str, Any]) -> Any:
    """The value of `e` where symbols stand for the arrays and numbers in `values`: slow, plain, and the same for numpy and cupy.

    >>> evaluate(trace(lambda x: x * x + 1), np, {"x": np.array([1.0, 2.0])})
    array([2., 5.])
    """
    arrays = [v for v in values.values() if hasattr(v, "dtype") and v.dtype != bool]
    e = _lower(e, arrays[0].dtype.name if arrays else "float64", select=False)
    got: dict[Expr, Any] = {}
    for n in nodes(e):
        if n.fn == "const":
            got[n] = n.args[0]
        elif n.fn == "sym":
            got[n] = values[n.args[0]]
        elif n.fn == "where":
            got[n] = xp.where(*(got[a] for a in n.args))
        else:
            got[n] = getattr(xp, _UFUNC[n.fn])(*(got[a] for a in n.args))
    return got[e]


# -- lowering to ufuncs -------------------------------------------------------------------------------------------------------

# erf(x) = x P(x^2) / Q(x^2) on |x| <= 3.925, where erf rounds to 1 in float32. P and Q are a minimax fit of the relative error
# (Lawson's reweighted least squares over Chebyshev points, after Cody, "A survey of practical rational and polynomial
# approximation of functions", SIAM Review 12, 1970): 2e-8 in exact arithmetic, 5e-7 with the rounding of float32.
_ERF32_P = (1.128379146, 0.1905945038, 0.05276934191, 0.003772566839, 0.0002848414211, 2.04599006e-06)
_ERF32_Q = (1.0, 0.5022427117, 0.114182981, 0.01498323351, 0.001163857139, 3.804727415e-05)

# float64: W. J. Cody, "Rational Chebyshev approximations for the error function", Mathematics of Computation 23 (1969) 631-637,
# with the coefficients of his program CALERF: x R(x^2) up to 0.46875, 1 - exp(-x^2) S(x) above. The third interval (x > 4) only
# matters for erfc: there erf differs from 1 by less than 2e-8, which S gives to more digits than float64 keeps.
_CODY_A = (3.20937758913846947e03, 3.77485237685302021e02, 1.13864154151050156e02, 3.16112374387056560e00, 1.85777706184603153e-1)
_CODY_B = (2.84423683343917062e03, 1.28261652607737228e03, 2.44024637934444173e02, 2.36012909523441209e01, 1.0)
_CODY_C = (1.23033935479799725e03, 2.05107837782607147e03, 1.71204761263407058e03, 8.81952221241769090e02, 2.98635138197400131e02,
           6.61191906371416295e01, 8.88314979438837594e00, 5.64188496988670089e-1, 2.15311535474403846e-8)  # fmt: skip
_CODY_D = (1.23033935480374942e03, 3.43936767414372164e03, 4.36261909014324716e03, 3.29079923573345963e03, 1.62138957456669019e03,
           5.37181101862009858e02, 1.17693950891312499e02, 1.57449261107098347e01, 1.0)  # fmt: skip


def _horner(coefficients: Sequence[float], x: Expr) -> Expr:
    total = const(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


def _erf32(x: Expr) -> Expr:
    y = max(min(x, 3.925), -3.925)
    s = y * y
    return y * _horner(_ERF32_P, s) / _horner(_ERF32_Q, s)


def _erf64(x: Expr) -> Expr:
    y = min(abs(x), 6.0)
    s = min(y * y, 0.25)
    small = x * _horner(_CODY_A, s) / _horner(_CODY_B, s)
    large = 1.0 - exp(-(y * y)) * (_horner(_CODY_C, y) / _horner(_CODY_D, y))
    return where(y < 0.46875, small, sign(x) * large)


def _lower(e: Expr, dtype: str, select: bool) -> Expr:
    """`e` in functions that are ufuncs. With `select`, `where` becomes bit masks: NumPy's masked copies mispredict a branch per
    element and cost 5 to 15 times an addition, where three bitwise passes cost three."""
    new: dict[Expr, Expr] = {}
    for n in nodes(e):
        args = () if n.fn in ("const", "sym") else tuple(new[a] for a in n.args)
        new[n] = _lower_node(n, args, dtype, select)
    return new[e]


def _lower_node(n: Expr, args: tuple[Expr, ...], dtype: str, select: bool) -> Expr:
    match n.fn:
        case "const" | "sym":
            return n
        case "sigmoid":
            # exp of more than this overflows; the true value there is below the smallest normal number
            limit = -709.0 if dtype == "float64" else -88.0
            return _node("div", const(1.0), _node("add", const(1.0), exp(_node("neg", _node("max", args[0], const(limit))))))
        case "softplus":
            return _node("add", _node("max", args[0], const(0.0)), log1p(exp(_node("neg", abs(args[0])))))
        case "rsqrt":
            return _node("div", const(1.0), sqrt(args[0]))
        case "erf":
            return _lower(_erf64(args[0]) if dtype == "float64" else _erf32(args[0]), dtype, select)
        case "mul" if select:
            for mask, other in (args, args[::-1]):
                if mask.fn == "_mask":
                    return _node("_mulb", other, mask.args[0])
        case "where" if select:
            c, a, b = args
            # where(x > 0, x, k * x) with 0 < k <= 1 is max(x, k * x)
            if c.fn in ("gt", "ge") and is_const(c.args[1], 0) and a is c.args[0] and b.fn == "mul" and b.args[1] is a:
                if 0 < (_number(b.args[0]) or 0) <= 1:
                    return _node("max", a, b)
            if c.fn not in _BOOL:
                c = _node("ne", c, const(0))
            if is_const(a, 1) and is_const(b, 0):
                return _node("_mask", c)
            if is_const(b, 0):
                return _node("_and", a, _node("_bits", c))
            if is_const(a, 0):
                return _node("_and", b, _node("_bits", _node("not", c)))
            return _node("_xor", _node("_and", _node("_xor", a, b), _node("_bits", c)), b)
    return n if args == n.args else _node(n.fn, *args)


_HALF = ("float16", "bfloat16")
_INT_VIEW = {1: np.dtype(np.int8), 2: np.dtype(np.int16), 4: np.dtype(np.int32), 8: np.dtype(np.int64)}
BLOCK = 32768  # elements of one block: its operands and scratch stay in the second-level cache


@lru_cache(maxsize=1024)
def _steps(e: Expr, dtype: str, out_dtype: str) -> tuple[list[tuple[str, tuple[Any, ...], str]], str]:
    """The lowered expression as (function, operands, dtype of the result), and the dtype it is computed in.

    An operand is ("in", name), ("const", value) or ("tmp", step number).
    """
    lowered = _lower(e, dtype, select=True)
    inner = [n for n in nodes(lowered) if n.fn not in ("const", "sym")]
    work = "float32" if dtype in _HALF and len(inner) > 1 else dtype
    if work != dtype:
        lowered = _lower(e, work, select=True)
        inner = [n for n in nodes(lowered) if n.fn not in ("const", "sym")]
    number = {n: i for i, n in enumerate(inner)}
    steps = []
    for n in inner:
        operands = tuple(
            ("tmp", number[a]) if a in number else ("in", a.args[0]) if a.fn == "sym" else ("const", a.args[0]) for a in n.args
        )
        steps.append((n.fn, operands, "bool" if n.fn in _BOOL else "int8" if n.fn == "_bits" else work))
    if not steps:
        steps.append(("_copy", (("in", lowered.args[0]) if lowered.fn == "sym" else ("const", lowered.args[0]),), work))
    return steps, work


def _copy_into(out: np.ndarray, value: Any) -> Callable[[], Any]:
    return partial(np.copyto, out, value, casting="unsafe")


def bind_ufuncs(e: Expr, values: Mapping[str, np.ndarray], out: np.ndarray) -> Callable[[], Any]:
    """A call without arguments that computes `e` from the arrays in `values` into `out`, everything bound and allocated now.

    `values` holds the arrays of all symbols in `e`; they broadcast to `out`. `out` may be one of them. The numeric arrays share
    one dtype; float16 and bfloat16 are worked in float32 when there is more than one step.
    """
    names = symbols(e)
    ins = {n: values[n] for n in names}
    numeric = [a for a in ins.values() if a.dtype != bool]
    dtype = numeric[0].dtype.name if numeric else out.dtype.name
    steps, work = _steps(e, dtype, out.dtype.name)
    if len(steps) == 1:
        return _bind_block(steps, work, ins, out, {})[0]
    flat = out.size > BLOCK and out.flags.c_contiguous
    flat = flat and all(a.size == 1 or (a.shape == out.shape and a.flags.c_contiguous) for a in ins.values())
    pool: dict[Any, list[np.ndarray]] = {}
    calls: list[Callable[[], Any]] = []
    if not flat:
        calls = _bind_block(steps, work, ins, out, pool)
    else:
        ins = {n: a.reshape(()) if a.size == 1 else a.reshape(-1) for n, a in ins.items()}
        line = out.reshape(-1)
        for start in range(0, line.size, BLOCK):
            part = slice(start, start + BLOCK)
            calls += _bind_block(steps, work, {n: a if a.ndim == 0 else a[part] for n, a in ins.items()}, line[part], pool)
    return calls[0] if len(calls) == 1 else partial(_run, tuple(calls))


def _run(calls: tuple[Callable[[], Any], ...]) -> None:
    for call in calls:
        call()


def _bind_block(steps: Any, work: str, ins: Mapping[str, np.ndarray], out: np.ndarray, pool: dict[Any, list[np.ndarray]]) -> list[Any]:
    """One call per step. Scratch comes from `pool`, by shape and dtype, and goes back there; `out` serves as scratch once no
    input that shares its memory is still to be read."""
    calls: list[Callable[[], Any]] = []
    last: dict[Any, int] = {}
    for i, (_, operands, _) in enumerate(steps):
        for o in operands:
            last[o] = i
    if work not in _HALF and any(a.dtype.name in _HALF for a in ins.values()):
        wide = {n: np.empty(a.shape, work) if a.dtype.name in _HALF else a for n, a in ins.items()}
        calls += [_copy_into(wide[n], a) for n, a in ins.items() if wide[n] is not a]
        ins = wide
    free: dict[Any, list[np.ndarray]] = {k: list(v) for k, v in pool.items()}
    own = (out.shape, out.dtype)
    aliases = [n for n, a in ins.items() if np.may_share_memory(a, out)]
    out_free_after = builtins.max((last.get(("in", n), -1) for n in aliases), default=-1)
    spare_out = True
    values: list[np.ndarray] = []
    taken: list[np.ndarray] = []
    for i, (fn, operands, dtype) in enumerate(steps):
        args = [ins[v] if kind == "in" else values[v] if kind == "tmp" else v for kind, v in operands]
        if i < len(steps) - 1 and all(kind == "const" for kind, _ in operands):
            values.append(np.empty((), np_dtype(dtype)))  # a value of constants alone is computed now
            _bind_step(fn, args, values[-1])()
            continue
        if spare_out and i > out_free_after:
            spare_out = False
            free.setdefault(own, []).append(out)
        for o in set(operands):
            if o[0] == "tmp" and last[o] == i and any(values[o[1]] is t for t in (*taken, out)):
                free.setdefault((values[o[1]].shape, values[o[1]].dtype), []).append(values[o[1]])
        final = i == len(steps) - 1 and out.dtype == np_dtype(dtype)
        shape = out.shape if final else np.broadcast_shapes(*(np.shape(a) for a in args))
        if final:
            target = out
        else:
            ready = free.get((shape, np_dtype(dtype)))
            target = ready.pop() if ready else np.empty(shape, np_dtype(dtype))
            if target is not out and not any(target is t for t in taken):
                taken.append(target)
        values.append(target)
        calls.append(_bind_step(fn, args, target))
        if i == len(steps) - 1 and not final:
            calls.append(_copy_into(out, target))
    for t in taken:
        have = pool.setdefault((t.shape, t.dtype), [])
        if not any(t is h for h in have):
            have.append(t)
    return calls


def _bind_step(fn: str, args: list[Any], out: Any) -> Callable[[], Any]:
    if fn == "_copy" or fn == "_mask":
        return _copy_into(out, args[0])
    if fn == "_bits":  # False, True -> 0, -1: the condition as a mask of bits
        return partial(np.negative, args[0].view(np.int8), out)
    kind = out.dtype if fn in ("_xor", "_and") else next((a.dtype for a in args if isinstance(a, np.ndarray)), out.dtype)
    args = [a if isinstance(a, np.ndarray) else _constant(a, kind) for a in args]
    if fn in ("_xor", "_and"):
        bits: Any = _INT_VIEW[out.dtype.itemsize]
        fixed = [a if a.dtype == out.dtype or (fn == "_and" and k == 1) else a.astype(out.dtype) for k, a in enumerate(args)]
        if any(f is not a and a.ndim for f, a in zip(fixed, args, strict=True)):
            raise ProgramError(f"where() in an elementwise body mixes {args[0].dtype} and {args[1].dtype}; cast one of them")
        args = [a if a.dtype == np.int8 and fn == "_and" and k == 1 else a.view(bits) for k, a in enumerate(fixed)]
        out = out.view(bits)
    ufunc = getattr(np, _UFUNC[fn])
    if fn in ("max", "min"):  # NumPy deprecates a third positional argument for these two
        return partial(ufunc, *args, out=out)
    return partial(ufunc, *args, out)


def _constant(value: Any, kind: np.dtype) -> Any:
    """A constant as a 0-d array of its neighbour's dtype: a Python number would be converted at every call."""
    if kind.kind == "b" and value in (0, 1):
        return np.array(bool(value))
    if kind.kind == "b" or (kind.kind in "iu" and (value != value or value in (math.inf, -math.inf) or value != int(value))):
        return np.asarray(value)
    return np.array(value, dtype=kind)


# -- C and CUDA ---------------------------------------------------------------------------------------------------------------

_C_TYPE = {
    "float32": "float", "float64": "double", "float16": "float", "bfloat16": "float", "bool": "unsigned char",
    "int8": "signed char", "uint8": "unsigned char", "int16": "short", "uint16": "unsigned short", "int32": "int",
    "uint32": "unsigned int", "int64": "long long", "uint64": "unsigned long long",
}  # fmt: skip
_C_CALL = {fn: fn for fn in ("exp", "log", "log1p", "sqrt", "tanh", "erf", "sin", "cos", "floor", "ceil", "pow")} | {
    "round": "rint", "abs": "fabs",
}  # fmt: skip
_C_INFIX = {**_COMPARE, "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&&", "or": "||"}


def to_c(e: Expr, dtype: str, result: str = "out") -> str:
    """Statements in C (and CUDA C++) that set the variable `result` to `e` for one element, symbols being variables.

    Half precision is worked in float. A value used more than once gets a temporary.

    >>> print(to_c(trace(lambda x, y: x * tanh(y)), "float32"))
    out = x * tanhf(y);
    """
    ctype = _C_TYPE[dtype]
    f = "" if dtype == "float64" else "f"
    uses: dict[Expr, int] = {}
    for n in nodes(e):
        for a in n.args if n.fn not in ("const", "sym") else ():
            uses[a] = uses.get(a, 0) + (2 if n.fn in ("max", "min", "sign", "mod", "floordiv", "softplus") else 1)
    lines: list[str] = []
    text: dict[Expr, str] = {}
    integer = ctype not in ("float", "double")

    def number(v: Any) -> str:
        if isinstance(v, bool):
            return "1" if v else "0"
        if v != v:
            return "NAN"
        if v in (math.inf, -math.inf):
            return "INFINITY" if v > 0 else "-INFINITY"
        if integer and v == int(v):
            return str(int(v))
        return (repr(float(v)) if v >= 0 else f"({float(v)!r}") + f + ("" if v >= 0 else ")")

    for n in nodes(e):
        a = [text[x] for x in n.args] if n.fn not in ("const", "sym") else []
        match n.fn:
            case "const":
                t = number(n.args[0])
            case "sym":
                t = n.args[0]
            case "neg":
                t = f"(-{a[0]})"
            case "not":
                t = f"(!{a[0]})"
            case "xor":
                t = f"(!{a[0]} != !{a[1]})"
            case "where":
                t = f"({a[0]} ? {a[1]} : {a[2]})"
            case "max":
                t = f"({a[0]} > {a[1]} || {a[0]} != {a[0]} ? {a[0]} : {a[1]})"
            case "min":
                t = f"({a[0]} < {a[1]} || {a[0]} != {a[0]} ? {a[0]} : {a[1]})"
            case "sign":
                t = f"({ctype})(({a[0]} > 0) - ({a[0]} < 0))"
            case "rsqrt":
                t = f"({number(1.0)} / sqrt{f}({a[0]}))"
            case "sigmoid":
                t = f"({number(1.0)} / ({number(1.0)} + exp{f}(-({a[0]}))))"
            case "softplus":
                t = f"(({a[0]} > 0 ? {a[0]} : {number(0.0)}) + log1p{f}(exp{f}(-fabs{f}({a[0]}))))"
            case "mod" if integer:
                t = f"(({a[0]} % {a[1]} + {a[1]}) % {a[1]})"
            case "mod":
                t = f"({a[0]} - floor{f}({a[0]} / {a[1]}) * {a[1]})"
            case "floordiv" if integer:
                t = f"({a[0]} / {a[1]} - (({a[0]} % {a[1]} != 0) && (({a[0]} < 0) != ({a[1]} < 0))))"
            case "floordiv":
                t = f"floor{f}({a[0]} / {a[1]})"
            case "abs" if integer:
                t = f"({a[0]} < 0 ? -{a[0]} : {a[0]})"
            case "isnan" | "isinf" | "isfinite":
                t = f"({n.fn}({a[0]}) != 0)"
            case fn if fn in _C_INFIX:
                t = f"({a[0]} {_C_INFIX[fn]} {a[1]})"
            case fn:
                t = f"{_C_CALL[fn]}{f}({', '.join(_bare(x) for x in a)})"
        if uses.get(n, 0) > 1 and a and n is not e:
            name = f"t{len(lines)}"
            lines.append(f"{'int' if n.fn in _BOOL else ctype} {name} = {_bare(t)};")
            t = name
        text[n] = t
    return "\n".join([*lines, f"{result} = {_bare(text[e])};"])


def _bare(text: str) -> str:
    """`text` without one pair of parentheses that encloses all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for k, ch in enumerate(text):
        depth += (ch == "(") - (ch == ")")
        if depth == 0 and k < len(text) - 1:
            return text
    return text[1:-1]


def c_function(name: str, e: Expr, dtype: str, params: Sequence[str]) -> str:
    """A C function `void name(long n, const T *x, ..., T *out)` that runs `to_c` over n elements; `params` names the arrays.

    Attributes must have been substituted by numbers. Symbols that are not C names (Out@GRAD) are renamed with _ for @.
    """
    ctype = _C_TYPE[dtype]
    unknown = sorted(set(symbols(e)) - set(params))
    if unknown:
        raise ProgramError(f"the C function {name} reads {', '.join(unknown)}, which is no parameter; parameters are {', '.join(params)}")
    c_names = {p: "v_" + p.replace("@", "_") for p in params}
    e = substitute(e, {p: sym(c) for p, c in c_names.items()})
    loads = "\n".join(f"    {ctype} {c} = {c}_[i];" for c in c_names.values())
    body = "\n".join("    " + line for line in to_c(e, dtype).splitlines())
    args = ", ".join(f"const {ctype} *{c}_" for c in c_names.values())
    loop = f"  for (long i = 0; i < n; i++) {{\n{loads}\n    {ctype} out;\n{body}\n    out_[i] = out;\n  }}\n"
    return f"void {name}(long n, {args}, {ctype} *out_) {{\n{loop}}}\n"
