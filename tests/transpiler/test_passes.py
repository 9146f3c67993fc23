"""Each pass by text: what goes in, what comes out."""

import pytest

from fluidx.testing import check_pass
from fluidx.transpiler.data_parallel import AllReduceGrads
from fluidx.transpiler.root_cards import RootCards

HEAD = """
  group dp = [0, 1]
  data %x: f32[-1,2] shard(0) over dp
  param %w: f32[2,4]
  var %lr: f32[1] persistable
"""
BEFORE = """
backward:
  %w@GRAD: f32[2,4] partial(avg) over dp = matmul(%x, %x2) {transpose_x=true} for %w, %w@GRAD
optimize:
  %w = sgd(%w, %w@GRAD, %lr)
"""


def test_all_reduce_stands_behind_the_operator_that_finishes_the_gradient():
    check_pass(
        AllReduceGrads(),
        given=HEAD + "  data %x2: f32[-1,4] shard(0) over dp",
        before=BEFORE,
        after="""
backward:
  %w@GRAD: f32[2,4] partial(avg) over dp = matmul(%x, %x2) {transpose_x=true} for %w, %w@GRAD
dist:
  %w@GRAD.avg: f32[2,4] = all_reduce(%w@GRAD) {group="dp", op="avg"}
optimize:
  %w = sgd(%w, %w@GRAD.avg, %lr)
""",
    )


def test_a_summed_loss_sums_its_gradients():
    job = check_pass(
        AllReduceGrads(),
        given=HEAD + "  data %x2: f32[-1,4] shard(0) over dp",
        before=BEFORE.replace("partial(avg)", "partial(sum)"),
        after="""
backward:
  %w@GRAD: f32[2,4] partial(sum) over dp = matmul(%x, %x2) {transpose_x=true} for %w, %w@GRAD
dist:
  %w@GRAD.sum: f32[2,4] = all_reduce(%w@GRAD) {group="dp", op="sum"}
optimize:
  %w = sgd(%w, %w@GRAD.sum, %lr)
""",
        loss_op="sum",
    )
    assert job.skipped == []


def test_reduce_broadcast_updates_on_the_root_only():
    check_pass(
        RootCards("collective"),
        given=HEAD + "  data %x2: f32[-1,4] shard(0) over dp",
        before=BEFORE,
        after="""
backward:
  %w@GRAD: f32[2,4] partial(avg) over dp = matmul(%x, %x2) {transpose_x=true} for %w, %w@GRAD
dist:
  %w@GRAD.avg: f32[2,4] at(0) over dp = reduce(%w@GRAD) {group="dp", op="avg", root=0}
optimize:
  %w = sgd(%w, %w@GRAD.avg, %lr) on dp:0
dist:
  %w = broadcast(%w) {group="dp", root=0}
""",
    )


def test_a_wrong_expectation_shows_both_texts():
    with pytest.raises(AssertionError, match="(?s)AllReduceGrads.*made.*all_reduce.*expected"):
        check_pass(AllReduceGrads(), given=HEAD + "  data %x2: f32[-1,4] shard(0) over dp", before=BEFORE, after=BEFORE)
