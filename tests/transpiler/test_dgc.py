"""Ranks that send their largest elements: n of them against n workers written out in NumPy."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Builder, ProgramPair, parse_pair
from fluidx.testing.models import integer_mlp, train_single
from fluidx.verify import verify_ranks

D, ROWS, COLUMNS, RATE, M = "float64", 6, 5, 0.1, 0.9


def regression(**options):
    """x @ w + bias: a weight of 30 elements that is compressed, and a bias that is not."""
    main, startup = fx.Program("regression"), fx.Program("regression_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, y = fx.data("x", [-1, ROWS], D), fx.data("y", [-1, COLUMNS], D)
        loss = fx.layers.mean(fx.layers.square(fx.layers.fc(x, COLUMNS) - y))
        fx.optimizer.DGCMomentumOptimizer(RATE, M, **{"least": 10, **options}).minimize(loss)
    return main, startup, loss


def feeds(rows, steps=6):
    rng = np.random.default_rng(5)
    return [{"x": rng.standard_normal((rows, ROWS)), "y": rng.standard_normal((rows, COLUMNS))} for _ in range(steps)]


def largest(v, k):
    """A mask of the k elements of largest size; random numbers have no equals."""
    return np.abs(v) >= np.sort(np.abs(v), axis=None)[-k]


def workers(w, bias, given, n, sent_of, nesterov=False, clip=None, decay=0.0):
    """What n workers do by the paper: each its own u and v; `sent_of(step)` elements of w are sent, None: all, as plain momentum does."""
    u, v = ([np.zeros_like(w) for _ in range(n)] for _ in range(2))
    velocity, used = np.zeros_like(bias), []
    for step, feed in enumerate(given):
        rows, k = len(feed["x"]), sent_of(step)
        sent, slopes = [], []
        for r in range(n):
            mine = slice(r * rows // n, (r + 1) * rows // n)
            x, off = feed["x"][mine], feed["x"][mine] @ w + bias - feed["y"][mine]
            g, slope = 2 * x.T @ off / off.size, 2 * off.sum(axis=0) / off.size
            if clip is not None:
                g = g * min(1.0, clip / n**0.5 / np.linalg.norm(g))
            g = g + decay * w
            u[r] = M * (u[r] + g) if nesterov else M * u[r] + g
            v[r] = v[r] + u[r] + (g if nesterov else 0)
            mask = np.ones_like(w, bool) if k is None else largest(v[r], k)
            sent.append(np.where(mask, v[r], 0))
            v[r] = np.where(mask, 0, v[r])
            if k is not None:
                u[r] = np.where(mask, 0, u[r])
            slopes.append(slope)
        slope = np.mean(slopes, axis=0)
        if clip is not None:
            slope = slope * min(1.0, clip / np.linalg.norm(slope))
        slope = slope + decay * bias
        velocity = M * velocity + slope
        w, bias = w - RATE * np.mean(sent, axis=0), bias - RATE * (slope + M * velocity if nesterov else velocity)
        used.append(np.count_nonzero(np.mean(sent, axis=0)))
    return w, bias, u, v, used


def on_ranks(model, given, n):
    main, startup, loss = model
    t = fx.DistributeTranspiler("replicas").transpile(program=main, startup_program=startup, trainers=n)
    report = t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(n), timeout=20) as exe:
        exe.run_startup()
        begin = exe.state("fc_0.w_0"), exe.state("fc_0.b_0")
        for feed in given:
            exe.run(feed=feed, fetch_list=[loss])
        own = [[s.get(f"fc_0.w_0_dgc_{key}_0") for s in exe.scopes] for key in "uv"]
        return begin, (exe.state("fc_0.w_0"), exe.state("fc_0.b_0"), *own), report


OPTIONS = {
    "at once": ({"rampup_begin_step": 0, "sparsity": [0.8]}, lambda step: 6),
    "after plain momentum": ({"rampup_begin_step": 3, "sparsity": [0.9]}, lambda step: None if step < 3 else 3),
    "warming up": (
        {"rampup_begin_step": 1, "rampup_step": 4, "sparsity": [0.5, 0.8, 0.999]},
        # of three shares in four runs, the second begins 4/3 and the third 8/3 runs after the first, rounded up
        lambda step: None if step < 1 else 15 if step < 3 else 6 if step < 4 else 1,
    ),
}


@pytest.mark.parametrize("options, sent_of", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_ranks_are_the_workers_of_the_paper(n, nesterov, options, sent_of):
    given = feeds(12)
    begin, found, report = on_ranks(regression(use_nesterov=nesterov, **options), given, n)
    w, bias, u, v, _ = workers(*begin, given, n, sent_of, nesterov)
    for a, b in zip(found, (w, bias, u, v), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)  # float64, added up in another order
    assert ("replica-local" in str(report)) is (n > 1)


def test_a_rank_clips_its_own_gradient_at_its_share_and_decays_it():
    given = feeds(12)
    clip, decay = fx.clip.GradientClipByNorm(0.5), fx.regularizer.L2Decay(0.3)
    model = regression(rampup_begin_step=1, sparsity=[0.8], grad_clip=clip, num_trainers=3, regularization=decay)
    begin, found, _ = on_ranks(model, given, 3)
    w, bias, *_ = workers(*begin, given, 3, lambda step: None if step < 1 else 6, clip=0.5, decay=0.3)
    np.testing.assert_allclose(found[0], w, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found[1], bias, rtol=1e-10, atol=1e-12)


def test_before_it_begins_it_is_momentum():
    given = [integer_mlp().feed(8, k) for k in range(2)]
    dgc = integer_mlp(optimizer=fx.optimizer.DGCMomentum(0.5, 0.5, rampup_begin_step=10, least=0))
    plain = integer_mlp(optimizer=fx.optimizer.Momentum(0.5, 0.5))
    (_, one), (_, other) = (train_single(m, given, []) for m in (dgc, plain))
    for p, _ in plain.gradients:
        assert np.array_equal(one.get(p), other.get(p))  # small integers and halves


def test_only_what_is_chosen_moves():
    given = feeds(12, 1)
    begin, found, _ = on_ranks(regression(rampup_begin_step=0, sparsity=[0.999]), given, 3)
    moved = np.count_nonzero(found[0] != begin[0])
    assert 1 <= moved <= 3  # one element of each rank
    assert all(np.count_nonzero(v) == ROWS * COLUMNS - 1 for v in found[3])


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "reduce_broadcast"])
def test_where_gradients_are_added_up_first_it_is_one_devices(strategy):
    main, startup, loss = regression(rampup_begin_step=1, sparsity=[0.8])
    t = fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=2)
    assert "replica-local" not in str(t.verify())


MEET = "= sparse_all_reduce(%where.tmp_1)"
SHARED = MEET + ' {group="dp", share=0.2}'
KEPT = "= where(%top_share.tmp_0, %fill_zeros_like.tmp_0, %elementwise_add.tmp_0)"
WRONG = {
    "ranks do not meet": ([0, 1], SHARED, "= assign(%where.tmp_1)"),
    "one rank does not meet": ([1], SHARED, "= assign(%where.tmp_1)"),
    "they meet over what they keep": ([0, 1], MEET, "= sparse_all_reduce(%fc_0.w_0_dgc_v_0)"),
    "they meet over all of it": ([0, 1], MEET, "= sparse_all_reduce(%elementwise_add.tmp_0)"),
    "they add their elements up": ([0, 1], SHARED, '= all_reduce(%where.tmp_1) {group="dp", op="sum"}'),
    "one rank keeps what it sends": ([1], KEPT, "= assign(%elementwise_add.tmp_0)"),
    "what is kept is called one value": ([0, 1], "dgc_v_0: f64[6,5] own over dp", "dgc_v_0: f64[6,5]"),
    "one rank expects to send more": ([1], "share=0.2", "share=0.3"),
    "one rank chooses otherwise": ([1], "= top_share(%elementwise_add.tmp_0,", "= top_share(%fc_0.w_0_dgc_u_0,"),
}  # fmt: skip


@pytest.mark.parametrize("ranks, old, new", WRONG.values(), ids=WRONG.keys())
def test_wrong_rank_programs_are_refused(ranks, old, new):
    main, startup, _ = regression(rampup_begin_step=0, sparsity=[0.8])
    t = fx.DistributeTranspiler("replicas").transpile(program=main, startup_program=startup, trainers=2)
    pairs = [str(ProgramPair(t.get_trainer_program(r), t.get_startup_program(r))) for r in range(2)]
    for r in ranks:
        assert old in pairs[r]
        pairs[r] = pairs[r].replace(old, new)
    read = [parse_pair(text) for text in pairs]
    with pytest.raises(fx.VerifyError):
        verify_ranks(t.source, [p.main for p in read], [p.startup for p in read])


def test_top_share_takes_the_largest_in_size():
    main = fx.Program("chosen")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        x, share = fx.data("x", [2, 4], "float32"), fx.data("share", [1], "float32")
        out = Builder(main.global_block()).top_share(x, share)
    exe = fx.Executor()

    def chosen(values, part):
        feed = {"x": np.array(values, "float32").reshape(2, 4), "share": np.array([part], "float32")}
        return exe.run(main, feed=feed, fetch_list=[out])[0].reshape(-1).nonzero()[0].tolist()

    assert chosen([1, -9, 3, 0, 8, -2, 5, 4], 0.25) == [1, 4]
    assert chosen([1, -9, 3, 0, 8, -2, 5, 4], 0.0) == [1]  # one at least
    assert chosen([1, -9, 3, 0, 8, -2, 5, 4], 1.0) == list(range(8))
    assert chosen([7, 7, -7, 7, 7, 7, 7, 9], 0.5) == [0, 1, 2, 7]  # of equal ones the first
    assert chosen([0] * 8, 0.375) == [0, 1, 2]
    assert chosen([1, np.nan, 3, np.inf, 8, -2, 5, 4], 0.25) == [1, 3]


def test_what_it_takes():
    make = fx.optimizer.DGCMomentumOptimizer
    with pytest.raises(fx.ProgramError, match="sparsity must be numbers of at least 0"):
        make(0.1, 0.9, 0, sparsity=[1.0])
    with pytest.raises(fx.ProgramError, match="needs num_trainers"):
        make(0.1, 0.9, 0, grad_clip=fx.clip.GradientClipByNorm(1.0))
    with pytest.raises(fx.ProgramError, match="must be a GradientClipByNorm"):
        make(0.1, 0.9, 0, grad_clip=fx.clip.GradientClipByGlobalNorm(1.0), num_trainers=2)


def test_small_parameters_are_as_fluid_leaves_them():
    assert not fx.optimizer.DGCMomentum(0.1, 0.9, 0).compresses(regression(rampup_begin_step=0)[0].global_block().var("fc_0.w_0"))


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("dtype, size", [("float32", 4), ("float64", 8)])
def test_traffic_counts_values_and_their_places(n, dtype, size):
    main, startup = fx.Program("sparse"), fx.Program("sparse_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 40], dtype)
        loss = fx.layers.mean(fx.layers.square(fx.layers.fc(x, 25, bias_attr=False)))
        fx.optimizer.DGCMomentumOptimizer(0.1, 0.9, rampup_begin_step=0, sparsity=[0.75, 0.99], least=10).minimize(loss)
    t = fx.DistributeTranspiler("replicas").transpile(program=main, startup_program=startup, trainers=n)
    pairs = 10  # of 1,000 elements what is sent when the warm-up is over
    assert t.traffic(0).total == pytest.approx((n - 1) * (pairs * (size + 4) + 8))  # places are int32, their number is an int64


def test_a_share_is_a_part():
    with fx.program_guard(fx.Program("share"), fx.Program()), pytest.raises(fx.ProgramError, match="must be from 0 to 1, got 1.5"):
        Builder(fx.default_main_program().global_block()).replica_sparse_mean(fx.data("x", [3], D), share=1.5)
