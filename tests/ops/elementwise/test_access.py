"""Access patterns derived from scalar expressions: how axes broadcast, and which operands may be partial sums or partial maxima."""

from __future__ import annotations

import math

import pytest

from fluidx.ir import TensorType, opdef
from fluidx.ir.rows import rows
from fluidx.ops import expr as ex
from fluidx.ops.elementwise.access import direction, linear_groups


def said(op, *shapes, dtype="float32", **attrs):
    d = opdef(op)
    ins = [TensorType(dtype, s) for s in shapes]
    attrs = d.complete_attrs(attrs)
    return d.pattern(ins, [d.infer(*ins, **attrs)], attrs).strip()


@pytest.mark.parametrize(
    ("op", "attrs", "expected"),
    [
        ("relu", {}, "* -> * | U(0)"),
        ("sqrt", {}, "* -> * |"),  # a term of a partial maximum may be negative
        ("scale", {"scale": -2.0}, "* -> * | L(0) D(0)"),
        ("scale", {"scale": -2.0, "bias": 1.0}, "* -> * | D(0)"),
        ("scale", {"scale": math.inf}, "* -> * |"),
        ("scale", {"scale": 0.0}, "~* -> * |"),  # X is not read
        ("clip", {"min": -1.0, "max": 2.0}, "* -> * | U(0)"),
        ("pow", {"factor": 1.0}, "* -> * | L(0) U(0)"),
        ("pow", {"factor": 2.0}, "* -> * |"),
    ],
)
def test_a_pattern_follows_from_the_expression_and_its_attributes(op, attrs, expected):
    assert said(op, (4, 6), **attrs) == expected


def test_sums_are_linear_in_both_operands_together_and_products_in_each():
    assert said("elementwise_sub", (4, 6), (6,)) == "*, * -> * | L(0,1)"
    assert said("elementwise_mul", (4, 6), (6,)) == "*, * -> * | L(0) L(1)"
    assert said("elementwise_div", (4, 6), (6,)) == "*, * -> * | L(0)"
    assert said("elementwise_max", (4, 6), (6,)) == "*, * -> * | U(0) U(1)"


def test_integers_overflow_so_their_arithmetic_is_neither_linear_nor_monotone():
    assert said("scale", (4, 6), dtype="int64", scale=0.5) == "* -> * |"
    assert said("increment", (4, 6), dtype="int64") == "* -> * |"
    assert said("relu", (4, 6), dtype="int64") == "* -> * | U(0)"


def test_where_is_linear_in_both_branches_together_and_not_in_the_condition():
    e = ex.trace(lambda c, a, b: ex.where(c > 0, a, 2 * b))
    assert linear_groups(e, ("c", "a", "b")) == [("a", "b")]
    assert direction(e, "a") == 0


def test_fluids_axis_aligns_y_in_either_slot():
    assert said("elementwise_div", (2, 3, 4, 5), (3, 4), axis=1) == "e0 e1 e2 e3, e1 e2 -> e0 e1 e2 e3 | L(0)"
    assert said("elementwise_add", (2, 3), (2, 1), axis=0) == "*, * -> * | L(0,1)"
    d, attrs = opdef("elementwise_div_grad_x"), {"axis": 0}
    y, g = TensorType("float32", (2, 1)), TensorType("float32", (2, 3, 4))
    assert d.inputs[0] == "Y" and d.pattern([y, g], [g], attrs) == "e0 e1, e0 e1 e2 -> e0 e1 e2 | L(1)"


def test_an_operand_of_one_element_allows_flat_ranges():
    x, one = TensorType("float32", (4, 6)), TensorType("float32", (1, 1))
    p = opdef("elementwise_mul").pattern_of([x, one], [x], {"axis": -1})
    assert [r.kind for r in rows(p)] == ["cut", "cut", "flat", "root", "whole", "linear", "linear", "own"]
