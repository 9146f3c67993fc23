"""Formulas: one form for what is equal, another for what is not, and the value of the expression that they were made of."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fluidx.ops.expr.nodes import exp, make_node, power, rsqrt, sqrt, sym, trace, where
from fluidx.rewrite.formula import Form, Formula, name, number, of, plus, times
from fluidx.rewrite.formula import power as to_the

several = settings(max_examples=200, deadline=None)
NAMES = ("a", "b", "c")
VALUES = {"a": 1.25, "b": 0.375, "c": 2.0}


def formula(body):
    e = trace(body)
    return of(e, {n: name(n) for n in "abcdvxyz"})


def added(*terms: float) -> float:
    """The sum. Where it cancels nearly all, what is left is rounding: ArithmeticError."""
    total = math.fsum(terms)
    if abs(total) < 1e-6 * sum(map(abs, terms)):
        raise ArithmeticError("nothing but rounding is left")
    return total


def value(f: Formula) -> float:
    """A formula worked out for VALUES."""
    terms = []
    for factors, coefficient in f.terms:
        bases = [(value(base) if isinstance(base, Formula) else VALUES[base], exponent) for base, exponent in factors]
        terms.append(coefficient * math.prod(math.pow(base, exponent) for base, exponent in bases))
    return added(*terms)


def worked_out(e) -> float:
    """An expression worked out for VALUES, by the rules of arithmetic; ValueError for a root of a negative number."""
    if e.fn == "sym":
        return VALUES[e.args[0]]
    if e.fn == "const":
        return e.args[0]
    x, *rest = (worked_out(a) for a in e.args)
    y = rest[0] if rest else 0.0
    return {
        "add": lambda: added(x, y), "sub": lambda: added(x, -y), "mul": lambda: x * y, "div": lambda: x / y, "neg": lambda: -x,
        "sqrt": lambda: math.sqrt(x), "rsqrt": lambda: 1 / math.sqrt(x), "pow": lambda: math.pow(x, y),
    }[e.fn]()  # fmt: skip


LEAVES = st.one_of(st.sampled_from([sym(n) for n in NAMES]), st.sampled_from([0.5, 1.0, 2.0, 3.0]).map(lambda v: make_node("const", v)))


def _grown(inner):
    two = st.tuples(st.sampled_from(["add", "sub", "mul", "div"]), inner, inner).map(lambda t: make_node(*t))
    one = st.tuples(st.sampled_from(["neg", "sqrt", "rsqrt"]), inner).map(lambda t: make_node(*t))
    powers = st.tuples(inner, st.sampled_from([2.0, 3.0, -1.0, 0.5, -0.5])).map(lambda t: make_node("pow", t[0], make_node("const", t[1])))
    return st.one_of(two, one, powers)


EXPRESSIONS = st.recursive(LEAVES, _grown, max_leaves=8)


@several
@given(EXPRESSIONS)
def test_a_formula_has_the_value_of_its_expression(e):
    f = of(e, {n: name(n) for n in NAMES})
    assume(f is not None)
    try:
        wanted = worked_out(e)
    except (ArithmeticError, ValueError):
        assume(False)
    try:
        found = value(f)
    except ArithmeticError:
        assume(False)
    assert found == pytest.approx(wanted, rel=1e-8)  # tens of roundings of float64, each magnified by 1e6 at most


def _shuffled(e, coin):
    """The expression written in another way: operands exchanged, quotients as products, roots as powers."""
    if e.fn in ("sym", "const"):
        return e
    x, *rest = (_shuffled(a, coin) for a in e.args)
    y = rest[0] if rest else x
    ways = {
        "add": [lambda: make_node("add", x, y), lambda: make_node("add", y, x), lambda: make_node("sub", x, make_node("neg", y))],
        "sub": [lambda: make_node("sub", x, y), lambda: make_node("add", make_node("neg", y), x)],
        "mul": [lambda: make_node("mul", x, y), lambda: make_node("mul", y, x)],
        "div": [lambda: make_node("div", x, y), lambda: make_node("mul", make_node("pow", y, make_node("const", -1.0)), x)],
        "neg": [lambda: make_node("neg", x), lambda: make_node("mul", make_node("const", -1.0), x)],
        "sqrt": [lambda: make_node("sqrt", x), lambda: make_node("pow", x, make_node("const", 0.5))],
        "rsqrt": [lambda: make_node("rsqrt", x), lambda: make_node("pow", x, make_node("const", -0.5))],
        "pow": [lambda: make_node("pow", x, y)],
    }[e.fn]
    return ways[coin() % len(ways)]()


@several
@given(EXPRESSIONS, st.randoms(use_true_random=False))
def test_another_way_to_write_it_is_the_same_formula(e, rng):
    f, other = (of(x, {n: name(n) for n in NAMES}) for x in (e, _shuffled(e, lambda: rng.randrange(6))))
    assert f == other  # to the bit: none of the ways rounds a number otherwise


@several
@given(st.randoms(use_true_random=False), st.sampled_from([1e-5, 1e-3, 0.5]), st.booleans(), st.booleans())
def test_the_holes_of_a_form_are_found_however_it_is_written(rng, eps, scaled, shifted):
    form = Form(
        lambda x, mean, v, scale, shift, *, epsilon: (x - mean) / sqrt(v + epsilon) * scale + shift,
        given=("x", "mean", "v"), neutral={"scale": 1.0, "shift": 0.0},
    )  # fmt: skip
    x, mean, v = sym("a"), sym("b"), sym("c")
    e = make_node("div", make_node("sub", x, mean), make_node("sqrt", make_node("add", v, make_node("const", eps))))
    e = make_node("mul", e, sym("s")) if scaled else e
    e = make_node("add", e, sym("t")) if shifted else e
    f = of(_shuffled(e, lambda: rng.randrange(6)), {n: name(n) for n in ("a", "b", "c", "s", "t")})
    wanted = {"epsilon": eps} | ({"scale": "s"} if scaled else {}) | ({"shift": "t"} if shifted else {})
    assert form.match(f, {"x": "a", "mean": "b", "v": "c"}) == wanted


@pytest.mark.parametrize(
    "a, b",
    [
        (lambda x: x * x, lambda x: power(x, 2.0)),
        (lambda x, v: x / sqrt(v + 1.0), lambda x, v: power(1.0 + v, -0.5) * x),
        (lambda x, v: x / sqrt(v), lambda x, v: x * rsqrt(v)),
        (lambda x, y: (x - y) * (x - y), lambda x, y: power(y - x, 2.0)),
        (lambda x, y, z: 2.0 * (x + y) * z, lambda x, y, z: (x * 2.0 + 2.0 * y) * z),
    ],
)
def test_equal_ones(a, b):
    assert formula(a) == formula(b)
    assert formula(a) is not None


@pytest.mark.parametrize(
    "a, b",
    [
        (lambda x, v: x / (sqrt(v) + 1e-5), lambda x, v: x / sqrt(v + 1e-5)),
        (lambda x: sqrt(x * x), lambda x: x),  # of a negative x it is -x
        (lambda x, y: x - y, lambda x, y: y - x),
        (lambda x, y: x / y, lambda x, y: y / x),
    ],
)
def test_others_are_not(a, b):
    assert formula(a) != formula(b) or formula(a) is None


def test_what_is_no_sum_of_products_of_powers_has_no_formula():
    assert formula(lambda x: exp(x)) is None
    assert formula(lambda x, y: where(x > y, x, y)) is None
    assert formula(lambda x, y: power(x, y)) is None
    assert to_the(number(0.0), -1.0) is None  # 1 / 0
    assert to_the(number(-2.0), 0.5) is None
    assert to_the(number(1e300), 2.0) is None  # above what a float holds
    assert formula(lambda a, b, c, d, x, y, z, v: a + b + c + d + x + y + z + v + 1.0) is None  # longer than any that is looked for


def test_terms_that_cancel_are_gone():
    assert plus(name("x"), times(number(-1.0), name("x"))) == number(0.0) == Formula(())
    assert times(number(0.0), name("x")) == number(0.0)
    assert times(name("x"), to_the(name("x"), -1.0)) == number(1.0)


def test_a_form_asks_for_what_is_given_and_for_nothing_more():
    form = Form(lambda x, mask, *, factor: factor * x + mask, given=("x",), neutral={"mask": 0.0})
    x, m, n = name("x"), name("m"), name("n")
    assert form.match(plus(m, times(number(0.5), x)), {"x": "x"}) == {"mask": "m", "factor": 0.5}
    assert form.match(x, {"x": "x"}) == {"factor": 1.0}
    assert form.match(m, {"x": "x"}) is None
    assert form.match(plus(x, times(number(2.0), m)), {"x": "x"}) is None
    assert form.match(plus(x, plus(m, n)), {"x": "x"}) is None
    assert form.match(plus(x, number(1.0)), {"x": "x"}) is None
