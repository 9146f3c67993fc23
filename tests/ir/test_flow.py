"""Who defines, reads and last uses what, with loops and branches inside each other."""

from __future__ import annotations

import pytest

import fluidx as fx
from fluidx.ir import BlockRef, OpDef, Operator, Program, ProgramError, Required, flow
from fluidx.ir.parser import parse_program

NESTED = """program p {
  data %x: f32[1]
  data %go: bool[1]
  data %other: bool[1]
  var %state: f32[1] persistable
forward:
  %a: f32[1] = relu(%x)
  %b: f32[1] = exp(%x)
  [%y: f32[1]] = cond(%go, []) {true_block=block 1, false_block=block 4, true_out=["t"], false_out=["b"]}
  %z: f32[1] = elementwise_add(%y, %y)
block 1 in 0 {
  %t: f32[1] = square(%a)
  while(%other, []) {sub_block=block 2}
}
block 2 in 1 {
  %u: f32[1] = elementwise_add(%t, %x)
  [%state] = cond(%other, []) {true_block=block 3, false_block=block 5, true_out=["u"], false_out=["deep"]}
}
block 3 in 2 {
  %other = logical_not(%go)
}
block 4 in 0 { }
block 5 in 2 {
  var %deep: f32[1]
  %deep = tanh(%u)
}
}"""


@pytest.fixture
def nested():
    return parse_program(NESTED)


def test_an_operator_reads_and_writes_what_its_bodies_do_outside_of_themselves(nested):
    relu, exp, cond, add = nested.ops
    assert (flow.reads(nested, relu), flow.writes(nested, relu)) == (("x",), ("a",))
    # b is not read by any operator, but handed out by the false branch
    assert flow.reads(nested, cond) == ("go", "a", "other", "x", "b")
    assert flow.writes(nested, cond) == ("y", "state", "other")
    assert flow.reads(nested, add) == ("y", "y")


def test_a_body_as_its_block_sees_it(nested):
    assert flow.sub_reads(nested, nested.block(1)) == ("a", "other", "x", "go")
    assert flow.sub_reads(nested, nested.block(2)) == ("t", "x", "other", "go")
    assert flow.sub_reads(nested, nested.block(5)) == ("u",)
    assert flow.sub_writes(nested, nested.block(2)) == ("state", "other")
    assert flow.sub_writes(nested, nested.block(4)) == ()


def test_where_names_are_written_and_read(nested):
    assert flow.definitions(nested) == {"a": [0], "b": [1], "y": [2], "state": [2], "other": [2], "z": [3]}
    assert flow.uses(nested) == {"x": [0, 1, 2], "go": [2], "a": [2], "other": [2], "b": [2], "y": [3]}
    assert flow.first_use(nested) == {"x": 0, "go": 2, "a": 2, "other": 2, "b": 2, "y": 3}
    assert flow.needs(nested) == ("x", "go", "other") and flow.needs(nested, nested.ops[3:]) == ("y",)


def test_effects_count_wherever_they_are():
    p = parse_program("""program p {
  data %go: bool[1]
  while(%go, []) {sub_block=block 1}
  block 1 in 0 { while(%go, []) {sub_block=block 2} }
  block 2 in 1 { %t: bool[1] = print(%go) }
}""")
    assert flow.acts(p, p.ops[0])
    p.block(2).oplist.clear()
    assert not flow.acts(p, p.ops[0])


STRAIGHT = """program p {
  data %x: f32[1]
  %a: f32[1] = relu(%x)
  %b: f32[1] = exp(%a)
  %a = square(%b)
  %c: f32[1] = tanh(%x)
  %c = increment(%c)
  %d: f32[1] = print(%x)
}"""


def live(p, *needed, **options):
    return [op.type for op in flow.live_ops(p, needed, **options)]


def test_only_what_is_needed_is_live():
    p = parse_program(STRAIGHT)
    assert live(p) == []
    assert live(p, "b") == ["relu", "exp"]
    assert live(p, "a") == ["relu", "exp", "square"]
    assert live(p, "c") == ["tanh", "increment"]
    assert live(p, keep=lambda op: flow.acts(p, op)) == ["print"]


def test_a_value_that_is_overwritten_unread_is_not_live():
    p = parse_program("program p { data %x: f32[1]; %a: f32[1] = relu(%x); %a = exp(%x) }")
    assert live(p, "a") == ["exp"]


def test_what_a_loop_may_leave_as_it_was_is_live():
    p = parse_program("""program p {
  data %go: bool[1]
  %a: bool[1] = logical_not(%go)
  while(%go, []) {sub_block=block 1}
  block 1 in 0 { %a = assign(%go); %go = logical_not(%go) }
}""")
    assert live(p, "a") == ["logical_not", "while"]
    assert flow.needs(p) == ("go",) and flow.needs(p, p.ops[1:]) == ("go",)


def test_a_value_that_is_given_is_not_computed_but_changed_in_place():
    p = parse_program(STRAIGHT)
    assert live(p, "a", given={"b"}) == ["square"]
    assert live(p, "c", given={"c"}) == ["increment"]


def test_blocks_that_run_each_other_are_refused_not_followed():
    p = Program("circle")
    p.global_block().create_var("go", [1], "bool")
    for parent in (0, 1):
        p.create_block(parent)
    loop = [Operator("while", {"Condition": ("go",)}, {}, {"sub_block": BlockRef(i)}) for i in range(4)]
    p.block(1).oplist = [loop[2]]
    p.block(2).oplist = [loop[1]]
    for op in loop:
        for question in (flow.reads, flow.writes):
            with pytest.raises(ProgramError, match="op while .*runs block"):
                question(p, op)


def test_a_declaration_says_what_its_blocks_hand_out():
    said = r"op 't_flow_loop': attribute 'body' is a block, so Control\(bodies=\.\.\.\) must declare its results"
    with pytest.raises(TypeError, match=said):

        class Loop(OpDef):
            name = "t_flow_loop"
            attrs = {"body": Required(BlockRef)}


def test_pruning_keeps_what_a_branch_hands_through():
    main = fx.Program()
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        x, go = fx.data("x", [1], "float32"), fx.data("go", [1], "bool")
        h = fx.layers.exp(x)
        y = fx.layers.cond(go, lambda: h, lambda: fx.layers.relu(x))
        fx.layers.tanh(y)
    cut = fx.io.prune(main, ["x", "go"], [y.name])
    assert [op.type for op in cut.ops] == ["exp", "cond"] and set(cut.global_block().descs) == {"x", "go", h.name, y.name}
