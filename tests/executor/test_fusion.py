"""Chains of elementwise operators: what becomes one step, what is stored, and that the answers stay the same bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fluidx as fx
from fluidx import native
from fluidx.executor import Scope
from fluidx.executor.context import RunContext
from fluidx.executor.plan.planner import plan
from fluidx.executor.run.bind import bind
from fluidx.ir import TensorType

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

L = fx.layers


def planned(program, feed, fetch, **options):
    types = {n: TensorType(a.dtype.name, a.shape) for n, a in feed.items()}
    return plan(program, types, [v.name for v in fetch], Scope().arrays, RunContext(), **options)


def steps(p):
    return ["+".join(op.type for op in s.ops) for s in p.steps]


def run(p, feed):
    return bind(p, Scope(), RunContext()).run(feed)


def both_ways(program, feed, fetch):
    """The fetched values of the fused and of the separate steps."""
    return [run(planned(program, feed, fetch, fuse=fuse), feed) for fuse in (True, False)]


def test_bias_and_activation_are_one_step_and_the_sum_is_stored_nowhere():
    x, b = fx.data("x", [-1, 8]), fx.data("b", [8])
    y = L.relu(L.elementwise_add(x, b, axis=1))
    feed = {"x": np.float32(np.arange(24).reshape(3, 8) - 12), "b": np.ones(8, "float32")}
    p = planned(fx.default_main_program(), feed, [y])
    assert steps(p) == ["elementwise_add+relu"] and [s.kernel for s in p.steps] == ["fused"]
    assert set(p.values) == {"x", "b", y.name}
    assert np.array_equal(run(p, feed)[0], np.maximum(feed["x"] + 1, 0))
    assert "elementwise_add + relu" in str(p)


def test_what_is_read_elsewhere_or_fetched_is_stored():
    x = fx.data("x", [-1, 4])
    a = L.scale(x, 2.0)
    b = L.tanh(a)
    c = L.exp(b)
    total = L.reduce_sum(a)
    feed = {"x": np.float32([[0.5, -1, 2, 0]])}
    p = planned(fx.default_main_program(), feed, [c, total])
    assert steps(p)[0] == "scale+tanh+exp" and a.name in p.values and b.name not in p.values
    fetched = planned(fx.default_main_program(), feed, [b, c, total])
    assert b.name in fetched.values
    for found, want in zip(run(fetched, feed), (np.tanh(2 * feed["x"]), np.exp(np.tanh(2 * feed["x"])), 2 * feed["x"].sum()), strict=True):
        np.testing.assert_allclose(found, want if np.ndim(want) else [want], 1e-6)  # NumPy's tanh and exp round otherwise


def test_a_chain_costs_the_bytes_of_what_it_reads_and_stores():
    x = fx.data("x", [-1, 8])
    y = L.relu(L.scale(x, 2.0, bias=1.0))
    p = planned(fx.default_main_program(), {"x": np.ones((4, 8), "float32")}, [y])
    assert p.cost(p.steps[0]) == (4 * 8 * 4, 4 * 8 * 4, 3 * 32)  # a product, a sum and a maximum


def test_a_result_lies_in_the_place_of_an_operand_that_is_free():
    x = fx.data("x", [64, 64])
    h = L.cumsum(x)  # of its own storage, which a feed is not
    y = L.relu(L.scale(h, 2.0))
    p = planned(fx.default_main_program(), {"x": np.ones((64, 64), "float32")}, [y])
    assert steps(p) == ["cumsum", "scale+relu"] and p.arena_bytes == 64 * 64 * 4


@pytest.mark.parametrize(
    "write",
    [
        lambda x: L.relu(L.reduce_sum(L.scale(x, 2.0), dim=[0])),  # another op between
        lambda x: L.elementwise_add(L.scale(x, 2.0), L.tanh(x[0:1])),  # another shape
        lambda x: L.scale(L.cast(x, "int64"), 3.0),  # integers
        lambda x: L.relu(L.cast(L.scale(x, 2.0), "float64")),  # two dtypes
        lambda x: L.assign(L.relu(x), output=x),  # what is fed is overwritten
    ],
)
def test_what_is_no_chain_stays_apart(write):
    x = fx.data("x", [4, 4])
    y = write(x)
    p = planned(fx.default_main_program(), {"x": np.ones((4, 4), "float32")}, [y])
    assert all(len(s.ops) == 1 for s in p.steps)


def test_state_is_written_by_its_own_operator():
    x = fx.data("x", [4])
    counter = L.create_global_var([4], 0.0, "float32", persistable=True)
    L.assign(L.scale(L.scale(x, 2.0), 2.0), output=counter)
    scope = Scope()
    exe = fx.Executor()
    exe.run(fx.default_startup_program(), scope=scope)
    exe.run(feed={"x": np.ones(4, "float32")}, scope=scope)
    assert scope.get(counter.name).tolist() == [4.0] * 4


OPS = [
    lambda v, w: v + w, lambda v, w: v - w, lambda v, w: v * w, lambda v, w: L.elementwise_max(v, w), lambda v, w: L.relu(v),
    lambda v, w: L.tanh(v), lambda v, w: L.sigmoid(w), lambda v, w: L.scale(v, 0.7), lambda v, w: L.scale(v, 0.1, bias=1.0),
    lambda v, w: L.gelu(v), lambda v, w: L.exp(v * 0.1), lambda v, w: 0.0 - v,
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=24),
    st.sampled_from([(1,), (7,), (3, 1030), (33, 5)]),
    st.data(),
)
def test_random_chains_have_the_bits_of_their_operators(picks, shape, data):
    main = fx.Program("chains")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        made = [fx.data("x", list(shape)), fx.data("y", list(shape)), fx.data("b", [shape[-1]])]
        for op, i, j in picks:
            made.append(OPS[op](made[i % len(made)] if len(made[i % len(made)].shape) == len(shape) else made[0], made[j % len(made)]))
    rng = np.random.default_rng(0)
    feed = {v.name: rng.standard_normal(v.shape).astype("float32") for v in made[:3]}
    fetch = [made[-1], *data.draw(st.lists(st.sampled_from(made[3:]), max_size=2))]
    fused, separate = both_ways(main, feed, fetch)
    for a, b in zip(fused, separate, strict=True):
        assert np.array_equal(a, b, equal_nan=True)


def test_a_training_step_has_the_bits_of_separate_steps():
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 16])
        h = L.fc(L.fc(x, 32, act="gelu"), 32, act="relu")
        loss = L.mean(L.square(L.fc(h, 1)))
        fx.optimizer.Adam(1e-2).minimize(loss)
    feed = {"x": np.random.default_rng(0).standard_normal((20, 16)).astype("float32")}
    losses = []
    for fuse in (True, False):
        scope = Scope()
        fx.Executor().run(startup, scope=scope)
        types = {"x": TensorType("float32", (20, 16))}
        p = plan(main, types, [loss.name], scope.arrays, RunContext(), fuse=fuse)
        assert any(len(s.ops) > 1 for s in p.steps) is fuse
        bound = bind(p, scope, RunContext())
        losses.append([bound.run(feed)[0].item() for _ in range(5)])
    assert losses[0] == losses[1]


def test_ranks_plan_a_chain_beside_an_operator_that_reads_only_its_shape():
    """A product with 0.0 reads no value: the gradient that a chain makes for it is stored nowhere."""
    main, startup = fx.Program(), fx.Program()
    main.random_seed = startup.random_seed = 1
    with fx.program_guard(main, startup):
        x = fx.data("x", [-1, 4])
        one = L.fc(x, 4) * 0.0 + 1.0
        loss = L.mean(L.tanh(one * L.fc(x, 4)))
        fx.optimizer.SGD(0.125).minimize(loss)
    feed = {"x": np.float32(np.arange(16).reshape(4, 4) % 5)}
    exe = fx.Executor()
    exe.run(startup)
    want = [exe.run(main, feed=feed, fetch_list=[loss])[0].item() for _ in range(3)]
    t = fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as ranks:
        ranks.run_startup()
        # sums are added in another order
        np.testing.assert_allclose([ranks.run(feed=feed, fetch_list=[loss])[0].item() for _ in range(3)], want, 1e-5)
