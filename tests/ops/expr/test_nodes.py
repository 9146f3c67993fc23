"""Scalar expressions: simplification, derivatives, and equal values in every form of an expression."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidx.ir import OPS
from fluidx.ops import expr as ex
from fluidx.ops.expr.derivative import derivative, in_terms_of
from fluidx.ops.expr.nodes import nodes, sym, trace
from fluidx.ops.expr.numpy import bind_ufuncs, evaluate

x, y, g, out = sym("x"), sym("y"), sym("g"), sym("Out")


# -- derivatives by hand ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, want",
    [
        (lambda x: x * x, "2 * x"),
        (lambda x: 3 * x + 1, "3"),
        (lambda x: x / 4, "0.25"),
        (lambda x: x**3, "x * (2 * x) + x * x"),
        (lambda x: ex.exp(2 * x), "2 * exp(2 * x)"),
        (lambda x: ex.log(x), "1 / x"),
        (lambda x: ex.sin(x), "cos(x)"),
        (lambda x: ex.cos(x), "-sin(x)"),
        (lambda x: ex.abs(x), "sign(x)"),
        (lambda x: ex.softplus(x), "sigmoid(x)"),
        (lambda x: ex.max(x, 0), "where(x > 0, 1, 0)"),
        (lambda x: ex.where(x > 0, x, 0.5 * x), "where(x > 0, 1, 0.5)"),
        (lambda x: ex.floor(x) + ex.sign(x) + ex.round(x), "0"),
        (lambda x: x - ex.tanh(x), "tanh(x) * tanh(x)"),
    ],
)
def test_derivative(body, want):
    assert repr(derivative(trace(body), x)) == want


@pytest.mark.parametrize(
    "name, saved",
    [("relu", "Out"), ("relu6", "Out"), ("tanh", "Out"), ("sigmoid", "Out"), ("exp", "Out"), ("sqrt", "Out"), ("rsqrt", "Out"),
     ("reciprocal", "Out"), ("clip", "Out"), ("brelu", "Out"), ("hard_sigmoid", "Out"), ("log", "X"), ("gelu", "X"), ("softplus", "X"),
     ("leaky_relu", "X"), ("elu", "X"), ("abs", "X")],
)  # fmt: skip
def test_a_gradient_reads_one_value_and_the_result_where_that_is_enough(name, saved):
    assert OPS[f"{name}_grad"].inputs == (saved, "Out@GRAD")


def test_the_gradient_of_relu_reads_the_result():
    e = ex.max(x, 0)
    assert repr(in_terms_of(g * derivative(e, x), e)) == "g * where(Out > 0, 1, 0)"


def test_the_gradient_of_clip_with_bounds_in_the_wrong_order_is_zero():
    clip = OPS["clip_grad"]
    got = np.empty(3, "float32")
    clip.kernel(np, np.float32([1, 1, 1]), np.float32([5, 6, 7]), out=got, min=2.0, max=1.0)
    assert got.tolist() == [0, 0, 0]


def test_equal_expressions_are_one_object():
    assert x * y + 1 is x * y + 1
    assert (x + y) is not (y + x)


@pytest.mark.parametrize(
    "e, want",
    [(x + 0, "x"), (0 * x, "0"), (1 * x, "x"), (x - x * 0, "x"), (ex.neg(-x), "x"), (-1 * x, "-x"), (2 * (3 * x), "6 * x"),
     (x**0.5, "sqrt(x)"),
     (x**2, "x * x"), (x**1, "x"), (x**0, "1"), (x + x, "2 * x"), (g * (1 / x), "g / x"), (ex.where(True, x, y), "x"),
     (ex.where(x > 0, y, y), "y"), (ex.exp(ex.lift(0.0)), "1"), (x / 8, "0.125 * x"), (x / 3, "x / 3"), (-(x - y), "y - x")],
)  # fmt: skip
def test_simplification(e, want):
    assert repr(e) == want


def test_functions_of_constants_without_a_value_are_not_computed():
    assert repr(ex.log(ex.lift(-1.0))) == "log(-1)"
    assert repr(ex.lift(1.0) / 0.0) == "1 / 0"


def test_a_body_cannot_branch_on_a_symbol():
    with pytest.raises(TypeError, match=r"x > 0 is not known while a body is traced; use where"):
        trace(lambda x: x if x > 0 else -x)


def test_a_body_takes_scalars_only():
    with pytest.raises(TypeError, match="works on scalars, got str"):
        trace(lambda x: x + "1")


# -- properties -----------------------------------------------------------------------------------------------------------------

SMOOTH = [ex.tanh, ex.sigmoid, ex.softplus, ex.erf, ex.sin, ex.cos, lambda a: ex.exp(-(a * a)), lambda a: ex.sqrt(a * a + 1),
          lambda a: ex.log(a * a + 1), lambda a: ex.log1p(a * a), lambda a: ex.rsqrt(a * a + 0.5), lambda a: -a,
          ex.atan, ex.asinh, lambda a: ex.sinh(ex.tanh(a)), lambda a: ex.acosh(a * a + 1.5),
          lambda a: ex.asin(0.9 * ex.sin(a))]  # fmt: skip
TWO = [ex.add, ex.sub, ex.mul, lambda a, b: a / (b * b + 1)]
LEAVES = st.sampled_from([x, y, ex.lift(0.5), ex.lift(-1.0), ex.lift(2.0), ex.lift(0.0), ex.lift(1.0)])
expressions = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(lambda f, a: f(a), st.sampled_from(SMOOTH), inner)
        | st.builds(lambda f, a, b: f(a, b), st.sampled_from(TWO), inner, inner)
        | st.builds(lambda a, b, c: ex.where(a > b, b, c), inner, inner, inner)
    ),
    max_leaves=10,
)
numbers = st.floats(-2, 2, width=32)


def value(e, **values):
    return float(evaluate(e, np, {k: np.float64(v) for k, v in values.items()}))


def kinks(e, px, py):
    """True if a condition in `e` is about to change."""
    return any(n.fn == "gt" and abs(value(n.args[0], x=px, y=py) - value(n.args[1], x=px, y=py)) < 1e-3 for n in nodes(e))


@settings(max_examples=150, deadline=None)
@given(expressions, numbers, numbers)
def test_the_derivative_is_the_limit_of_differences(e, px, py):
    if kinks(e, px, py):
        return
    h = 1e-5
    slope = (value(e, x=px + h, y=py) - value(e, x=px - h, y=py)) / (2 * h)
    exact = value(derivative(e, x), x=px, y=py)
    curve = abs(value(derivative(derivative(derivative(e, x), x), x), x=px, y=py))
    assert math.isclose(exact, slope, rel_tol=1e-5, abs_tol=1e-6 + h * h * curve + 1e-10 * abs(value(e, x=px, y=py)))


@settings(max_examples=150, deadline=None)
@given(expressions, numbers, numbers)
def test_the_derivative_through_the_saved_result_is_the_same(e, px, py):
    d = derivative(e, x)
    saved = in_terms_of(derivative(e, x, out), e)
    assert math.isclose(value(d, x=px, y=py), value(saved, x=px, y=py, Out=value(e, x=px, y=py)), rel_tol=1e-6, abs_tol=1e-6)


@settings(max_examples=150, deadline=None)
@given(expressions, st.sampled_from([((5,), (5,)), ((2, 3), (3,)), ((1,), (4,)), ((40000,), (40000,)), ((40000,), (1,))]), st.booleans())
def test_the_bound_ufuncs_give_the_value_of_the_expression(e, shapes, in_place):
    rng = np.random.default_rng(0)
    values = {name: rng.uniform(-2, 2, s) for name, s in zip("xy", shapes, strict=True)}
    want = np.broadcast_to(evaluate(e, np, values), np.broadcast_shapes(*shapes))
    target = np.empty(want.shape)
    if in_place and values["x"].shape == want.shape:
        target = values["x"]
    bind_ufuncs(e, values, target)()
    np.testing.assert_allclose(target, want, rtol=1e-10, atol=1e-12)
