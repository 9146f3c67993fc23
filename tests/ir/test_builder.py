"""Builder: operators written by calling them, with results under fresh or given names."""

from __future__ import annotations

import json

import pytest

import fluidx as fx
from fluidx.ir import Builder, Operator, ProgramError
from fluidx.ir.jsonform import op_from_json, op_to_json
from fluidx.ir.make_op import filled, make_op


@pytest.fixture
def b():
    main = fx.Program("main")
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        yield Builder(main.global_block())


@pytest.fixture
def x(b):
    return fx.data("x", [6], "float32")


def test_results_get_fresh_names_or_the_given_one(b, x):
    assert b.relu(x).name == "relu.tmp_0" and b.relu(x).name == "relu.tmp_1"
    assert b.relu(x, name="y").name == "y"
    assert [v.name for v in b.split(x, num=2, n_out=2, name="half")] == ["half.0", "half.1"]


def test_outputs_are_directed_into_variables_and_names(b, x):
    a = b.block.create_var("a", [2, 2], "float32")
    assert b.relu(x, out={"Out": "y"}).name == "y"
    assert b.relu(x, out={"Out": ["z"]}).name == "z"
    assert [v.name for v in b.unpack(x, shapes=((2, 2), (2,)), out={"Out": [a, "c"]})] == ["a", "c"]
    assert [v.name for v in b.split(x, num=2, out={"Out": ("p", "q")})] == ["p", "q"]
    assert b.block.ops[-1].outputs == {"Out": ("p", "q")}


def test_an_optional_output_is_left_away_with_none(b, x):
    out, mask = b.dropout(x, dropout_prob=0.5, out={"Mask": None})
    assert (out.name, mask) == ("dropout.tmp_0", None)
    assert b.block.ops[-1].outputs == {"Out": ("dropout.tmp_0",)}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda b, x: b.relu(x, x), r"op relu takes 1 inputs \(X\), got 2"),
        (lambda b, x: b.relu(x, out={"Oot": "y"}), "op relu has no output 'Oot'; did you mean 'Out'?"),
        (lambda b, x: b.relu(x, out={"Out": ["y", "z"]}), "op relu takes one variable as output 'Out', got 2"),
        (lambda b, x: b.split(x, num=2, out={"Out": ["y"]}), "op split makes 2 outputs 'Out', 1 names were given"),
    ],
)
def test_a_call_that_does_not_fit_the_declaration_is_refused(b, x, call, message):
    with pytest.raises(ProgramError, match=message):
        call(b, x)
    assert len(b.block.ops) == 0


def test_a_suffix_names_a_result_after_the_first_operand(b, x):
    y = b.matmul(b.reshape(x, shape=[2, 3], name="y"), b.reshape(x, shape=[3, 2], name="z"), suffix="product")
    assert y.name == "y.product"
    assert [v.name for v in b.split(x, num=2, n_out=2, suffix="half")] == ["x.half.0", "x.half.1"]


def test_an_operand_is_a_variable_its_record_or_its_name(b, x):
    for operand in (x, x.desc, x.name):
        b.relu(operand)
    assert len({op.inputs["X"] for op in b.block.ops}) == 1
    b.sum([x, x.desc, "x"])
    assert b.block.ops[-1].inputs == {"X": ("x", "x", "x")}


def test_a_made_operator_has_its_names_by_slot_and_all_attributes(b, x):
    """As a Builder writes it."""
    for args, attrs, outs in (((x,), {"scale": 2.0}, "scale"), (([x, x],), {}, "sum"), ((x, x), {}, "elementwise_add")):
        out = b.emit(outs, *args, **attrs)
        names = [v.name for a in args for v in (a if isinstance(a, list) else [a])]
        made = make_op(outs, names, [out.name], filled(outs, attrs), role=b.block.ops[-1].role)
        assert made == b.block.ops[-1] and dict(made.attrs) == dict(b.block.ops[-1].attrs)
        assert (made.input_arg_names, made.output_arg_names) == (tuple(names), (out.name,))


@pytest.mark.parametrize(
    "op, xs, outs, said",
    [
        ("recv", [], ["y"], "%y = recv()"),
        ("send", ["x"], [], "send(%x)"),
        ("unpack", ["x"], ["y", "z"], "[%y, %z] = unpack([%x])"),
        ("pack", ["x", "y"], ["z"], "%z = pack([%x, %y])"),
        ("elementwise_max", ["x", "y"], ["z"], "%z = elementwise_max(%x, %y)"),
        ("dropout", ["x"], ["y", "z"], "%y, %z = dropout(%x)"),
    ],
)
def test_a_made_operator_takes_names_in_the_order_of_its_slots(op, xs, outs, said):
    made = make_op(op, xs, outs)
    assert str(made).startswith(said)
    assert Operator(op, made.inputs, made.outputs, role=made.role) == made
    assert (made.input_arg_names, made.output_arg_names) == (tuple(xs), tuple(outs))


def test_an_operator_keeps_its_slots_in_json(b, x):
    b.dropout(x, dropout_prob=0.5, out={"Mask": None})
    (op,) = b.block.ops
    assert op_from_json(json.loads(json.dumps(op_to_json(op)))) == op
