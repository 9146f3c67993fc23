"""The symbolic run of the programs of two ranks: what each rank has after it, what runs once for both, and ranks that wait for ever."""

import pytest

from fluidx.ir import parse_pair
from fluidx.ir.change_stamps import Stamp
from fluidx.ir.errors import VerifyError
from fluidx.ir.operator import op_types
from fluidx.verify.mesh import RankGroups
from fluidx.verify.normal_form import ExpressionTable
from fluidx.verify.simultaneous_run import SimultaneousRun
from fluidx.verify.values import ProgramValues

RELU = "  %y: f32[4,6] shard(0) over dp = relu(%x)\n"
WHOLE = '  %s: f32[4,6] = all_gather(%y) {group="dp"}\n'
OTHER = '  %k: f32[2,6] local = recv() {{group="dp", peer={peer}, shape=[2,6]{batch}}}\n'
SEND = '  send(%x) {{group="dp", peer={peer}{batch}}}\n'


def ran(*bodies):
    """The run of the programs of two ranks, each with the rows of x that it has; equal ones are one program, as in a transpile."""
    texts = [f"program main {{\n  group dp = [0, 1]\n  data %x: f32[4,6] shard(0) over dp\nforward:\n{body}}}" for body in bodies]
    made = {text: parse_pair(text).main for text in texts}
    programs = [made[text] for text in texts]
    table = ExpressionTable({t for p in programs for t in op_types(p.global_block().oplist)})
    mesh = RankGroups(programs[0].groups, 2)
    run = SimultaneousRun(ProgramValues(table, mesh), mesh, programs, Stamp(programs).twins(programs), None)
    run.run()
    return run


def values(run, name):
    return [run.rank_values.value(name, rank) for rank in range(2)]


def test_an_operator_of_all_ranks_runs_once_and_a_collective_gives_all_the_same():
    run = ran(*[RELU + WHOLE] * 2)
    assert len(set(values(run, "s"))) == len(set(values(run, "y"))) == 1
    assert run.operators.describe(values(run, "y")[0]) == "relu(%x) (shard(0) over dp)"
    assert run.operators.describe(values(run, "s")[0]) == "relu(%x) (replicate)"
    assert run.collective_calls.count == 1 and run.messages.count == 0


def test_a_rank_has_what_its_own_operators_compute():
    """Rank 1 takes tanh where rank 0 takes relu: the same name, and two values."""
    run = ran(RELU, RELU.replace("relu", "tanh"))
    assert [run.operators.describe(v) for v in values(run, "y")] == ["relu(%x) (shard(0) over dp)", "tanh(%x) (shard(0) over dp)"]


def test_a_message_brings_the_part_of_its_sender():
    run = ran(SEND.format(peer=1, batch="") + RELU, OTHER.format(peer=0, batch="") + RELU)
    assert run.messages.count == 1
    assert run.operators.describe(run.rank_values.value("k", 1), local=True) == "%x[0:12]"  # two of four rows of six
    assert len(set(values(run, "y"))) == 1  # after the messages both run the same again


@pytest.mark.parametrize("first, second", [(SEND, OTHER), (OTHER, SEND)], ids=["send first", "receive first"])
def test_ranks_that_wait_for_each_other_are_named(first, second):
    """A send is assumed to wait for its receive."""
    with pytest.raises(VerifyError) as failure:
        ran(*[first.format(peer=1 - rank, batch="") + second.format(peer=1 - rank, batch="") for rank in range(2)])
    op = "send(%x)" if first is SEND else "%k = recv()"
    lines = str(failure.value).splitlines()
    assert lines[0] == "rank 0: the ranks wait for each other for ever: 2 of 2 ranks are stuck"
    assert [line.partition(" {")[0] for line in lines[1:3]] == [f"  rank {r} waits for rank {1 - r} in {op}" for r in range(2)]


def test_messages_of_one_batch_start_together():
    run = ran(*[SEND.format(peer=1 - r, batch=', batch="a"') + OTHER.format(peer=1 - r, batch=', batch="a"') for r in range(2)])
    assert run.messages.count == 2


def test_a_collective_that_one_rank_does_not_call_is_refused():
    with pytest.raises(VerifyError, match="rank 0") as failure:
        ran(RELU + WHOLE, RELU)
    assert 'all_gather(%y) {group="dp"}' in str(failure.value)


def test_an_operator_that_no_rule_allows_is_shown_in_its_program():
    with pytest.raises(VerifyError) as failure:
        ran(*["  %y: f32[4,6] = relu(%x)\n"] * 2)
    said = "op relu: no rule allows its placements: X shard(0) over dp cannot give Out whole over dp; all_gather X over dp first"
    assert str(failure.value).splitlines()[0] == said and ">   0  %y: f32[4,6] = relu(%x)" in str(failure.value)
