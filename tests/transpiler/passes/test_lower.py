"""Redistributes become collectives, by text. Those of many roots and flat ranges are made from each other, and each names its own."""

from fluidx.testing import check_pass
from fluidx.transpiler.passes.lower import Lower

PARTS = "group dp = [0, 1, 2]; data %a: f32[4] partial(sum) over dp; data %b: f32[4] partial(sum) over dp; data %c: f32[4]"


def test_each_root_and_each_flat_range_is_that_of_its_own_value():
    check_pass(
        Lower(),
        given=PARTS,
        before="""
        dist:
          %a.at: f32[4] at(1) over dp = redistribute(%a) {reason="update"}
          %b.at: f32[4] at(2) over dp = redistribute(%b) {reason="update"}
          %a.all: f32[4] = redistribute(%a.at) {reason="update"}
          %b.all: f32[4] = redistribute(%b.at) {reason="update"}
          %a.cut: f32[4] pieces(0, 1, 3, 4) over dp = redistribute(%a) {reason="update"}
          %b.cut: f32[4] pieces(0, 2, 2, 4) over dp = redistribute(%b) {reason="update"}
          %a.full: f32[4] = redistribute(%a.cut) {reason="update"}
          %b.full: f32[4] = redistribute(%b.cut) {reason="update"}
        """,
        after="""
        dist:
          %a.at: f32[4] at(1) over dp = reduce(%a) {group="dp", op="sum", root=1}
          %b.at: f32[4] at(2) over dp = reduce(%b) {group="dp", op="sum", root=2}
          %a.all: f32[4] = broadcast(%a.at) {group="dp", root=1}
          %b.all: f32[4] = broadcast(%b.at) {group="dp", root=2}
          %a.cut: f32[4] pieces(0, 1, 3, 4) over dp = reduce_scatter(%a) {group="dp", op="sum", bounds=[0, 1, 3, 4]}
          %b.cut: f32[4] pieces(0, 2, 2, 4) over dp = reduce_scatter(%b) {group="dp", op="sum", bounds=[0, 2, 2, 4]}
          %a.full: f32[4] = all_gather(%a.cut) {group="dp", bounds=[0, 1, 3, 4]}
          %b.full: f32[4] = all_gather(%b.cut) {group="dp", bounds=[0, 2, 2, 4]}
        """,
    )


def test_two_roots_or_a_root_and_a_range_are_not_mistaken_for_each_other():
    check_pass(
        Lower(),
        given=PARTS,
        before="""
        dist:
          %c.1: f32[4] at(1) over dp = redistribute(%c) {reason="update"}
          %c.2: f32[4] at(2) over dp = redistribute(%c.1) {reason="update"}
          %c.0: f32[4] at(0) over dp = redistribute(%c.2) {reason="update"}
          %c.cut: f32[4] pieces(0, 1, 3, 4) over dp = redistribute(%c.0) {reason="update"}
          %c.end: f32[4] at(1) over dp = redistribute(%c.cut) {reason="update"}
          %c.same: f32[4] at(1) over dp = redistribute(%c.end) {reason="update"}
        """,
        after="""
        dist:
          %c.1: f32[4] at(1) over dp = assign(%c)
          %c.2: f32[4] at(2) over dp = transfer(%c.1) {group="dp", root=1, to=2}
          %c.0: f32[4] at(0) over dp = transfer(%c.2) {group="dp", root=2, to=0}
          %c.cut: f32[4] pieces(0, 1, 3, 4) over dp = scatter_parts(%c.0) {group="dp", root=0, bounds=[0, 1, 3, 4]}
          %c.end: f32[4] at(1) over dp = gather_parts(%c.cut) {group="dp", root=1, bounds=[0, 1, 3, 4]}
          %c.same: f32[4] at(1) over dp = assign(%c.end)
        """,
    )
