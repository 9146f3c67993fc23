"""Functions that a model defines itself, against their bodies written in NumPy."""

import numpy as np
import pytest

import fluidx as fx

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
