"""Scalar expressions: derivatives, the ufunc sequences, C code."""

import ctypes
import itertools
import math
import shutil
import subprocess
import tracemalloc
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidx.ir import OPS, Builder, Program, ProgramError
from fluidx.ops import expr as ex
from fluidx.ops.expr import bind_ufuncs, c_function, derivative, evaluate, in_terms_of, substitute, sym, to_c, trace

x, y, g, out = sym("x"), sym("y"), sym("g"), sym("Out")


# -- the derivatives that are worked by hand -----------------------------------------------------------------------------------


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


def test_the_gradient_of_relu_asks_the_result():
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


def test_constants_without_a_value_are_left_alone():
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
          lambda a: ex.log(a * a + 1), lambda a: ex.log1p(a * a), lambda a: ex.rsqrt(a * a + 0.5), lambda a: -a]  # fmt: skip
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
    """True when a condition in `e` is about to change its mind."""
    return any(n.fn == "gt" and abs(value(n.args[0], x=px, y=py) - value(n.args[1], x=px, y=py)) < 1e-3 for n in ex.nodes(e))


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


# -- kernels ----------------------------------------------------------------------------------------------------------------------


def test_one_ufunc_is_bound_bare():
    a = np.ones(3, "float32")
    call = OPS["elementwise_add"].bind(np, [a, a], [np.empty_like(a)], {"axis": -1}, None)
    assert isinstance(call, partial) and call.func is np.add and call.args[0] is a
    relu = OPS["relu"].bind(np, [a], [np.empty_like(a)], {}, None)
    assert isinstance(relu, partial) and relu.func is np.maximum


def test_leaky_relu_is_a_product_and_a_maximum():
    a = np.float32([-2, 4])
    call = OPS["leaky_relu"].bind(np, [a], [np.empty_like(a)], {"alpha": 0.5}, None)
    assert [step.func for step in call.args[0]] == [np.multiply, np.maximum]


def test_scratch_of_a_large_tensor_is_one_block():
    a = np.ones(1 << 20, "float32")
    target = np.empty_like(a)
    tracemalloc.start()
    call = bind_ufuncs(trace(lambda x: x * ex.sigmoid(x) + ex.where(x > 0, x, ex.exp(x))), {"x": a}, target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < a.nbytes / 2, "scratch must not be of tensor size"
    call()
    np.testing.assert_allclose(target, 1 + 1 / (1 + math.exp(-1)), rtol=1e-6)


def test_where_does_not_let_nan_through():
    a = np.float32([-1, 0, 4, np.nan])
    target = np.empty_like(a)
    with np.errstate(invalid="ignore"):
        bind_ufuncs(trace(lambda x: ex.where(x >= 0, ex.sqrt(x), 0)), {"x": a}, target)()
    assert target.tolist() == [0, 0, 2, 0]


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
def test_whole_numbers_stay_whole(dtype):
    a = np.arange(5).astype(dtype)
    target = np.empty_like(a)
    bind_ufuncs(trace(lambda x: ex.where(x > 2, 2 * x + 1, ex.max(x, 1))), {"x": a}, target)()
    assert target.tolist() == [1, 1, 2, 7, 9]


def test_half_precision_is_worked_in_float32():
    a = np.float16([0.1, 1.7, -2.3])
    target = np.empty_like(a)
    bind_ufuncs(trace(lambda x: x * ex.tanh(ex.softplus(x))), {"x": a}, target)()
    wide = a.astype("float64")
    want = (wide * np.tanh(np.log1p(np.exp(wide)))).astype("float16")
    assert target.tolist() == want.tolist()


@pytest.mark.parametrize("dtype, bound", [("float32", 5e-7), ("float64", 4e-16)])
def test_erf(dtype, bound):
    a = np.concatenate([np.linspace(-7, 7, 20001), [0.46875, 3.925, 1e-8, 0.0, np.inf, -np.inf]]).astype(dtype)
    target = np.empty_like(a)
    bind_ufuncs(trace(lambda x: ex.erf(x)), {"x": a}, target)()
    assert np.abs(target - np.array([math.erf(float(v)) for v in a])).max() < bound


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions_do_not_overflow(dtype):
    a = np.array([-1e4, -100, 100, 1e4], dtype)
    for body, want in (
        (lambda x: ex.sigmoid(x), [0, 0, 1, 1]),
        (lambda x: ex.softplus(x), [0, 0, 100, 1e4]),
        (lambda x: -ex.softplus(-x), [-1e4, -100, 0, 0]),
    ):
        target = np.empty_like(a)
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            bind_ufuncs(trace(body), {"x": a}, target)()
        np.testing.assert_allclose(target, want, atol=1e-37)


def test_axis_lines_up_the_axes_as_in_fluid():
    a, b = np.zeros((2, 3, 4), "float32"), np.float32([1, 2, 3])
    target = np.empty_like(a)
    OPS["elementwise_add"].kernel(np, a, b, out=target, axis=1)
    assert target[1, :, 3].tolist() == [1, 2, 3]


def test_integer_division_rounds_towards_zero_and_floordiv_down():
    a, b = np.array([7, -7, 7, -7]), np.array([2, 2, -2, -2])
    target = np.empty_like(a)
    OPS["elementwise_div"].kernel(np, a, b, out=target, axis=-1)
    assert target.tolist() == [3, -3, -3, 3]
    OPS["elementwise_floordiv"].kernel(np, a, b, out=target, axis=-1)
    assert target.tolist() == [3, -4, -4, 3]
    OPS["elementwise_mod"].kernel(np, a, b, out=target, axis=-1)
    assert target.tolist() == [1, 1, -1, -1]


def written(*types, op="elementwise_add", **attrs):
    block = Program("p").global_block()
    made = [block.create_var(f"x{k}", shape, dtype, is_data=True) for k, (dtype, shape) in enumerate(types)]
    return Builder(block).emit(op, *made, **attrs)


def test_open_axes_broadcast():
    assert written(("float32", (-1, 4)), ("float32", (4,))).shape == (-1, 4)
    assert written(("float32", (-1, 1)), ("float32", (1, 4))).shape == (-1, 4)
    assert written(("float32", (-1,)), ("float32", (8,))).shape == (8,)


@pytest.mark.parametrize(
    "types, attrs, said",
    [
        ([("float32", (2, 3)), ("float32", (4,))], {}, r"shapes \[2, 3\] and \[4\] do not broadcast: 3 against 4"),
        ([("float32", (2, 3)), ("int64", (3,))], {}, "X is float32 and Y is int64; cast one of them"),
        ([("float32", (2, 3)), ("float32", (3, 4))], {"axis": 1}, "shapes|does not fit"),
        ([("float32", (2, 3, 4)), ("float32", (4, 5))], {"axis": 2}, "with axis 2, Y of shape .* does not fit into X of shape"),
        ([("bool", (2,)), ("bool", (2,))], {}, "expected a number, found bool; cast it first"),
    ],
)
def test_operands_that_do_not_fit(types, attrs, said):
    with pytest.raises(ProgramError, match=said):
        written(*types, **attrs)


def test_the_gradient_of_a_sum_of_equal_shapes_is_the_gradient_itself():
    from fluidx.backward import gradients

    program = Program("p")
    block = program.global_block()
    a, b, w = (block.create_var(n, (2, 3), "float32", is_data=True) for n in "abw")
    c = Builder(block).elementwise_add(a, b)
    gradients([c], [a, b], [w])
    assert not {op.type for op in program.ops} & {"reduce_to", "elementwise_mul", "scale"}


# -- C ---------------------------------------------------------------------------------------------------------------------------


def test_c_statements_share_what_is_used_twice():
    t = ex.tanh(x)
    assert to_c(g * (1 - t * t), "float32") == "float t0 = tanhf(x);\nout = g * (1.0f - (t0 * t0));"
    assert to_c(ex.where(x > 0, g, 0), "float64") == "out = (x > 0.0) ? g : 0.0;"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_c_functions_compute_what_numpy_computes(tmp_path):
    names = ["relu", "gelu", "tanh_grad", "mish_grad", "leaky_relu", "hard_swish_grad", "softplus", "sigmoid_grad", "elementwise_pow",
             "elementwise_mod", "round", "rsqrt", "softshrink", "elementwise_floordiv", "gelu_grad", "sign", "erf", "abs"]  # fmt: skip
    cases, source = [], ["#include <math.h>"]
    for name, dtype in itertools.product(names, ("float32", "float64")):
        op = OPS[name]
        e = substitute(op.expr, op.attrs)
        symbols = ex.symbols(e)
        source.append(c_function(f"{name}_{dtype}", e, dtype, symbols))
        cases.append((name, dtype, e, symbols))
    path = tmp_path / "ops.c"
    path.write_text("\n".join(source))
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-o", tmp_path / "ops.so", path, "-lm"], check=True)
    library = ctypes.CDLL(str(tmp_path / "ops.so"))
    rng = np.random.default_rng(0)
    for name, dtype, e, symbols in cases:
        arrays = {s: rng.uniform(0.3, 3, 50).astype(dtype) for s in symbols}
        got = np.empty(50, dtype)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*arrays.values(), got)]
        getattr(library, f"{name}_{dtype}")(ctypes.c_long(50), *pointers)
        np.testing.assert_allclose(got, evaluate(e, np, arrays), rtol=2e-5 if dtype == "float32" else 1e-13, err_msg=name)
