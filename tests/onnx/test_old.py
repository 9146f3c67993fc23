"""Operators as older opsets had them, by what their documentation says: axes of broadcasting, types by name, sizes as attributes."""

import numpy as np
import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.integers(-4, 5, (2, 3, 4, 5)).astype(np.float32)
OF_3, OF_4_5, OF_3_4 = np.float32([1, 2, -4]), RNG.integers(1, 5, (4, 5)).astype(np.float32), RNG.integers(1, 5, (3, 4)).astype(np.float32)


def model_of(opset, op_type, x, weights, kind, **attrs):
    """A model of one node, its batch open, its weights listed as inputs, as IR 3 asks."""
    initializers = [numpy_helper.from_array(w, f"w{k}") for k, w in enumerate(weights)]
    code = helper.np_dtype_to_tensor_dtype(x.dtype)
    inputs = [helper.make_tensor_value_info("x", code, ["n", *x.shape[1:]])]
    inputs += [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in initializers]
    node = helper.make_node(op_type, ["x", *(t.name for t in initializers)], ["y"], **attrs)
    graph = helper.make_graph([node], "old", inputs, [helper.make_tensor_value_info("y", kind, [None] * 4)], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=3)


def found(opset, op_type, x, *weights, kind=TensorProto.FLOAT, **attrs):
    """What the program of a model of one node gives."""
    model = fx.onnx.load(model_of(opset, op_type, x, weights, kind, **attrs))
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    return exe.run(model.program, feed={"x": x}, fetch_list=model.fetches, scope=scope)[0]


@pytest.mark.parametrize(
    ("second", "attrs", "lies"),
    [
        (OF_3, {"axis": 1}, OF_3[:, None, None]),
        (OF_3_4, {"axis": 1}, OF_3_4[:, :, None]),
        (OF_3_4, {"axis": -3}, OF_3_4[:, :, None]),
        (OF_4_5, {"axis": 2}, OF_4_5),
        (OF_4_5, {}, OF_4_5),
        (np.float32(3), {}, np.float32(3)),
    ],
)
def test_a_second_operand_lies_along_the_axes_from_axis_on(second, attrs, lies):
    for op_type, work in {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply}.items():
        np.testing.assert_array_equal(found(6, op_type, X, second, broadcast=1, **attrs), work(X, lies))


def test_comparisons_and_logic_have_axes_too():
    of_3, at = np.array([True, False, True]), {"broadcast": 1, "axis": 1, "kind": TensorProto.BOOL}
    np.testing.assert_array_equal(found(6, "And", X > 0, of_3, **at), (X > 0) & of_3[:, None, None])
    np.testing.assert_array_equal(found(6, "Xor", X > 0, of_3, **at), (X > 0) ^ of_3[:, None, None])
    np.testing.assert_array_equal(found(6, "Greater", X, OF_3, **at), OF_3[:, None, None] < X)
    np.testing.assert_array_equal(found(6, "Equal", X.astype("int32"), OF_3.astype("int32"), **at), OF_3[:, None, None] == X)


def test_values_behind_such_an_operand_have_shapes():
    """Softmax of opset 12 and before is written by the number of its axes."""
    text = """<ir_version: 3, opset_import: ["": 6]> g (float[n, 3, 4] x, float[3] w) => (float[n, 3, 4] y) <float[3] w = {1, 2, -4}> {
      s = Add <broadcast = 1, axis = 1> (x, w)
      y = Softmax <axis = 2> (s)
    }"""
    x = X[..., 0]
    e = np.exp(x.astype(np.float64) + OF_3[:, None])
    (y,) = fx.onnx.session(onnx.parser.parse_model(text)).run([x])
    np.testing.assert_allclose(y, e / e.sum(axis=2, keepdims=True), rtol=1e-6)  # rounding of float32


@pytest.mark.parametrize(("axis", "rows"), [({}, 2), ({"axis": 2}, 6), ({"axis": 3}, 24)])
def test_hardmax_took_the_axes_from_axis_on_as_one(axis, rows):
    """Of equal ones the first."""
    flat = X.reshape(rows, -1)
    np.testing.assert_array_equal(found(11, "Hardmax", X, **axis), np.eye(flat.shape[1])[flat.argmax(axis=1)].reshape(X.shape))


def test_sizes_and_types_were_attributes():
    np.testing.assert_array_equal(
        found(1, "Pad", X, paddings=[0, 0, 1, 0, 0, 0, 0, 2], value=1.5), np.pad(X, ((0, 0), (0, 0), (1, 0), (0, 2)), constant_values=1.5)
    )
    assert found(1, "Cast", X, to="DOUBLE", kind=TensorProto.DOUBLE).dtype == np.float64
    halves = {"kernel_shape": [2, 5], "strides": [2, 5]}
    expected = np.sqrt((X.astype(np.float64).reshape(2, 3, 2, 2, 5) ** 2).sum(axis=(3, 4)))[..., None]
    np.testing.assert_allclose(found(1, "LpPool", X, p=2.0, **halves), expected, rtol=1e-6)  # a root in float32
    with pytest.raises(fx.onnx.OnnxError, match=r"\(Cast of opset 1\): there is no type 'NUMBER'; there are: FLOAT"):
        found(1, "Cast", X, to="NUMBER")


def test_batch_normalization_was_not_always_by_channel():
    scale, bias, mean, variance = (RNG.random((3, 4, 5), np.float32) + 0.5 for _ in range(4))
    expected = (X - mean) / np.sqrt(variance.astype(np.float64) + 1e-3) * scale + bias
    y = found(7, "BatchNormalization", X, scale, bias, mean, variance, spatial=0, epsilon=1e-3)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)  # four roundings of float32, and what cancels


@pytest.mark.parametrize(
    ("scales", "rows", "columns"),
    [((0.6, 1), [0, 2], range(5)), ((2, 0.6), np.arange(8) // 2, [0, 2, 4]), ((1, 1.6), range(4), [0, 0, 1, 1, 2, 3, 3, 4])],
)
def test_resize_took_the_one_before_where_it_grew_and_the_one_behind_where_it_shrank(scales, rows, columns):
    """Element k of the result is at k / scale."""
    y = found(10, "Resize", X, np.float32([1, 1, *scales]), mode="nearest")
    np.testing.assert_array_equal(y, X[:, :, rows][..., columns])


@pytest.mark.parametrize(("nearest", "rule"), [("floor", np.floor), ("round_prefer_floor", lambda at: np.ceil(at - 0.5))])
def test_half_pixels_of_tensorflow_are_another_nearest(nearest, rule):
    at = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "mode": "nearest", "nearest_mode": nearest}
    y = found(11, "Resize", X, np.float32([]), np.float32([1, 1, 1, 1.6]), **at)
    columns = np.minimum(rule((np.arange(8) + 0.5) / 1.6).astype(int), 4)
    np.testing.assert_array_equal(y, X[..., columns])


@pytest.mark.parametrize("op_type", ["Dropout", "BatchNormalization"])
def test_a_model_for_training_is_not_read_as_one_for_inference(op_type):
    weights = [np.ones(3, np.float32)] * 4 if op_type == "BatchNormalization" else []
    with pytest.raises(fx.onnx.OnnxError, match=rf"\({op_type} of opset 6\): its is_test is 0, which means training; .*set it to 1"):
        found(6, op_type, X, *weights, is_test=0)


def test_where_the_axes_are_not_known_it_is_said():
    model = model_of(6, "Add", X, [OF_3], TensorProto.FLOAT, broadcast=1, axis=1)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(fx.onnx.OnnxError, match="number of axes of 'x', which the model does not declare; give its inputs shapes"):
        fx.onnx.session(model)
