"""The verifier: no false alarm on right programs, no wrong program let through."""

import pytest

import fluidx as fx
from fluidx.ir.verifier import check_program, verify_ranks
from fluidx.testing.models import classifier, integer_mlp
from fluidx.testing.mutate import mutations

MODELS = {
    "momentum": lambda: classifier(width=4),
    "lamb": lambda: classifier(fx.optimizer.Lamb(0.01), width=4),
    "clip": lambda: classifier(
        fx.optimizer.Adam(0.01, grad_clip=fx.clip.GradientClipByGlobalNorm(1.0), regularization=fx.regularizer.L2Decay(0.1)), width=4
    ),
    "sum": integer_mlp,
}
STRATEGIES = {
    "data_parallel": fx.strategies.data_parallel,
    "reduce_broadcast": fx.strategies.reduce_broadcast,
    "ring_optimizer": lambda: fx.strategies.ring_optimizer(chunk_mb=48 / 2**20),
}


@pytest.mark.parametrize("trainers", [2, 3, fx.Cluster(2, 2)], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_every_mutant_is_caught(model, strategy, trainers):
    m = model()
    t = fx.DistributeTranspiler(strategy())
    t.transpile(program=m.main, startup_program=m.startup, trainers=trainers)
    t.verify()
    mains = [t.get_trainer_program(r) for r in range(t.world_size)]
    startups = [t.get_startup_program(r) for r in range(t.world_size)]
    missed, made = [], 0
    for what, broken in mutations(mains):
        made += 1
        if not _caught(t, broken, startups):
            missed.append(what)
    for what, broken in mutations(startups):
        made += 1
        if not _caught(t, mains, broken):
            missed.append(f"startup, {what}")
    assert made > 50
    assert not missed, f"{len(missed)} of {made} mutants passed: {missed[:5]}"


def _caught(t, mains, startups):
    try:
        verify_ranks(t.source, mains, startups, layout=t.layout, loss_op=t.job.loss_op, notes=t.job.notes)
    except fx.VerifyError:
        return True
    return False


def test_a_mutation_on_all_ranks_alike_is_caught_too():
    m = classifier(width=4)
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(program=m.main, startup_program=m.startup, trainers=2)
    mains = []
    for r in range(2):
        p = t.get_trainer_program(r).copy()
        ops = p.global_block().oplist
        at = next(i for i, op in enumerate(ops) if op.type == "all_reduce")
        ops[at] = ops[at].replace(attrs={**ops[at].attrs, "op": "sum"})
        mains.append(p)
    with pytest.raises(fx.VerifyError, match="does not hold one device's value"):
        verify_ranks(t.source, mains, [t.get_startup_program(r) for r in range(2)], loss_op="avg")


def test_a_forgotten_all_reduce_is_named():
    m = classifier(width=4)
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(program=m.main, startup_program=m.startup, trainers=2)
    mains = []
    for r in range(2):
        p = t.get_trainer_program(r).copy()
        ops = p.global_block().oplist
        gone = next(op for op in ops if op.type == "all_reduce")
        names = {gone.output_arg_names[0]: gone.input_arg_names[0]}
        p.global_block().oplist = [op.renamed(names) for op in ops if op is not gone]
        mains.append(p)
    with pytest.raises(fx.VerifyError, match="all_reduce, reduce or ring_reduce it first"):
        verify_ranks(t.source, mains, [t.get_startup_program(r) for r in range(2)], loss_op="avg")


def test_a_deadlock_names_who_waits_for_whom():
    text = """
program p {
  group dp = [0, 1]
  var %x: f32[4] persistable
dist:
  send(%x) {group="dp", peer=PEER}
  %y: f32[4] = recv() {group="dp", peer=PEER, shape=[4]}
}
"""
    ranks = []
    for r in range(2):
        p = fx.Program.parse_from_string(text.replace("PEER", str(1 - r)))
        p.rank = r
        ranks.append(p)
    source = fx.ir.ProgramPair(fx.Program("one"), fx.Program("start"))
    with pytest.raises(fx.VerifyError, match="(?s)wait for each other for ever.*rank 0 waits for rank 1.*rank 1 waits for rank 0"):
        verify_ranks(source, ranks, [fx.Program("s0"), fx.Program("s1")])


def test_the_report_says_what_was_proved():
    m = classifier(width=4)
    t = fx.DistributeTranspiler("ring_optimizer")
    t.transpile(program=m.main, startup_program=m.startup, trainers=3)
    text = str(t.verify())
    for word in ("types", "collectives", "messages", "no deadlock", "startup", "same answers", "4 parameters"):
        assert word in text


def test_a_use_before_definition_points_into_the_program():
    p = fx.Program("p")
    block = p.global_block()
    block.create_var("x", [4], "float32")
    block.append_op("relu", {"X": "x"}, {"Out": "y"})
    with pytest.raises(fx.VerifyError, match="reads %x before any operator defines it"):
        check_program(p)


def test_nothing_runs_unverified():
    m = classifier(width=4)
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(program=m.main, startup_program=m.startup, trainers=2)
    _, broken = next(mutations([t.get_trainer_program(r) for r in range(2)]))
    t.get_trainer_program = broken.__getitem__
    t._ranks = {r: (broken[r], t.get_startup_program(r)) for r in range(2)}
    with pytest.raises(fx.VerifyError):
        fx.ParallelExecutor(t, places=fx.cpu_places(2))
