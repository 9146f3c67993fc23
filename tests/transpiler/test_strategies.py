"""A strategy is data: named steps that can be looked at, replaced and added to. Passes keep to a contract, and say what they did."""

from dataclasses import dataclass

import pytest

import fluidx as fx
from fluidx.ir.pass_base import run_passes
from fluidx.testing.models import classifier, integer_mlp, train_ranks, train_single
from fluidx.transpiler import Job, Pass, Strategy, skip, strategy
from fluidx.transpiler.passes.lower import Lower
from fluidx.transpiler.passes.place import Place
from fluidx.transpiler.placement.parameter_homes import AtRoots, Sharded


@dataclass(frozen=True)
class SplitAllReduce(Pass):
    """Replace all_reduce by reduce_scatter and all_gather, where axis 0 divides by the group."""

    group: str = "dp"
    requires = ("lowered",)

    def rule(self, b, op):
        if op.type != "all_reduce" or op.attrs["group"] != self.group:
            return None
        rows, ranks = b.block.desc(op.input_arg_names[0]).type.shape[0], b.group_size(self.group)
        if rows % ranks:
            return skip(f"axis 0 is {rows}, group {self.group} has {ranks} ranks")
        part = b.reduce_scatter(op.input_arg_names[0], group=self.group, op=op.attrs["op"], suffix="shard")
        return b.all_gather(part, group=self.group, name=op.output_arg_names[0])


def transpiled(s, model=None, trainers=2):
    m = model or integer_mlp()
    return fx.DistributeTranspiler(s).transpile(program=m.main, startup_program=m.startup, trainers=trainers)


def test_a_strategy_prints_as_the_call_that_makes_it_and_lists_its_steps():
    assert repr(fx.strategies.data_parallel()) == "data_parallel()"
    assert repr(fx.strategies.data_parallel(bucket_mb=4, overlap=False, wire="float16")) == (
        "data_parallel(bucket_mb=4, overlap=False, wire='float16')"
    )
    assert repr(fx.strategies.ring_optimizer(chunk_mb=1, strict=True)) == "ring_optimizer(chunk_mb=1, roots='greedy', strict=True)"
    assert repr(fx.strategies.zero2(loss="loss")) == "zero2(loss='loss')"
    ring = fx.strategies.ring_optimizer()
    assert ring.steps_named() == ["groups", "place", "startup", "lower", "bucket", "hosts", "carry", "waves", "pack"]
    assert [repr(p) for p in ring.passes][-2:] == [
        "GatherWaves(wave_mb=4.0, types=(('reduce', 'reduce_scatter'), ('broadcast', 'all_gather')))",
        "PackSmall(small_kb=64.0, types=(('reduce', 'reduce_scatter'), ('broadcast', 'all_gather')))",
    ]  # fmt: skip
    assert all(isinstance(fx.strategies.get(name), Strategy) for name in fx.strategies.CATALOGUE)


def test_before_after_and_replace_give_a_new_strategy():
    base = fx.strategies.data_parallel()
    after, before = base.after("lower", SplitAllReduce()), base.before("hosts", SplitAllReduce(), name="split")
    assert after.steps_named() == ["groups", "place", "startup", "lower", "SplitAllReduce", "bucket", "hosts", "carry"]
    assert before.steps_named() == ["groups", "place", "startup", "lower", "bucket", "split", "hosts", "carry"]
    assert base.steps_named() == ["groups", "place", "startup", "lower", "bucket", "hosts", "carry"]
    cut = base.replace("place", Place(Sharded()))
    assert cut.passes[1] == Place(Sharded()) and base.passes[1] != cut.passes[1]
    assert [op.type for op in transpiled(cut).main.ops].count("reduce_scatter") == 4


def test_a_pass_of_a_users_own_is_proved_run_and_explained():
    model = integer_mlp()
    fetch = [model.loss, *[g for _, g in model.gradients]]
    split = fx.strategies.data_parallel(bucket_mb=0).after("lower", SplitAllReduce())
    (one,), scope = train_single(model, [model.feed(8)], fetch)
    (many,), state = train_ranks(model, split, 2, [model.feed(8)], fetch)
    assert all((a == b).all() for a, b in zip(one, many, strict=True))
    assert all((state[p] == scope.get(p)).all() for p, _ in model.gradients)
    t = transpiled(split, model)
    kinds = [op.type for op in t.main.ops]
    assert (kinds.count("reduce_scatter"), kinds.count("all_gather"), kinds.count("all_reduce")) == (2, 2, 2)
    assert t.explain()[-1] == (
        'SplitAllReduce kept %fc_0.b_0@GRAD.sum = all_reduce(%fc_0.b_0@GRAD) {group="dp", op="sum"}: axis 0 is 5, group dp has 2 ranks'
    )


def test_a_strategy_of_ones_own_is_one_call():
    mine = strategy("mine", AtRoots("hash"), {"depth": 3}, algorithm="ring")
    assert repr(mine) == "mine(depth=3, algorithm='ring')"
    model = integer_mlp()
    (one,), _ = train_single(model, [model.feed(8)], [model.loss])
    (many,), _ = train_ranks(model, mine, 3, [model.feed(8)], [model.loss])
    assert one[0] == many[0]


def test_explain_says_what_moves_how_many_bytes_and_why():
    lines = transpiled(fx.strategies.zero1(bucket_mb=0)).explain()
    assert [line for line in lines if "fc_1.w_0" in line] == [
        "%fc_1.w_0@GRAD: partial(sum) over dp to shard(1) over dp, 80 bytes, for update",
        "%fc_1.w_0: replicate to shard(1) over dp, nothing is sent, for sgd: cut *1",
        "%fc_1.w_0: shard(1) over dp to replicate, 80 bytes, for its storage placement",
    ]
    assert len(lines) == 3 * 4
    assert len(transpiled("data_parallel").explain()) == 4


def test_no_pass_changes_what_it_is_given():
    for name in fx.strategies.CATALOGUE:
        m = classifier(kind="batch_norm", width=4)
        ranks = fx.Mesh(dp=4, pp=1) if name == "pipeline" else fx.Cluster(2, 2)
        job, pair = Job(ranks), fx.ProgramPair(m.main, m.startup)
        for step in fx.strategies.get(name).steps:
            before = str(pair)
            result = run_passes([step], pair, job, lambda *_: None)
            assert str(pair) == before, step
            pair = result
        turns = {"unrolled"} if name in ("micro_batches", "pipeline") else set()
        assert job.facts == {"grouped", "placed", "lowered"} | turns


def test_passes_are_run_in_the_order_of_what_they_require():
    m = integer_mlp()
    pair, job = fx.ProgramPair(m.main, m.startup), Job(fx.Cluster(1, 2))
    with pytest.raises(fx.TranspileError, match="requires programs that are grouped"):
        run_passes([("place", Place())], pair, job, lambda *_: None)
    seen = []
    steps = [s for s in fx.strategies.data_parallel().steps if s[0] != "lower"]
    run_passes(steps[:2], pair, job, lambda step, one, before, after: seen.append((step, before is pair)))
    assert seen == [("groups", True), ("place", False)]
    assert Lower.requires == Place.ensures == ("placed",)


def test_a_failed_transpile_leaves_the_earlier_result_alone():
    t = transpiled("data_parallel")
    main = t.main
    with pytest.raises(fx.TranspileError):
        t.transpile(program=fx.Program("empty"), startup_program=fx.Program("s"), trainers=0)
    closed = integer_mlp()
    d = closed.main.global_block().descs
    d["x"] = d["x"].changed(type=fx.ir.TensorType("float32", (8, 6)))
    with pytest.raises(fx.TranspileError, match="no input with an open batch axis"):
        t.transpile(program=closed.main, startup_program=closed.startup, trainers=3)
    assert t.main is main and t.world_size == 2 and t.verify().ranks == 2


@dataclass(frozen=True)
class Doubled(Pass):
    """Adds every reduced value to itself, as a careless pass might."""

    def rule(self, b, op):
        if op.type != "all_reduce":
            return None
        once = b.all_reduce(op.input_arg_names[0], suffix="once", **op.attrs)
        return b.elementwise_add(once, once, name=op.output_arg_names[0])


@pytest.mark.parametrize("strategy_name", [*fx.strategies.CATALOGUE])
def test_a_proof_behind_each_pass_accepts_what_is_right(strategy_name, monkeypatch):
    monkeypatch.setenv("FLUIDX_VERIFY", "1")
    if strategy_name == "pipeline":  # which needs an axis of stages
        transpiled(strategy_name, trainers=fx.Mesh(dp=2, pp=1)).verify()
        return
    if strategy_name != "rails":  # which need several hosts
        transpiled(strategy_name).verify()
    transpiled(strategy_name, trainers=fx.Cluster(2, 2))


def test_a_proof_behind_each_pass_names_the_one_that_broke_the_programs(monkeypatch):
    broken = fx.strategies.data_parallel().after("lower", Doubled())
    monkeypatch.delenv("FLUIDX_VERIFY", raising=False)
    transpiled(broken)  # nobody asked
    monkeypatch.setenv("FLUIDX_VERIFY", "1")
    with pytest.raises(fx.VerifyError, match=r"behind step 'Doubled', Doubled\(\), the programs do not compute what the source does: "):
        transpiled(broken)


def test_one_program_is_not_its_own_startup():
    m = integer_mlp()
    with pytest.raises(fx.TranspileError, match="is given as program and as startup_program"):
        fx.DistributeTranspiler().transpile(program=m.main, startup_program=m.main, trainers=2)
