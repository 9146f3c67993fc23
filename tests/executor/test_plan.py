"""Plans: the executor's answers are those of the slow interpreter, in little memory and without touching what is not its own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fluidx as fx
from fluidx import native
from fluidx.executor.plan.allocation import Interval, assign
from fluidx.testing.reference import interpret
from tests.sweep import examples

L = fx.layers
SHAPES = [(3, 4), (4, 3), (12,), (2, 6), (1, 12)]
UNARY = ["relu", "abs", "scale", "assign", "square"]
BINARY = ["elementwise_add", "elementwise_sub", "elementwise_max", "elementwise_min", "elementwise_mul"]


class Writer:
    """Appends operators drawn at random; values stay small integers, so any order of additions gives the same bits."""

    def __init__(self, draw):
        self.draw = draw
        self.program = fx.Program("random")
        self.block = self.program.global_block()
        self.shapes = {}
        for k in range(2):
            self.declare(f"x{k}", is_data=True)
            self.declare(f"w{k}", persistable=True)
        self.state = [n for n in self.shapes if n[0] == "w"]
        self.data = [n for n in self.shapes if n[0] == "x"]

    def declare(self, name, **kind):
        shape = self.draw(st.sampled_from(SHAPES))
        self.block.create_var(name, shape, "float32", **kind)
        self.shapes[name] = shape

    def pick(self, shape=None):
        return self.draw(st.sampled_from([n for n, s in self.shapes.items() if shape is None or s == shape]))

    def target(self, shape):
        """A new name, or one that has a value already and loses it: feeds and state too."""
        old = [n for n, s in self.shapes.items() if s == shape]
        if old and self.draw(st.integers(0, 2)) == 0:
            return self.draw(st.sampled_from(old))
        return f"v{len(self.shapes)}"

    def emit(self, op, inputs, out_shape, **attrs):
        out = self.target(out_shape)
        self.block.append_op(op, inputs, {"Out": out}, attrs)
        self.shapes[out] = out_shape

    def clip(self, name):
        """Into a small range, in place: the values stay exact."""
        self.block.append_op("clip", {"X": name}, {"Out": name}, {"min": -4.0, "max": 4.0})

    def step(self):
        kind = self.draw(
            st.sampled_from(["unary", "binary", "binary", "view", "view", "slice", "transpose", "reduce", "matmul", "increment"])
        )
        x = self.pick()
        shape = self.shapes[x]
        if kind == "unary":
            op = self.draw(st.sampled_from(UNARY))
            self.emit(op, {"X": x}, shape, **({"scale": -1.0, "bias": 1.0} if op == "scale" else {}))
        elif kind == "binary":
            self.emit(self.draw(st.sampled_from(BINARY)), {"X": x, "Y": self.pick(shape)}, shape)
        elif kind == "view":
            new = self.draw(st.sampled_from(SHAPES)) if np.prod(shape) == 12 else (*shape, 1)
            self.emit("reshape", {"X": x}, new, shape=new)
        elif kind == "slice":
            rows = self.draw(st.integers(1, shape[0]))
            self.emit("slice", {"Input": x}, (rows, *shape[1:]), axes=(0,), starts=(shape[0] - rows,), ends=(shape[0],))
        elif kind == "transpose" and len(shape) == 2:
            self.emit("transpose", {"X": x}, shape[::-1], axis=(1, 0))
        elif kind == "reduce" and len(shape) == 2:
            self.emit("reduce_sum", {"X": x}, (shape[0], 1), dim=(1,), keep_dim=True)
        elif kind == "matmul" and len(shape) == 2:
            self.emit("matmul", {"X": x, "Y": self.pick(shape)}, (shape[0], shape[0]), transpose_y=True)
        elif kind == "increment":
            self.block.append_op("scale", {"X": x}, {"Out": x}, {"scale": 1.0, "bias": 1.0})
        self.clip(self.program.ops[-1].output_arg_names[0] if self.program.ops else x)


@st.composite
def programs(draw):
    w = Writer(draw)
    for _ in range(draw(st.integers(1, 14))):
        w.step()
    fetch = draw(st.lists(st.sampled_from(sorted(w.shapes)), min_size=1, max_size=5))
    return w, fetch


@settings(max_examples=examples(150, 300), deadline=None)
@given(programs())
def test_a_random_program_gives_the_interpreters_bits_twice(case):
    w, fetch = case
    rng = np.random.default_rng(0)
    state = {n: rng.integers(-3, 4, w.shapes[n]).astype("float32") for n in w.state}
    scope, exe = fx.Scope(), fx.Executor()
    for n, a in state.items():
        scope.set(n, a)
    for run in range(2):
        feed = {n: rng.integers(-3, 4, w.shapes[n]).astype("float32") for n in w.data}
        given_feed = {n: a.copy() for n, a in feed.items()}
        want = interpret(w.program, feed, state)
        found = exe.run(w.program, feed=feed, fetch_list=fetch, scope=scope)
        for n, a in zip(fetch, found, strict=True):
            assert np.array_equal(a, want[n]), f"run {run}: {n}\n{w.program}"
        state = {n: want[n] for n in state}
        for n in state:
            assert np.array_equal(scope.get(n), state[n]), f"run {run}: state {n}\n{w.program}"
        for n in feed:
            assert np.array_equal(feed[n], given_feed[n]), f"the feed {n} was changed\n{w.program}"


def plan_of(exe):
    (bound,) = {id(b): b for b, _, _ in exe._ready.values()}.values()
    return bound.plan


def chain(length, rows=1000):
    x = fx.data("x", [rows], "float32")
    y = x
    for _ in range(length):
        y = L.exp(L.cumsum(y * 0.0))  # cumsum cannot work in place
    return y, {"x": np.zeros(rows, "float32")}


@pytest.mark.parametrize("length", [3, 50])
def test_a_long_chain_needs_two_buffers(length):
    y, feed = chain(length)
    exe = fx.Executor()
    (found,) = exe.run(feed=feed, fetch_list=[y])
    assert np.array_equal(found, np.ones(1000, "float32"))
    assert plan_of(exe).arena_bytes == 2 * 4032  # 4000 bytes, rounded up to 64


def test_an_elementwise_chain_needs_one_buffer():
    x = fx.data("x", [1000], "float32")
    y = L.relu(x)
    for _ in range(20):
        y = L.scale(L.tanh(y), 2.0)
    exe = fx.Executor()
    exe.run(feed={"x": np.ones(1000, "float32")}, fetch_list=[y])
    assert plan_of(exe).arena_bytes == 4032


def test_values_that_are_fetched_or_read_later_keep_their_buffers():
    x = fx.data("x", [4], "float32")
    a = L.scale(x, 2.0)
    b = L.relu(a)  # a is read again below
    c = b + a
    exe = fx.Executor()
    feed = {"x": np.float32([-1, 0, 1, 2])}
    assert [v.tolist() for v in exe.run(feed=feed, fetch_list=[c, b])] == [[-2, 0, 4, 8], [0, 0, 2, 4]]


def test_views_take_no_step_and_no_memory():
    x = fx.data("x", [2, 6], "float32")
    h = L.scale(x, 2.0)
    y = L.transpose(L.reshape(h, [3, 4]), [1, 0])[1:3]
    exe = fx.Executor()
    (found,) = exe.run(feed={"x": np.arange(12, dtype="float32").reshape(2, 6)}, fetch_list=[y])
    assert np.array_equal(found, 2 * np.arange(12, dtype="float32").reshape(3, 4).T[1:3])
    plan = plan_of(exe)
    assert [s.op.type for s in plan.steps if s.kernel != "view"] == ["scale"] and plan.arena_bytes == 64


def test_a_view_that_is_written_later_leaves_its_source_alone():
    x = fx.data("x", [4], "float32")
    h = L.scale(x, 1.0)
    v = L.reshape(h, [2, 2])
    L.assign(L.zeros([2, 2], "float32"), output=v)
    feed = {"x": np.ones(4, "float32")}
    assert [a.tolist() for a in fx.Executor().run(feed=feed, fetch_list=[h, v])] == [[1, 1, 1, 1], [[0, 0], [0, 0]]]


def test_a_view_of_a_parameter_that_is_written_later_leaves_the_parameter_alone():
    w = L.create_global_var([4], 1.0, "float32", persistable=True, name="w")
    v = L.reshape(w, [2, 2])
    L.assign(L.zeros([2, 2], "float32"), output=v)
    exe = fx.Executor()
    exe.run(fx.default_startup_program())
    exe.run(fetch_list=[v])
    assert fx.global_scope().get("w").tolist() == [1, 1, 1, 1]


def test_an_increment_of_a_feed_runs_and_leaves_the_callers_array_alone():
    x = fx.data("x", [1], "float32")
    L.increment(x)
    given_x = np.zeros(1, "float32")
    exe = fx.Executor()
    for _ in range(2):
        assert exe.run(feed={"x": given_x}, fetch_list=[x])[0].tolist() == [1.0]
    assert given_x.tolist() == [0.0]


def test_fetched_arrays_are_copies():
    x = fx.data("x", [2], "float32")
    w = L.create_global_var([2], 5.0, "float32", persistable=True, name="w")
    y = L.scale(x, 2.0)
    exe = fx.Executor()
    exe.run(fx.default_startup_program())
    feed = {"x": np.ones(2, "float32")}
    first = exe.run(feed=feed, fetch_list=[x, w, y, y])
    for a in first:
        a[:] = -1
    again = exe.run(feed=feed, fetch_list=[x, w, y, y])
    assert [a.tolist() for a in again] == [[1, 1], [5, 5], [2, 2], [2, 2]]
    assert feed["x"].tolist() == [1, 1]
    assert len({id(a) for a in again}) == 4


def test_return_numpy_false_returns_arrays_of_the_device():
    x = fx.data("x", [2], "float32")
    (y,) = fx.Executor().run(feed={"x": np.ones(2, "float32")}, fetch_list=[x + 1.0], return_numpy=False)
    assert isinstance(y, np.ndarray)


def test_a_plan_is_made_once_per_shapes_scope_and_program_version():
    x = fx.data("x", [-1], "float32")
    other = fx.data("other", [-1], "float32")
    y = L.scale(x, 2.0) + other
    exe, scope = fx.Executor(), fx.Scope()

    def plan(rows, scope=scope, fetch=y, names=("x", "other")):
        exe.run(feed={n: np.ones(rows, "float32") for n in names}, fetch_list=[fetch], scope=scope)
        return next(reversed(exe._ready.values()))[0]

    first = plan(2)
    assert plan(2) is first
    assert plan(2, names=("other", "x")) is first  # the order of the feed says nothing
    assert plan(5) is not first  # sizes that grow by one would share plans
    assert plan(2) is first
    assert plan(2, scope=fx.Scope()) is not first
    assert plan(2, fetch=x) is not first
    scope.set("unrelated", np.ones(1))
    second = plan(2)
    assert second is not first  # arrays of the scope may have been replaced
    L.relu(y)
    assert plan(2) is not second


def test_a_parameter_given_anew_is_the_one_that_runs():
    w = L.create_global_var([2], 1.0, "float32", persistable=True, name="w")
    y = L.scale(w, 2.0)
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(fx.default_startup_program(), scope=scope)
    scope.set("w", np.float32([3, 4]))
    assert exe.run(fetch_list=[y], scope=scope)[0].tolist() == [6, 8]
    scope.bind("w", np.float32([5, 6]))
    assert exe.run(fetch_list=[y], scope=scope)[0].tolist() == [10, 12]


def test_old_plans_are_dropped():
    x = fx.data("x", [-1], "float32")
    y = L.relu(x)
    exe = fx.Executor()
    for rows in range(60, 1, -1):  # sizes that grow would share plans
        exe.run(feed={"x": np.ones(rows, "float32")}, fetch_list=[y])
    assert len(exe._ready) == 32


def test_operators_that_nothing_needs_do_not_run():
    x, label = fx.data("x", [1], "float32"), fx.data("label", [1], "float32")
    y = L.relu(x)
    L.elementwise_sub(y, label)
    L.cond(label > 0.0, lambda: label + 1.0, lambda: label)
    exe = fx.Executor()
    assert exe.run(feed={"x": np.ones(1, "float32")}, fetch_list=[y])[0].tolist() == [1]
    assert [s.op.type for s in plan_of(exe).steps] == ["relu"]


def test_a_fed_intermediate_value_is_not_computed():
    x = fx.data("x", [1], "float32")
    h = L.exp(x)
    y = h + 1.0
    assert fx.Executor().run(feed={h: np.float32([5])}, fetch_list=[y])[0].tolist() == [6]


def test_steps_are_counted_per_program_and_forgotten_with_it():
    scope, exe = fx.Scope(), fx.Executor()
    for _ in range(3):
        p = fx.Program()
        with fx.program_guard(p, fx.Program()):
            y = L.ones([1], "float32")
        exe.run(p, fetch_list=[y], scope=scope)
        assert scope.steps[p] == 1
    exe.close()
    del p, y
    import gc

    gc.collect()
    assert len(scope.steps) == 0


@pytest.mark.parametrize("seed", range(20))
def test_intervals_that_overlap_get_separate_bytes(seed):
    rng = np.random.default_rng(seed)
    items = []
    for _ in range(60):
        start = int(rng.integers(0, 40))
        items.append(Interval(int(rng.integers(0, 9000)), start, start + int(rng.integers(0, 10))))
    offsets, total = assign(items)
    for i, a in enumerate(items):
        assert offsets[i] % 64 == 0 and offsets[i] + a.nbytes <= total
        for j in range(i):
            b = items[j]
            if a.start <= b.stop and b.start <= a.stop:
                assert offsets[i] + a.nbytes <= offsets[j] or offsets[j] + b.nbytes <= offsets[i]


def test_values_that_live_until_the_end_leave_no_gaps_between_activations():
    """Four activations of 4 lines that backward frees one by one, and as many gradients of 3 lines that stay: 16 lines are live at first,
    and 3 lines come for each 4 that go."""
    line, layers = 64, 4
    activations = [Interval(4 * line, k, 2 * layers - k) for k in range(layers)]
    gradients = [Interval(3 * line, layers + k + 2, 100) for k in range(layers)]
    assert assign([*activations, *gradients])[1] == 4 * layers * line


def test_state_feeds_and_the_arena_begin_on_lines_of_the_cache():
    x = fx.data("x", [-1, 3], "float32")
    loss = L.mean(L.fc(x, 5))
    fx.optimizer.Momentum(0.1, 0.9).minimize(loss)
    exe, scope = fx.Executor(), fx.Scope()
    scope.set("fc_0.b_0", np.ones(5, "float32"))
    exe.run(fx.default_startup_program(), scope=scope)
    exe.run(feed={"x": np.ones((7, 3), "float32")}, fetch_list=[loss], scope=scope)
    bound = next(reversed(exe._ready.values()))[0]
    begun = [*scope.arrays.values(), *(a for _, a in bound.feeds)]
    assert len(begun) > 4 and all(a.ctypes.data % 64 == 0 for a in begun)


def test_convolutions_and_attention_are_planned_where_the_kernels_are_not_built(monkeypatch):
    """Which kernels would cover them is no question then."""
    monkeypatch.setattr(native, "_state", native._State(None, "not built, says this test", "", ""))
    x = fx.data("x", [2, 4, 6, 6])
    y = fx.layers.relu(fx.layers.batch_norm(fx.layers.conv2d(x, 8, 3)))
    q = fx.layers.reshape(y, [2, 8, 4, 4])
    out = fx.layers.scaled_dot_product_attention(q, q, q)
    exe = fx.Executor()
    exe.run(fx.default_startup_program())
    (got,) = exe.run(feed={"x": np.ones((2, 4, 6, 6), "float32")}, fetch_list=[out])
    assert got.shape == (2, 8, 4, 4) and not native.has_products()


def test_a_number_sliced_out_of_what_is_fed_is_that_of_the_run():
    x = fx.data("x", [2], "int64")
    block = fx.default_main_program().global_block()
    block.append_op("slice", {"Input": x}, {"Out": "y"}, {"axes": [0], "starts": [1], "ends": [2], "decrease_axis": [0]})
    assert [fx.Executor().run(feed={"x": np.int64([0, k])}, fetch_list=["y"])[0].item() for k in (3, 8)] == [3, 8]
