"""16-bit floats: what a plan puts aside for them, and that every op's result is its float32 result, rounded."""

from itertools import product

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor.context import RunContext
from fluidx.executor.plan.planner import plan
from fluidx.executor.plan.storage_proof import check_storage
from fluidx.executor.run.bind import bind
from fluidx.executor.scope import Scope
from fluidx.ir import Builder, Effect, Program, ProgramError, TensorType, all_ops, np_dtype, opdef
from fluidx.testing.models import TestModel, train_ranks, train_single
from fluidx.testing.reference import type_of

OPS = [
    d
    for d in all_ops()
    if not d.name.startswith("t_")
    and d.effect not in (Effect.COLLECTIVE, Effect.P2P)
    and d.control.run_reference is None
    and d.in_slots
    and not d.control.sized_by_values  # they are no part of a plan
    and d.name != "stash_write"  # which only writes in place, what a plan keeps of several rounds
]
NATIVELY = pytest.mark.parametrize(
    "natively", [False, pytest.param(True, marks=pytest.mark.skipif(bool(native.why_not()), reason="the extension is not built"))]
)


def f16(*shape):
    return TensorType("float16", shape)


def cast(args, source, to):
    def one(a):
        return cast(a, source, to) if isinstance(a, list) else a if a is None or a.dtype.name != source else a.astype(np_dtype(to))

    return [one(a) for a in args]


def flat(args):
    return [v for a in args if a is not None for v in (a if isinstance(a, list) else [a])]


def through_a_plan(definition, args, attrs, natively):
    """The results of a program of one operator."""
    program = Program("one")
    block, feed, operands = program.global_block(), {}, []
    for slot, a in zip(definition.in_slots, args, strict=True):
        made = []
        for v in flat([a]):
            made.append(block.create_var(f"v{len(feed)}", v.shape, v.dtype.name, is_data=True))
            feed[made[-1].name] = v
        operands.append(made if slot.many else made[0] if made else None)
    types = definition.infer(*map(type_of, args), **definition.complete_attrs(attrs))
    many = [len(types)] if isinstance(types, list) else [len(t) for t in types if isinstance(t, list)] if isinstance(types, tuple) else []
    outs = Builder(block).emit(definition.name, *operands, n_out=many[0] if many else 0, **attrs)
    fetch = [v.name for v in flat(list(outs) if isinstance(outs, tuple) else [outs])]
    ctx = RunContext()
    planned = plan(program, {n: type_of(v) for n, v in feed.items()}, fetch, {}, ctx, natively=natively)
    check_storage(planned)
    return bind(planned, Scope(), ctx).run(feed)


@pytest.mark.parametrize("definition", OPS, ids=lambda d: d.name)
def test_a_result_is_that_of_float32_rounded_once(definition):
    ways = [False] if native.why_not() else [False, True]
    for sample, dtype, natively in product(definition.samples(), ["float16", "bfloat16"], ways):
        args = [*sample.args, *[None] * (len(definition.in_slots) - len(sample.args))]
        narrow = cast(args, "float32", dtype)
        try:
            for given in (narrow, cast(narrow, dtype, "float32")):
                definition.infer(*map(type_of, given), **definition.complete_attrs(sample.attrs))
        except ProgramError:  # the op does not take this dtype here, or nothing else
            continue
        found = through_a_plan(definition, narrow, sample.attrs, natively)
        wide = through_a_plan(definition, cast(narrow, dtype, "float32"), sample.attrs, natively)
        for a, b in zip(found, wide, strict=True):
            with np.errstate(all="ignore"):
                want = b.astype(a.dtype) if a.dtype == np_dtype(dtype) else b
            assert a.dtype == want.dtype
            a, want = a.astype("float64"), want.astype("float64")
            if natively and dtype == "bfloat16" and definition.name == "scaled_dot_product_attention" and native.multiplies_pairs():
                # weights are rounded to be multiplied, which changes a mean of values by up to 2^-8 of the largest one, and its rounding
                np.testing.assert_allclose(a, want, rtol=0, atol=2.0**-6 * np.abs(want[np.isfinite(want)]).max(initial=0))
            else:
                np.testing.assert_array_equal(a, want)


@pytest.fixture
def cumsum_of_halves():
    program = Program("sums")
    with fx.program_guard(program):
        fx.layers.cumsum(fx.layers.reshape(fx.data("x", [4, 8], "float16"), [8, 4]))
    return program


def test_a_c_kernel_that_takes_16_bits_gets_them():
    if native.why_not():
        pytest.skip(native.why_not())
    program = Program("relu")
    with fx.program_guard(program):
        y = fx.layers.relu(fx.data("x", [4, 8], "float16"))
    (step,) = plan(program, {"x": f16(4, 8)}, [y.name], {}, RunContext(), natively=True).steps
    assert step.kernel == "native" and step.scratch == ()


@NATIVELY
def test_float32_stands_aside_for_operand_and_result(cumsum_of_halves, natively):
    out = cumsum_of_halves.global_block().ops[-1].output_arg_names
    planned = plan(cumsum_of_halves, {"x": f16(4, 8)}, out, {}, RunContext(), natively=natively)
    view, step = planned.steps
    assert view.kernel == "view" and view.scratch == ()  # what moves bytes takes them as they are
    aside = TensorType("float32", (8, 4))
    assert [(s.type, s.reads) for s in step.scratch if s.of] == [(aside, True), (aside, False)]
    assert planned.arena_bytes >= 2 * 8 * 4 * 4  # the peak counts both
    assert step.kernel != "native"


def test_conversions_and_kernel_are_one_call_into_c():
    if native.why_not():
        pytest.skip(native.why_not())
    program = Program("pooled")
    with fx.program_guard(program):
        y = fx.layers.pool2d(fx.data("x", [2, 3, 4, 4], "float16"), 2, "max", 2)
    ctx = RunContext()
    bound = bind(plan(program, {"x": f16(2, 3, 4, 4)}, [y.name], {}, ctx, natively=True), Scope(), ctx)
    ((_, step),) = bound.compute.steps
    assert [call.fn for call in step.calls] == ["copy", "pool_f32", "copy"]


@NATIVELY
def test_nothing_is_converted_of_which_only_the_shape_is_read(natively):
    program = Program("rows")
    block = program.global_block()
    for name, shape, dtype in (("table", (1000, 4), "float16"), ("ids", (3,), "int64"), ("g", (3, 4), "float16")):
        block.create_var(name, shape, dtype, is_data=True)
    block.append_op("gather_grad", {"X": "table", "Index": "ids", "Out@GRAD": "g"}, {"X@GRAD": "dx"})
    feed = {"table": np.zeros((1000, 4), "float16"), "ids": np.array([7, 0, 7]), "g": np.float16([[1] * 4, [2] * 4, [3] * 4])}
    ctx = RunContext()
    planned = plan(program, {n: type_of(v) for n, v in feed.items()}, ["dx"], {}, ctx, natively=natively)
    assert [(s.of, s.reads) for s in planned.steps[0].scratch if s.of] == [("g", True), ("dx", False)]
    (dx,) = bind(planned, Scope(), ctx).run(feed)
    assert dx[7].tolist() == [4] * 4 and dx[0].tolist() == [2] * 4 and dx.sum() == 24


def test_on_a_gpu_the_blas_takes_two_matrices_of_halves():
    for op in (opdef("matmul"), opdef("mul")):
        assert not op.widens("cuda", [f16(2, 3)])
        assert op.widens("cuda", [f16(4, 2, 3)]) and op.widens("cpu", [f16(2, 3)])


def test_what_only_moves_elements_takes_them():
    takes = {d.name for d in OPS if not d.widens("cpu", [f16(2, 3)])}
    assert {"concat", "gather", "transpose", "cast", "where", "lookup_table", "print"} <= takes
    assert takes.isdisjoint({"relu", "sum", "scatter", "pad2d_grad", "gather_grad", "softmax", "adam", "dropout", "reduce_max"})


def test_a_branch_and_a_loop_over_halves():
    main = Program("control")
    with fx.program_guard(main, Program("startup")):
        x = fx.data("x", [3], "float16")
        big = fx.layers.reduce_sum(fx.layers.cast(x, "float32")) > 3.0
        y = fx.layers.cond(big, lambda: fx.layers.tanh(x), lambda: fx.layers.exp(x))
        k, total = fx.layers.fill_constant([1], "int64", 0), fx.layers.assign(x)
        _, total = fx.layers.while_loop(lambda k, t: k < 3, lambda k, t: [k + 1, fx.layers.elementwise_add(t, x)], [k, total])
    exe = fx.Executor()
    for value in (0.1, 2.3):
        a = np.full(3, value, "float16")
        found, added = exe.run(main, feed={"x": a}, fetch_list=[y, total])
        want = (np.tanh if value > 1 else np.exp)(a.astype("float64")).astype("float16")
        sums = a
        for _ in range(3):
            sums = (sums.astype("float32") + a.astype("float32")).astype("float16")
        assert found.dtype == added.dtype == np.float16 and added.tolist() == sums.tolist()
        np.testing.assert_allclose(found, want, rtol=1e-3)  # a unit in the last place of float16


def mixed(optimizer=None, dtype="float16"):
    """A classifier that computes in 16 bits between a cast of its input and the loss."""
    main, startup = Program("mixed"), Program("mixed_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, label = fx.data("x", [-1, 12], "float32"), fx.data("label", [-1, 1], "int64")
        h = fx.layers.fc(fx.layers.cast(x, dtype), 16, act="relu")
        h = fx.layers.fc(fx.layers.layer_norm(h), 5)
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(fx.layers.cast(h, "float32"), label))
        _, pairs = (optimizer or fx.optimizer.SGD(0.1)).minimize(loss)

    def feed(rows, seed=0):
        rng = np.random.default_rng(seed)
        return {"x": rng.standard_normal((rows, 12), "float32"), "label": rng.integers(0, 5, (rows, 1))}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


@pytest.mark.parametrize("dtype, rough", [("float16", 4e-3), ("bfloat16", 3e-2)])  # some units in the last place
@pytest.mark.parametrize("optimizer", [None, "Adam"])
def test_a_mixed_model_trains_alike_on_all_bodies_and_as_in_float32(dtype, rough, optimizer, monkeypatch):
    def train(dtype):
        m = mixed(fx.optimizer.Adam(0.01) if optimizer else None, dtype)
        losses, scope = train_single(m, [m.feed(10, k) for k in range(4)], [m.loss, m.gradients[0][1]])
        return losses, {p: scope.get(p) for p, _ in m.gradients}

    with_c, state = train(dtype)
    monkeypatch.setenv("FLUIDX_KERNELS", "numpy")
    by_numpy, other = train(dtype)
    reference, _ = train("float32")
    for (a, da), (b, db), (c, dc) in zip(with_c, by_numpy, reference, strict=True):
        assert da.dtype == db.dtype == np_dtype(dtype)
        np.testing.assert_allclose(a, b, rtol=rough)
        np.testing.assert_allclose(a, c, rtol=4 * rough)
        np.testing.assert_allclose(da.astype("float32"), db.astype("float32"), atol=rough)
        np.testing.assert_allclose(da.astype("float32"), dc, atol=4 * rough)
    for name, value in state.items():
        np.testing.assert_allclose(value.astype("float32"), other[name].astype("float32"), atol=rough)


@NATIVELY
@pytest.mark.parametrize("strategy", ["data_parallel", "zero1"])
def test_a_mixed_model_trains_on_two_ranks_as_on_one(strategy, natively, monkeypatch):
    monkeypatch.setenv("FLUIDX_KERNELS", "auto" if natively else "numpy")
    m = mixed(fx.optimizer.Momentum(0.1, 0.9))
    feeds = [m.feed(8, k) for k in range(3)]
    want, scope = train_single(m, feeds, [m.loss])
    found, state = train_ranks(m, getattr(fx.transpiler.strategies, strategy)(), 2, feeds, [m.loss])
    for (a,), (b,) in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=4e-3)  # gradients are sums of halves that were rounded on the ranks
    for name, _ in m.gradients:
        assert state[name].dtype == scope.get(name).dtype
        np.testing.assert_allclose(state[name].astype("float32"), scope.get(name).astype("float32"), atol=4e-3)
