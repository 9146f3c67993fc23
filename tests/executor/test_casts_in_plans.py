"""Casts between float32 and 16 bits in plans: the kernels around them make them."""

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor.context import RunContext
from fluidx.executor.plan.casts import _ahead
from fluidx.executor.plan.planner import plan
from fluidx.executor.plan.storage_proof import check_storage
from fluidx.executor.run.bind import bind
from fluidx.executor.scope import Scope
from fluidx.ir import TensorType, np_dtype
from fluidx.ir.operator import Operator
from fluidx.testing.reference import type_of

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason="the extension is not built")
L = fx.layers


def dense(x):
    return L.fc(L.fc(x, 24, act="gelu"), 16, act="relu")


def transformer(x):
    h = L.reshape(L.fc(x, 48), [-1, 4, 12])
    a = L.fc(L.layer_norm(h, begin_norm_axis=2), 12, num_flatten_dims=2, act="gelu")
    h = h + L.dropout(L.fc(a, 12, num_flatten_dims=2), 0.25, seed=3, dropout_implementation="upscale_in_train")
    return L.reshape(L.layer_norm(h, begin_norm_axis=2), [-1, 48])


def residual(x):
    h = L.relu(L.batch_norm(L.conv2d(L.reshape(x, [-1, 1, 4, 4]), 4, 3, padding=1)))
    h = L.relu(h + L.batch_norm(L.conv2d(h, 4, 3, padding=1)))
    return L.reshape(L.pool2d(h, 2, "avg", 2), [-1, 16])


NETS = {"dense": dense, "transformer": transformer, "residual": residual}
OPTIMIZERS = {"Adam": lambda: fx.optimizer.Adam(0.01), "Momentum": lambda: fx.optimizer.Momentum(0.1, 0.9)}


def mixed(net, optimizer, dtype="bfloat16"):
    main, startup = fx.Program("mixed"), fx.Program("mixed_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, label = fx.data("x", [-1, 16], "float32"), fx.data("label", [-1, 1], "int64")
        loss = L.mean(L.softmax_with_cross_entropy(L.fc(NETS[net](x), 5), label))
        fx.mixed_precision.decorate(OPTIMIZERS[optimizer](), dtype=dtype, init_loss_scaling=1.0, use_dynamic_loss_scaling=False).minimize(
            loss
        )
    scope = Scope()
    fx.Executor().run(startup, scope=scope)
    rng = np.random.default_rng(0)
    return main, loss, scope, {"x": rng.standard_normal((6, 16), "float32"), "label": rng.integers(0, 5, (6, 1))}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", NETS)
def test_a_step_has_no_casts_but_those_of_weights_and_data(net, optimizer):
    main, loss, scope, feed = mixed(net, optimizer)
    planned = plan(main, {n: type_of(v) for n, v in feed.items()}, [loss.name], scope.arrays, RunContext())
    check_storage(planned)
    given = {p.name for p in main.all_parameters()} | {*feed}
    casts = [op.input_arg_names[0] for step in planned.steps for op in step.ops if op.type == "cast"]
    # a value that is only shaped differently is the same memory
    views = {op.output_arg_names[0]: op.input_arg_names[0] for s in planned.steps if s.kernel == "view" for op in s.ops}
    assert len(casts) >= len([n for n in given if ".w_" in n and "norm" not in n])
    assert {views.get(n, n) for n in casts} <= given


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("net", NETS)
def test_no_bit_changes(net, dtype):
    """With casts as steps of their own, and each operator as one."""

    def losses(fuse):
        main, loss, scope, feed = mixed(net, "Momentum", dtype)
        ctx = RunContext()
        bound = bind(plan(main, {n: type_of(v) for n, v in feed.items()}, [loss.name], scope.arrays, ctx, fuse=fuse), scope, ctx)
        return [np.array(bound.run(feed)[0]) for _ in range(3)], {p.name: np.array(scope.get(p.name)) for p in main.all_parameters()}

    (one, state), (two, other) = losses(True), losses(False)
    np.testing.assert_array_equal(one, two)
    for name, value in state.items():
        np.testing.assert_array_equal(value, other[name])


def types(**given):
    return {n: TensorType(*t) for n, t in given.items()}


def steps(main, feeds, fetch):
    planned = plan(main, feeds, fetch, {}, RunContext(), natively=True)
    return [(s.kernel, [op.type for op in s.ops], [*s.reads], [*s.writes]) for s in planned.steps]


@pytest.fixture
def main():
    main = fx.Program("casts")
    with fx.unique_name.guard(), fx.program_guard(main):
        yield main


def test_a_chain_loads_one_type_and_stores_another(main):
    x = fx.data("x", [8, 4], "bfloat16")
    y = L.cast(L.relu(L.cast(x, "float32") * 2.0), "float16")
    ((kernel, _, reads, writes),) = steps(main, types(x=("bfloat16", (8, 4))), [y.name])
    assert (reads, writes[-1]) == (["x"], y.name)
    ctx = RunContext()
    bound = bind(plan(main, types(x=("bfloat16", (8, 4))), [y.name], {}, ctx, natively=True), Scope(), ctx)
    value = np.linspace(-3, 3, 32).reshape(8, 4).astype(bound.arrays["x"].dtype)
    (found,) = bound.run({"x": value})
    np.testing.assert_array_equal(found, np.maximum(value.astype("float32") * 2, 0).astype("float16"))


def test_a_result_between_two_operators_of_a_chain_is_rounded(main):
    """1 + 2^-8 is 1 in bfloat16, so subtracting 1 leaves nothing."""
    x = fx.data("x", [4], "bfloat16")
    y = L.scale(L.scale(x, bias=1.0), bias=-1.0)
    ctx = RunContext()
    planned = plan(main, types(x=("bfloat16", (4,))), [y.name], {}, ctx, natively=True)
    assert [len(s.ops) for s in planned.steps] == [2]
    bound = bind(planned, Scope(), ctx)
    (found,) = bound.run({"x": np.full(4, 2.0**-8).astype(bound.arrays["x"].dtype)})
    assert found.astype("float64").tolist() == [0, 0, 0, 0]


def test_a_cast_that_is_fetched_or_read_by_others_stays(main):
    x = fx.data("x", [8, 4], "bfloat16")
    wide = L.cast(x, "float32")
    y = L.softmax(wide)
    assert [ops for _, ops, _, _ in steps(main, types(x=("bfloat16", (8, 4))), [y.name])] == [["softmax"]]
    assert [ops for _, ops, _, _ in steps(main, types(x=("bfloat16", (8, 4))), [y.name, wide.name])] == [["cast"], ["softmax"]]
    z = L.cumsum(wide)  # without a C kernel
    assert [ops for _, ops, _, _ in steps(main, types(x=("bfloat16", (8, 4))), [y.name, z.name])] == [["cast"], ["softmax"], ["cumsum"]]


def test_a_float32_result_that_is_kept_is_not_written_in_16_bits(main):
    x = fx.data("x", [8, 4], "float32")
    y = L.softmax(x)
    half = L.cast(y, "float16")
    given = types(x=("float32", (8, 4)))
    assert [ops for _, ops, _, _ in steps(main, given, [half.name])] == [["softmax"]]
    assert [ops for _, ops, _, _ in steps(main, given, [half.name, y.name])] == [["softmax"], ["cast"]]
    wide = L.cast(half, "float32")  # what was rounded stays rounded
    (found,) = fx.Executor().run(main, feed={"x": np.arange(32, dtype="float32").reshape(8, 4)}, fetch_list=[wide])
    np.testing.assert_array_equal(found, found.astype("float16").astype("float32"))


def test_a_cast_of_a_bias_does_not_part_a_product_from_what_follows_it():
    main, loss, scope, feed = mixed("dense", "Momentum")
    planned = plan(main, {n: type_of(v) for n, v in feed.items()}, [loss.name], scope.arrays, RunContext())
    order = [[op.type for op in step.ops] for step in planned.steps]
    for name, act in (("fc_0", "gelu"), ("fc_1", "relu")):
        (at,) = [k for k, s in enumerate(planned.steps) if s.op.output_arg_names == (f"{name}.tmp_0",)]
        (bias,) = [k for k, s in enumerate(planned.steps) if s.op.type == "cast" and s.op.input_arg_names == (f"{name}.b_0",)]
        assert bias < at  # rows of 24 are too short for a tail
        assert order[at : at + 2] == [["mul"], ["elementwise_add", act]]


# -- names that are assigned again ----------------------------------------------------------------------------------------------------


def computed(main, feed, fetch):
    return [np.asarray(a, "float64") for a in fx.Executor().run(main, feed=feed, fetch_list=fetch)]


def softmax_of(x):
    e = np.exp(np.asarray(x, "float64") - np.max(np.asarray(x, "float64"), 1, keepdims=True))
    return e / e.sum(1, keepdims=True)


HALF = np.linspace(-2, 2, 32).reshape(8, 4).astype("float16")
WIDE = np.linspace(3, -1, 32).reshape(8, 4).astype("float32") ** 2


def append(main, op, x, out, **attrs):
    main.global_block().append_op(type=op, inputs={"X": [x]}, outputs={"Out": [out]}, attrs=attrs)


def test_a_reader_of_a_name_that_got_another_value_reads_that(main):
    h, w = fx.data("h", [8, 4], "float16"), fx.data("w", [8, 4], "float32")
    m = L.cast(h, "float32")
    before = L.softmax(m)
    L.assign(w, output=m)
    after = L.softmax(m)
    one, two = computed(main, {"h": HALF, "w": WIDE}, [before, after])
    np.testing.assert_allclose(one, softmax_of(HALF), atol=1e-6)
    np.testing.assert_allclose(two, softmax_of(WIDE), atol=1e-6)


def test_a_cast_into_a_name_that_has_a_value_waits_for_its_readers(main):
    h, w = fx.data("h", [8, 4], "float16"), fx.data("w", [8, 4], "float32")
    g = L.scale(h, scale=1.0)
    source = L.softmax(w)
    first = L.softmax(g)
    append(main, "cast", source, g, dtype="float16")
    one, two = computed(main, {"h": HALF, "w": WIDE}, [first, g])
    np.testing.assert_allclose(one, softmax_of(HALF), atol=1e-3)
    np.testing.assert_allclose(two, softmax_of(WIDE), atol=1e-3)


def test_a_cast_into_a_fed_name_waits_for_the_readers_of_the_feed(main):
    h, w = fx.data("h", [8, 4], "float16"), fx.data("w", [8, 4], "float32")
    source = L.softmax(w)
    first = L.relu(h)
    append(main, "cast", source, h, dtype="float16")
    one, two = computed(main, {"h": HALF, "w": WIDE}, [first, L.scale(h, scale=2.0)])
    np.testing.assert_array_equal(one, np.maximum(HALF, 0))
    np.testing.assert_allclose(two, 2 * softmax_of(WIDE), atol=2e-3)


def test_a_value_that_its_reader_overwrites_is_read_from_the_cast(main):
    """h becomes softmax(float32(h)): the rows may not be overwritten while they are read."""
    h = fx.data("h", [8, 4], "float16")
    wide = L.cast(h, "float32")
    append(main, "softmax", wide, wide, axis=-1)
    append(main, "cast", wide, h, dtype="float16")
    (found,) = computed(main, {"h": HALF}, [L.scale(h, scale=1.0)])
    np.testing.assert_allclose(found, softmax_of(HALF), atol=1e-3)


def test_a_branch_that_assigns_a_cast_value_is_seen(main):
    h, w, yes = fx.data("h", [8, 4], "float16"), fx.data("w", [8, 4], "float32"), fx.data("yes", [1], "bool")
    m = L.cast(h, "float32")
    chosen = L.cond(yes, lambda: L.softmax(m), lambda: L.softmax(w))
    L.assign(chosen, output=m)
    last = L.relu(m)
    for value, want in ((True, HALF), (False, WIDE)):
        (found,) = computed(main, {"h": HALF, "w": WIDE, "yes": np.array([value])}, [last])
        np.testing.assert_allclose(found, softmax_of(want), atol=1e-6)


ROUNDED = {"a": "float16", "b": "float16", "c": "float16", "p": "float32", "q": "float32", "r": "float32"}
SIMPLE = {
    "softmax": softmax_of, "relu": lambda x: np.maximum(x, 0), "assign": lambda x: x, "scale": lambda x: 2 * x, "cast": lambda x: x,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_programs_that_assign_few_names_again_and_again(seed):
    """Each operator in turn, each result rounded to the type of its name."""
    rng = np.random.default_rng(seed)
    values = {n: rng.uniform(-2, 2, (8, 4)).astype(d) for n, d in ROUNDED.items()}
    feed = dict(values)
    main = fx.Program("again")
    with fx.unique_name.guard(), fx.program_guard(main):
        names = {n: fx.data(n, [8, 4], d) for n, d in ROUNDED.items()}
        for _ in range(14):
            x, out = rng.choice([*names], 2)
            alike = [n for n in ROUNDED if ROUNDED[n] == ROUNDED[x]]
            op = "cast" if ROUNDED[x] != ROUNDED[out] else rng.choice([op for op in SIMPLE if op != "cast"])
            assert op == "cast" or out in alike
            attrs = {"cast": {"dtype": ROUNDED[out]}, "scale": {"scale": 2.0}, "softmax": {"axis": -1}}.get(op, {})
            append(main, op, names[x], names[out], **attrs)
            values[out] = SIMPLE[op](values[x].astype("float64")).astype(ROUNDED[out])
        results = [L.scale(v, scale=1.0) for v in names.values()]
    for found, want in zip(computed(main, feed, results), values.values(), strict=True):
        np.testing.assert_allclose(found, want.astype("float64"), rtol=2e-2, atol=2e-3)


def test_messages_that_start_together_stay_together():
    """No cast comes between them, though what reads the last of them reads the cast, too."""
    receives = [Operator("recv", {}, {"Out": (n,)}, {"peer": 1, "batch": "swap", "shape": [8, 4], "dtype": "float32"}) for n in "ab"]
    cast = Operator("cast", {"X": ("h",)}, {"Out": ("wide",)}, {"dtype": "float32"})
    add = Operator("elementwise_add", {"X": ("b",), "Y": ("wide",)}, {"Out": ("y",)}, {"axis": -1})
    assert [op.type for op in _ahead([*receives, cast, add])] == ["recv", "recv", "cast", "elementwise_add"]


def test_products_round_weights_themselves():
    main, loss, scope, feed = mixed("dense", "Momentum")
    planned = plan(main, {n: type_of(v) for n, v in feed.items()}, [loss.name], scope.arrays, RunContext())
    cast = {op.input_arg_names[0] for step in planned.steps for op in step.ops if op.type == "cast"}
    assert not [n for n in cast if ".w_" in n]
    reads = [step.reads for step in planned.steps if step.op.type in ("mul", "matmul")]
    assert all(any(n == f"fc_{k}.w_0" for names in reads for n in names) for k in range(3))


def test_a_product_of_two_casts_rounds_the_weight_alone(main):
    """1 + 2^-9 is 1 in bfloat16, whichever of the operands has it."""
    x = fx.data("x", [8, 4], "float32")
    w = L.create_parameter([4, 4], "float32", name="w")
    y = L.matmul(L.cast(x, "bfloat16"), L.cast(w, "bfloat16"))
    held = {"w": np.full((4, 4), 1 + 2.0**-9, "float32")}
    planned = plan(main, types(x=("float32", (8, 4))), [y.name], held, RunContext(), natively=True)
    cast, product = [s.op for s in planned.steps]
    assert cast.input_arg_names == ("x",) and product.input_arg_names == (*cast.output_arg_names, "w")
    scope = Scope()
    scope.set("w", held["w"])
    (found,) = fx.Executor().run(main, feed={"x": np.full((8, 4), 1 + 2.0**-9, "float32")}, fetch_list=[y], scope=scope)
    np.testing.assert_array_equal(found.astype("float32"), np.full((8, 4), 4, "float32"))


def test_a_float32_product_does_not_round(main):
    """A bfloat16 operand is widened for it: the other one keeps its digits."""
    x, h = fx.data("x", [8, 4], "float32"), fx.data("h", [4, 4], "bfloat16")
    y = L.matmul(x, L.cast(h, "float32"))
    value = np.full((8, 4), 1 + 2.0**-9, "float32")
    half = np.ones((4, 4), np_dtype("bfloat16"))
    (found,) = fx.Executor().run(main, feed={"x": value, "h": half}, fetch_list=[y])
    np.testing.assert_array_equal(found, 4 * value)


def test_a_cast_of_a_weight_stays_where_other_operators_read_it(main):
    x = fx.data("x", [8, 4], "bfloat16")
    half = L.cast(L.create_parameter([4, 4], "float32", name="w"), "bfloat16")
    y, z = L.matmul(x, half), L.cumsum(half)
    planned = plan(main, types(x=("bfloat16", (8, 4))), [y.name, z.name], {"w": np.ones((4, 4), "float32")}, RunContext(), natively=True)
    assert half.name in planned.steps[[s.op.type for s in planned.steps].index("matmul")].op.input_arg_names


def kept(net, dtype):
    """Bytes of the arena that forward leaves for backward, for 256 rows."""
    main, loss, scope, feed = mixed(net, "Momentum", dtype) if dtype != "float32" else whole(net)
    feeds = {n: TensorType(v.dtype.name, (256, *v.shape[1:])) for n, v in feed.items()}
    planned = plan(main, feeds, [loss.name], scope.arrays, RunContext())
    first = next(k for k, s in enumerate(planned.steps) if any("@GRAD" in n for n in s.writes))
    return sum(b.nbytes for b in planned.buffers if b.kind == "arena" and b.start < first <= b.stop)


def whole(net):
    main, startup = fx.Program("whole"), fx.Program("whole_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, label = fx.data("x", [-1, 16], "float32"), fx.data("label", [-1, 1], "int64")
        loss = L.mean(L.softmax_with_cross_entropy(L.fc(NETS[net](x), 5), label))
        OPTIMIZERS["Momentum"]().minimize(loss)
    scope = Scope()
    fx.Executor().run(startup, scope=scope)
    return main, loss, scope, {"x": np.zeros((6, 16), "float32"), "label": np.zeros((6, 1), "int64")}


@pytest.mark.parametrize("net", ["dense", "transformer"])
def test_forward_leaves_half_the_bytes_for_backward(net):
    assert kept(net, "bfloat16") <= 0.6 * kept(net, "float32")


def test_kernels_without_16_bit_operands_get_float32(main):
    """Points in float16, samples of float32, which are cast back; and a product with 8-bit weights whose result is cast."""
    x, points = fx.data("x", [1, 1, 2, 3]), fx.data("points", [1, 2, 2, 2], "float16")
    y = L.cast(L.grid_sampler(x, L.cast(points, "float32")), "float16")
    h, w, scale = fx.data("h", [3, 16]), fx.data("w", [64, 1, 16], "uint8"), fx.data("scale", [64, 1])
    product = main.global_block().create_var(name="product", shape=[3, 64], dtype="float32")
    main.global_block().append_op(
        type="matmul_n_bits", inputs={"X": [h], "Y": [w], "Scale": [scale]}, outputs={"Out": [product]}, attrs={"bits": 8}
    )
    z = L.cast(product, "float16")
    image = np.arange(6, dtype="float32").reshape(1, 1, 2, 3)
    corners = np.array([[[-1, -1], [1, -1]], [[-1, 1], [1, 1]]], "float16")[None]
    rows, weights = np.ones((3, 16), "float32"), np.full((64, 1, 16), 130, "uint8")  # 130 - 128 is 2
    feed = {"x": image, "points": corners, "h": rows, "w": weights, "scale": np.arange(64, dtype="float32")[:, None]}
    found = computed(main, feed, [y, z])
    np.testing.assert_array_equal(found[0].reshape(-1), [0, 2, 3, 5])
    np.testing.assert_array_equal(found[1], np.tile(np.arange(64) * 32, (3, 1)))
