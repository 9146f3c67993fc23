"""batch_norm over runs of rows (sub_batches): ranks that hold whole runs need not talk, others gather, and all give one device's values."""

import numpy as np
import pytest

import fluidx as fx
from fluidx import VerifyError
from fluidx.backward import append_backward
from fluidx.ir import ProgramError, Shard, parse_pair
from fluidx.ir.opdef import OPS, Effect
from fluidx.testing.models import TestModel, train_ranks, train_single
from fluidx.verify import verify_ranks
from tests.sweep import swept
from tests.transpiler.models import STRATEGIES, D, L, same_answers, written

FIRST = ["data_parallel", "ring_optimizer", "zero1"]


def convolutions(runs=4, **weights):
    """Two convolutions, each with a batch_norm over runs of rows."""

    def write():
        x, label = fx.data("x", [-1, 3, 8, 8], D), fx.data("label", [-1, 1], "int64")
        h = L.batch_norm(L.conv2d(x, 4, 3, padding=1, bias_attr=False, **weights), act="relu", sub_batches=runs)
        h = L.batch_norm(L.conv2d(L.pool2d(h, 2, "max", 2), 6, 3, padding=1, bias_attr=False), act="relu", sub_batches=runs)
        loss = L.mean(L.cross_entropy(L.fc(L.pool2d(h, 2, "avg", 2), 5, act="softmax"), label))

        def feed(rows, seed=0):
            rng = np.random.default_rng(seed)
            return {"x": rng.standard_normal((rows, 3, 8, 8)), "label": rng.integers(0, 5, (rows, 1))}

        return loss, fx.optimizer.Momentum(0.1, 0.9), feed

    return written(write)


def transpiled(model, strategy="data_parallel", trainers=2):
    t = fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=trainers)
    t.verify()
    return t


@swept(2, strategy=list(STRATEGIES), ranks=[2, 4])
def test_training_is_one_devices(strategy, ranks):
    # float64: the order of sums is all that differs; 13, 7 and 5 rows are uneven, of 2 rows and of 1 some runs and ranks have none
    same_answers(convolutions(), STRATEGIES[strategy](), ranks, rows=(8, 13, 7, 2, 1, 5), tol=1e-10)


@swept(3, strategy=FIRST, runs_and_ranks=[(4, 3), (2, 4), (3, 2)])
def test_ranks_whose_number_does_not_divide_the_runs_gather_the_batch(strategy, runs_and_ranks):
    runs, ranks = runs_and_ranks
    model = convolutions(runs)
    same_answers(model, STRATEGIES[strategy](), ranks, rows=(8, 7, 2), tol=1e-10)
    moved = [line for line in transpiled(model, trainers=ranks).explain() if "ghost_batch_norm" in line]
    assert moved[0].startswith("%conv2d_0.tmp_0: shard(0) over dp to replicate") and moved[0].endswith("for ghost_batch_norm: whole")


def exact(runs):
    """A batch_norm of what is fed, and the gradient of it."""
    main, startup = fx.Program("exact"), fx.Program("exact_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3, 5])
        x.stop_gradient = False
        y = L.batch_norm(x, sub_batches=runs)
        pairs = append_backward(L.reduce_sum(y * y * y))

    def feed(rows, seed=0):
        return {"x": np.random.default_rng(seed).standard_normal((rows, 3, 5)).astype("float32")}

    return TestModel(main, startup, y, feed, [(p.name, g.name) for p, g in pairs])


@pytest.mark.parametrize("rows", [8, 16, 11, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_values_and_the_inputs_gradient_are_bit_equal(ranks, rows):
    """A run is normalized by the same arithmetic wherever it lies."""
    model = exact(4)
    fetch = [model.loss, "x@GRAD", "batch_norm_0.tmp_1", "batch_norm_0.tmp_2"]
    (one,), scope = train_single(model, [model.feed(rows)], fetch)
    (many,), state = train_ranks(model, "data_parallel", ranks, [model.feed(rows)], fetch)
    for name, a, b in zip(fetch, one, many, strict=True):
        assert np.array_equal(a, b), name
    for name, value in state.items():  # the moving statistics are a sum over the ranks
        np.testing.assert_allclose(value, scope.get(name), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("strategy", FIRST)
@pytest.mark.parametrize("ranks", [2, 4])
def test_only_the_moving_statistics_and_gradients_of_parameters_are_reduced(strategy, ranks):
    main = transpiled(convolutions(), strategy, ranks).main
    talk = (Effect.COLLECTIVE, Effect.P2P)
    descs = main.global_block().descs
    talking = [
        n
        for op in main.ops
        if OPS[op.type].effect in talk or op.type.startswith("ring")
        for n in op.input_arg_names
        if not any(n.startswith(p.name) for p in main.all_parameters()) and "pack" not in n
    ]
    assert talking == ["batch_norm_0.tmp_3", "batch_norm_1.tmp_3"]
    assert [descs[n].type.shape for n in talking] == [(2, 4), (2, 6)]
    assert all(descs[n].placement == (Shard(0, "dp"),) for n in ("batch_norm_0.tmp_0", "batch_norm_0.tmp_1", "conv2d_0.tmp_0@GRAD"))


def test_the_default_reduces_statistics_in_between():
    ops = [op.type for op in transpiled(convolutions(1)).main.ops]
    assert ops.count("bn_mean") == ops.count("bn_variance") == 2 and "ghost_batch_norm" not in ops


@pytest.mark.parametrize("cluster", [fx.Cluster(2, 2), fx.Cluster(2, 1)], ids=str)
def test_on_several_hosts(cluster):
    same_answers(convolutions(), "data_parallel", cluster, rows=(8, 7), tol=1e-10)


@pytest.mark.parametrize("mesh", [fx.Mesh(dp=2, tp=2), fx.Mesh(tp=2, dp=2), fx.Mesh(dp=1, tp=2)], ids=repr)
def test_channels_and_runs_may_be_cut_at_once(mesh):
    model = convolutions(param_attr=fx.ParamAttr(placement=Shard(0, "tp")))
    same_answers(model, "data_parallel", mesh, rows=(7, 2), tol=1e-10)
    t = transpiled(model, trainers=mesh)
    dp = [Shard(0, "dp")] if mesh.axes.get("dp", 1) > 1 else []
    assert set(t.main.global_block().descs["batch_norm_0.tmp_1"].placement) >= {Shard(1, "tp"), *dp}


def test_a_second_group_does_not_cut_the_rows_again():
    """What the inner group's ranks have would begin where runs do by luck only: of 3 rows and 6 runs, say, on 2 x 3 ranks."""
    model = exact(6)
    data = model.main.global_block().descs
    data["x"] = data["x"].changed(placement=(Shard(0, "dp"), Shard(0, "tp")))
    mesh = fx.Mesh(dp=2, tp=3)
    same_answers(model, "data_parallel", mesh, rows=(3, 7, 12), fetch=("x@GRAD",), tol=1e-5)
    t = transpiled(model, trainers=mesh)
    assert t.explain()[0].startswith("%x: shard(0) over tp shard(0) over dp to shard(0) over tp, ")


def test_a_batch_of_a_size_that_is_known():
    main, startup = fx.Program("known"), fx.Program("known_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, other = fx.data("x", [6, 3], D), fx.data("other", [-1, 3], D)
        y = L.batch_norm(L.fc(x, 3), sub_batches=4)
        loss = L.reduce_sum(y * y * y) + L.reduce_sum(other)
        fx.optimizer.SGD(0.1).minimize(loss)
    descs = main.global_block().descs
    descs["x"] = descs["x"].changed(placement=(Shard(0, "dp"),))

    def feed(rows, seed=0):
        rng = np.random.default_rng(seed)
        return {"x": rng.standard_normal((6, 3)), "other": rng.standard_normal((rows, 3))}

    for ranks in (2, 4, 3):
        same_answers(TestModel(main, startup, loss, feed, []), "data_parallel", ranks, rows=(7,), fetch=(y,))
        place = transpiled(TestModel(main, startup, loss, feed, []), trainers=ranks).main.global_block().descs[y.name].placement
        assert place == ((Shard(0, "dp"),) if ranks != 3 else ())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_trained_model_is_evaluated_on_ranks(ranks):
    main, startup = fx.Program("normed"), fx.Program("normed_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = L.batch_norm(L.tanh(L.fc(fx.data("x", [-1, 4], D), 3)), momentum=0.5, sub_batches=4)
        test = main.clone(for_test=True)
    t = fx.DistributeTranspiler().transpile(program=test, startup_program=startup, trainers=ranks)
    t.verify()
    assert not any(OPS[op.type].effect is Effect.COLLECTIVE for op in t.main.ops)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(startup, scope=scope)
    feed = {"x": np.random.default_rng(0).standard_normal((7, 4))}
    exe.run(main, feed=feed, scope=scope)
    with fx.ParallelExecutor(t, places=fx.cpu_places(ranks)) as exes:
        exes.run_startup()
        for d in test.list_vars():
            if d.persistable:
                exes.set_state(d.name, scope.get(d.name))
        (many,) = exes.run(feed=feed, fetch_list=[h])
    np.testing.assert_allclose(many, exe.run(test, feed=feed, fetch_list=[h], scope=scope)[0], rtol=1e-12)


def test_recompute_repeats_the_runs_and_advances_the_moving_statistics_once():
    feed = {"x": np.random.default_rng(0).standard_normal((6, 5))}
    results = []
    for recompute in (False, True):
        main, startup = fx.Program(), fx.Program()
        with fx.program_guard(main, startup), fx.unique_name.guard():
            x = fx.data("x", [-1, 5], D)
            first = L.fc(x, 4, act="tanh")
            second = L.fc(L.batch_norm(first, sub_batches=2), 4, act="tanh")
            loss = L.mean(L.square(L.fc(second, 3)))
            pairs = append_backward(loss, checkpoints=[first, second] if recompute else None)
            fx.optimizer.SGD(0.1).apply_gradients(pairs)
        ops = [op.type for op in main.ops]
        assert (ops.count("ghost_batch_norm"), ops.count("bn_running")) == (1 + recompute, 1)
        scope, exe = fx.Scope(), fx.Executor()
        exe.run(startup, scope=scope)
        results.append([exe.run(main, feed=feed, fetch_list=[loss, "batch_norm_0.w_1"], scope=scope) for _ in range(3)])
    assert all(np.array_equal(a, b) for step in zip(*results, strict=True) for a, b in zip(*step, strict=True))


# -- the proof ----------------------------------------------------------------------------------------------------

SOURCE = """program runs {
  data %x: f32[-1,3]
  var %w: f32[3] persistable
startup:
  %w = fill_constant() {shape=[3], value=1.0}
forward:
  %y: f32[-1,3], %m: f32[4,3], %v: f32[4,3], %s: f32[2,3] = ghost_batch_norm(%x, %w, %w, %w, %w) {sub_batches=4}
}"""


def prove(ranks, groups="group dp = RANKS", cut="shard(0) over dp"):
    groups = groups.replace("RANKS", str(list(range(ranks))))
    text = SOURCE.replace("program runs {", f"program runs {{\n  {groups}").replace("data %x: f32[-1,3]", f"data %x: f32[-1,3] {cut}")
    for name, type_ in (("y", "f32[-1,3]"), ("m", "f32[4,3]"), ("v", "f32[4,3]")):
        text = text.replace(f"%{name}: {type_}", f"%{name}: {type_} {cut}")
    text = text.replace("%s: f32[2,3]", f"%s: f32[2,3] {cut.replace('shard(0, 2)', 'shard(0)').replace('shard(0)', 'partial(sum)')}")
    pairs = [parse_pair(text)] * ranks
    return verify_ranks(parse_pair(SOURCE), [p.main for p in pairs], [p.startup for p in pairs], "by hand")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_whole_runs_on_every_rank_are_proved(ranks):
    assert f"on {ranks} rank" in str(prove(ranks))


@pytest.mark.parametrize("ranks", [3, 5, 6, 8])
def test_runs_that_ranks_would_share_are_refused(ranks):
    with pytest.raises(VerifyError, match="no rule allows its placements: X shard.0. over dp"):
        prove(ranks)


def test_rows_cut_by_blocks_are_refused():
    with pytest.raises(VerifyError, match="no rule allows its placements"):
        prove(2, cut="shard(0, 2) over dp")


def test_rows_cut_by_two_groups_are_refused():
    with pytest.raises(VerifyError, match="two groups shard n, which is sharded in runs"):
        prove(4, "group dp = [0, 1] [2, 3]\n  group tp = [0, 2] [1, 3]", "shard(0) over tp shard(0) over dp")


def test_a_builder_refuses_what_the_proof_would():
    from fluidx.ir.program_rewriter import Writer

    for ranks, right in ((2, True), (3, False)):
        pair = parse_pair(SOURCE.replace("program runs {", f"program runs {{\n  group dp = {list(range(ranks))}"))
        block = pair.main.global_block()
        block.descs["x"] = block.descs["x"].changed(placement=(Shard(0, "dp"),))
        build = Writer(pair.main).builder()
        if right:
            assert build.ghost_batch_norm("x", "w", "w", "w", "w", sub_batches=4)[1].placement == (Shard(0, "dp"),)
            continue
        with pytest.raises(ProgramError, match="op ghost_batch_norm: no rule allows its inputs' placements over dp"):
            build.ghost_batch_norm("x", "w", "w", "w", "w", sub_batches=4)
