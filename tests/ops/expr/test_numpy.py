"""Scalar expressions as sequences of ufuncs."""

import math
import tracemalloc
from functools import partial

import numpy as np
import pytest

from fluidx.ir import OPS
from fluidx.ops import expr as ex
from fluidx.ops.expr.nodes import trace
from fluidx.ops.expr.numpy import bind_ufuncs


def test_an_expression_of_one_ufunc_is_that_ufunc():
    a = np.ones(3, "float32")
    call = OPS["elementwise_add"].native.bind([a, a], [np.empty_like(a)], {"axis": -1}, None)
    assert isinstance(call, partial) and call.func is np.add and call.args[0] is a
    relu = OPS["relu"].native.bind([a], [np.empty_like(a)], {}, None)
    assert isinstance(relu, partial) and relu.func is np.maximum


def test_leaky_relu_is_a_product_and_a_maximum():
    a = np.float32([-2, 4])
    call = OPS["leaky_relu"].native.bind([a], [np.empty_like(a)], {"alpha": 0.5}, None)
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
def test_integers_stay_integers(dtype):
    a = np.arange(5).astype(dtype)
    target = np.empty_like(a)
    bind_ufuncs(trace(lambda x: ex.where(x > 2, 2 * x + 1, ex.max(x, 1))), {"x": a}, target)()
    assert target.tolist() == [1, 1, 2, 7, 9]


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
