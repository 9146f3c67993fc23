"""Functions that a model defines itself, against their bodies written in NumPy."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.onnx import limits

onnx = pytest.importorskip("onnx")

X = np.float32([[1, -2, 3, -4], [-5, 6, -7, 8]])


def model_of(graph, *functions):
    parts = [f'<domain: "own", opset_import: ["": 17, "own": 1]> {text}' for text in functions]
    return onnx.parser.parse_model("\n".join(['<ir_version: 10, opset_import: ["": 17, "own": 1]>', graph, *parts]))


def outputs(model):
    """What the program gives, after a session gave the same."""
    loaded, exe, scope = fx.onnx.load(model), fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(loaded.startup, scope=scope)
    found = exe.run(loaded.program, feed={"x": X}, fetch_list=loaded.fetches, scope=scope)
    for a, b in zip(found, fx.onnx.session(model).run([X]), strict=True):
        np.testing.assert_array_equal(a, b)
    return found


def leaky(x, alpha):
    return np.where(x < 0, x * np.float32(alpha), x)


def test_functions_call_functions_and_hand_their_attributes_on():
    model = model_of(
        "g (float[n, 4] x) => (float[n, 4] y) { y = own.twice <slope: float = 0.5> (x) }",
        "twice <slope> (a) => (b) { t = own.once <s: float = @slope> (a)  b = own.once <s: float = @slope> (t) }",
        "once <s> (a) => (b) { b = LeakyRelu <alpha: float = @s> (a) }",
    )
    np.testing.assert_array_equal(outputs(model)[0], leaky(X, 0.25))


def test_an_attribute_that_a_call_leaves_out_has_the_default_of_the_function():
    model = model_of(
        "g (float[n, 4] x) => (float[n, 4] y, float[n, 4] z) { y = own.f (x)  z = own.f <s: float = 0.25> (x) }",
        "f <s: float = 0.5> (a) => (b) { b = LeakyRelu <alpha: float = @s> (a) }",
    )
    given, own = outputs(model)[::-1]
    np.testing.assert_array_equal(own, leaky(X, 0.5))
    np.testing.assert_array_equal(given, leaky(X, 0.25))
    assert len(model.graph.node[0].attribute) == 0  # the model itself stays as it is


def test_names_inside_a_function_are_its_own_and_overloads_are_told_apart():
    model = model_of(
        "g (float[n, 4] x) => (float[n, 4] y) { t = Neg (x)  u = own.f (x)  v = own.f:other (x)  w = Add (u, v)  y = Add (w, t) }",
        "f (x) => (y) { t = Relu (x)  y = Add (t, t) }",
    )
    other = onnx.FunctionProto()
    other.CopyFrom(model.functions[0])
    other.overload, other.node[0].op_type = "other", "Abs"
    model.functions.append(other)
    np.testing.assert_array_equal(outputs(model)[0], 2 * np.maximum(X, 0) + 2 * np.abs(X) - X)


def nested(depth, times):
    """A function that calls another one so many times, which calls a third one so, ..."""
    called = [f"own.f{d + 1}" for d in range(depth - 1)] + ["Relu"]
    bodies = [" ".join(f"v{k + 1} = {name} (v{k})" for k in range(times)) for name in called]
    functions = [f"f{d} (v0) => (v{times}) {{ {body} }}" for d, body in enumerate(bodies)]
    return model_of("g (float[n, 4] x) => (float[n, 4] y) { y = own.f0 (x) }", *functions)


@pytest.mark.parametrize("reader", [fx.onnx.load, fx.onnx.session])
def test_functions_that_come_to_too_many_nodes_are_refused_before_they_are_written_out(reader, monkeypatch):
    with pytest.raises(fx.onnx.OnnxError, match=r"gives 1000000000 nodes \(the largest is f0 with 1000000000\)"):
        reader(nested(9, 10))
    monkeypatch.setattr(limits, "OPERATORS", 8)
    assert [type(reader(nested(3, 2)))] and len(fx.onnx.load(nested(3, 2)).program.ops) == 8
    with pytest.raises(fx.onnx.OnnxError, match=r"16 nodes .* allows 8; raise it"):
        reader(nested(4, 2))


def test_functions_that_come_to_too_many_bytes_are_refused(monkeypatch):
    large = onnx.numpy_helper.from_array(np.ones((64, 1024), "float32"))
    model = nested(3, 10)
    model.functions[-1].node.add(op_type="Constant", output=["held"]).attribute.append(onnx.helper.make_attribute("value", large))
    monkeypatch.setattr(limits, "MEMORY", 2**24)  # there are 100 calls with 256 KB each
    with pytest.raises(fx.onnx.OnnxError, match=r"gives \d\d MB .* more than this machine has"):
        fx.onnx.session(model)


def test_functions_in_a_ring_are_refused():
    model = nested(2, 2)
    model.functions[1].node[0].op_type, model.functions[1].node[0].domain = "f0", "own"
    with pytest.raises(fx.onnx.OnnxError, match="are recursive"):
        fx.onnx.session(model)


@pytest.mark.parametrize("read", [fx.onnx.load, lambda model: fx.onnx.session(model).run([X])])
def test_loops_that_are_written_out_are_bounded(read, monkeypatch):
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 17]>
        g (float[n, 4] x) => (float[n, 4] y) {
            often = Constant <value = int64 {100}> ()
            goes = Constant <value = bool {1}> ()
            y = Loop (often, goes, x) <body = b (int64 k, bool c, float[n, 4] s) => (bool d, float[n, 4] t) {
                d = Identity (c)
                t = Sin (s)
            }>
        }""")
    read(model)
    monkeypatch.setattr(limits, "OPERATORS", 50)
    with pytest.raises(fx.onnx.OnnxError, match="the program has more than 50 operators here, because loops and functions are unrolled"):
        read(model)
