"""Programs with operators whose results have sizes that values decide: what runs before, between and behind them."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.ir.sizes import StandInShapes
from fluidx.testing import numeric_grad
from tests.executor.test_fake_cupy import device_executor

X = np.float32([[1, -2, 3], [-4, 5, -6]])


@pytest.fixture(autouse=True)
def fresh():
    with fx.program_guard(fx.Program("main"), fx.Program("startup")), fx.unique_name.guard(), fx.scope_guard(fx.Scope()):
        yield


def positive(x):
    return fx.layers.masked_select(x, x > 0.0)


def run(feed, *fetch, exe=None):
    return (exe or fx.Executor()).run(feed=feed, fetch_list=list(fetch))


def test_values_from_before_and_behind_a_cut_are_fetched():
    x = fx.data("x", [-1, 3], "float32")
    twice = x * 2.0
    chosen = positive(twice)
    total = fx.layers.reduce_sum(chosen) + fx.layers.reduce_sum(twice)
    found = run({"x": X}, twice, chosen, total, x, chosen)
    assert [v.tolist() for v in found] == [(2 * X).tolist(), [2, 6, 10], [12], X.tolist(), [2, 6, 10]]


def test_several_cuts_one_behind_the_other():
    x = fx.data("x", [-1], "float32")
    big = fx.layers.masked_select(y := positive(x), y > 2.0)
    kinds, index = fx.layers.unique(big)
    assert [v.tolist() for v in run({"x": np.float32([5, -1, 3, 1, 5])}, big, kinds, index)] == [[5, 3, 5], [5, 3], [0, 1, 0]]


def test_a_cut_whose_result_nobody_needs_is_not_made():
    x = fx.data("x", [-1, 3], "float32")
    positive(x)
    y = x + 1.0
    exe = fx.Executor()
    assert run({"x": X}, y, exe=exe)[0].tolist() == (X + 1).tolist()
    assert not exe._segments


def test_plans_are_kept_for_sizes_that_recur(monkeypatch):
    from fluidx.executor.dynamic import segment_cache

    made, prepare = [], segment_cache.prepare
    monkeypatch.setattr(segment_cache, "prepare", lambda *args, **named: made.append(1) or prepare(*args, **named))
    x = fx.data("x", [-1], "float32")
    y = positive(x) * 2.0
    exe = fx.Executor()
    for values, plans in ([1, -1], 2), ([-3, 2], 2), ([2, 3], 3), ([-1, 5], 3), ([-1, -1], 4), ([4, 4], 4):
        want = [2 * v for v in values if v > 0]
        assert run({"x": np.float32(values)}, y, exe=exe)[0].tolist() == want
        assert len(made) == plans


def test_state_is_written_before_and_behind_a_cut():
    before = fx.layers.create_global_var([1], 0.0, "float32", persistable=True, name="before")
    behind = fx.layers.create_global_var([1], 0.0, "float32", persistable=True, name="behind")
    exe = fx.Executor()
    exe.run(fx.default_startup_program())
    x = fx.data("x", [-1], "float32")
    fx.layers.increment(before, 1.0)
    fx.layers.assign(behind + fx.layers.reduce_sum(positive(x)), behind)
    for k in range(1, 4):
        values = run({"x": np.float32([1, -1, 2])}, before, behind, exe=exe)
        assert [v.item() for v in values] == [k, 3 * k]
    assert fx.global_scope().get("behind").item() == 9


def test_a_name_written_again_has_its_value_of_the_time():
    x = fx.data("x", [-1], "float32")
    y = x + 1.0
    first = positive(y)
    fx.layers.assign(x * 0.0, y)
    second = fx.layers.where(y > -1.0)
    found = run({"x": np.float32([1, -5, 2])}, first, second, y)
    assert [v.tolist() for v in found] == [[2, 3], [[0], [1], [2]], [0, 0, 0]]


def test_random_numbers_are_those_of_a_program_without_cuts():
    x = fx.data("x", [4], "float32")
    drawn = fx.layers.dropout(x, 0.5, seed=3)
    chosen = positive(x)
    again = fx.layers.dropout(x, 0.5, seed=4) + 0.0 * fx.layers.reduce_sum(chosen)
    feed, exe, other = {"x": np.float32([1, 2, 3, 4])}, fx.Executor(), fx.Executor()
    whole = fx.Program.parse_from_string(
        "".join(
            line + "\n" for line in str(fx.default_main_program()).splitlines() if not line.strip().startswith(f"%{chosen.name}")
        ).replace(chosen.name, "x")
    )
    for _ in range(3):
        cut = exe.run(feed=feed, fetch_list=[drawn, again])
        want = other.run(whole, feed=feed, fetch_list=[drawn.name, again.name], scope=fx.global_scope())
        assert [v.tolist() for v in cut] == [v.tolist() for v in want]
        fx.global_scope().steps[whole] = fx.global_scope().steps[fx.default_main_program()]


def selected_mean(square):
    x = fx.data("x", [-1, 3], "float64")
    w = fx.layers.create_parameter([3, 3], "float64", name="w", default_initializer=fx.initializer.NumpyArrayInitializer(square))
    h = fx.layers.matmul(x, w)
    return x, w, fx.layers.mean(fx.layers.square(fx.layers.masked_select(h, h > 0.5)))


def test_the_gradient_through_masked_select_is_that_of_central_differences():
    square = np.random.default_rng(1).normal(size=(3, 3))
    x, w, loss = selected_mean(square)
    values = np.random.default_rng(2).normal(size=(5, 3))
    (grad,) = fx.gradients([loss], [w])
    exe = fx.Executor()
    exe.run(fx.default_startup_program())
    (found,) = exe.run(feed={"x": values}, fetch_list=[grad])

    def value(_):
        h = values @ square
        return (h[h > 0.5] ** 2).mean()

    np.testing.assert_allclose(found, numeric_grad(value, square, 1e-6), rtol=1e-7, atol=1e-8)  # float64, steps of 1e-6


def test_training_through_a_selection_lowers_the_loss():
    x, _, loss = selected_mean(np.eye(3))
    fx.optimizer.SGD(0.05).minimize(loss)
    exe = fx.Executor()
    exe.run(fx.default_startup_program())
    values = np.random.default_rng(0).normal(size=(8, 3))
    losses = [exe.run(feed={"x": values}, fetch_list=[loss])[0].item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def test_nothing_may_be_chosen():
    x = fx.data("x", [-1], "float32")
    y = positive(x)
    (grad,) = fx.gradients([fx.layers.reduce_sum(y * 2.0)], [x])
    found = run({"x": np.float32([-1, -2])}, y, y * 3.0, grad)
    assert [v.tolist() for v in found] == [[], [], [0, 0]]


def test_the_host_reads_what_a_device_made():
    x = fx.data("x", [-1], "float32")
    y = positive(x * 2.0) + 1.0
    assert run({"x": np.float32([1, -1, 3])}, y, exe=device_executor())[0].tolist() == [3, 7]


# -- sizes ----------------------------------------------------------------------------------------------------------------------------


def test_a_size_that_values_decide_is_its_own():
    x = fx.data("x", [-1], "float32")
    y, z = positive(x), positive(x)
    kinds, index, counts = fx.layers.unique_with_counts(x)
    sizes = StandInShapes(x.block)
    assert sizes.equal(y, fx.layers.relu(y)) and sizes.equal(index, x.astype("int32")) and sizes.equal(kinds.astype("int32"), counts)
    assert not sizes.equal(y, x) and not sizes.equal(y, z) and not sizes.equal(kinds, x)


# -- looking on, errors -----------------------------------------------------------------------------------------------------------------


def test_a_profile_has_the_operators_between_plans():
    x = fx.data("x", [-1], "float32")
    y = fx.layers.reduce_sum(positive(x * 2.0))
    with fx.profiler.profiler() as seen:
        run({"x": np.float32([1, -1])}, y)
    kernels = {row.name: row.kernel for row in seen.rows()}
    assert kernels["masked_select"] == "host" and "reduce_sum" in kernels


def test_the_trace_has_them_too(monkeypatch, capsys):
    monkeypatch.setenv("FLUIDX_DEBUG", "4")
    x = fx.data("x", [-1], "float32")
    y = positive(x)
    run({"x": np.float32([1, -1, 2])}, y * 2.0)
    assert f"masked_select -> %{y.name}[2]" in capsys.readouterr().out


def test_a_nan_behind_a_cut_is_found(monkeypatch):
    monkeypatch.setenv("FLUIDX_CHECK_NAN", "1")
    x = fx.data("x", [-1], "float32")
    y = fx.layers.log(positive(x) - 1.5)
    with pytest.raises(fx.ExecutionError, match="op log made a NaN"):
        run({"x": np.float32([1, -1, 2])}, y)
    with pytest.raises(fx.ExecutionError, match="op masked_select made an infinity"):
        run({"x": np.float32([np.inf])}, y)


def test_sizes_that_do_not_meet_name_the_operator_and_its_line():
    x = fx.data("x", [-1], "float32")
    y = fx.layers.masked_select(x, x > 0.0) + fx.layers.masked_select(x, x < 0.0)
    with pytest.raises(fx.ProgramError, match="op elementwise_add.*\n.*with the sizes that were fed\n  written at .*test_segmented_run.py"):
        run({"x": np.float32([1, -1, 2, 3, -2])}, y)


def test_a_mask_of_another_size_names_the_operator_between_plans():
    x, mask = fx.data("x", [-1], "float32"), fx.data("mask", [-1], "bool")
    y = fx.layers.masked_select(x, mask)
    said = r"op masked_select: Mask must be .*f32\[3\], found bool\[2\](.*\n)+.*written at .*test_segmented_run.py"
    with pytest.raises(fx.ExecutionError, match=said):
        run({"x": np.float32([1, -1, 2]), "mask": np.array([True, False])}, y)


def test_what_wants_one_plan_is_told_that_there_are_several():
    positive(fx.data("x", [-1], "float32"))
    with pytest.raises(
        fx.ProgramError, match="op masked_select makes values whose sizes depend on values, so program main is no single plan"
    ):
        dry_plan(fx.default_main_program(), batch=3)


def test_a_transpile_refuses_and_says_what_to_do():
    x, _, loss = selected_mean(np.eye(3))
    fx.optimizer.SGD(0.05).minimize(loss)
    with pytest.raises(fx.TranspileError, match=r"op masked_select makes values .*; keep the sizes, with a mask (.*\n)+.*segmented_run.py"):
        fx.DistributeTranspiler().transpile(trainers=2)


def test_one_element_cut_out_of_a_vector_is_the_one_of_each_run():
    x = fx.data("x", [3], "float32")
    y = x.block.create_var("y", [], "float32")
    x.block.append_op("slice", {"Input": x}, {"Out": y}, {"axes": [0], "starts": [1], "ends": [2], "decrease_axis": [0]})
    exe = fx.Executor()
    assert [run({"x": np.float32([0, k, 0])}, y, exe=exe)[0].item() for k in (5, 7)] == [5, 7]


def test_state_may_be_made_by_an_operator_between_plans():
    x = fx.data("x", [-1], "float32")
    kept = x.block.create_var("kept", [-1], "float32", persistable=True)
    x.block.append_op("masked_select", {"X": x, "Mask": x > 0.0}, {"Out": kept})
    y = kept * 2.0
    exe = fx.Executor()
    for values in ([1, -1, 2], [3, -1, 2], [-1, -1, 5], [7, 8, 9]):
        want = [v for v in values if v > 0]
        found = run({"x": np.float32(values)}, y, kept, exe=exe)
        assert [v.tolist() for v in found] == [[2 * v for v in want], want] and fx.global_scope().get("kept").tolist() == want


@pytest.mark.parametrize("most", [0, 5])
def test_what_a_loop_keeps_for_its_gradient_crosses_a_cut(most):
    main = fx.Program("loop")
    with fx.program_guard(main, fx.Program()):
        x = fx.data("x", [-1], "float64")
        x.stop_gradient = False
        begin = fx.layers.fill_constant([1], "float64", 0.0)
        _, y = fx.layers.while_loop(lambda i, y: i < 3.0, lambda i, y: [i + 1.0, y * x], [begin, x], max_rounds=most)
        chosen = fx.layers.masked_select(y, y > 2.0)
        (g,) = fx.gradients([fx.layers.reduce_sum(chosen)], [x])
    # y is x to the power of 4, of which 16 is chosen
    found = fx.Executor().run(main, feed={"x": np.array([1.0, 2.0])}, fetch_list=[chosen, g])
    assert [v.tolist() for v in found] == [[16.0], [0.0, 32.0]]
