"""Carry: which collectives get an algorithm, and which stay whole."""

import pytest

import fluidx as fx
from fluidx.ir.errors import TranspileError
from fluidx.testing import check_pass
from fluidx.transpiler.passes.carry import Carry

GIVEN = """
  group dp = [0, 1, 2, 3]
  var %g: f32[4,3] partial(sum) over dp
  var %m: f32[4,3] partial(max) over dp
  var %open: f32[-1,3] partial(sum) over dp
  var %w: f32[4,3] at(1) over dp
  var %p: f32[4,3] pieces(0, 5, 12, 12, 12) over dp
"""
SUM = '%g.sum: f32[4,3] = all_reduce(%g) {group="dp", op="sum"}'
ROOT = '%g.root: f32[4,3] at(0) over dp = reduce(%g) {group="dp", op="sum", root=0}'
FULL = '%w.full: f32[4,3] = broadcast(%w) {group="dp", root=1}'
PIECES = '%p.full: f32[4,3] = all_gather(%p) {bounds=[0, 5, 12, 12, 12], group="dp"}'


def lines(*ops, algorithm=""):
    named = f'{{algorithm="{algorithm}", ' if algorithm else "{"
    return "\n".join(["dist:", *(op.replace("{", named) for op in ops)])


def test_each_collective_gets_the_algorithm():
    ops = (SUM, ROOT, FULL, PIECES)
    check_pass(Carry("tree"), given=GIVEN, before=lines(*ops), after=lines(*ops, algorithm="tree"))


def test_only_collectives_that_are_named_get_it_and_what_has_one_keeps_it():
    before = lines(SUM, ROOT) + "\n" + lines(FULL, algorithm="star")
    after = lines(SUM) + "\n" + lines(ROOT, algorithm="ring") + "\n" + lines(FULL, algorithm="star")
    check_pass(Carry("ring", ("reduce", "broadcast")), given=GIVEN, before=before, after=after)


STAY = """
dist:
  %m.max: f32[4,3] = all_reduce(%m) {group="dp", op="max"}
  %open.sum: f32[-1,3] = all_reduce(%open) {group="dp", op="sum"}
"""


def test_what_no_algorithm_can_carry_stays_whole_and_says_why():
    job = check_pass(Carry("ring"), given=GIVEN, before=STAY, after=STAY)
    assert job.log == [
        "%m.max: all_reduce over dp is left to the communicator: algorithms can only add values up, and this is max",
        "%open.sum: all_reduce over dp is left to the communicator: messages need a known size, and f32[-1,3] has open axes",
    ]


def test_an_algorithm_that_cannot_do_what_is_asked_of_it_is_refused():
    said = "reduce of %g over dp: double_binary_tree has only an all_reduce: its two trees have different roots; tree has one root"
    with pytest.raises(TranspileError, match=said):
        check_pass(Carry("double_binary_tree"), given=GIVEN, before=lines(ROOT), after="")
    with pytest.raises(TranspileError, match="unknown algorithm 'rign'; did you mean 'ring'"):
        check_pass(Carry("rign"), given=GIVEN, before=lines(ROOT), after="")


def test_auto_is_whole_inside_a_host_and_by_size_between_hosts():
    job = check_pass(Carry("auto"), given=GIVEN, before=lines(SUM, ROOT), after=lines(SUM, ROOT))
    assert job.log[0] == "%g.sum: all_reduce over dp, 4 ranks, 48 bytes: communicator 1 us; recursive_doubling 3 us; halving_doubling 6 us"
    alone = GIVEN + "  group node = [0] [1] [2] [3]\n  group rail = [0, 1, 2, 3]\n  var %large: f32[1000000] partial(sum) over dp\n"
    large = '%large.sum: f32[1000000] = all_reduce(%large) {group="dp", op="sum"}'
    # among four: 2 messages of all bytes by recursive doubling, or 4 messages and 1.5 times the bytes by halving and doubling
    after = lines(SUM, algorithm="recursive_doubling") + "\n" + lines(large, algorithm="halving_doubling")
    job = check_pass(Carry("auto"), given=alone, before=lines(SUM, large), after=after)
    assert job.log == [
        "%g.sum: all_reduce over dp, 4 ranks, 48 bytes: recursive_doubling 30 us; halving_doubling 60 us; tree 60 us",
        "%large.sum: all_reduce over dp, 4 ranks, 4000000 bytes: halving_doubling 660 us; ring 690 us; recursive_doubling 830 us",
    ]


@pytest.mark.parametrize("strategy", fx.strategies.CATALOGUE)
def test_every_strategy_takes_an_algorithm_and_says_so(strategy):
    made = fx.strategies.get(strategy, algorithm="tree", hierarchical=False)
    assert "algorithm='tree', hierarchical=False" in repr(made)
    assert "algorithm" not in repr(fx.strategies.get(strategy))
    with pytest.raises(TranspileError, match=f"{strategy}: unknown algorithm 'trees'; did you mean 'tree'"):
        fx.strategies.get(strategy, algorithm="trees")
    with pytest.raises(TranspileError, match=f"{strategy}: hierarchical must be True, False or 'auto', got 3"):
        fx.strategies.get(strategy, hierarchical=3)
