"""Scalar expressions: an elementwise op is written once over symbolic scalars, and its kernels and its gradient follow.

`trace` runs a body such as `lambda x, *, alpha: where(x > 0, x, alpha * x)` on symbols and returns an `Expr`. Three things follow from an
expression:

- the symbolic derivative, simplified, in which the op's saved result may occur (derivative.py): tanh needs Out, not X; - the value on
arrays, as a prebound sequence of NumPy ufunc calls (numpy.py); - one call of a C kernel that runs the expression as a small program
(native.py).

Expressions are hash-consed: equal expressions are the same object, so a common subexpression is computed once.

>>> trace(lambda x: x * x + 0)
x * x
"""

from __future__ import annotations

import builtins
import inspect
import math
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# -- the nodes --------------------------------------------------------------------------------------------------------------

_TABLE: weakref.WeakValueDictionary[tuple, Expr] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


class Expr:
    """A scalar expression: a constant, a symbol or a function of expressions. Equal expressions are the same object."""

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
        return apply("floordiv", self, o)

    def __mod__(self, o: Any) -> Expr:
        return apply("mod", self, o)

    def __pow__(self, o: Any) -> Expr:
        return power(self, o)

    def __rpow__(self, o: Any) -> Expr:
        return power(o, self)

    def __neg__(self) -> Expr:
        return neg(self)

    def __abs__(self) -> Expr:
        return abs(self)

    def __gt__(self, o: Any) -> Expr:
        return apply("gt", self, o)

    def __ge__(self, o: Any) -> Expr:
        return apply("ge", self, o)

    def __lt__(self, o: Any) -> Expr:
        return apply("lt", self, o)

    def __le__(self, o: Any) -> Expr:
        return apply("le", self, o)

    def __and__(self, o: Any) -> Expr:
        return apply("and", self, o)

    def __or__(self, o: Any) -> Expr:
        return apply("or", self, o)

    def __xor__(self, o: Any) -> Expr:
        return apply("xor", self, o)

    def __invert__(self) -> Expr:
        return apply("not", self)

    def __bool__(self) -> bool:
        raise TypeError(f"the value of {self!r} is not known while a body is traced; use where(condition, a, b)")

    def __repr__(self) -> str:
        return _show(self, 0)


def make_node(fn: str, *args: Any) -> Expr:
    """The unique node for a function and its arguments, without simplification."""
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
    return make_node("const", value)


def sym(name: str) -> Expr:
    """A named scalar: an input, an attribute, or `Out`, the result of the op."""
    return make_node("sym", name)


def lift(value: Any) -> Expr:
    """An expression unchanged; a number as a constant; TypeError for anything else."""
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
    """Each node once, arguments before the functions of them."""
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
    """`e` with each node replaced by `change(node, new arguments)`. None keeps the node, with its new arguments and simplified."""
    new: dict[Expr, Expr] = {}
    for n in nodes(e):
        args = () if n.fn in ("const", "sym") else tuple(new[a] for a in n.args)
        r = change(n, args)
        new[n] = (n if not args else apply(n.fn, *args)) if r is None else r
    return new[e]


def operations(exprs: Iterable[Expr], scalars: Container[str] = ()) -> int:
    """The number of functions in expressions: equal ones count once, and functions of the symbols `scalars` alone do not count.

    >>> x, lr = sym("x"), sym("lr")
    >>> operations([x * x + 1, x * x]), operations([x * (1 - lr)], {"lr"})
    (2, 1)
    """
    found = {n for e in exprs for n in nodes(e) if n.fn not in ("const", "sym")}
    return len([n for n in found if not scalars or any(s not in scalars for s in symbols(n))])


def substitute(e: Expr, values: Mapping[str, Any]) -> Expr:
    """`e` with symbols replaced by expressions or numbers, simplified."""
    return rebuild(e, lambda n, args: lift(values[n.args[0]]) if n.fn == "sym" and n.args[0] in values else None)


def trace(body: Callable[..., Any]) -> Expr:
    """Run a body on symbols with the names of its parameters."""
    names = inspect.signature(body).parameters
    positional = [sym(n) for n, p in names.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return lift(body(*positional, **{n: sym(n) for n, p in names.items() if p.kind is p.KEYWORD_ONLY}))


# -- the functions for bodies, which simplify their results -------------------------------------------------------------------------

COMPARE = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
BOOLEAN = {*COMPARE, "and", "or", "xor", "not", "isnan", "isinf", "isfinite"}


def number_of(e: Expr) -> Any:
    return e.args[0] if e.fn == "const" and not isinstance(e.args[0], bool) else None


def _fold(fn: str, values: Sequence[Any]) -> Any:
    """The value of a function of constants, or None if it should not be computed (1/0, log(-1))."""
    try:
        result = _SCALAR[fn](*values)
    except (ArithmeticError, ValueError):
        return None
    return None if isinstance(result, complex) else result


def apply(fn: str, *args: Any) -> Expr:
    """The function applied to the arguments, simplified."""
    exprs = tuple(lift(a) for a in args)
    if all(a.fn == "const" for a in exprs):
        value = _fold(fn, [a.args[0] for a in exprs])
        if value is not None:
            return const(value)
    rule = _RULES.get(fn)
    return rule(*exprs) if rule else make_node(fn, *exprs)


def _add(a: Expr, b: Expr) -> Expr:
    if is_const(a, 0):
        return b
    if is_const(b, 0):
        return a
    if b.fn == "neg":
        return apply("sub", a, b.args[0])
    if a.fn == "neg":
        return apply("sub", b, a.args[0])
    if a is b:
        return apply("mul", 2.0, a)
    if a.fn == "const" and b.fn == "sub" and b.args[1].fn == "const":
        return apply("add", apply("sub", a, b.args[1]), b.args[0])
    return make_node("add", a, b)


def _sub(a: Expr, b: Expr) -> Expr:
    if is_const(b, 0):
        return a
    if is_const(a, 0):
        return apply("neg", b)
    if b.fn == "neg":
        return apply("add", a, b.args[0])
    return make_node("sub", a, b)


def _mul(a: Expr, b: Expr) -> Expr:
    if b.fn == "const" and a.fn != "const":
        a, b = b, a
    if is_const(a, 0):
        return a
    if is_const(a, 1):
        return b
    if is_const(a, -1):
        return apply("neg", b)
    if a.fn == "const" and b.fn == "mul" and b.args[0].fn == "const":
        return apply("mul", apply("mul", a, b.args[0]), b.args[1])
    if a.fn == "neg":
        return apply("neg", apply("mul", a.args[0], b))
    if b.fn == "neg":
        return apply("neg", apply("mul", a, b.args[0]))
    if (product := _mul_by_mask(a, b)) is not None:
        return product
    for x, y in ((a, b), (b, a)):
        if (product := _mul_into(x, y)) is not None:
            return product
    return make_node("mul", a, b)


def _mul_by_mask(mask: Expr, x: Expr) -> Expr | None:
    """The product of a mask and another mask, or a product with a mask: as one mask, times the rest."""
    if not is_mask(mask):
        return None
    if is_mask(x):
        return apply("where", apply("and", mask.args[0], x.args[0]), 1.0, 0.0)
    if x.fn == "mul" and any(is_mask(v) for v in x.args):
        other, rest = x.args if is_mask(x.args[0]) else x.args[::-1]
        return apply("mul", apply("mul", mask, other), rest)
    return None


def _mul_into(x: Expr, y: Expr) -> Expr | None:
    """x * y with y moved into x: into the numerator of 1/x, or into the branches of a `where` with a branch that simplifies."""
    if x.fn == "div" and is_const(x.args[0], 1):
        return apply("div", y, x.args[1])
    if x.fn == "where" and not is_mask(x):
        c, t, f = x.args
        if any(is_const(v, 0) or is_const(v, 1) for v in (t, f)) or (t.fn == "const" and f.fn == "const"):
            return apply("where", c, apply("mul", y, t), apply("mul", y, f))
    return None


def _div(a: Expr, b: Expr) -> Expr:
    if is_const(b, 1):
        return a
    if is_const(a, 0):
        return a
    if a.fn == "neg":
        return apply("neg", apply("div", a.args[0], b))
    k = number_of(b)
    if k and math.frexp(k)[0] in (0.5, -0.5) and builtins.abs(k) < 1e30 and builtins.abs(k) > 1e-30:
        return apply("mul", 1.0 / k, a)  # a power of two: the same value, and multiplication is faster
    return make_node("div", a, b)


def _neg(a: Expr) -> Expr:
    if a.fn == "neg":
        return a.args[0]
    if a.fn == "sub":
        return make_node("sub", a.args[1], a.args[0])
    if a.fn == "mul" and a.args[0].fn == "const":
        return apply("mul", apply("neg", a.args[0]), a.args[1])
    return make_node("neg", a)


def _pow(a: Expr, b: Expr) -> Expr:
    k = number_of(b)
    if k == 0:
        return const(1.0)
    if k == 1:
        return a
    if k == 2:
        return apply("mul", a, a)
    if k == 3:
        return apply("mul", apply("mul", a, a), a)
    if k == -1:
        return apply("div", 1.0, a)
    if k == 0.5:
        return apply("sqrt", a)
    if k == -0.5:
        return apply("rsqrt", a)
    return make_node("pow", a, b)


def _where(c: Expr, a: Expr, b: Expr) -> Expr:
    if c.fn == "const":
        return a if c.args[0] else b
    if a is b:
        return a
    if c.fn == "not":
        return apply("where", c.args[0], b, a)
    if is_const(a, 0) and is_const(b, 1):
        return make_node("where", make_node("not", c), b, a)
    return make_node("where", c, a, b)


def is_mask(e: Expr) -> bool:
    """Is this where(c, 1, 0)? That is a condition as a number; a product with it is a product with the bool."""
    return e.fn == "where" and is_const(e.args[1], 1) and is_const(e.args[2], 0)


_RULES: dict[str, Callable[..., Expr]] = {
    "add": _add, "sub": _sub, "mul": _mul, "div": _div, "neg": _neg, "pow": _pow, "where": _where,
    "abs": lambda a: a if a.fn == "abs" else apply("abs", a.args[0]) if a.fn == "neg" else make_node("abs", a),
    "not": lambda a: a.args[0] if a.fn == "not" else make_node("not", a),
    "max": lambda a, b: a if a is b else make_node("max", a, b),
    "min": lambda a, b: a if a is b else make_node("min", a, b),
}  # fmt: skip

_SCALAR: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b, "neg": lambda a: -a,
    "pow": lambda a, b: a**b, "mod": lambda a, b: a % b, "floordiv": lambda a, b: a // b,
    "exp": math.exp, "log": math.log, "log1p": math.log1p, "sqrt": math.sqrt, "rsqrt": lambda a: 1 / math.sqrt(a), "tanh": math.tanh,
    "sigmoid": lambda a: 0.5 * math.tanh(0.5 * a) + 0.5,
    "softplus": lambda a: builtins.max(a, 0.0) + math.log1p(math.exp(-builtins.abs(a))),
    "erf": math.erf, "sin": math.sin, "cos": math.cos, "tan": math.tan, "sinh": math.sinh, "cosh": math.cosh, "asin": math.asin,
    "acos": math.acos, "atan": math.atan, "asinh": math.asinh, "acosh": math.acosh, "atanh": math.atanh, "fmod": math.fmod,
    "bit_and": lambda a, b: a & b, "bit_or": lambda a, b: a | b, "bit_xor": lambda a, b: a ^ b, "bit_not": lambda a: ~a,
    "shift_left": lambda a, b: a << b, "shift_right": lambda a, b: a >> b, "abs": builtins.abs, "sign": lambda a: float((a > 0) - (a < 0)),
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
        return apply(fn, *args)

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
tan = _function("tan", 1, "Tangent of radians.")
sinh = _function("sinh", 1, "Hyperbolic sine.")
cosh = _function("cosh", 1, "Hyperbolic cosine.")
asin = _function("asin", 1, "The angle in radians whose sine is a.")
acos = _function("acos", 1, "The angle in radians whose cosine is a.")
atan = _function("atan", 1, "The angle in radians whose tangent is a.")
asinh = _function("asinh", 1, "The number whose hyperbolic sine is a.")
acosh = _function("acosh", 1, "The number, not negative, whose hyperbolic cosine is a.")
atanh = _function("atanh", 1, "The number whose hyperbolic tangent is a.")
fmod = _function("fmod", 2, "The remainder of a / b rounded towards zero, with the sign of a.")
bit_and = _function("bit_and", 2, "The bits that are set in both integers.")
bit_or = _function("bit_or", 2, "The bits that are set in one or both integers.")
bit_xor = _function("bit_xor", 2, "The bits that are set in exactly one of two integers.")
bit_not = _function("bit_not", 1, "The bits that are not set.")
shift_left = _function("shift_left", 2, "The bits of a shifted left by b; 0 where b is negative or shifts all bits out.")
shift_right = _function("shift_right", 2, "The bits of a shifted right by b, with the sign kept: 0 or -1 where b is negative or too large.")
abs = _function("abs", 1, "Absolute value.")
sign = _function("sign", 1, "-1, 0 or 1")
floor = _function("floor", 1, "Largest integer not above a.")
ceil = _function("ceil", 1, "Smallest integer not below a.")
round = _function("round", 1, "Nearest integer, ties to the even one.")
min = _function("min", 2, "The smaller; a NaN wins.")
max = _function("max", 2, "The larger; a NaN wins.")
where = _function("where", 3, "where(condition, a, b)")
eq = _function("eq", 2, "a == b")
ne = _function("ne", 2, "a != b")
isnan = _function("isnan", 1, "True for NaN.")
isinf = _function("isinf", 1, "True for either infinity.")
isfinite = _function("isfinite", 1, "True unless NaN or infinite.")


# -- printing -----------------------------------------------------------------------------------------------------------------

_INFIX = {
    "or": ("|", 1), "xor": ("^", 2), "and": ("&", 3), **{fn: (s, 4) for fn, s in COMPARE.items()},
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
