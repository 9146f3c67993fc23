"""What the programs for all ranks say of a rank is what its own programs say."""

import pytest

import fluidx as fx
from fluidx.ir.opdef import Effect, opdef
from fluidx.ir.parts import coords_of, holds
from fluidx.testing.models import integer_mlp
from tests.transpiler import staged

S = fx.strategies
CASES = {
    "data_parallel": (S.data_parallel, 4, False),
    "ring": (lambda: S.data_parallel(algorithm="ring"), 4, False),
    "zero1": (S.zero1, 4, False),
    "zero3": (S.zero3, 4, False),
    "reduce_broadcast": (S.reduce_broadcast, 4, False),
    "reduce_broadcast tree": (lambda: S.reduce_broadcast(algorithm="tree"), 4, False),
    "two hosts": (S.data_parallel, fx.Cluster(2, 2), False),
}
BY_STAGES = {
    "pipeline": (lambda: S.pipeline(micro_batches=2), fx.Mesh(dp=2, pp=2), True),
    "pipeline of reduce_broadcast": (lambda: S.pipeline(micro_batches=2, of=S.reduce_broadcast()), fx.Mesh(dp=2, pp=2), True),
}


def transpiled(case):
    strategy, trainers, stages = (CASES | BY_STAGES)[case]
    m = staged.layers(2) if stages else integer_mlp()
    return fx.DistributeTranspiler(strategy()).transpile(program=m.main, startup_program=m.startup, trainers=trainers)


def names_of(program):
    return {n for op in program.global_block().oplist for n in op.output_arg_names}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_computes_what_its_program_does(case):
    t = transpiled(case)
    common = t.common_programs(1)
    assert common is not None and common.stand_for_ranks and [*t._ranks] == [1]
    block = common.pair.main.global_block()
    for rank in range(t.world_size):
        coords = coords_of(t.main.groups, rank, t.main.turns)
        own = t.get_trainer_program(rank)
        made = names_of(own)
        assert block.descs.items() <= own.global_block().descs.items()
        held = [n for n, d in block.descs.items() if holds(d.placement, coords)]
        assert [n for n in held if common.computes(rank, n)] == [n for n in held if n in made]
        assert all(common.computes(rank, n) for n in made - block.descs.keys())


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_send_may_send(case):
    t = transpiled(case)
    programs = [p for r in range(t.world_size) for p in (t.get_trainer_program(r), t.get_startup_program(r))]
    sends = any(opdef(op.type).effect is Effect.P2P for p in programs for block in p.blocks for op in block.oplist)
    common = t.common_programs(0)
    assert common is not None and (common.may_send or not sends)
    assert common.may_send == any(p.global_block().oplist != q.global_block().oplist for p, q in zip(programs[::2], programs[2::2]))


@pytest.mark.parametrize("case", ["data_parallel", "ring"])
def test_texts_of_the_programs_for_all_ranks_are_equal_if_all_rank_programs_are(case):
    a, b, c = transpiled(case), transpiled(case), transpiled("zero1")
    assert a.common_programs(0).digest == b.common_programs(1).digest != c.common_programs(0).digest
    assert all(str(a.get_trainer_program(r)) == str(b.get_trainer_program(r)) for r in range(4))


@pytest.mark.parametrize("case", BY_STAGES)
def test_programs_for_all_ranks_do_not_stand_for_stages(case):
    assert not transpiled(case).common_programs(0).stand_for_ranks


@pytest.mark.parametrize("case", ["data_parallel", "ring", *BY_STAGES])
def test_rank_programs_that_were_changed_are_not_covered(case):
    t = transpiled(case)
    assert t.common_programs(0) is not None
    t.get_trainer_program(2).global_block().oplist = []
    assert t.common_programs(0) is None


@pytest.mark.parametrize("case", ["data_parallel", *BY_STAGES])
def test_a_rank_program_of_another_transpile_is_not_covered(case):
    t = transpiled(case)
    t.get_trainer_program(0).origin = "0123456789abcdef"
    assert t.common_programs(0) is None


@pytest.mark.parametrize("case", ["data_parallel", *BY_STAGES])
def test_a_program_for_all_ranks_that_was_changed_covers_no_rank_program(case):
    t = transpiled(case)
    t.get_trainer_program(0)
    t.main.global_block().oplist = t.main.global_block().oplist[:-1]
    assert t.common_programs(0) is None
