"""`fluidx.onnx.backend`, as the documentation of onnx.backend.base says what a backend does."""

import numpy as np
import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx")

from onnx import helper  # noqa: E402

from fluidx.onnx import backend  # noqa: E402

X = np.float32([[1, -2], [3, -4]])
OnnxError = fx.onnx.OnnxError


def model_of(text):
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17, "other": 1]> {text}')


TWO = "g (float[n, 2] a, float[n, 2] b) => (float[n, 2] less, float[n, 2] more) { less = Sub (a, b)  more = Add (a, b) }"


def test_outputs_come_in_order_and_by_name():
    ready = backend.prepare(model_of(TWO), device="CPU")
    for inputs in ([X, X], (X, X), {"b": X, "a": X}):
        found = ready.run(inputs)
        assert isinstance(found, tuple) and found[0] is found["less"] and found.more is found[1]
        np.testing.assert_array_equal(found.more, 2 * X)


def test_one_input_needs_no_list_and_bytes_may_stand_in_another_order():
    model = model_of("g (float[n, 2] x) => (float[n, 2] y) { y = Relu (x) }")
    for x in (X, [X], [X.astype(">f4")], {"x": X}):
        np.testing.assert_array_equal(backend.run_model(model, x)[0], np.maximum(X, 0))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([[[1.0, 2.0]]], r"input 'x' takes an array of float32, found a list; give np.asarray\(x, 'float32'\)$"),
        (None, "input 'x' takes an array of float32, found nothing"),
        ([X, X], "2 values are fed; the model has: x"),
    ],
)
def test_what_is_no_array_is_refused(inputs, message):
    with pytest.raises(OnnxError, match=message):
        backend.run_model(model_of("g (float[n, 2] x) => (float[n, 2] y) { y = Relu (x) }"), inputs)


def test_a_device_that_is_not_supported_is_refused():
    supported = {d: backend.supports_device(d) for d in ("CPU", "CPU:0", "CUDA", "CUDA:1", "TPU", "", "CPU:x", None)}
    assert [d for d, yes in supported.items() if yes] == ["CPU", "CPU:0"]
    relu = helper.make_node("Relu", ["x"], ["y"])
    for run in (lambda: backend.prepare(model_of(TWO), "CUDA:0"), lambda: backend.run_node(relu, [X], device="CUDA")):
        with pytest.raises(OnnxError, match="device 'CUDA.*': models run on the CPU"):
            run()


def test_a_model_is_compatible_where_it_can_be_prepared():
    assert backend.is_compatible(model_of(TWO)) and not backend.is_compatible(model_of(TWO), "CUDA")
    assert not backend.is_compatible(model_of("g (float[n] x) => (float[n] y) { y = other.Nothing (x) }"))


def test_a_node_is_fed_by_order_or_by_name_and_may_leave_operands_and_outputs_out():
    less = helper.make_node("Sub", ["a", "b"], ["c"])
    for inputs in ([3 * X, X], (3 * X, X), {"b": X, "a": 3 * X}):
        np.testing.assert_array_equal(backend.run_node(less, inputs).c, 2 * X)
    clip = helper.make_node("Clip", ["x", "", "most"], ["y"])
    for inputs in ([X, np.float32(2)], [X, None, np.float32(2)]):
        np.testing.assert_array_equal(backend.run_node(clip, inputs)[0], np.minimum(X, 2))
    square = helper.make_node("Mul", ["x", "x"], ["y"])
    for inputs in (X, [X], [X, X]):
        np.testing.assert_array_equal(backend.run_node(square, inputs)[0], X * X)
    top = helper.make_node("TopK", ["x", "k"], ["", "at"])
    assert [v.tolist() for v in backend.run_node(top, [X, np.int64([1])])] == [[[0], [0]]]
    with pytest.raises(OnnxError, match=r"node 'Sub' \(Sub\) reads a, b; 1 values are fed"):
        backend.run_node(less, [X])


def test_a_node_is_of_the_opset_that_is_asked_for():
    old = helper.make_node("Squeeze", ["x"], ["y"], axes=[0])
    assert backend.run_node(old, [X[:1]], opset_version=11)[0].shape == (2,)
    with pytest.raises(OnnxError, match=r"\(Squeeze\): its operator has no attribute 'axes' in this opset; there are none"):
        backend.run_node(old, [X[:1]], opset_version=13)


def test_a_model_without_the_opset_of_its_nodes_is_told_so():
    model = model_of("g (float[n] x) => (float[n] y) { y = Relu (x) }")
    del model.opset_import[:]
    with pytest.raises(OnnxError, match=r"\(Relu\): the model names no opset of ai.onnx; add one to its opset_import"):
        backend.prepare(model)
