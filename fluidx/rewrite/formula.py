"""Formulas: sums of products of powers in a normal form, so that chains of elementwise operators can be compared.

`x * x`, `pow(x, 2)` and `square(x)` are one formula, and so are `d / sqrt(v)`, `d * rsqrt(v)` and `d * v ** -0.5`. A sum is not multiplied
out: it is one factor of a product. Equal formulas may differ in rounding, at 0 / 0, and for powers outside of their domain.

>>> x, v = name("x"), name("v")
>>> d = plus(x, number(-3.0))
>>> times(d, power(power(v, 0.5), -1.0)) == times(power(v, -0.5), d)
True
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, permutations, product
from typing import NamedTuple

from ..ops.expr.nodes import Expr, nodes, number_of, substitute, symbols, trace

_MOST = 8  # the most terms, and the most factors of a term: no pass looks for a longer formula

Factors = tuple[tuple["str | Formula", float], ...]  # (name or sum, exponent), sorted


class Formula(NamedTuple):
    """A sum of terms, sorted; a term is its factors and its coefficient. A number has no factors."""

    terms: tuple[tuple[Factors, float], ...]

    def names(self) -> list[str]:
        """The names in it, each once."""
        found: dict[str, None] = {}
        for factors, _ in self.terms:
            for base, _ in factors:
                found.update(dict.fromkeys(base.names() if isinstance(base, Formula) else (base,)))
        return list(found)

    def numbers(self) -> list[float]:
        """The coefficients in it, each once."""
        found: dict[float, None] = {}
        for factors, coefficient in self.terms:
            found[coefficient] = None
            for base, _ in factors:
                if isinstance(base, Formula):
                    found.update(dict.fromkeys(base.numbers()))
        return list(found)


def number(value: float) -> Formula:
    return Formula((((), float(value)),) if value else ())


def name(value: str) -> Formula:
    return Formula(((((value, 1.0),), 1.0),))


def plus(a: Formula, b: Formula) -> Formula:
    total = dict(a.terms)
    for factors, coefficient in b.terms:
        total[factors] = total.get(factors, 0.0) + coefficient
    return Formula(tuple(sorted(((f, c) for f, c in total.items() if c), key=repr)))


def times(a: Formula, b: Formula) -> Formula:
    (ca, fa), (cb, fb) = _as_product(a), _as_product(b)
    if not fa or not fb:  # a number multiplies every term
        c, other = (ca, b) if not fa else (cb, a)
        return Formula(tuple((f, t * c) for f, t in other.terms)) if c else number(0.0)
    exponents = dict(fa)
    for base, e in fb:
        exponents[base] = exponents.get(base, 0.0) + e
    return _product(ca * cb, exponents)


def power(a: Formula, e: float) -> Formula | None:
    """`a` to a constant power; None if that is not a product of powers, or if the sign of a base could be lost."""
    c, factors = _as_product(a)
    whole = float(e).is_integer()
    plain = c > 0 and len(factors) <= 1 and all(x == 1.0 for _, x in factors)
    if c == 0 or not (whole or plain):
        return None
    try:
        return _product(c**e, {base: x * e for base, x in factors})
    except OverflowError:
        return None


def _as_product(a: Formula) -> tuple[float, Factors]:
    """(coefficient, factors). A sum of several terms is one factor, whose first term is positive."""
    if not a.terms:
        return 0.0, ()
    if len(a.terms) == 1:
        ((factors, coefficient),) = a.terms
        return coefficient, factors
    sign = 1.0 if a.terms[0][1] > 0 else -1.0
    return sign, ((Formula(tuple((f, sign * c) for f, c in a.terms)), 1.0),)


def _product(coefficient: float, exponents: Mapping[str | Formula, float]) -> Formula:
    factors = tuple(sorted(((base, e) for base, e in exponents.items() if e), key=repr))
    if len(factors) == 1 and factors[0][1] == 1.0 and isinstance(base := factors[0][0], Formula):
        return Formula(tuple((f, coefficient * c) for f, c in base.terms))
    return Formula(((factors, coefficient),)) if coefficient else number(0.0)


def of(expr: Expr, values: Mapping[str, Formula]) -> Formula | None:
    """The formula of a scalar expression over symbols with given formulas; None for other functions, or if it is too long."""
    done: dict[Expr, Formula | None] = {}
    for n in nodes(expr):
        if n.fn == "sym":
            made: Formula | None = values[n.args[0]]
        elif n.fn == "const":
            made = None if (k := number_of(n)) is None else number(k)
        else:
            args = [done[a] for a in n.args]
            made = None if n.fn not in _FUNCTIONS or None in args else _FUNCTIONS[n.fn](*args)
        if made is not None and (len(made.terms) > _MOST or any(len(f) > _MOST for f, _ in made.terms)):
            made = None
        done[n] = made
    return done[expr]


def _over(a: Formula, b: Formula) -> Formula | None:
    return None if (inverse := power(b, -1.0)) is None else times(a, inverse)


def _to_the(a: Formula, b: Formula) -> Formula | None:
    c, factors = _as_product(b)
    return power(a, c) if not factors else None


_FUNCTIONS: dict[str, Callable[..., Formula | None]] = {
    "add": plus, "sub": lambda a, b: plus(a, times(number(-1.0), b)), "mul": times, "div": _over, "pow": _to_the,
    "neg": lambda a: times(number(-1.0), a), "sqrt": lambda a: power(a, 0.5), "rsqrt": lambda a: power(a, -0.5),
}  # fmt: skip


class Form:
    """A pattern of a formula, written as a function. Its parameters are the given names, names to be found, and (keyword-only) numbers to
    be found.

    `neutral` are parameters that may be absent from a formula, with the number that takes their place.

    >>> form = Form(lambda x, scale, *, factor: factor * x * scale, given=("x",), neutral={"scale": 1.0})
    >>> form.match(times(times(name("s"), name("y")), number(2.0)), {"x": "y"})
    {'scale': 's', 'factor': 2.0}
    >>> form.match(name("y"), {"x": "y"})
    {'factor': 1.0}
    """

    def __init__(self, body: Callable[..., Expr], given: tuple[str, ...] = (), neutral: Mapping[str, float] | None = None):
        absent = dict(neutral or {})
        parameters = inspect.signature(body).parameters.values()
        holes = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in given)
        self.numbers = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        self.ways: list[tuple[Expr, tuple[str, ...]]] = []  # an expression, and its parameters for names
        for some in (gone for k in range(len(absent) + 1) for gone in combinations(absent, k)):
            e = substitute(trace(body), {hole: absent[hole] for hole in some})
            self.ways.append((e, tuple(h for h in holes if h not in some)))

    def match(self, formula: Formula, given: Mapping[str, str]) -> dict[str, str | float] | None:
        """Values of the parameters with which the pattern equals `formula`; None if there are none."""
        return next(self.matches(formula, given), None)

    def matches(self, formula: Formula, given: Mapping[str, str]) -> Iterator[dict[str, str | float]]:
        """All matches: two names with the same role, such as two terms of a sum, match in both orders."""
        names, numbers = formula.names(), formula.numbers()
        if not set(given.values()).issubset(names):
            return
        others = [n for n in names if n not in given.values()]
        fixed = {hole: name(n) for hole, n in given.items()}
        for e, holes in self.ways:
            if len(holes) != len(others):
                continue
            for order, counted in product(permutations(others), product(numbers, repeat=len(self.numbers))):
                named, numbered = dict(zip(holes, order, strict=True)), dict(zip(self.numbers, counted, strict=True))
                known = {**fixed, **{h: name(n) for h, n in named.items()}, **{h: number(v) for h, v in numbered.items()}}
                if of(e, {s: known[s] for s in symbols(e)}) == formula:
                    yield {**named, **numbered}
