"""Loops and branches: executor against interpreter, gradients of cond, and control flow on many ranks."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.context import RunContext
from fluidx.executor.plan.planner import plan
from fluidx.ir import TensorType
from fluidx.testing import interpret, numeric_grad
from fluidx.testing.models import TestModel, train_ranks, train_single

L = fx.layers


def agree(fetch, feed=None):
    """The fetched values, which executor and interpreter must agree on, in two runs."""
    program = fx.default_main_program()
    exe = fx.Executor()
    exe.run(fx.default_startup_program())
    scope = fx.global_scope()
    values = []
    for _ in range(2):
        state = {n: scope.get(n) for n in scope.local_var_names()}
        env = interpret(program, feed or {}, state)
        values = exe.run(program, feed=feed, fetch_list=fetch)
        for v, a in zip(fetch, values, strict=True):
            assert np.array_equal(a, env[v.name]), v.name
    return values


def test_a_loop_that_runs_no_round_passes_its_values_on():
    x = fx.data("x", [-1], "float32")
    h = L.scale(x, 2.0)
    n = fx.data("n", [1], "int64")
    i = L.zeros([1], "int64")
    i, h = L.while_loop(lambda i, h: L.less_than(i, n), lambda i, h: [L.increment(i, in_place=False), h * 2.0], [i, h])
    for rounds in (0, 1, 5):
        feed = {"x": np.float32([1, 2]), "n": np.int64([rounds])}
        assert agree([h], feed)[0].tolist() == [2 * 2**rounds, 4 * 2**rounds]


def test_a_loop_writes_a_variable_that_a_view_looks_at():
    x = fx.data("x", [4], "float32")
    h = L.scale(x, 1.0)
    before = L.reshape(h, [2, 2])
    i, n = L.zeros([1], "int64"), L.fill_constant([1], "int64", 3)
    more = L.less_than(i, n)
    with L.While(more).block():
        L.assign(h + 1.0, output=h)
        L.increment(i)
        L.less_than(i, n, cond=more)
    after = L.reshape(h, [2, 2])
    feed = {"x": np.zeros(4, "float32")}
    assert [a.tolist() for a in agree([before, after], feed)] == [[[0, 0], [0, 0]], [[3, 3], [3, 3]]]


def test_loops_in_loops_and_branches_in_loops():
    total, i, n = L.zeros([1], "float32"), L.zeros([1], "int64"), L.fill_constant([1], "int64", 4)
    more = L.less_than(i, n)
    with L.While(more).block():
        j = L.zeros([1], "int64")
        again = L.less_than(j, i)
        with L.While(again).block():
            odd = L.equal(L.elementwise_mod(j, L.fill_constant([1], "int64", 2)), L.ones([1], "int64"))
            L.assign(total + L.cond(odd, lambda: L.fill_constant([1], "float32", 10.0), lambda: L.ones([1], "float32")), output=total)
            L.increment(j)
            L.less_than(j, i, cond=again)
        L.increment(i)
        L.less_than(i, n, cond=more)
    # j of the rounds: 0; 0 1; 0 1 2
    assert agree([total])[0].tolist() == [1 + 11 + 12]


def test_a_branch_that_writes_state_writes_the_scope():
    w = L.create_global_var([1], 1.0, "float32", persistable=True, name="w")
    flag = fx.data("flag", [1], "bool")

    def double():
        L.assign(w * 2.0, output=w)

    L.cond(flag, double, None)
    exe = fx.Executor()
    exe.run(fx.default_startup_program())
    for on, want in [(True, 2), (False, 2), (True, 4)]:
        exe.run(feed={"flag": [on]})
        assert fx.global_scope().get("w").tolist() == [want]


def test_branches_of_other_sizes_are_no_single_plan():
    a, b, flag = fx.data("a", [-1], "float32"), fx.data("b", [-1], "float32"), fx.data("flag", [1], "bool")
    y = L.cond(flag, lambda: a * 1.0, lambda: b * 1.0)
    types = {"a": TensorType("float32", (2,)), "b": TensorType("float32", (1,)), "flag": TensorType("bool", (1,))}
    with pytest.raises(fx.ProgramError, match=r"op cond: 'cond_0.tmp_0' is f32\[2\] in true_block and f32\[1\] in false_block"):
        plan(fx.default_main_program(), types, [y.name], {}, RunContext())


def test_a_failure_in_a_body_names_the_operator_in_it():
    ids = fx.data("ids", [1], "int64")
    flag = fx.data("flag", [1], "bool")
    y = L.cond(flag, lambda: L.one_hot(ids, 3), lambda: L.zeros([1, 3], "float32"))
    exe = fx.Executor()
    assert exe.run(feed={"ids": np.int64([7]), "flag": [False]}, fetch_list=[y])[0].tolist() == [[0, 0, 0]]
    with pytest.raises(fx.ExecutionError) as error:
        exe.run(feed={"ids": np.int64([7]), "flag": [True]}, fetch_list=[y])
    assert str(error.value).startswith("op one_hot_v2: id 7 is out of range") and "test_control_flow.py" in str(error.value)
    assert error.value.operator.type == "one_hot_v2"


# -- gradients ------------------------------------------------------------------------------------------------------------


def check_gradient(build, sizes, flags=1):
    """Build y from float64 inputs and bools, and compare fx.gradients with central differences for every choice of the bools."""
    xs = [fx.data(f"x{k}", [size], "float64") for k, size in enumerate(sizes)]
    bools = [fx.data(f"flag{k}", [1], "bool") for k in range(flags)]
    loss = L.reduce_sum(build(*xs, *bools))
    grads = fx.gradients([loss], xs)
    exe, rng = fx.Executor(), np.random.default_rng(0)
    for choice in np.ndindex(*[2] * flags):
        feed = {x.name: rng.uniform(0.5, 2, size) for x, size in zip(xs, sizes, strict=True)}
        feed |= {b.name: np.array([bool(c)]) for b, c in zip(bools, choice, strict=True)}
        found = exe.run(feed=feed, fetch_list=grads)
        for x, g in zip(xs, found, strict=True):
            want = numeric_grad(lambda _: exe.run(feed=feed, fetch_list=[loss])[0].item(), feed[x.name])  # noqa: B023
            np.testing.assert_allclose(g, want, rtol=1e-6, atol=1e-8, err_msg=f"{choice} {x.name}")


def test_the_gradient_of_cond_is_that_of_the_branch_that_ran():
    check_gradient(lambda x, y, p: L.cond(p, lambda: L.square(x) * y, lambda: L.exp(y) * 3.0), [3, 3])


def test_the_gradient_of_a_branch_that_hands_a_variable_through():
    check_gradient(lambda x, p: L.cond(p, lambda: x, lambda: x * x) * x, [3])


def test_the_gradient_of_branches_of_several_results():
    def build(x, y, p):
        a, b = L.cond(p, lambda: [x * y, x], lambda: [y, L.square(y)])
        return a * b + y

    check_gradient(build, [2, 2])


def test_the_gradient_of_cond_in_cond():
    def build(x, y, p, q):
        return L.cond(p, lambda: L.cond(q, lambda: x * x, lambda: x * y) * y, lambda: L.exp(x))

    check_gradient(build, [2, 2], flags=2)


def test_the_gradient_of_a_branch_in_a_branch_that_reads_what_the_outer_one_computes():
    def build(x, y, p, q):
        def outer():
            h = L.exp(x) * y
            return L.cond(q, lambda: L.square(h), lambda: L.cond(p, lambda: h * x, lambda: h)) + h

        return L.cond(p, outer, lambda: x * y)

    check_gradient(build, [2, 2], flags=2)


def test_the_gradient_of_a_branch_with_a_loop_beside_it():
    x, p = fx.data("x", [2], "float64"), fx.data("p", [1], "bool")
    x.stop_gradient = False

    def branch():
        h = L.square(x)
        h.stop_gradient = True
        (n,) = L.while_loop(lambda v: v < 10.0, lambda v: v + L.reduce_sum(h), [L.fill_constant([1], "float64", 0.0)])
        return x * n

    (g,) = fx.gradients([L.reduce_sum(L.cond(p, branch, lambda: x))], [x])
    exe = fx.Executor()
    # the loop adds 1 + 4 until 10 is reached, and counts as a constant
    assert exe.run(feed={"x": np.array([1.0, 2.0]), "p": [True]}, fetch_list=[g])[0].tolist() == [10.0, 10.0]
    assert exe.run(feed={"x": np.array([1.0, 2.0]), "p": [False]}, fetch_list=[g])[0].tolist() == [1.0, 1.0]


def test_the_gradient_runs_a_branch_again_without_writing_outside(capsys):
    """The first run's results stay, and what the gradient does not need is not computed again."""
    x, p = fx.data("x", [3], "float32"), fx.data("p", [1], "bool")
    v = x * 2.0

    def branch():
        L.assign(v + x, output=v)
        L.Print(v)

    L.cond(p, branch)
    (g,) = fx.gradients(L.reduce_sum(v), x)
    exe = fx.Executor()
    feed = {"x": np.float32([1, 2, 3])}
    assert [a.tolist() for a in exe.run(feed=feed | {"p": [True]}, fetch_list=[v, g])] == [[3, 6, 9], [3, 3, 3]]
    assert [a.tolist() for a in exe.run(feed=feed | {"p": [False]}, fetch_list=[v, g])] == [[2, 4, 6], [2, 2, 2]]
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("write", [lambda v: v * v, lambda v: L.cond(L.reduce_sum(v) > 0.0, lambda: v * v, lambda: v)])
def test_a_gradient_that_needs_a_value_which_the_branch_overwrites_is_refused(write):
    x, p = fx.data("x", [3], "float32"), fx.data("p", [1], "bool")
    v = x * 2.0

    def branch():
        L.assign(write(v), output=v)

    L.cond(p, branch)
    with pytest.raises(fx.ProgramError, match="write to another variable there"):
        fx.gradients(L.reduce_sum(v), x)


def test_a_value_that_was_counted_up_in_a_branch_cannot_be_read_again():
    x, p = fx.data("x", [1], "float32"), fx.data("p", [1], "bool")
    n = L.create_global_var([1], 1.0, "float32", persistable=True, name="n")

    def branch():
        y = x + n
        L.increment(n)
        return y * y

    with pytest.raises(fx.ProgramError, match="needs the value of 'n' before a branch overwrites it; write to another variable there"):
        fx.gradients(L.cond(p, branch, lambda: x), x)
    assert fx.default_main_program().num_blocks == 3  # what was begun is taken back


def test_running_statistics_in_a_branch_advance_once():
    x, p = fx.data("x", [4, 2], "float32"), fx.data("p", [1], "bool")
    y = L.cond(p, lambda: L.batch_norm(x, momentum=0.5, moving_mean_name="mean"), lambda: x)
    fx.optimizer.SGD(0.0).minimize(L.reduce_sum(L.square(y)))
    exe = fx.Executor()
    exe.run(fx.default_startup_program())
    value = np.float32([[1, 2], [3, 4], [5, 6], [7, 8]])
    for run in (1, 2):
        exe.run(feed={"x": value, "p": [True]})
        assert fx.global_scope().get("mean").tolist() == pytest.approx((value.mean(0) * (1 - 0.5**run)).tolist())


def test_parameters_in_branches_are_trained():
    x = fx.data("x", [-1, 2], "float32")
    p = fx.data("p", [1], "bool")
    ones = fx.initializer.Constant(1.0)
    y = L.cond(
        p,
        lambda: L.fc(x, 1, param_attr=fx.ParamAttr("a", initializer=ones), bias_attr=False),
        lambda: L.fc(x, 1, param_attr=fx.ParamAttr("b", initializer=ones), bias_attr=False),
    )
    fx.optimizer.SGD(1.0).minimize(L.reduce_sum(y))
    exe = fx.Executor()
    exe.run(fx.default_startup_program())
    for flag in (True, False, False):
        exe.run(feed={"x": np.float32([[1, 2]]), "p": [flag]})
    assert fx.global_scope().get("a").ravel().tolist() == [0, -1]
    assert fx.global_scope().get("b").ravel().tolist() == [-1, -3]


# -- many ranks -----------------------------------------------------------------------------------------------------------


def replicated_model():
    """A learning-rate-like scalar, fed whole, decides the branch; a loop doubles it."""
    main, startup = fx.Program("control"), fx.Program("start")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3], "float32")
        scale = fx.data("scale", [1], "float32")
        (factor,) = L.while_loop(lambda v: v < 4.0, lambda v: v * 2.0, [scale])
        h = L.fc(x, 2, bias_attr=False)
        h = L.cond(scale > 1.0, lambda: L.relu(h), lambda: h * 0.5)
        loss = L.mean(L.square(h) * factor)
        _, pairs = fx.optimizer.SGD(0.1).minimize(loss)

    def feed(rows, seed=0):
        x = np.random.default_rng(seed).standard_normal((rows, 3), "float32")
        return {"x": x, "scale": np.float32([seed % 2 * 2 + 0.5])}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


@pytest.mark.parametrize("strategy", ["data_parallel", "reduce_broadcast", "ring_optimizer"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_replicated_condition_gives_one_devices_answers(strategy, ranks):
    m = replicated_model()
    feeds = [m.feed(6, k) for k in range(4)]
    one, scope = train_single(m, feeds, [m.loss])
    many, state = train_ranks(m, strategy, ranks, feeds, [m.loss])
    np.testing.assert_allclose(many, one, rtol=1e-5)
    for p, _ in m.gradients:
        np.testing.assert_allclose(state[p], scope.get(p), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["cond", "while"])
@pytest.mark.parametrize("strategy", ["data_parallel", "ring_optimizer"])
def test_a_condition_computed_from_the_batch_is_that_of_the_whole_batch(kind, strategy):
    main, startup = fx.Program("decided"), fx.Program("decided_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 1], "float32")
        go = L.reduce_sum(x) > 0.0
        if kind == "cond":
            h = L.cond(go, lambda: x * 2.0, lambda: x)
        else:
            h = L.scale(x, 1.0)
            with L.While(go).block():
                L.assign(h - 1.0, output=h)
                L.assign(L.reduce_sum(h) > 0.0, output=go)
        w = L.create_parameter([1], "float32", name="w")
        loss = L.mean(h * w)
        fx.optimizer.SGD(0.1).minimize(loss)
    # the ranks' own rows would decide otherwise than the whole batch
    feeds = [{"x": np.float32([[-1], [-2], [7], [1]])}, {"x": np.float32([[3], [1], [-9], [-1]])}]
    m = TestModel(main, startup, loss, lambda rows: feeds[0], [])
    one, scope = train_single(m, feeds, [loss, h])
    many, state = train_ranks(m, strategy, 2, feeds, [loss, h])
    for a, b in zip(one, many, strict=True):
        for x_, y_ in zip(a, b, strict=True):
            np.testing.assert_allclose(y_, x_, rtol=1e-6)
    np.testing.assert_allclose(state["w"], scope.get("w"), rtol=1e-6)


def _rounds(body, state, rounds=3):
    """`body(state)` again and again."""
    i, n = L.fill_constant([1], "int64", 0), L.fill_constant([1], "int64", rounds)
    return L.while_loop(lambda i, s: L.less_than(i, n), lambda i, s: [L.increment(i, in_place=False), body(s)], [i, state])[1]


def _nothing():
    return L.fill_constant([1], "float64", 0.0)


def _read_before_and_written_in_place(h):
    s = L.assign(L.reduce_mean(h))
    before, i, n = s * 2.0, L.fill_constant([1], "int64", 0), L.fill_constant([1], "int64", 3)
    more = L.less_than(i, n)
    with L.While(more).block():
        L.assign(L.tanh(s) + L.reduce_mean(h), output=s)
        L.increment(i)
        L.less_than(i, n, cond=more)
    return h + s + before


OF_THE_BATCH = {
    "sum": lambda h: h + _rounds(lambda s: s + L.reduce_mean(h), _nothing()),
    "no sum": lambda h: h + _rounds(lambda s: L.tanh(s) + L.reduce_mean(h), L.reduce_mean(h)),
    "nested": lambda h: h + _rounds(lambda s: _rounds(lambda t: t + s * L.reduce_mean(h), _nothing(), 2) + L.reduce_mean(h), _nothing()),
    "in place": _read_before_and_written_in_place,
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", [fx.strategies.data_parallel, fx.strategies.zero1, fx.strategies.fsdp, fx.strategies.ring_optimizer])
@pytest.mark.parametrize("of", OF_THE_BATCH)
def test_a_loop_may_carry_a_value_of_all_rows_of_the_batch(of, strategy, ranks):
    main, startup = fx.Program("main"), fx.Program("startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss = L.mean(L.square(OF_THE_BATCH[of](L.fc(fx.data("x", [-1, 5], "float64"), 4))))
        _, pairs = fx.optimizer.Momentum(0.1, 0.9).minimize(loss)
    feeds = [{"x": np.random.default_rng(rows).standard_normal((rows, 5))} for rows in (5, 7)]
    built = TestModel(main, startup, loss, lambda rows: feeds[0], [(p.name, g.name) for p, g in pairs])
    single, scope = train_single(built, feeds, [loss])
    values, state = train_ranks(built, strategy(), ranks, feeds, [loss])  # proves the ranks first
    # ranks add up float64 sums in another order than one device
    np.testing.assert_allclose(values, single, rtol=1e-9)
    for name, a in state.items():
        np.testing.assert_allclose(a, scope.get(name), rtol=1e-8, atol=1e-10, err_msg=name)


def test_a_carried_gradient_is_reduced_once_before_its_loop():
    main, startup = fx.Program("main"), fx.Program("startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss = L.mean(L.square(OF_THE_BATCH["sum"](L.fc(fx.data("x", [-1, 5], "float64"), 4))))
        fx.optimizer.SGD(0.1).minimize(loss)
    t = fx.DistributeTranspiler(fx.strategies.data_parallel())
    made = t.transpile(program=main, startup_program=startup, trainers=2).main
    assert t.verify()
    assert not any(op.type == "all_reduce" for block in made.blocks[1:] for op in block.oplist)
    assert any("the loop writes it" in line for line in t.explain())
