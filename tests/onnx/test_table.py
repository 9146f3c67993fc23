"""The table of operators that ONNX and fluidx both have: what it says of either side holds there."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402

import fluidx as fx  # noqa: E402
from fluidx.ir.opdef import opdef  # noqa: E402
from fluidx.onnx.export import to_onnx  # noqa: E402
from fluidx.onnx.normalize import NEWEST  # noqa: E402
from fluidx.onnx.table import ENTRIES, Attribute, load_all  # noqa: E402
from tests.onnx.one_node import ran  # noqa: E402

load_all()
NAMED = {f"{e.domain}:{e.onnx}-{e.op}".lstrip(":"): e for e in ENTRIES}
STANDARD = [name for name, e in NAMED.items() if e.domain != "com.microsoft"]  # onnx has the schemas of these


@pytest.mark.parametrize("name", STANDARD)
def test_attributes_are_those_of_the_schema_with_its_defaults(name):
    e = NAMED[name]
    schema = onnx.defs.get_schema(e.onnx, NEWEST, e.domain)
    for attribute, own in e.attrs.items():
        said = schema.attributes[attribute].default_value
        if said.type:
            default = helper.get_attribute_value(said)
            default = default.decode() if isinstance(default, bytes) else default
            assert np.float32(own.default) == np.float32(default) if isinstance(default, float) else own.default == default
    assert set(e.theirs) <= set(schema.attributes)


@pytest.mark.parametrize("name", NAMED)
def test_attributes_and_slots_are_those_of_the_operator(name):
    e = NAMED[name]
    definition = opdef(e.op)
    assert {a.name for a in e.attrs.values()} | set(e.ours) <= set(definition.attrs)
    assert set(e.operands) <= {slot.name for slot in definition.in_slots}


def test_values_are_translated_both_ways():
    words = Attribute("approximate", "none", {"none": False, "tanh": True})
    assert (words.read("tanh"), words.written(True), words.written(False)) == (True, "tanh", "none")
    flag = Attribute("zeros", False)
    assert (flag.read(1), flag.written(True), flag.written(False)) == (True, 1, None)
    listed = Attribute("stopwords", ())
    assert (listed.read(["a"]), listed.written(("a",)), listed.written(())) == (("a",), ["a"], None)


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("HardSigmoid", {"alpha": 0.25, "beta": 0.125}),
        ("Selu", {"alpha": 2.0, "gamma": 1.5}),
        ("Gelu", {"approximate": "tanh"}),
    ],
)
def test_a_node_comes_back_as_it_went_in(op, attrs):
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 3]) for n in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], **attrs)], "g", [x], [y])
    loaded = fx.onnx.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    assert len(loaded.program.ops) == 1
    (node,) = to_onnx(loaded.program, None, loaded.fetches).graph.node
    found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert node.op_type == op and {n: v.decode() if isinstance(v, bytes) else v for n, v in found.items()} == attrs


@pytest.mark.parametrize(
    ("op", "dtype", "count", "attrs", "said"),
    [
        ("BitShift", "uint8", 2, {"direction": "UP"}, "direction must be one of LEFT, RIGHT, found 'UP'"),
        ("Gelu", "float32", 1, {"approximate": "sigmoid"}, "approximate must be one of none, tanh, found 'sigmoid'"),
    ],
)
def test_a_value_that_an_attribute_does_not_have_is_refused_with_those_it_has(op, dtype, count, attrs, said):
    with pytest.raises(fx.onnx.OnnxError, match=said):
        ran(op, [np.ones(3, dtype)] * count, **attrs)
