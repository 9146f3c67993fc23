"""Propagation: the placement that every value gets from those of data and parameters, and the changes of placement between operators."""

import pytest

from fluidx.ir import At, Partial, Shard, TranspileError, parse_pair
from fluidx.transpiler.placement.propagate import Propagation

ROWS, COLUMNS, SUM = (Shard(0, "dp"),), (Shard(1, "dp"),), (Partial("sum", "dp"),)


def propagated(body, allowed=None, **rest):
    """The walk over a program with x f32[4,6] and w f32[6,2], which are stored as `rest` says."""
    text = "program main {\n  group dp = [0, 1]\n  data %x: f32[4,6]\n  param %w: f32[6,2]\nforward:\n" + body + "\n}"
    more = {} if allowed is None else {"allowed": allowed}
    walk = Propagation(parse_pair(text).main, {"dp": 2}, rest, set(), lambda parameter: None, **more)
    walk.run()
    return walk


def placements(walk, *names):
    return [walk.program.global_block().desc(name).placement for name in names]


def test_rows_stay_rows_and_a_transpose_makes_them_columns():
    walk = propagated("""
  %y: f32[4,2] = matmul(%x, %w)
  %z: f32[4,2] = relu(%y)
  %t: f32[2,4] = transpose(%z) {axis=[1,0]}""", x=ROWS)  # fmt: skip
    assert placements(walk, "y", "z", "t") == [ROWS, ROWS, COLUMNS] and walk.moves == []


def test_a_sum_over_a_sharded_axis_is_partial_and_stays_so_where_an_operator_is_linear():
    walk = propagated("""
  %y: f32[4,2] = matmul(%x, %w)
  %d: f32[4,2] = scale(%y) {scale=2.0}""", x=COLUMNS, w=ROWS)  # fmt: skip
    assert placements(walk, "y", "d") == [SUM, SUM] and walk.moves == []


def test_an_operator_runs_where_its_parameter_is():
    walk = propagated("  %y: f32[4,2] = matmul(%x, %w)\n  %z: f32[4,2] = relu(%y)", w=(At(1, "dp"),))
    assert placements(walk, "y", "z") == [(At(1, "dp"),), (At(1, "dp"),)] and walk.moves == []


def test_readers_that_need_another_placement_share_one_copy():
    """relu and tanh are not linear: both need the whole sum, which is made once, in front of the first of them."""
    walk = propagated("""
  %y: f32[4,2] = matmul(%x, %w)
  %z: f32[4,2] = relu(%y)
  %q: f32[4,2] = tanh(%y)""", x=COLUMNS, w=ROWS)  # fmt: skip
    ops = walk.program.global_block().oplist
    assert [op.type for op in ops] == ["matmul", "redistribute", "relu", "tanh"]
    assert [op.input_arg_names for op in ops[1:]] == [("y",), ("y.sum",), ("y.sum",)]
    assert placements(walk, "y", "y.sum", "z", "q") == [SUM, (), (), ()]
    (move,) = walk.moves
    assert (move.name, move.old, move.new, move.nbytes, move.sends) == ("y", SUM, (), 4 * 4 * 2, True)


def test_a_copy_serves_until_the_name_is_written_again():
    walk = propagated("""
  %s: f32[1,6] = reduce_sum(%x) {dim=[0], keep_dim=true}
  %a: f32[1,6] = relu(%s)
  %s = reduce_sum(%x) {dim=[0], keep_dim=true}
  %b: f32[1,6] = relu(%s)""", x=ROWS)  # fmt: skip
    assert [op.type for op in walk.program.global_block().oplist] == ["reduce_sum", "redistribute", "relu"] * 2
    assert [(m.name, m.old, m.new) for m in walk.moves] == [("s", SUM, ())] * 2


def test_a_move_may_be_refused():
    def no(move, op):
        raise TranspileError(f"{op.type} would move %{move.name}")

    with pytest.raises(TranspileError, match="relu would move %s"):
        propagated("  %s: f32[1,6] = reduce_sum(%x) {dim=[0], keep_dim=true}\n  %a: f32[1,6] = relu(%s)", no, x=ROWS)
    assert propagated("  %a: f32[4,6] = relu(%x)", no, x=ROWS).moves == []
