"""Operators at different roots are one case for the placement rules; operands and results at two roots are another one."""

import numpy as np
import pytest

from fluidx.ir.make_op import make_op
from fluidx.ir.opdef import opdef
from fluidx.ir.types import At, Shard, TensorType
from fluidx.verify.mesh import RankGroups
from fluidx.verify.normal_form import ExpressionTable
from fluidx.verify.operator_check import OperatorClasses

T = TensorType("float32", (8,))
N = 4


def classes():
    return OperatorClasses(RankGroups({"dp": (tuple(range(N)),)}, N), ExpressionTable())


def checked(found, type_, ins, outs):
    op = make_op(type_, tuple(f"x{k}" for k in range(len(ins))), ("out",), opdef(type_).complete_attrs({}))
    table = checked.table
    given, made = (tuple(table.signature(T, p) for p in places) for places in (ins, outs))
    counts = (len(ins),) if type_ == "sum" else ()
    op_class = found.of(op, given, made, counts)
    return op_class.wrong or op_class.no_row


checked.table = ExpressionTable()


@pytest.mark.parametrize("type_, many", [("relu", 1), ("elementwise_add", 2), ("sum", 3)])
def test_a_rule_that_was_found_for_other_roots_allows_what_it_allows_by_itself(type_, many):
    """Each combination is asked of classes that know many others, and of new ones."""
    rng = np.random.default_rng(many)
    known = classes()
    allowed = 0
    for _ in range(300):
        pick = lambda: ((), (At(int(rng.integers(N)), "dp"),), (Shard(0, "dp"),))[int(rng.integers(3))]  # noqa: E731
        same = pick()
        ins = [same if rng.integers(3) else pick() for _ in range(many)]
        outs = [same if rng.integers(3) else pick()]
        alone, among = checked(classes(), type_, ins, outs), checked(known, type_, ins, outs)
        assert bool(alone) is bool(among), (ins, outs, alone, among)
        allowed += not alone
    assert 50 < allowed < 290


def test_operands_at_two_roots_are_refused_after_many_at_one():
    found = classes()
    for k in range(N):
        at = (At(k, "dp"),)
        assert not checked(found, "elementwise_add", [at, at], [at])
    for other in ([(At(0, "dp"),), (At(1, "dp"),)], [(At(2, "dp"),), (At(1, "dp"),)]):
        assert checked(found, "elementwise_add", other, [other[0]])
    assert checked(found, "elementwise_add", [(At(1, "dp"),)] * 2, [(At(2, "dp"),)])
