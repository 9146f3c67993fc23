"""ghost_batch_norm against plain NumPy: the batch is split into runs, and each run is normalized separately."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fluidx as fx
from fluidx.ir import ProgramError, TensorType
from fluidx.ir.parts import Part, bounds
from fluidx.ops.nn.ghost_batch_norm import BnRunning, GhostBatchNorm, GhostBatchNormGrad
from fluidx.testing import numeric_grad

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
EPS = 1e-2


def runs_of(x, g):
    """The runs of rows, by the definition."""
    return [x[k * len(x) // g : (k + 1) * len(x) // g] for k in range(g)]


def normed(x, g, scale, bias):
    """Each run normalized separately, with its own mean and variance. Channels are axis 1."""
    axes, shape = (0, *range(2, x.ndim)), (1, -1) + (1,) * (x.ndim - 2)
    out = []
    for run in runs_of(x, g):
        if len(run):
            hat = (run - run.mean(axis=axes, keepdims=True)) / np.sqrt(run.var(axis=axes, keepdims=True) + EPS)
            out.append(hat * scale.reshape(shape) + bias.reshape(shape))
    return np.concatenate(out)


def mean_statistics(x, g):
    """The mean over the nonempty runs of their means and variances."""
    axes = (0, *range(2, x.ndim))
    filled = [run for run in runs_of(x, g) if len(run)]
    return np.stack([np.mean([run.mean(axis=axes) for run in filled], axis=0), np.mean([run.var(axis=axes) for run in filled], axis=0)])


def slope(f, x, g):
    return numeric_grad(lambda v: float((f(v) * g).sum()), x)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2), st.booleans(), st.integers(0, 20))
def test_values_and_gradients_are_those_of_separate_runs(run_bound, n, g, c, spatial, last, seed):
    rng = np.random.default_rng(seed)
    shape = (n, c, *rng.integers(1, 4, spatial))
    x, dy, scale, bias = rng.standard_normal(shape) * 3 + 2, rng.standard_normal(shape), rng.standard_normal(c), rng.standard_normal(c)
    layout = "NHWC" if last and spatial else "NCHW"

    def to(a):
        return np.ascontiguousarray(np.moveaxis(a, 1, -1)) if layout == "NHWC" else a

    unread = np.full(c, np.nan)
    y, saved, inv, stats = run_bound(GhostBatchNorm, to(x), scale, bias, unread, unread, sub_batches=g, data_layout=layout, epsilon=EPS)
    np.testing.assert_allclose(y, to(normed(x, g, scale, bias)), **CLOSE)
    np.testing.assert_allclose(stats, mean_statistics(x, g), **CLOSE)
    dx, dscale, dbias = run_bound(GhostBatchNormGrad, to(x), scale, saved, inv, to(dy), sub_batches=g, data_layout=layout)
    np.testing.assert_allclose(dx, to(slope(lambda v: normed(v, g, scale, bias), x, dy)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dscale, slope(lambda v: normed(x, g, v, bias), scale, dy), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dbias, dy.sum(axis=(0, *range(2, x.ndim))), **CLOSE)


def test_runs_worked_by_hand(run_bound):
    x = np.array([[1], [3], [10], [30], [50]], "float64")  # two runs: rows 0 and 1, rows 2 to 4
    one, zero = np.ones(1), np.zeros(1)
    y, saved, inv, stats = run_bound(GhostBatchNorm, x, one, zero, zero, one, sub_batches=2, epsilon=0.0)
    assert saved.tolist() == [[2], [30]] and inv[0, 0] == 1 and stats.tolist() == [[16], [(1 + 800 / 3) / 2]]
    assert y[:2].tolist() == [[-1], [1]] and y[3, 0] == 0
    dx, dscale, dbias = run_bound(GhostBatchNormGrad, x, one, saved, inv, np.ones_like(x), sub_batches=2)
    assert dbias.tolist() == [5] and abs(dscale[0]) < 1e-12 and np.abs(dx).max() < 1e-12


def test_runs_without_rows_contribute_nothing(run_bound):
    x = np.array([[4], [8]], "float64")  # of 5 runs, the third and the last have one row each
    one, zero = np.ones(1), np.zeros(1)
    y, saved, inv, stats = run_bound(GhostBatchNorm, x, one, zero + 7, zero, one, sub_batches=5, epsilon=0.25)
    assert y.tolist() == [[7], [7]] and saved.ravel().tolist() == [0, 0, 4, 0, 8] and inv.ravel().tolist() == [0, 0, 2, 0, 2]
    assert stats.tolist() == [[6], [0]]


def test_one_run_is_batch_norm(run_bound):
    from fluidx.ops.nn.batch_norm import BatchNorm

    rng = np.random.default_rng(0)
    x, scale, bias, mean = rng.standard_normal((6, 3, 2, 2)), *rng.standard_normal((3, 3))
    variance = np.ones(3)
    y, saved, inv, stats = run_bound(GhostBatchNorm, x, scale, bias, mean, variance, sub_batches=1)
    want = run_bound(BatchNorm, x, scale, bias, mean, variance, momentum=0.5)
    assert np.array_equal(y, want[0]) and np.array_equal(saved[0], want[3]) and np.array_equal(inv[0], want[4])
    running = run_bound(BnRunning, mean, variance, stats, momentum=0.5)
    assert np.array_equal(running[0], want[1]) and np.array_equal(running[1], want[2])


@pytest.mark.parametrize("dtype, rough", [("float16", 1e-2), ("float32", 1e-5)])
def test_statistics_of_16_bit_floats_are_in_float32(run_bound, dtype, rough):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((7, 3, 4)).astype(dtype), rng.standard_normal((4, 3)).astype("float32")
    y, saved, inv, stats = run_bound(GhostBatchNorm, x, *w, sub_batches=3, epsilon=EPS)
    assert (y.dtype, saved.dtype, stats.dtype) == (dtype, "float32", "float32")
    np.testing.assert_allclose(y, normed(x.astype(float), 3, w[0], w[1]), rtol=rough, atol=rough)
    dx, dscale, dbias = run_bound(GhostBatchNormGrad, x, w[0], saved, inv, y, sub_batches=3)
    assert (dx.dtype, dscale.dtype) == (dtype, "float32")
    want = slope(lambda v: normed(v, 3, w[0], w[1]), x.astype(float), y.astype(float))
    np.testing.assert_allclose(dx, want, rtol=10 * rough, atol=10 * rough)


@pytest.mark.parametrize("g", [2, 4, 6, 12])
def test_ranks_hold_whole_runs_if_their_number_divides_that_of_the_runs(g):
    for rows in range(40):
        runs = bounds(rows, g)
        for n in (n for n in range(1, g + 1) if g % n == 0):
            assert bounds(rows, n) == runs[:: g // n]


def test_a_part_of_the_runs_gives_its_part_of_everything():
    rng = np.random.default_rng(0)
    x, scale, bias = rng.standard_normal((7, 3, 2)), *rng.standard_normal((2, 3))
    want, stats = normed(x, 5, scale, bias), mean_statistics(x, 5)
    total = np.zeros((2, 3))
    for first, last in ((0, 1), (1, 4), (4, 5)):
        rows = slice(first * 7 // 5, last * 7 // 5)
        y, mine = np.empty_like(x[rows]), np.empty((2, 3))
        saved = np.empty((last - first, 3)), np.empty((last - first, 3))
        attrs = GhostBatchNorm.complete_attrs({"sub_batches": 5, "epsilon": EPS})
        GhostBatchNorm.kernel(np, x[rows], scale, bias, None, None, out=(y, *saved, mine), part=Part(7, first, 5), **attrs)
        np.testing.assert_allclose(y, want[rows], **CLOSE)
        total += mine
    np.testing.assert_allclose(total, stats, **CLOSE)


def test_views_whose_axes_cannot_be_joined_are_copied(run_bound):
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((5, 3, 4, 2)).transpose(0, 1, 3, 2) for _ in range(2))
    w = rng.standard_normal((4, 3))
    views = run_bound(GhostBatchNorm, x, *w, sub_batches=2)
    for a, b in zip(views, run_bound(GhostBatchNorm, x.copy(), *w, sub_batches=2)):
        np.testing.assert_allclose(a, b, **CLOSE)
    back = [run_bound(GhostBatchNormGrad, f(x), w[0], *views[1:3], f(dy), sub_batches=2) for f in (lambda a: a, np.ascontiguousarray)]
    for a, b in zip(*back):
        np.testing.assert_allclose(a, b, **CLOSE)


def test_rows_that_do_not_match_runs_are_refused():
    x, w = np.ones((3, 2)), np.ones(2)
    outs = np.empty_like(x), np.empty((1, 2)), np.empty((1, 2)), np.empty((2, 2))
    attrs = GhostBatchNorm.complete_attrs({"sub_batches": 4})
    with pytest.raises(ProgramError, match="3 rows do not match runs 1 to 2 of the 4 runs of 8"):
        GhostBatchNorm.kernel(np, x, w, w, w, w, out=outs, part=Part(8, 1, 4), **attrs)


@pytest.mark.parametrize("shape", [(0, 2), (3, 2, 0)])
def test_an_empty_batch_has_no_statistics(run_bound, shape):
    w = np.ones(2, "float32")
    with pytest.raises(ProgramError, match="op ghost_batch_norm cannot take statistics over an empty batch"):
        run_bound(GhostBatchNorm, np.ones(shape, "float32"), w, w, w, w, sub_batches=2)


def f32(*shape):
    return TensorType("float32", shape)


@pytest.mark.parametrize(
    "op, types, attrs, message",
    [
        (GhostBatchNorm, [f32(2, 3), *[f32(3)] * 4], {"sub_batches": 0}, "sub_batches must be from 1 to 65536, got 0"),
        (GhostBatchNorm, [f32(2, 3), *[f32(3)] * 4], {"sub_batches": 2, "epsilon": -1.0}, "epsilon must not be negative"),
        (GhostBatchNorm, [f32(2, 3), f32(4), *[f32(3)] * 3], {"sub_batches": 2}, r"Scale must have shape \[3\]"),
        (GhostBatchNormGrad, [f32(2, 3), f32(3), f32(3, 3), f32(2, 3), f32(2, 3)], {"sub_batches": 2}, "needs statistics of 2 runs"),
        (BnRunning, [f32(3), f32(3), f32(3)], {}, r"needs Mean and Variance \[c\] and Batch \[2,c\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused(op, types, attrs, message):
    with pytest.raises(ProgramError, match=message):
        op.infer(*types, **op.complete_attrs(attrs))


def test_sub_batches_must_be_given_as_a_whole_number():
    for value in (True, 2.5, "2"):
        with pytest.raises(ProgramError, match="op ghost_batch_norm: attribute 'sub_batches' must be int"):
            GhostBatchNorm.complete_attrs({"sub_batches": value})


# -- the layer ----------------------------------------------------------------------------------------------------------------------------


def layer(**options):
    main, startup = fx.Program("main"), fx.Program("startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3, 4, 4], "float64")
        x.stop_gradient = False
        y = fx.layers.batch_norm(x, momentum=0.75, epsilon=EPS, **options)
        loss = fx.layers.reduce_sum(y * fx.layers.sin(y))
        test = main.clone(for_test=True)
        fx.append_backward(loss)
    return main, startup, test, y


def test_the_layer_trains_by_runs_and_keeps_the_mean_of_their_statistics():
    main, startup, _, y = layer(sub_batches=4)
    x = np.random.default_rng(1).standard_normal((10, 3, 4, 4)) * 2 + 5
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(startup, scope=scope)
    found, dx = exe.run(main, feed={"x": x}, fetch_list=[y, "x@GRAD"], scope=scope)
    one, zero = np.ones(3), np.zeros(3)
    np.testing.assert_allclose(found, normed(x, 4, one, zero), **CLOSE)
    want = numeric_grad(lambda v: float((normed(v, 4, one, zero) * np.sin(normed(v, 4, one, zero))).sum()), x)
    np.testing.assert_allclose(dx, want, rtol=1e-4, atol=1e-5)
    mean, variance = mean_statistics(x, 4)
    np.testing.assert_allclose(scope.get("batch_norm_0.w_1"), 0.25 * mean, **CLOSE)
    np.testing.assert_allclose(scope.get("batch_norm_0.w_2"), 0.75 + 0.25 * variance, **CLOSE)


def test_one_run_changes_nothing():
    assert str(layer(sub_batches=1)[0]) == str(layer()[0])


@pytest.mark.parametrize("options", [{"is_test": True}, {"use_global_stats": True}], ids=str)
def test_runs_have_no_effect_where_the_moving_statistics_are_used(options):
    assert str(layer(sub_batches=4, **options)[0]) == str(layer(**options)[0])


def test_a_clone_for_test_uses_the_moving_statistics():
    x = np.random.default_rng(1).standard_normal((10, 3, 4, 4))
    values = []
    for options in ({}, {"sub_batches": 4}):
        _, startup, test, y = layer(**options)
        exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
        exe.run(startup, scope=scope)
        state = {"batch_norm_0.w_1": np.array([1.0, 2, 3]), "batch_norm_0.w_2": np.array([0.5, 2, 1])}
        for name, value in state.items():
            scope.set(name, value)
        values.append(exe.run(test, feed={"x": x}, fetch_list=[y], scope=scope)[0])
        assert all(np.array_equal(scope.get(n), v) for n, v in state.items())
    assert np.array_equal(*values)


def test_a_clone_for_test_can_be_differentiated():
    gradients = []
    for options in ({"sub_batches": 4}, {}):
        _, startup, test, y = layer(**options)
        with fx.program_guard(test, startup):
            fx.append_backward(fx.layers.reduce_sum(fx.layers.square(test.global_block().var(y.name))))
        exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
        exe.run(startup, scope=scope)
        fetch = ["x@GRAD", "batch_norm_0.w_0@GRAD", "batch_norm_0.b_0@GRAD"]
        gradients.append(exe.run(test, feed={"x": np.random.default_rng(1).standard_normal((5, 3, 4, 4))}, fetch_list=fetch, scope=scope))
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


@pytest.mark.parametrize(
    "value, message",
    [
        (0, "layers.batch_norm: sub_batches must be 1 or more, got 0"),
        (-2, "layers.batch_norm: sub_batches must be 1 or more, got -2"),
        (True, "layers.batch_norm: sub_batches must be an integer, got bool: True"),
        (2.5, "layers.batch_norm: sub_batches must be an integer, got float: 2.5"),
        (10**30, "sub_batches must be from 1 to 65536"),
        ("2", "layers.batch_norm: sub_batches must be an integer, got str: '2'"),
    ],
)
def test_a_wrong_number_of_runs_is_refused(value, message):
    with pytest.raises(ProgramError) as error:
        layer(sub_batches=value)
    assert message in str(error.value)
