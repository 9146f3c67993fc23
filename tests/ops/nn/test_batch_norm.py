"""batch_norm against float64 formulas and numbers worked by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fluidx as fx
from fluidx.ir import ProgramError, TensorType
from fluidx.ops.nn.batch_norm import BatchNorm, BatchNormGrad
from fluidx.testing import numeric_grad

L = fx.layers
CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # float32 against float64


def normal(rng, *shape):
    return rng.standard_normal(shape).astype("float32")


def slope(f, x, g):
    """The gradient of sum(f(x) * g) in float64."""
    return numeric_grad(lambda v: float((f(v) * g).sum()), x.astype(float))


def batch_norm(x, scale, bias, eps=1e-5):
    x = x.astype(float)
    axes = (0, *range(2, x.ndim))
    shape = (1, -1) + (1,) * (x.ndim - 2)
    hat = (x - x.mean(axis=axes, keepdims=True)) / np.sqrt(x.var(axis=axes, keepdims=True) + eps)
    return hat * scale.reshape(shape) + bias.reshape(shape)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(0, 2), st.booleans(), st.integers(0, 20))
def test_batch_norm_and_its_gradients_equal_the_formula(run_bound, n, c, spatial, last, seed):
    rng = np.random.default_rng(seed)
    shape = (n, c, *rng.integers(1, 4, spatial))
    x, g, scale, bias = normal(rng, *shape) * 3 + 2, normal(rng, *shape), normal(rng, c), normal(rng, c)
    layout = "NHWC" if last and spatial else "NCHW"

    def to(a):
        return np.ascontiguousarray(np.moveaxis(a, 1, -1)) if layout == "NHWC" else a

    mean, var = np.zeros(c, "float32"), np.ones(c, "float32")
    y, mean_out, var_out, saved, inv = run_bound(BatchNorm, to(x), scale, bias, mean, var, momentum=0.75, data_layout=layout, epsilon=1e-2)
    np.testing.assert_allclose(y, to(batch_norm(x, scale, bias, 1e-2)), **CLOSE)
    axes = (0, *range(2, x.ndim))
    np.testing.assert_allclose(saved, x.mean(axis=axes), **CLOSE)
    np.testing.assert_allclose(mean_out, 0.25 * x.mean(axis=axes), **CLOSE)
    np.testing.assert_allclose(var_out, 0.75 + 0.25 * x.var(axis=axes), **CLOSE)
    dx, dscale, dbias = run_bound(BatchNormGrad, to(x), scale, saved, inv, to(g), data_layout=layout)
    np.testing.assert_allclose(dx, to(slope(lambda v: batch_norm(v, scale, bias, 1e-2), x, g)), rtol=5e-3, atol=5e-4)
    np.testing.assert_allclose(dscale, slope(lambda v: batch_norm(x, v, bias, 1e-2), scale, g), rtol=5e-3, atol=5e-4)
    np.testing.assert_allclose(dbias, g.sum(axis=axes), **CLOSE)


def test_batch_statistics_worked_by_hand(run_bound):
    x = np.array([[1, 10], [3, 30]], "float32")
    ones, zeros = np.ones(2, "float32"), np.zeros(2, "float32")
    y, mean, var, _, inv = run_bound(BatchNorm, x, ones, zeros, zeros, ones, epsilon=0.0, momentum=0.5)
    assert y.tolist() == [[-1, -1], [1, 1]] and inv.tolist() == [1, np.float32(0.1)]
    assert mean.tolist() == [1, 10] and var.tolist() == [1, 50.5]


def test_running_statistics_may_be_updated_in_place_and_do_not_change_at_test_time():
    x = np.array([[1], [3]], "float32")
    mean, var, one = np.array([4], "float32"), np.array([1], "float32"), np.ones(1, "float32")
    y, saved, inv = np.empty_like(x), np.empty(1, "float32"), np.empty(1, "float32")
    attrs = {**BatchNorm.attrs, "momentum": 0.5, "epsilon": 0.0}
    BatchNorm.kernel(np, x, one, one, mean, var, out=(y, mean, var, saved, inv), **attrs)
    assert (mean[0], var[0], saved[0]) == (3, 1, 2) and y.tolist() == [[0], [2]]
    BatchNorm.kernel(np, x, one, one, mean, var, out=(y, mean, var, saved, inv), **{**attrs, "is_test": True})
    assert (mean[0], var[0], saved[0]) == (3, 1, 3) and y.tolist() == [[-1], [1]]



@pytest.mark.parametrize(
    "op, shapes, attrs, message",
    [
        (BatchNorm, [(2, 3, 4), (4,), (3,), (3,), (3,)], {}, r"Scale must have shape \[3\] for X f32.2,3,4., got f32.4."),
        (BatchNorm, [(3,), (3,), (3,), (3,), (3,)], {}, "needs X with at least 2 axes"),
    ],
)
def test_operands_that_do_not_fit_are_refused(op, shapes, attrs, message):
    with pytest.raises(ProgramError, match=message):
        op.infer(*(s and TensorType("float32", s) for s in shapes), **op.complete_attrs(attrs))


def looped(unrolled, trainers=None):
    """Loss, weights and running statistics after two steps of a net that normalizes in each of three iterations, with the same weights."""
    with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard(), fx.scope_guard(fx.Scope()):
        x, n = fx.data("x", [-1, 3], "float64"), L.fill_constant([1], "int64", 3)
        names = {"param_attr": "w", "bias_attr": "b", "moving_mean_name": "mean", "moving_variance_name": "variance"}

        def normalized(h):
            return L.batch_norm(h * h, **names) + x

        if unrolled:
            h = normalized(normalized(normalized(x)))
        else:
            i = L.zeros([1], "int64")
            _, h = L.while_loop(lambda i, h: L.less_than(i, n), lambda i, h: [L.increment(i, in_place=False), normalized(h)], [i, x])
        loss = L.mean(L.square(h))
        fx.optimizer.SGD(0.1).minimize(loss)
        main, startup = fx.default_main_program(), fx.default_startup_program()
        feed, fetch = {"x": np.random.default_rng(0).normal(size=(5, 3))}, [loss.name, "w", "b", "mean", "variance"]
        if trainers is None:
            exe = fx.Executor()
            exe.run(startup)
            return [exe.run(main, feed=feed, fetch_list=fetch) for _ in range(2)]
        t = fx.DistributeTranspiler(fx.strategies.data_parallel())
        t.transpile(program=main, startup_program=startup, trainers=trainers)
        assert t.verify()
        with fx.ParallelExecutor(t, places=fx.cpu_places(trainers)) as exe:
            exe.run_startup()
            return [exe.run(feed=feed, fetch_list=fetch) for _ in range(2)]


@pytest.mark.parametrize("trainers", [None, 2])
def test_a_loop_that_normalizes_in_each_iteration_equals_the_unrolled_loop(trainers):
    for found, want in zip(looped(False, trainers), looped(True), strict=True):
        for a, b in zip(found, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11)  # sums of float64 over iterations and rows in another order


def test_the_statistics_have_no_gradient_and_the_error_says_which():
    with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
        x = fx.data("x", [-1, 3], "float64")
        L.batch_norm(x, moving_mean_name="mean")
        mean = x.block.var("mean")
        mean.stop_gradient = False
        said = "op batch_norm has a gradient through Y only, not through MeanOut, 'mean': set stop_gradient on it"
        with pytest.raises(fx.ProgramError, match=said):
            fx.gradients([L.reduce_sum(mean)], [x])
