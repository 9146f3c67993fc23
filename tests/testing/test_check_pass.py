"""check_pass itself: what it must not accept."""

from dataclasses import dataclass

import pytest

from fluidx.ir import Partial, ProgramPair, Role, TranspileError
from fluidx.ir.pass_base import Pass
from fluidx.testing import check_pass

HEAD = """
  group dp = [0, 1]
  data %x: f32[-1,2] shard(0) over dp; data %x2: f32[-1,4] shard(0) over dp
  param %w: f32[2,4]
  var %lr: f32[1] persistable
"""
BEFORE = """
backward:
  %w@GRAD: f32[2,4] partial(sum) over dp = matmul(%x, %x2) {transpose_x=true} for %w, %w@GRAD
optimize:
  %w = sgd(%w, %w@GRAD, %lr)
"""
AFTER = """
backward:
  %w@GRAD: f32[2,4] partial(sum) over dp = matmul(%x, %x2) {transpose_x=true} for %w, %w@GRAD
dist:
  %w@GRAD.sum: f32[2,4] = all_reduce(%w@GRAD) {group="dp", op="sum"}
optimize:
  %w = sgd(%w, %w@GRAD.sum, %lr)
"""


@dataclass(frozen=True)
class _Reduces(Pass):
    """All-reduces the gradient before its update."""

    def rewrite_pair(self, pair, job):
        main = pair.main.copy()
        block = main.global_block()
        made, update = block.oplist
        block.declare(block.descs["w@GRAD"].changed(name="w@GRAD.sum", placement=()))
        attrs = {"group": "dp", "op": "sum"}
        block.oplist = [made]
        with main.role_guard(Role.DIST):
            block.append_op("all_reduce", {"X": "w@GRAD"}, {"Out": "w@GRAD.sum"}, attrs)
        block.oplist.append(update.renamed({"w@GRAD": "w@GRAD.sum"}))
        return ProgramPair(main, pair.startup)


@pytest.mark.parametrize(
    "wrong",
    [
        AFTER.replace("%w@GRAD.sum: f32[2,4]", "%w@GRAD.sum: i64[99]"),
        AFTER.replace("%w@GRAD.sum: f32[2,4]", "%w@GRAD.sum: f32[2,4] partial(max) over dp"),
        AFTER.replace("partial(sum)", "partial(max)"),
        "var %lr: f32[1] at(0) over dp persistable\n" + AFTER,
        "var %unused: f32[1]\n" + AFTER,
        BEFORE,
    ],
)
def test_operators_types_and_placements_are_compared(wrong):
    check_pass(_Reduces(), given=HEAD, before=BEFORE, after=AFTER)
    with pytest.raises(AssertionError, match="(?s)_Reduces.* made.*expected"):
        check_pass(_Reduces(), given=HEAD, before=BEFORE, after=wrong)


@dataclass(frozen=True)
class _MovesTheRate(Pass):
    def rewrite_pair(self, pair, job):
        main = pair.main.copy()
        d = main.global_block().descs
        d["lr"] = d["lr"].changed(placement=(Partial("sum", "dp"),))
        return ProgramPair(main, pair.startup)


def test_the_head_lines_of_after_say_what_changed():
    check_pass(_MovesTheRate(), given=HEAD, before=BEFORE, after="var %lr: f32[1] partial(sum) over dp persistable\n" + BEFORE)


@dataclass(frozen=True)
class _ChangesWhatItWasGiven(Pass):
    def rewrite_pair(self, pair, job):
        result = ProgramPair(pair.main.copy(), pair.startup)
        pair.main.global_block().oplist.pop()
        return result


@dataclass(frozen=True)
class _ReturnsWhatItWasGiven(Pass):
    def rewrite_pair(self, pair, job):
        d = pair.main.global_block().descs
        d["lr"] = d["lr"].changed(placement=(Partial("sum", "dp"),))
        return pair


@pytest.mark.parametrize("one", [_ChangesWhatItWasGiven(), _ReturnsWhatItWasGiven()])
def test_the_program_that_a_pass_was_given_stays_as_it_is(one):
    with pytest.raises((AssertionError, TranspileError), match="changed the program (that )?it was given"):
        check_pass(one, given=HEAD, before=BEFORE, after=BEFORE)
