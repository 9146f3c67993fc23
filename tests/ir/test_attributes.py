"""Attributes are what was written: 1, 1.0 and True are three values, 0.0 and -0.0 two, whatever was looked at before.

Python takes equal numbers for one key of a dictionary, so each test meets one of two equal values first and asks about the other.
"""

from __future__ import annotations

import enum

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Operator, Program, ProgramError, opdef
from fluidx.ir.attributes import attrs_key, normalize_attr
from fluidx.ir.builder import Builder
from fluidx.ir.source_location import call_site
from fluidx.verify import check_program

ZEROS = [(0.0, -0.0), (-0.0, 0.0)]


def program_of(write):
    """A program over %x: f32[2,3] that `write(builder, x)` goes on with, and what that returned."""
    main = fx.Program("p")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        x = fx.data("x", [2, 3], "float32")
        return main, write(Builder(main.global_block()), x)


def value_of(write, x=-1.0):
    main, out = program_of(write)
    return fx.Executor(fx.CPUPlace()).run(main, feed={"x": np.full((2, 3), x, "float32")}, fetch_list=[out])[0]


@pytest.mark.parametrize("first, then", ZEROS)
def test_a_bound_of_minus_zero_is_not_one_of_zero(first, then):
    for bound in (first, then):
        found = value_of(lambda b, x, bound=bound: b.clip(x, min=bound, max=1.0))
        assert (np.signbit(found) == np.signbit(bound)).all()


@pytest.mark.parametrize("first, then", ZEROS)
def test_an_attribute_of_minus_zero_is_completed_written_and_read_as_such(first, then):
    for bias in (first, then):
        assert np.signbit(opdef("scale").complete_attrs({"scale": 2.0, "bias": bias})["bias"]) == np.signbit(bias)
        main, _ = program_of(lambda b, x, bias=bias: b.scale(x, scale=2.0, bias=bias))
        back = Program.parse_from_string(str(main))
        assert back == main and np.signbit(back.ops[0].attr("bias")) == np.signbit(bias)


@pytest.mark.parametrize("a, b", [(0.0, -0.0), (1, 1.0), (1, True), (0.0, False), ((1, 0), (1, 0.0)), ((1, 0), (True, False))])
def test_operators_with_equal_attributes_that_are_written_otherwise_differ(a, b):
    ops = [Operator("foreign", {}, {}, {"value": v}) for v in (a, b)]
    assert ops[0] != ops[1] and attrs_key(ops[0].attrs) != attrs_key(ops[1].attrs)
    again = Operator("foreign", {}, {}, {"value": a}, site=call_site())
    assert ops[0] == again and not ops[0] != again


def test_operators_are_equal_in_whatever_order_their_attributes_stand():
    assert Operator("foreign", {}, {}, {"a": 1, "b": 2}) == Operator("foreign", {}, {}, {"b": 2, "a": 1})


@pytest.mark.parametrize(
    "op, right, wrong, message",
    [
        ("softmax", {"axis": 1}, {"axis": True}, "op softmax: attribute 'axis' must be int, got bool: True"),
        ("scale", {"scale": 1.0}, {"scale": True}, "op scale: attribute 'scale' must be float, got bool: True"),
        ("transpose", {"axis": (1, 0)}, {"axis": (True, False)}, "op transpose: attribute 'axis[0]' must be int, got bool: True"),
        ("transpose", {"axis": (1, 0)}, {"axis": (1, "0")}, "op transpose: attribute 'axis[1]' must be int, got str: '0'"),
        ("flip", {"dims": [0]}, {"dims": [0.5]}, "op flip: attribute 'dims[0]' must be int, got float: 0.5"),
        ("unpack", {"shapes": [[2, 3]]}, {"shapes": [[2, True]]}, "op unpack: attribute 'shapes[0][1]' must be int, got bool: True"),
    ],
)  # fmt: skip
def test_an_equal_attribute_of_a_wrong_type_is_refused_after_a_right_one(op, right, wrong, message):
    opdef(op).complete_attrs(right)
    with pytest.raises(ProgramError) as e:
        opdef(op).complete_attrs(wrong)
    assert str(e.value) == message


def test_whole_floats_in_a_tuple_of_integers_become_integers():
    main, out = program_of(lambda b, x: b.transpose(x, axis=[1.0, 0.0]))
    assert attrs_key(main.ops[0].attrs) == "{'axis': (1, 0)}" and out.shape == (3, 2)


class Axis(enum.IntEnum):
    ROWS = 0


class Half(float):
    pass


@pytest.mark.parametrize(
    "given, kept",
    [(np.float64(0.5), 0.5), (np.float32(0.5), 0.5), (np.int64(2), 2), (np.bool_(True), True), (np.str_("a"), "a"), (Half(0.5), 0.5)]
    + [(Axis.ROWS, 0), ([np.float64(1.5), Axis.ROWS], (1.5, 0)), (np.arange(2), (0, 1)), (np.array(3.0), 3.0)],
)
def test_numbers_of_other_libraries_and_classes_are_kept_as_plain_ones(given, kept):
    assert repr(normalize_attr(given)) == repr(kept)


def test_a_program_with_an_attribute_of_a_wrong_type_is_refused_beside_one_of_the_right_type():
    said = "%a: f32[2,3] = softmax(%x) {axis=1}\n  %b: f32[2,3] = softmax(%x) {only axis=true}"
    with pytest.raises(fx.VerifyError, match="op softmax: attribute 'axis' must be int, got bool: True"):
        check_program(Program.parse_from_string(f"program p {{\n  data %x: f32[2,3]\nforward:\n  {said}\n}}"))


def test_rank_programs_read_back_are_proved_though_an_attribute_came_from_numpy():
    from fluidx.verify import verify_ranks

    main, startup = fx.Program(), fx.Program()
    with fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3], "float32")
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(Builder(main.global_block()).scale(fx.layers.fc(x, 2), scale=np.float64(0.5))))
    t = fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=2)
    read = [[Program.parse_from_string(str(get(r))) for r in range(2)] for get in (t.get_trainer_program, t.get_startup_program)]
    verify_ranks(fx.ir.ProgramPair(main, startup), *read)
