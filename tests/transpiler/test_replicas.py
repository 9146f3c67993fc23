"""Ranks that train by themselves and meet now and then: n of them are n separate devices, averaged by hand."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Own, Program, ProgramPair, Shard
from fluidx.verify import verify_ranks

L, D = fx.layers, "float64"


def model(k=2, optimizer=None, placement=None):
    """A small net, trained by itself, whose parameters are averaged in every k-th run; and what is fed."""
    main, startup = fx.Program("alone"), fx.Program("alone_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, y = fx.data("x", [-1, 6], D), fx.data("y", [-1, 1], D)
        out = L.fc(L.batch_norm(L.fc(x, 5, act="tanh", param_attr=fx.ParamAttr(placement=placement))), 1)
        loss = L.mean(L.square(out - y))
        fx.optimizer.LocalSGDOptimizer(optimizer or fx.optimizer.Adam(0.05), k).minimize(loss)
    return main, startup, loss, out


def trained(main):
    """The parameters that the optimizer updates: those of batch_norm's running statistics are each rank's own."""
    return [p for p in main.all_parameters() if p.trainable]


def feeds(rows):
    rng = np.random.default_rng(3)
    return [{"x": rng.standard_normal((n, 6)), "y": rng.standard_normal((n, 1))} for n in rows]


def by_hand(main, startup, loss, out, k, n, given):
    """n executors of one device, each with its rows; in every k-th step their parameters become the mean of all."""
    exe, scopes = fx.Executor(fx.CPUPlace()), [fx.executor.Scope() for _ in range(n)]
    for s in scopes:
        exe.run(startup, scope=s)
    seen = []
    for step, feed in enumerate(given, 1):
        rows = len(feed["x"])
        cuts = [slice(r * rows // n, (r + 1) * rows // n) for r in range(n)]
        values = [exe.run(main, {f: v[c] for f, v in feed.items()}, [loss, out], scope=s) for s, c in zip(scopes, cuts, strict=True)]
        seen.append((np.mean([v[0] for v in values], axis=0), np.concatenate([v[1] for v in values])))
        if step % k == 0:
            for p in trained(main):
                mean = np.mean([s.get(p.name) for s in scopes], axis=0)
                for s in scopes:
                    s.set(p.name, mean)
    return seen, scopes


def transpiled(main, startup, trainers):
    return fx.DistributeTranspiler("replicas").transpile(program=main, startup_program=startup, trainers=trainers)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_rank_is_a_device_by_itself_until_they_meet(n):
    k, given = 2, feeds([8, 7, 9, 8, 11])
    main, startup, loss, out = model(k)
    seen, scopes = by_hand(main, startup, loss, out, k, n, given)
    t = transpiled(main, startup, n)
    t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(n)) as exe:
        exe.run_startup()
        for feed, (mean, rows) in zip(given, seen, strict=True):
            found = exe.run([loss, out], feed)
            # the mean over the ranks is a sum in another order: rounding of float64, which Adam's division by small numbers magnifies
            np.testing.assert_allclose(found[0], mean, rtol=1e-10)
            np.testing.assert_allclose(found[1], rows, rtol=1e-10)
        for p in main.all_parameters():
            for s, mine in zip(scopes, exe.scopes, strict=True):
                np.testing.assert_allclose(mine.get(p.name), s.get(p.name), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_replica_may_be_several_ranks(axis):
    """Four ranks, two for each replica: they share the first weight and what is computed with it, and train as two devices do."""
    k, given = 2, feeds([8, 7, 9, 8])
    wanted, scopes = by_hand(*(whole := model(k)), k, 2, given)
    main, startup, loss, out = model(k, placement=Shard(axis, "tp"))
    t = transpiled(main, startup, fx.Mesh(dp=2, tp=2))
    t.verify()
    assert t.main.global_block().desc("fc_0.w_0").placement == (Shard(axis, "tp"), Own("dp"))
    with fx.ParallelExecutor(t, places=fx.cpu_places(4)) as exe:
        exe.run_startup()
        for feed, (mean, rows) in zip(given, wanted, strict=True):
            found = exe.run([loss, out], feed)
            # sums in another order: rounding of float64, which Adam's division by small numbers magnifies
            np.testing.assert_allclose(found[0], mean, rtol=1e-9)
            np.testing.assert_allclose(found[1], rows, rtol=1e-9)
        for p in trained(whole[0]):  # the last step was a meeting
            np.testing.assert_allclose(exe.state(p.name), scopes[0].get(p.name), rtol=1e-9, atol=1e-12)


def test_nothing_is_cut_among_replicas():
    main, startup, *_ = model(placement=Shard(1, "dp"))
    transpiled(main, startup, 1)
    with pytest.raises(fx.TranspileError) as caught:
        transpiled(main, startup, 2)
    said, op, line = str(caught.value).split("\n")
    assert said == (
        "'fc_0.w_0' is annotated shard(1) over dp, but here each rank of dp has its own copy; remove the placement, or shard it over "
        "another axis, with trainers=fx.Mesh(dp=2, tp=2)"
    )
    assert op.startswith("  in %fc_0.tmp_0 = mul(%x, %fc_0.w_0)") and __file__ in line


def test_a_mean_of_maxima_is_no_maximum_of_means():
    """Each replica's columns lie on two ranks: its maximum is taken before replicas meet."""
    main, startup = fx.Program("maxima"), fx.Program("maxima_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = L.shard(fx.data("x", [-1, 4], D), Shard(1, "tp"))
        mean = L.replica_mean(L.reduce_max(L.reduce_sum(x, dim=0, keep_dim=True), dim=1))
    t = transpiled(main, startup, fx.Mesh(dp=2, tp=2))
    t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(4)) as exe:
        exe.run_startup()
        (found,) = exe.run([mean], {"x": np.array([[8.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0]])})
    assert found == [6.0]  # of the means the maximum is 4


def test_nothing_is_sent_between_meetings():
    main, startup, *_ = model()
    t = transpiled(main, startup, 4)
    assert not [op for op in t.main.ops if op.type in ("all_reduce", "broadcast")]
    inner = [op.type for b in t.main.blocks[1:] for op in b.oplist]
    assert inner.count("all_reduce") == len(trained(main))


def test_values_that_ranks_have_of_their_own_are_fetched_as_rows_or_as_the_mean():
    main, startup, loss, out = model()
    given = feeds([7])
    t = transpiled(main, startup, 2)
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as exe:
        exe.run_startup()
        both = exe.run([loss, out], given[0], return_merged=False)
        exe.run_startup()
        mean, rows = exe.run([loss, out], given[0])
    np.testing.assert_array_equal(mean, (both[0][0] + both[0][1]) / 2)
    np.testing.assert_array_equal(rows, np.concatenate(both[1]))
    assert [len(part) for part in both[1]] == [3, 4]


def test_every_rank_needs_a_row():
    main, startup, loss, _ = model()
    with fx.ParallelExecutor(transpiled(main, startup, 4), places=fx.cpu_places(4)) as exe:
        exe.run_startup()
        with pytest.raises(fx.FeedError, match="has 3 rows for 4 ranks, each of which trains on its own rows; feed at least 4"):
            exe.run([loss], feeds([3])[0])
        exe.run([loss], feeds([4])[0])


def test_what_is_saved_is_the_mean_where_there_is_one(tmp_path):
    decorate = fx.mixed_precision.decorate
    main, startup, loss, _ = model(4, decorate(fx.optimizer.SGD(0.05), init_loss_scaling=8.0, dtype="bfloat16"))
    with fx.ParallelExecutor(transpiled(main, startup, 2), places=fx.cpu_places(2)) as exe:
        exe.run_startup()
        exe.run([], feeds([8])[0])
        fx.save(main, tmp_path / "alike", exe)
        saved = fx.io.load_program_state(tmp_path / "alike")
        apart = [s.get("fc_0.w_0") for s in exe.scopes]
        assert not np.array_equal(*apart) and np.allclose(saved["fc_0.w_0"], np.mean(apart, axis=0), rtol=1e-15)  # one rounding
        exe.scopes[1].set("num_good_steps_0", np.array([0], "int32"))
        with pytest.raises(fx.io.CheckpointError, match=r"cannot save: variable 'num_good_steps_0': each rank has its own, \[1\], \[0\]"):
            fx.save(main, tmp_path / "apart", exe)


def test_wire_has_nothing_to_narrow():
    with pytest.raises(fx.TranspileError, match="replicas: wire='float16' narrows gradients"):
        fx.strategies.replicas(wire="float16")


def test_the_report_says_that_answers_are_not_one_devices():
    main, startup, *_ = model()
    assert "replica-local" in str(transpiled(main, startup, 2).verify())
    assert "replica-local" not in str(
        fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=2).verify()
    )


def test_text_and_json_say_it():
    main, startup, *_ = model()
    t = transpiled(main, startup, 2)
    assert "data %x: f64[-1,6] own over dp" in str(t.main)
    assert str(Program.parse_from_string(str(t.get_trainer_program(1)))) == str(t.get_trainer_program(1))
    assert t.main.global_block().desc("x").placement == (Own("dp"),)


def test_one_value_of_all_ranks_is_asked_for_by_name():
    main, startup = fx.Program("asks"), fx.Program("asks_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 4], D)
        h = L.fc(x, 3, param_attr=fx.ParamAttr(placement=Shard(1, "tp")), bias_attr=False)
        flag = L.greater_than(L.reduce_mean(h), L.fill_constant([1], D, 0.0))
        L.cond(flag, lambda: L.scale(h, 2.0), lambda: h)
    with pytest.raises(fx.FluidxError, match="needs one global value of .*, but each rank has its own; use layers.replica_mean"):
        transpiled(main, startup, fx.Mesh(dp=2, tp=1))


BREAK = {
    "a sum instead of the mean": lambda s: s.replace('op="avg"', 'op="sum"', 1),
    "no meeting": lambda s: s.replace('all_reduce(%fc_0.b_0) {group="dp", op="avg"}', "assign(%fc_0.b_0)"),
    "the mean left to each rank": lambda s: s.replace('all_reduce(%fc_0.b_0) {group="dp", op="avg"}', "replica_mean(%fc_0.b_0)"),
    "one value claimed for all": lambda s: s.replace("own over dp", "", 2),
    "cut rows": lambda s: s.replace("data %x: f64[-1,6] own over dp", "data %x: f64[-1,6] shard(0) over dp"),
}


@pytest.mark.parametrize("which", BREAK)
def test_wrong_programs_of_replicas_are_refused(which):
    main, startup, *_ = model()
    t = transpiled(main, startup, 2)
    texts = [str(t.get_trainer_program(r)) for r in range(2)]
    broken = [Program.parse_from_string(BREAK[which](text)) for text in texts]
    assert str(broken[0]) != texts[0]
    for mains in (broken, [Program.parse_from_string(texts[0]), broken[1]]):
        with pytest.raises(fx.VerifyError):
            verify_ranks(ProgramPair(main, startup), mains, [t.get_startup_program(r) for r in range(2)])


def test_means_travel_together():
    # gradients that each rank has of its own, and whose mean all ranks take: two of them go in one bucket
    main, startup = fx.Program("means"), fx.Program("means_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss = L.mean(L.fc(L.fc(fx.data("x", [-1, 8], D), 8, bias_attr=False), 8, bias_attr=False))
        fx.optimizer.DGCMomentumOptimizer(0.1, 0.9, rampup_begin_step=0).minimize(loss)  # both are too small to be compressed
    t = transpiled(main, startup, 2)
    assert [op.type for op in t.main.ops if op.type in ("pack", "all_reduce", "unpack")] == ["pack", "all_reduce", "unpack"]
    t.verify()
    wrong = [Program.parse_from_string(str(t.get_trainer_program(r))) for r in range(2)]
    for p in wrong:  # each takes the other's mean
        p.global_block().oplist = [
            op.replace(outputs={"Out": op.output_arg_names[::-1]}) if op.type == "unpack" else op for op in p.global_block().oplist
        ]
    with pytest.raises(fx.VerifyError, match="does not hold one device's value"):
        verify_ranks(ProgramPair(main, startup), wrong, [t.get_startup_program(r) for r in range(2)])
