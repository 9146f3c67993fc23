"""Operators are immutable records: nothing reachable from one can be changed, and copies are equal."""

from __future__ import annotations

import copy
import pickle

import pytest

import fluidx as fx
from fluidx.ir import Operator, Role
from fluidx.ir.operator import Frozen


def op(**attrs):
    return Operator("foreign", {"X": ("x", "y")}, {"Out": ("z",)}, attrs, Role.BACKWARD, ("w", "w@GRAD"), None, "gpu:1")


CHANGES = {
    "set": lambda d: d.__setitem__("axis", 1),
    "delete": lambda d: d.__delitem__("axis"),
    "update": lambda d: d.update(axis=1),
    "or": lambda d: d.__ior__({"axis": 1}),
    "pop": lambda d: d.pop("axis"),
    "popitem": lambda d: d.popitem(),
    "setdefault": lambda d: d.setdefault("other", 1),
    "clear": lambda d: d.clear(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("part", ["attrs", "inputs", "outputs"])
def test_attributes_and_slots_cannot_be_changed(part, change):
    o = op(axis=0)
    with pytest.raises(TypeError, match="operators are immutable; op.replace"):
        change(getattr(o, part))
    assert o == op(axis=0)


def test_fields_cannot_be_changed():
    o = op()
    with pytest.raises(AttributeError, match="operators are immutable; use op.replace"):
        o.attrs = {}
    with pytest.raises(AttributeError, match="operators are immutable"):
        del o.role


def test_the_dictionaries_given_are_not_kept():
    inputs, attrs = {"X": ("x",)}, {"axis": 0}
    o = Operator("foreign", inputs, {}, attrs)
    inputs["X"], attrs["axis"] = ("y",), 1
    assert (o.input("X"), o.attr("axis")) == (("x",), 0)


def test_changed_copies_share_nothing_that_can_change():
    o = op(axis=0)
    later = o.replace(attrs={**o.attrs, "axis": 1})
    assert (o.attr("axis"), later.attr("axis")) == (0, 1)
    assert later.inputs is o.inputs
    assert o.all_attrs() == {"axis": 0} and type(o.all_attrs()) is dict


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_and_pickles_are_equal_and_immutable_too(duplicate):
    o = op(axis=0, shape=(2, 3))
    again = duplicate(o)
    assert again == o and hash(again) == hash(o)
    assert type(again.attrs) is type(again.inputs) is Frozen
    assert tuple(again) == tuple(o)


def test_one_ranks_communication_cannot_be_changed_through_anothers():
    main, startup = fx.Program("net"), fx.Program("net")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 4], "float32"), 3))
        fx.optimizer.SGD(0.1).minimize(loss)
    t = fx.DistributeTranspiler(fx.strategies.data_parallel(bucket_mb=0))
    t.transpile(program=main, startup_program=startup, trainers=2)
    reduces = [o for r in (0, 1) for o in t.get_trainer_program(r).ops if o.type == "all_reduce"]
    assert len(reduces) == 4
    with pytest.raises(TypeError, match="operators are immutable"):
        reduces[0].attrs["op"] = "max"
    assert "max" not in {o.attr("op") for o in reduces}


def test_a_tuples_own_replace_keeps_what_is_read_and_written_in_step():
    op = Operator("relu", {"X": ("x",)}, {"Out": ("y",)})
    other = op._replace(inputs={"X": ("z",)})
    assert other == op.replace(inputs={"X": ("z",)})
    assert other.input_arg_names == ("z",) and op._replace(outputs={"Out": ("q",)}).output_arg_names == ("q",)
