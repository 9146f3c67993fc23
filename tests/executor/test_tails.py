"""Chains whose first operator is one with a tail: what becomes one step, that its parts all get their tail, and that the bits are those of
separate steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fluidx as fx
from fluidx import native
from fluidx.executor import Scope
from fluidx.executor.context import RunContext
from fluidx.executor.plan.cost import total
from fluidx.executor.plan.planner import plan
from fluidx.executor.plan.storage_proof import check_storage
from fluidx.executor.run.bind import bind
from fluidx.ir import Builder, TensorType, opdef

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

L = fx.layers


@pytest.fixture(autouse=True)
def two_threads():
    before = native.num_threads()
    native.set_num_threads(2)
    yield
    native.set_num_threads(before)


@pytest.fixture(params=native.levels() if native.enabled() else [])
def level(request):
    with native.at_level(request.param):
        if not native.has_products():
            pytest.skip(native.describe())
        yield request.param


def whole(rng, *shape, dtype="float32"):
    """Small whole numbers, of which sums of products are exact in any order."""
    return rng.integers(-3, 4, shape).astype(dtype)


def planned(program, feed, fetch, scope=None, **options):
    types = {n: TensorType(a.dtype.name, a.shape) for n, a in feed.items()}
    made = plan(program, types, [v.name for v in fetch], (scope or Scope()).arrays, RunContext(), **options)
    check_storage(made)
    return made


def steps(p):
    return ["+".join(op.type for op in s.ops) for s in p.steps]


def both_ways(feed, fetch):
    """Fused and separate: the steps, and the fetched values."""
    program = fx.default_main_program()
    plans = [planned(program, feed, fetch, fuse=fuse) for fuse in (True, False)]
    return steps(plans[0]), *(bind(p, Scope(), RunContext()).run(feed) for p in plans)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 5), (13, 300, 700), (131, 257, 64), (300, 530, 260), (2000, 6, 40)])
@pytest.mark.parametrize(("tx", "ty"), [(False, False), (True, False), (False, True)])
def test_every_element_of_a_product_gets_its_tail_once(level, m, n, k, tx, ty, dtype):
    """Not before all of k is summed, and whatever pieces, blocks and strips the product is made in."""
    rng = np.random.default_rng(m + n)
    feed = {
        "x": whole(rng, *((k, m) if tx else (m, k)), dtype=dtype), "y": whole(rng, *((n, k) if ty else (k, n)), dtype=dtype),
        "b": whole(rng, n, dtype=dtype), "r": whole(rng, m, n, dtype=dtype),
    }  # fmt: skip
    x, y, b, r = (fx.data(name, list(a.shape), dtype) for name, a in feed.items())
    biased = L.elementwise_add(L.matmul(x, y, transpose_x=tx, transpose_y=ty), b, axis=1)
    out = L.elementwise_mul(biased, r)
    p = planned(fx.default_main_program(), feed, [biased, out])
    product = (feed["x"].T if tx else feed["x"]).astype("float64") @ (feed["y"].T if ty else feed["y"]) + feed["b"]
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        got = bind(p, Scope(), RunContext()).run(feed)
        assert np.array_equal(got[0], product) and np.array_equal(got[1], product * feed["r"])
    # short rows are better done several at a time, which a tail does not
    short = m > 1 and n < 128
    assert steps(p) == (["matmul", "elementwise_add+elementwise_mul"] if short else ["matmul+elementwise_add+elementwise_mul"])


def test_the_products_of_a_batch_have_one_tail():
    rng = np.random.default_rng(0)
    feed = {"x": whole(rng, 2, 3, 40, 16), "y": whole(rng, 2, 3, 16, 290), "m": whole(rng, 2, 3, 1, 290)}
    x, y, m = (fx.data(name, list(a.shape)) for name, a in feed.items())
    out = L.relu(L.elementwise_add(L.matmul(x, y), m))
    names, fused, apart = both_ways(feed, [out])
    assert names == ["matmul+elementwise_add+relu"]
    assert np.array_equal(fused[0], np.maximum(feed["x"] @ feed["y"] + feed["m"], 0)) and np.array_equal(fused[0], apart[0])


def test_a_product_that_takes_several_calls_has_no_tail():
    rng = np.random.default_rng(0)
    feed = {"x": whole(rng, 2, 2, 2, 33, 8), "y": whole(rng, 2, 2, 2, 8, 40)}
    x, y = (fx.data(name, list(a.shape)) for name, a in feed.items())
    out = L.relu(L.matmul(x, y))
    names, fused, _ = both_ways(feed, [out])
    assert names == ["matmul", "relu"] and np.array_equal(fused[0], np.maximum(feed["x"] @ feed["y"], 0))


def test_what_a_tail_reads_keeps_its_storage():
    """The residual dies here, and may not be taken for the result: parts of it are read after parts of the result are made."""
    rng = np.random.default_rng(1)
    feed = {"x": whole(rng, 64, 64), "w": whole(rng, 64, 64)}
    x, w = (fx.data(name, list(a.shape)) for name, a in feed.items())
    r = L.scale(x, 2.0)
    out = L.elementwise_add(L.matmul(r, w), r)
    names, fused, _ = both_ways(feed, [out])
    assert names == ["scale", "matmul+elementwise_add"] and np.array_equal(fused[0], 2 * feed["x"] @ feed["w"] + 2 * feed["x"])


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("given", [False, True], ids=["of the batch", "given"])
def test_batch_norm_residual_and_relu_are_one_step_with_the_bits_of_three(level, layout, given):
    rng = np.random.default_rng(2)
    feed = {name: rng.standard_normal((5, 6, 9, 7) if layout == "NCHW" else (5, 9, 7, 66)).astype("float32") for name in "xr"}
    main, startup = fx.Program("norm"), fx.Program("start")
    with fx.program_guard(main, startup):
        x, r = (fx.data(name, list(a.shape)) for name, a in feed.items())
        y = L.relu(L.elementwise_add(L.batch_norm(x, data_layout=layout, is_test=given), r))
    made = []
    for fuse in (True, False):
        scope = Scope()
        fx.Executor().run(startup, scope=scope)
        p = planned(main, feed, [y], scope, fuse=fuse)
        assert steps(p) == (["batch_norm+elementwise_add+relu"] if fuse else ["batch_norm", "elementwise_add", "relu"])
        got = bind(p, scope, RunContext()).run(feed)
        made.append([a.tobytes() for a in (*got, *(scope.arrays[n] for n in sorted(scope.arrays)))])
    assert made[0] == made[1]


WAYS = {
    "pixel": {"filter_size": 1}, "pixel strided": {"filter_size": 1, "stride": 2}, "winograd": {"filter_size": 3, "padding": 1},
    "strided": {"filter_size": 3, "padding": 1, "stride": 2}, "few": {"filter_size": 5, "num_filters": 3},
    "grouped": {"filter_size": 3, "groups": 2}, "depthwise": {"filter_size": 3, "groups": 32},
    "dilated": {"filter_size": 3, "dilation": 2, "padding": 2},
}  # fmt: skip


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("way", WAYS)
def test_convolution_bias_residual_and_relu_are_one_step_exactly(level, layout, way):
    """Whichever way is taken, and wherever its pieces end, of three images and two threads."""
    rng, options = np.random.default_rng(3), {"num_filters": 32, **WAYS[way]}
    shape = (3, 32, 27, 29) if layout == "NCHW" else (3, 27, 29, 32)
    feed = {"x": whole(rng, *shape)}
    main, startup = fx.Program("images"), fx.Program("start")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", list(shape))
        y = L.conv2d(x, data_format=layout, bias_attr=False, param_attr="w", **options)
        feed["b"] = whole(rng, *((options["num_filters"], 1, 1) if layout == "NCHW" else (1, 1, options["num_filters"])))
        feed["r"] = whole(rng, 3, *y.shape[1:])
        b, r = (fx.data(name, list(feed[name].shape)) for name in "br")
        out = L.relu(L.elementwise_add(L.elementwise_add(y, b, axis=1), r))
    scope = Scope()
    fx.Executor().run(startup, scope=scope)
    scope.set("w", whole(rng, *scope.get("w").shape))
    fused, apart = (planned(main, feed, [out], scope, fuse=fuse) for fuse in (True, False))
    short = layout == "NHWC"  # a row of the vector machine is a pixel's channels then
    assert steps(fused)[0].partition("conv2d")[2] == ("" if short else "+elementwise_add+elementwise_add+relu")
    (right,) = bind(planned(main, feed, [out], scope, natively=False), scope, RunContext()).run(feed)
    for p in (fused, apart):
        assert np.array_equal(bind(p, scope, RunContext()).run(feed)[0], right)


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_of_an_activation_is_the_tail_of_the_convolution_behind_it(level, way):
    options, made = {"num_filters": 32, **WAYS[way]}, []
    main, startup = fx.Program("images"), fx.Program("start")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [3, 32, 13, 11])
        x.stop_gradient = False
        h = L.relu(L.scale(x, 2.0))
        y = L.conv2d(h, bias_attr=False, param_attr="w", **options)
        loss = L.reduce_sum(L.elementwise_mul(y, fx.data("g", list(y.shape))))
        (dx,) = fx.gradients([loss], [x])
    rng, scope = np.random.default_rng(4), Scope()
    fx.Executor().run(startup, scope=scope)
    scope.set("w", whole(rng, *scope.get("w").shape))
    feed = {"x": whole(rng, 3, 32, 13, 11), "g": whole(rng, *y.shape)}
    for natively in (True, False):
        p = planned(main, feed, [dx], scope, natively=natively)
        assert not natively or any("conv2d_grad+relu_grad" in step for step in steps(p))
        made.append(bind(p, scope, RunContext()).run(feed)[0])
    assert np.array_equal(*made)


def test_what_a_tail_costs_is_what_its_operators_cost_apart_without_the_values_between():
    main, startup = fx.Program("images"), fx.Program("start")
    with fx.program_guard(main, startup):
        x = fx.data("x", [3, 16, 16, 16])
        h = L.relu(L.batch_norm(L.relu(L.conv2d(x, 32, 3))))
        loss = L.mean(L.fc(L.conv2d(h, 16, 1, act="tanh"), 300, act="relu"))
        fx.optimizer.SGD(0.1).minimize(loss)
    scope, feed = Scope(), {"x": np.ones((3, 16, 16, 16), "float32")}
    fx.Executor().run(startup, scope=scope)
    fused, apart = (planned(main, feed, [loss], scope, fuse=fuse) for fuse in (True, False))
    heads = {s.op.type for s in fused.steps if s.kernel == "fused" and opdef(s.op.type).native.tail}
    assert heads >= {"conv2d", "batch_norm", "mul", "conv2d_grad"}
    whole, parts = (total([p.cost(s) for s in p.steps]) for p in (fused, apart))
    assert whole.flops == parts.flops and whole.written < parts.written and whole.read < parts.read


def test_the_gradient_through_a_layer_follows_its_product():
    """The gradient of the weights comes first, so that the activation's is the tail of the other one."""
    main, startup = fx.Program("layers"), fx.Program("start")
    with fx.program_guard(main, startup):
        x = fx.data("x", [-1, 48])
        loss = L.mean(L.fc(L.fc(x, 40, act="tanh"), 36))
        fx.optimizer.SGD(0.1).minimize(loss)
    scope = Scope()
    fx.Executor().run(startup, scope=scope)
    assert "matmul+tanh_grad" in steps(planned(main, {"x": np.ones((50, 48), "float32")}, [loss], scope))


TAILS = {
    "add": lambda v, x: L.elementwise_add(v, x), "bias": lambda v, x: L.elementwise_mul(v, L.slice(x, [0], [0], [1])),
    "relu": lambda v, x: L.relu(v), "scale": lambda v, x: L.scale(v, -0.5, 1.0), "max": lambda v, x: L.elementwise_max(v, x),
}  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(TAILS)), min_size=1, max_size=6), st.integers(1, 90), st.integers(32, 90), st.integers(1, 600),
    st.integers(0, 63), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_chain_behind_a_product_has_the_bits_of_separate_steps(names, m, n, k, fetched, seed):
    rng = np.random.default_rng(seed)
    feed = {"x": whole(rng, m, k), "y": whole(rng, k, n), "z": whole(rng, m, n)}
    main = fx.Program("chain")
    with fx.program_guard(main):
        x, y, z = (fx.data(name, list(a.shape)) for name, a in feed.items())
        values = [L.matmul(x, y)]
        for name in names:
            values.append(TAILS[name](values[-1], z))
        fetch = [v for k, v in enumerate(values) if fetched >> k & 1 or v is values[-1]]
        _, fused, apart = both_ways(feed, fetch)
    for a, b in zip(fused, apart, strict=True):
        assert np.array_equal(a, b)


def test_a_chain_over_a_view_that_no_kernel_takes_reads_a_copy():
    """Four axes in an order of their own are more loops than the vector machine has."""
    x, z = fx.data("x", [2, 3, 4, 5]), fx.data("z", [5, 1, 1, 1])
    y = L.sigmoid(L.relu(L.elementwise_add(L.transpose(x, [3, 1, 0, 2]), z)))
    feed = {"x": np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype("float32"), "z": np.ones((5, 1, 1, 1), "float32")}
    names, fused, apart = both_ways(feed, [y])
    assert names == ["transpose", "elementwise_add+relu+sigmoid"] and np.array_equal(fused[0], apart[0])


@pytest.mark.parametrize("moved", [[0, 2, 1, 3], [0, 3, 1, 2]])
def test_a_convolution_of_a_view_reads_a_copy(moved):
    """Its C kernel reads images in one piece. The convolution is a step of its own here, as no operator follows."""
    x, w = fx.data("x", [2, 18, 18, 18]), fx.data("w", [3, 18, 3, 3])
    y = L.tanh(x)
    b = Builder(fx.default_main_program().global_block())
    made = b.conv2d(L.transpose(y, moved), w)
    rng = np.random.default_rng(0)
    feed = {n: rng.standard_normal(s, dtype="float32") for n, s in (("x", (2, 18, 18, 18)), ("w", (3, 18, 3, 3)))}
    exe = fx.Executor()
    with fx.profiler.profiler() as profile:
        (found,) = exe.run(feed=feed, fetch_list=[made])
    assert [row.kernel for row in profile.rows() if row.name == "conv2d"] == ["native"]
    image = np.tanh(feed["x"]).transpose(moved)
    seen = np.lib.stride_tricks.sliding_window_view(image, (3, 3), (2, 3))
    np.testing.assert_allclose(found, np.einsum("nchwij,ocij->nohw", seen, feed["w"]), atol=1e-4)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_tail_over_rows_of_a_view_may_have_no_rows(rows):
    """Rows of few columns that do not follow one another in memory are copied first; where there are none, nothing is."""
    main = fx.Program("rows")
    with fx.program_guard(main):
        x, w, u = fx.data("x", [-1, 4]), fx.data("w", [4, 3]), fx.data("u", [4, 9])
        columns = L.slice(L.matmul(x, u), [1], [3], [6])
        y = L.elementwise_mul(L.matmul(x, w), columns)
    feed = {"x": np.arange(rows * 4).reshape(rows, 4) - 5, "w": np.arange(12).reshape(4, 3), "u": np.arange(36).reshape(4, 9)}
    (found,) = fx.Executor().run(main, feed={n: a.astype("float32") for n, a in feed.items()}, fetch_list=[y])
    assert np.array_equal(found, (feed["x"] @ feed["w"]) * (feed["x"] @ feed["u"][:, 3:6]))
