"""Loops and branches whose sub-blocks no plan holds: values that grow from round to round, and sizes that values decide inside of them."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.testing import interpret, numeric_grad
from tests.executor.test_fake_cupy import device_executor

L = fx.layers


@pytest.fixture(autouse=True)
def fresh():
    with fx.program_guard(fx.Program("main"), fx.Program("startup")), fx.unique_name.guard(), fx.scope_guard(fx.Scope()):
        yield


def run(feed, *fetch, exe=None):
    return [v.tolist() for v in (exe or fx.Executor()).run(feed=feed, fetch_list=list(fetch))]


def counted(n, body, states, bound=0):
    """`body(i, *states)` for i from 0 to n - 1; i and the states behind it."""
    i = L.zeros([1], "int64")
    return L.while_loop(lambda i, *s: L.less_than(i, n), lambda i, *s: [i + 1, *body(i, *s)], [i, *states], max_rounds=bound)


def growing():
    """x, and behind it the numbers of the rounds."""
    x, n = fx.data("x", [-1], "float32"), fx.data("n", [1], "int64")
    return counted(n, lambda i, rows: [L.concat([rows, L.cast(i, "float32")], 0)], [x])


@pytest.mark.parametrize("executor", [fx.Executor, device_executor])
def test_a_value_grows_with_the_rounds_of_a_loop(executor):
    i, rows = growing()
    total, exe = L.reduce_sum(rows), executor()
    for n in (0, 1, 4, 2):
        want = [5, 6, *range(n)]
        assert run({"x": np.float32([5, 6]), "n": np.int64([n])}, rows, total, i, exe=exe) == [want, [sum(want)], [n]]


def test_what_grows_is_what_the_interpreter_has():
    _, rows = growing()
    feed = {"x": np.float32([1]), "n": np.int64([3])}
    assert run(feed, rows) == [interpret(fx.default_main_program(), feed)[rows.name].tolist()]


def test_a_loop_until_few_distinct_values_are_left():
    x = fx.data("x", [-1], "float32")

    def halved(v, rounds):
        kinds, _ = L.unique(L.floor(v * 0.5))
        return [kinds, rounds + 1.0]

    begin = L.fill_constant([1], "float32", 0.0)
    v, rounds = L.while_loop(lambda v, rounds: L.reduce_max(v) > 1.0, halved, [x, begin])
    exe = fx.Executor()
    assert run({"x": np.float32([9, 4, 5, 8, 1])}, v, rounds, exe=exe) == [[1, 0], [3]]  # 9 4 5 8 1; 4 2 0; 2 1 0; 1 0
    assert run({"x": np.float32([3, 2])}, v, rounds, exe=exe) == [[1], [1]]
    assert run({"x": np.float32([1, 1])}, v, rounds, exe=exe) == [[1, 1], [0]]


def test_a_loop_in_a_loop_grows_too():
    n = fx.data("n", [1], "int64")

    def up_to(i, rows):  # rows, then 0 to i - 1
        return [counted(i, lambda j, rows: [L.concat([rows, j], 0)], [rows])[1]]

    x = fx.data("x", [-1], "int64")
    _, rows = counted(n, up_to, [x])
    assert run({"x": np.int64([7]), "n": np.int64([4])}, rows) == [[7, 0, 0, 1, 0, 1, 2]]


def test_branches_may_give_other_sizes():
    x = fx.data("x", [-1], "float32")
    y = L.cond(L.reduce_sum(x) > 0.0, lambda: L.concat([x, x], 0), lambda: L.masked_select(x, x > 0.0))
    twice, exe = y * 2.0, fx.Executor()
    assert run({"x": np.float32([1, 2])}, y, twice, exe=exe) == [[1, 2, 1, 2], [2, 4, 2, 4]]
    assert run({"x": np.float32([1, -2])}, y, twice, exe=exe) == [[1], [2]]


def test_state_that_such_a_loop_writes_is_kept():
    seen = L.create_global_var([1], 0.0, "float32", persistable=True, name="seen")
    exe = fx.Executor()
    exe.run(fx.default_startup_program())
    x, n = fx.data("x", [-1], "float32"), fx.data("n", [1], "int64")

    def body(i, total):
        L.assign(seen + 1.0, seen)
        return [total + L.reduce_sum(L.masked_select(x, x > seen))]

    _, total = counted(n, body, [L.fill_constant([1], "float32", 0.0)])
    feed = {"x": np.float32([1, 2, 3]), "n": np.int64([2])}
    assert run(feed, total, seen, exe=exe) == [[5 + 3], [2]]
    assert run(feed, total, seen, exe=exe) == [[0], [4]]
    assert fx.global_scope().get("seen").tolist() == [4]


def test_all_rounds_have_the_random_numbers_of_a_plan():
    x, n = fx.data("x", [8], "float32"), fx.data("n", [1], "int64")
    drawn = []
    for selects in (False, True):

        def body(i, kept, selects=selects):
            now = kept * L.dropout(x, 0.5, seed=3, dropout_implementation="upscale_in_train")
            return [now + 0.0 * L.reduce_sum(L.masked_select(x, x > 0.0)) if selects else now]

        drawn.append(counted(n, body, [x])[1])
    exe, feed = fx.Executor(), {"x": np.arange(1, 9, dtype="float32"), "n": np.int64([2])}
    for _ in range(2):
        planned, walked = run(feed, *drawn, exe=exe)
        assert planned == walked and 0 < np.count_nonzero(planned) < 8


def test_plans_of_rounds_are_kept_for_sizes_that_recur(monkeypatch):
    from fluidx.executor.dynamic import segment_cache

    made, prepare = [], segment_cache.prepare
    monkeypatch.setattr(segment_cache, "prepare", lambda *args, **named: made.append(1) or prepare(*args, **named))
    x, n = fx.data("x", [-1], "float32"), fx.data("n", [1], "int64")
    _, total = counted(n, lambda i, t: [t + L.reduce_sum(L.masked_select(x, x > 0.0))], [L.fill_constant([1], "float32", 0.0)])
    exe = fx.Executor()
    assert run({"x": np.float32([1, -1]), "n": np.int64([1])}, total, exe=exe) == [[1]]
    plans = len(made)
    assert run({"x": np.float32([2, -1]), "n": np.int64([9])}, total, exe=exe) == [[18]] and len(made) == plans


@pytest.mark.parametrize("bound", [0, 4])
def test_the_gradient_through_rounds_that_select_is_that_of_central_differences(bound):
    x, n = fx.data("x", [3], "float64"), fx.data("n", [1], "int64")
    x.stop_gradient = False
    _, h = counted(n, lambda i, h: [h * L.reduce_mean(L.square(L.masked_select(h, h > 0.3))) + L.sin(x)], [x], bound)
    loss = L.reduce_sum(h)
    (grad,) = fx.gradients([loss], [x])
    exe = fx.Executor()
    for rounds in (0, 1, 3):
        feed = {"x": np.array([0.2, 0.5, 0.7]), "n": np.int64([rounds])}
        (found,) = exe.run(feed=feed, fetch_list=[grad])
        want = numeric_grad(lambda _: exe.run(feed=feed, fetch_list=[loss])[0].item(), feed["x"])  # noqa: B023
        # central differences of float64 are right to about 1e-9 of the loss
        np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-8)


def test_a_value_that_grows_has_no_gradient():
    x, n = fx.data("x", [-1], "float64"), fx.data("n", [1], "int64")
    x.stop_gradient = False
    _, h = counted(n, lambda i, h: [L.concat([h, x * h[0:1]], 0)], [x])
    (grad,) = fx.gradients([L.reduce_sum(h)], [x])
    with pytest.raises(fx.ExecutionError, match=r"one size in all iterations, found \[2\] in the first iteration and \[4\] in iteration 1"):
        run({"x": np.array([1.0, 2.0]), "n": np.int64([2])}, grad)


def test_errors_inside_name_the_operator_and_its_line():
    x, n = fx.data("x", [-1], "float32"), fx.data("n", [1], "int64")
    _, h = counted(n, lambda i, h: [h + L.masked_select(x, x > 0.0)], [x])
    assert run({"x": np.float32([1, 2]), "n": np.int64([2])}, h) == [[3, 6]]
    with pytest.raises(fx.ProgramError, match="op elementwise_add.*\n.*with the sizes that were fed\n  written at .*segmented_bodies.py"):
        run({"x": np.float32([1, -2, 3]), "n": np.int64([1])}, h)


def test_what_wants_one_plan_is_told_which_operator_is_none():
    x = fx.data("x", [-1], "float32")
    L.cond(L.reduce_sum(x) > 0.0, lambda: L.reduce_sum(L.masked_select(x, x > 0.0)), lambda: L.reduce_sum(x))
    with pytest.raises(fx.ProgramError, match="op cond runs op masked_select, which makes values whose sizes depend on values, so program"):
        dry_plan(fx.default_main_program(), batch=3)
