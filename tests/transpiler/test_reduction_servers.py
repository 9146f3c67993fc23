"""Reduction servers: ranks behind the trainers that add gradients up, and keep nothing."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Program, ProgramPair
from fluidx.testing.models import classifier, integer_mlp, train_ranks, train_single
from fluidx.verify import verify_ranks
from tests.transpiler import models
from tests.transpiler.models import MODELS, same_answers, written

P = 4 * (6 * 5 + 5 + 5 * 4 + 4)  # bytes of integer_mlp's parameters
SMALL = {"bucket_mb": 100 / 2**20, "first_bucket_mb": 60 / 2**20}  # three buckets of them


def transpiled(model, trainers=2, servers=1, **options):
    strategy = fx.strategies.reduction_servers(servers, **options)
    return fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=trainers)


def sent(t):
    return [op.attrs["batch"] for op in t.get_trainer_program(0).ops if op.type == "send"]


@pytest.mark.parametrize("trainers, servers", [(1, 2), (2, 1), (3, 2), (2, 70), (fx.Cluster(2, 2), 3)])
@pytest.mark.parametrize("options", [{}, SMALL, {"bucket_mb": 0}], ids=["one bucket", "buckets", "one by one"])
def test_one_devices_answers_bit_for_bit_where_sums_are_exact(trainers, servers, options):
    model = integer_mlp(optimizer=fx.optimizer.Momentum(0.5, 0.5))
    feeds, fetch = [model.feed(7)], [model.loss, *[g for _, g in model.gradients]]
    (one,), scope = train_single(model, feeds, fetch)
    (many,), state = train_ranks(model, fx.strategies.reduction_servers(servers, **options), trainers, feeds, fetch)
    assert all(np.array_equal(a, b) for a, b in zip(one, many, strict=True))
    assert all(np.array_equal(scope.get(n), value) for n, value in state.items())


@pytest.mark.parametrize("name", MODELS)
def test_models_of_many_kinds(name):
    same_answers(name, fx.strategies.reduction_servers(2, bucket_mb=1 / 2**10, first_bucket_mb=1 / 2**11), 3)


@pytest.mark.parametrize("trainers, servers", [(2, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("options", [{}, SMALL, {"bucket_mb": 0}], ids=["one bucket", "buckets", "one by one"])
def test_bytes_of_a_step(trainers, servers, options):
    t = transpiled(integer_mlp(), trainers, servers, **options)
    for rank in range(trainers):  # a trainer sends its gradients once, whatever the number of ranks; a ring takes 2(n-1)/n of P
        assert t.traffic(rank) == {"ps": P}
    out = [t.traffic(trainers + k).total for k in range(servers)]
    assert sum(out) == trainers * P  # each trainer gets the sums once
    values = len({op.output_arg_names for op in t.main.ops if op.type == "push"})
    assert max(out) - min(out) <= 4 * trainers * values  # slices of a value are alike but for one number


def test_servers_only_add_up_and_have_nothing_between_steps():
    t = transpiled(integer_mlp(optimizer=fx.optimizer.Adam(0.1)), 2, servers=2)
    for k in range(2):
        main, startup = t.get_pserver_programs(k)
        assert {op.type for op in main.ops} == {"send", "recv", "sum"}
        assert [str(op) for op in startup.ops] == ['nccl_init() {group="ps"}']
        assert not any(d.persistable or d.is_data for p in (main, startup) for d in p.list_vars())
    assert t.explain()[-1] == f"%fc_1.b_0@GRAD.sum.packed: {P} B added up by 2 servers"
    types = [op.type for op in t.get_trainer_program(0).ops]
    assert types.count("adam") == 4 and "sum" not in types and "fill_constant" not in types[types.index("pack") :]


def test_servers_have_no_blocks_that_trainers_run():
    model = written(MODELS["branch"])
    t = transpiled(model, 2, servers=1)
    assert len(t.get_trainer_program(0).blocks) > 1 == len(t.get_trainer_program(2).blocks)


def test_sums_come_back_together_with_what_is_sent_next():
    t = transpiled(integer_mlp(), 2, **SMALL)
    moves = [op.type for op in t.main.ops if op.type in ("push", "pull")]
    assert moves == ["push", *["push", "pull"] * (len(moves) // 2 - 1), "pull"] and len(moves) > 4
    assert len(set(sent(t))) == len(moves) // 2
    for rank in range(3):
        ops = [op for op in t.get_trainer_program(rank).ops if op.type in ("send", "recv")]
        batches = {b: {op.type for op in ops if op.attrs["batch"] == b} for b in sent(t)[1:]}
        assert all(both == {"send", "recv"} for both in batches.values())


def test_what_is_no_sum_of_a_known_size_stays_among_the_trainers():
    main, startup = fx.Program("largest"), fx.Program("largest_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3], "float32")
        h = fx.layers.fc(x, 2)
        h = h - fx.layers.reduce_max(h)  # a maximum over the rows
        fx.optimizer.SGD(0.5).minimize(fx.layers.reduce_sum(h))
    t = fx.DistributeTranspiler("reduction_servers").transpile(program=main, startup_program=startup, trainers=2)
    t.verify()
    left = [op.attrs["op"] for op in t.get_trainer_program(0).ops if op.type == "all_reduce"]
    assert left == ["max"] and sent(t)


def test_a_sum_that_is_state_itself_is_kept_by_trainers_alone():
    main, startup = fx.Program("counted"), fx.Program("counted_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3], "float32")
        last = fx.layers.create_global_var([1], 0.0, "float32", persistable=True, name="last")
        h = fx.layers.fc(x, 2)
        fx.layers.assign(fx.layers.reduce_sum(x), output=last)
        fx.optimizer.SGD(0.5).minimize(fx.layers.reduce_sum(h))
    t = fx.DistributeTranspiler(fx.strategies.reduction_servers(2)).transpile(program=main, startup_program=startup, trainers=2)
    t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(4)) as exe:
        exe.run_startup()
        exe.run(feed={"x": np.ones((5, 3), "float32")}, fetch_list=[])
        assert exe.state("last") == 15
    assert not any(d.persistable for k in range(2) for d in t.get_pserver_program(k).list_vars())


@pytest.mark.parametrize("options", [{"wire": "float16"}, {"wire": "bfloat16"}, {"algorithm": "tree"}, {"strict": True}], ids=str)
def test_the_options_of_all_strategies(options):
    model = classifier(fx.optimizer.Adam(0.01, grad_clip=fx.clip.GradientClipByGlobalNorm(0.1)))
    t = transpiled(model, 3, 2, **options)
    report = t.verify()
    numbers = sum(int(np.prod(p.shape)) for p in model.main.all_parameters())
    assert t.traffic(0) == {"ps": (2 if "wire" in options else 4) * numbers}
    assert sum(report.rounded.values()) == (numbers if "wire" in options else 0)


def test_mixed_precision_and_clips_and_micro_batches():
    clip = fx.clip.GradientClipByGlobalNorm(0.1)
    for optimizer, strategy in (
        (fx.mixed_precision.decorate(fx.optimizer.Adam(0.01, grad_clip=clip)), fx.strategies.reduction_servers(2)),
        (fx.optimizer.Momentum(0.1, 0.9, grad_clip=clip), fx.strategies.micro_batches(2, of=fx.strategies.reduction_servers(2))),
    ):
        model = classifier(optimizer)
        feeds = [model.feed(12, k) for k in range(3)]
        one, _ = train_single(model, feeds, [model.loss])
        many, _ = train_ranks(model, strategy, 3, feeds, [model.loss])
        np.testing.assert_allclose(many, one, rtol=2e-3)  # halves have 11 bits, and are added up in another order


def test_a_checkpoint_is_one_devices(tmp_path):
    model, strategy = integer_mlp(optimizer=fx.optimizer.Momentum(0.5, 0.5)), fx.strategies.reduction_servers(2)
    t = fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=2)
    names = [d.name for d in model.main.list_vars() if d.persistable]
    with fx.ParallelExecutor(t, places=fx.cpu_places(4)) as exe:
        exe.run_startup()
        exe.run(feed=model.feed(4), fetch_list=[])
        fx.save(model.main, tmp_path / "step", exe)
        before = {n: exe.state(n) for n in names}
        exe.run(feed=model.feed(4), fetch_list=[])
        assert any(not np.array_equal(exe.state(n), before[n]) for n in names)
        fx.load(model.main, tmp_path / "step", exe)
        assert all(np.array_equal(exe.state(n), before[n]) for n in names)


def thin():
    x, label, feed = models._rows((6,))
    loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(fx.layers.fc(fx.layers.fc(x, 8, act="tanh"), 5), label))
    return loss, fx.optimizer.PowerSGDOptimizer(fx.optimizer.Momentum(0.1, 0.9), 2), feed


def test_state_in_terms_that_trainers_keep():
    same_answers(written(thin), fx.strategies.reduction_servers(2), 3)


def test_a_feed_that_all_trainers_get_whole():
    main, startup = fx.Program("scaled"), fx.Program("scaled_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, factor = fx.data("x", [-1, 3], "float32"), fx.data("factor", [1], "float32")
        loss = fx.layers.reduce_sum(fx.layers.fc(x, 2) * factor)
        fx.optimizer.SGD(0.5).minimize(loss)
    t = fx.DistributeTranspiler("reduction_servers").transpile(program=main, startup_program=startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.cpu_places(3)) as exe:
        exe.run_startup()
        feed = {"x": np.ones((4, 3), "float32"), "factor": np.zeros(1, "float32")}
        assert exe.run(feed=feed, fetch_list=[loss])[0] == 0


def test_pservers_says_how_many_there_are():
    model = integer_mlp()
    t = fx.DistributeTranspiler(fx.strategies.reduction_servers(1, bucket_mb=5))
    t.transpile(program=model.main, startup_program=model.startup, pservers="a:1,b:1", trainers=2)
    assert repr(t.strategy) == "reduction_servers(servers=2, bucket_mb=5)" and t.world_size == 4
    assert t.get_pserver_program("b:1") is t.get_trainer_program(3)


def merged():
    return integer_mlp(optimizer=fx.optimizer.GradientMergeOptimizer(fx.optimizer.SGD(0.5), 2))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: fx.strategies.reduction_servers(0), "reduction_servers: servers must be an integer of at least 1, got 0"),
        (lambda: fx.strategies.reduction_servers(bucket_mb=-1), "reduction_servers: bucket_mb must be a number of MiB, 0 or more, got -1"),
        (lambda: transpiled(integer_mlp(), fx.Mesh(dp=2, tp=2)), "servers need trainers with one axis, dp; Mesh("),
        (
            lambda: transpiled(integer_mlp(), fx.Cluster(2, 2), hierarchical=True),
            "hierarchical=True has no use where gradients go to servers; leave it out",
        ),
        (
            lambda: transpiled(merged()),
            "op all_reduce is in a sub-block, and servers do not know when it runs; data_parallel() takes such programs, and "
            "micro_batches(k, of=reduction_servers()) accumulates gradients\n",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be(call, message):
    with pytest.raises(fx.TranspileError) as e:
        call()
    assert str(e.value).startswith(message)


BREAK = {
    "a term left out": (2, ".served.of1]", ".served.of0]"),
    "another trainer": (2, "peer=1, shape", "peer=0, shape"),
    "a term for the sum": (2, "= sum([%fc_1.b_0@GRAD.sum.packed.served.of0, ", "= sum(["),
    "to one trainer twice": (2, "peer=1}", "peer=0}"),
    "its own term for the sum": (0, "[%fc_1.b_0@GRAD.sum.packed.from0, ", "[%fc_1.b_0@GRAD.sum.packed.served.part0, "),
    "slices in another order": (0, "packed.from0, %fc_1.b_0@GRAD.sum.packed.from29]", "packed.from29, %fc_1.b_0@GRAD.sum.packed.from0]"),
    "the wrong server": (1, "served.part0) {batch=\"push.fc_1.b_0@GRAD.sum.packed.served\", group=\"ps\", peer=2}",
                         "served.part0) {batch=\"push.fc_1.b_0@GRAD.sum.packed.served\", group=\"ps\", peer=3}"),
    "a trainer without a parameter": (1, "  param %fc_1.b_0: f32[4]\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("which", BREAK)
def test_wrong_programs_are_refused(which):
    model, (rank, old, new) = integer_mlp(), BREAK[which]
    t = transpiled(model, 2, servers=2)
    mains, startups = ([get(r) for r in range(4)] for get in (t.get_trainer_program, t.get_startup_program))
    source = ProgramPair(model.main, model.startup)
    verify_ranks(source, mains, startups)
    text = str(mains[rank])
    assert old in text
    text = text.replace(old, new, 1)
    with pytest.raises((fx.VerifyError, fx.ProgramError)):
        mains[rank] = Program.parse_from_string(text)
        verify_ranks(source, mains, startups)


def test_a_trainer_must_have_what_the_others_have():
    # a counter that nothing else reads: only the rule that a rank which keeps anything keeps all tells that it is gone
    model = integer_mlp()
    t = transpiled(model, 2)
    mains, startups = ([get(r) for r in range(3)] for get in (t.get_trainer_program, t.get_startup_program))
    for programs in (mains, startups):
        programs[1] = programs[1].copy()
        block = programs[1].global_block()
        block.oplist = [op for op in block.oplist if "fc_1.b_0" not in op.output_arg_names or op.type == "unpack"]
        block.descs = {n: d for n, d in block.descs.items() if n != "fc_1.b_0" or programs is startups}
    with pytest.raises(fx.VerifyError):
        verify_ranks(ProgramPair(model.main, model.startup), mains, startups)
