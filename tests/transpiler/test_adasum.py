"""Adaptive summation of what ranks have of their own, against the formula written out in float64."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Builder, ProgramPair, Shard, parse_pair
from fluidx.verify import verify_ranks

D = "float64"


def pair(a, b):
    dot = float((a * b).sum())
    half = [1 - dot / (2 * (x * x).sum()) if (x * x).sum() > 1e-30 else 1.0 for x in (a, b)]
    return half[0] * a + half[1] * b


def adasum(values):
    """Ranks beyond a power of two first join the first ones; then neighbours in pairs, pairs in pairs, ..."""
    values = list(values)
    full = 1 << len(values).bit_length() - 1
    values = [pair(v, values[k + full]) if k + full < len(values) else v for k, v in enumerate(values[:full])]
    while len(values) > 1:
        values = [pair(values[k], values[k + 1]) for k in range(0, len(values), 2)]
    return values[0]


def together(rows):
    """What n ranks make of a row each; every rank's result."""
    n, size = rows.shape
    main, startup = fx.Program("meet"), fx.Program("meet_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, size], str(rows.dtype))
        out = Builder(main.global_block()).replica_adasum(fx.layers.reduce_sum(x, dim=0))
    t = fx.DistributeTranspiler("replicas").transpile(program=main, startup_program=startup, trainers=n)
    t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(n), timeout=20) as exe:
        exe.run_startup()
        return exe.run(feed={"x": rows}, fetch_list=[out], return_merged=False)[0]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8])
def test_ranks_are_combined_in_pairs(n):
    rows = np.random.default_rng(n).standard_normal((n, 7))
    found = together(rows)
    np.testing.assert_allclose(found[0], adasum(rows), rtol=1e-12)
    assert all(np.array_equal(found[0], other) for other in found[1:])  # bit by bit


@pytest.mark.parametrize("n", [2, 4, 8])
def test_what_is_orthogonal_is_added_up_and_what_agrees_is_averaged(n):
    np.testing.assert_array_equal(together(np.eye(n, 9))[0], np.eye(n, 9).sum(axis=0))
    same = np.tile([[3.0, -4.0, 0.0]], (n, 1))
    np.testing.assert_array_equal(together(same)[0], same[0])
    lengths = np.arange(1, n + 1)[:, None] * np.array([[1.0, 2.0]])  # of one direction, the mean of pairs of pairs: of powers of two all
    np.testing.assert_allclose(together(lengths)[0], lengths.mean(axis=0), rtol=1e-14)


def test_nothing_is_added_as_it_is():
    rows = np.array([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    np.testing.assert_array_equal(together(rows)[0], [1.0, 2.0])


def test_halves_are_reckoned_in_single_precision():
    rows = np.array([[200.0, 200.0], [300.0, -100.0]], "float16")  # whose squares are beyond float16
    np.testing.assert_allclose(together(rows)[0], adasum(rows.astype(D)), rtol=2e-3)  # a float16 has 11 bits


def regression(inner):
    main, startup = fx.Program("regression"), fx.Program("regression_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, y = fx.data("x", [-1, 6], D), fx.data("y", [-1, 5], D)
        loss = fx.layers.mean(fx.layers.square(fx.layers.fc(x, 5, bias_attr=False) - y))
        fx.optimizer.AdasumOptimizer(inner).minimize(loss)
    return main, startup, loss


def feeds(steps=4):
    rng = np.random.default_rng(5)
    return [{"x": rng.standard_normal((16, 6)), "y": rng.standard_normal((16, 5))} for _ in range(steps)]


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_steps_of_workers_are_summed(n):
    main, startup, loss = regression(fx.optimizer.Momentum(0.1, 0.9))
    t = fx.DistributeTranspiler("replicas").transpile(program=main, startup_program=startup, trainers=n)
    assert "replica-local" in str(t.verify())
    with fx.ParallelExecutor(t, places=fx.cpu_places(n), timeout=20) as exe:
        exe.run_startup()
        w, velocity = exe.state("fc_0.w_0"), [0.0] * n
        for feed in feeds():
            exe.run(feed=feed, fetch_list=[loss])
            steps = []
            for r in range(n):
                x, y = (feed[k][r * 16 // n : (r + 1) * 16 // n] for k in "xy")
                velocity[r] = 0.9 * velocity[r] + 2 * x.T @ (x @ w - y) / y.size
                steps.append(-0.1 * velocity[r])
            w = w + adasum(steps)
            for scope in exe.scopes:
                np.testing.assert_allclose(scope.get("fc_0.w_0"), w, rtol=1e-10)  # float64, and a subtraction of near values


def test_one_device_steps_as_the_inner_optimizer():
    (main, startup, loss), given = regression(fx.optimizer.SGD(0.1)), feeds()
    exe, scope = fx.Executor(), fx.executor.Scope()
    exe.run(startup, scope=scope)
    w = scope.get("fc_0.w_0")
    for feed in given:
        exe.run(main, feed=feed, fetch_list=[loss], scope=scope)
        w = w - 0.1 * 2 * feed["x"].T @ (feed["x"] @ w - feed["y"]) / feed["y"].size
    np.testing.assert_allclose(scope.get("fc_0.w_0"), w, rtol=1e-12)


@pytest.mark.parametrize("n, sent", [(2, 1), (4, 2), (8, 3), (3, (2 * 1 + 2) / 3), (6, (4 * 2 + 2 * 2) / 6)])
def test_bytes(n, sent):
    main, startup, _ = regression(fx.optimizer.SGD(0.1))
    t = fx.DistributeTranspiler("replicas").transpile(program=main, startup_program=startup, trainers=n)
    assert t.traffic(0).total == pytest.approx(sent * 8 * 30)


def test_a_value_that_another_axis_cuts_is_combined_whole():
    """The columns of a weight lie on two ranks each; its steps are weighted by products over all of its elements."""
    n, lr = 2, 0.1
    main, startup = fx.Program("cut"), fx.Program("cut_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 6], D)
        h = fx.layers.fc(x, 4, param_attr=fx.ParamAttr(name="w", placement=Shard(1, "tp")), bias_attr=False)
        fx.optimizer.AdasumOptimizer(fx.optimizer.SGD(lr)).minimize(fx.layers.reduce_sum(fx.layers.square(h)))
    t = fx.DistributeTranspiler("replicas").transpile(program=main, startup_program=startup, trainers=fx.Mesh(dp=n, tp=2))
    t.verify()
    rows = np.random.default_rng(2).standard_normal((n, 6))
    with fx.ParallelExecutor(t, places=fx.cpu_places(2 * n), timeout=20) as exe:
        exe.run_startup()
        w = exe.state("w").copy()
        exe.run(feed={"x": rows}, fetch_list=[])
        steps = [-lr * 2 * r[:, None] @ (r[None] @ w) for r in rows]
        np.testing.assert_allclose(exe.state("w"), w + adasum(steps), rtol=1e-10)  # float64, sums in another order

    by_columns = []  # each pair of ranks weighs its own columns
    for r in range(2 * n):
        text = str(ProgramPair(t.get_trainer_program(r), t.get_startup_program(r)))
        text = "\n".join(line for line in text.splitlines() if "all_gather(" not in line and "part(" not in line)
        assert text.count("= adasum_reduce(%elementwise_sub.tmp_0.moved)") == 1
        text = text.replace("tmp_0.moved", "tmp_0").replace("tmp_0.part", "tmp_0")
        by_columns.append(parse_pair(text.replace("adasum.tmp_0: f64[6,4]", "adasum.tmp_0: f64[6,4] shard(1) over tp")))
    with pytest.raises(fx.VerifyError, match=r"op replica_adasum, which the ranks compute together here: X shard\(1\) over tp"):
        verify_ranks(t.source, [p.main for p in by_columns], [p.startup for p in by_columns])


MEET = '= adasum_reduce(%elementwise_sub.tmp_1) {group="dp"}'
WRONG = {
    "ranks do not meet": ([0, 1], "= assign(%elementwise_sub.tmp_1)"),
    "one rank does not meet": ([1], "= assign(%elementwise_sub.tmp_1)"),
    "ranks take the mean": ([0, 1], '= all_reduce(%elementwise_sub.tmp_1) {group="dp", op="avg"}'),
    "ranks sum parameters": ([0, 1], '= adasum_reduce(%fc_0.w_0) {group="dp"}'),
}


@pytest.mark.parametrize("ranks, new", WRONG.values(), ids=WRONG.keys())
def test_wrong_rank_programs_are_refused(ranks, new):
    main, startup, _ = regression(fx.optimizer.SGD(0.1))
    t = fx.DistributeTranspiler("replicas").transpile(program=main, startup_program=startup, trainers=2)
    pairs = [str(ProgramPair(t.get_trainer_program(r), t.get_startup_program(r))) for r in range(2)]
    for r in ranks:
        assert MEET in pairs[r]
        pairs[r] = pairs[r].replace(MEET, new)
    read = [parse_pair(text) for text in pairs]
    with pytest.raises(fx.VerifyError):
        verify_ranks(t.source, [p.main for p in read], [p.startup for p in read])


def test_whole_numbers_have_no_adaptive_sum():
    with fx.program_guard(fx.Program("whole"), fx.Program()), pytest.raises(fx.ProgramError, match="must be of floats"):
        Builder(fx.default_main_program().global_block()).replica_adasum(fx.data("n", [3], "int64"))
