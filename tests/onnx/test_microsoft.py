"""Operators of ONNX Runtime's own domain, compared with it."""

import numpy as np
import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx")


def quantized_lstm(rng, directions, zero_point, length, inputs=6, hidden=5):
    """A model of one DynamicQuantizeLSTM, and what to feed it."""
    from onnx import helper, numpy_helper


    def eight(*shape):
        # 7 bits: on processors without VNNI, ONNX Runtime adds pairs of products of 8 bits in 16 bits, which saturate
        return rng.integers(-64, 64, shape).astype("int8")

    scale, zero = np.full(directions, 0.01, "float32"), np.full(directions, zero_point, "int8")
    held = {
        "w": eight(directions, inputs, 4 * hidden), "r": eight(directions, hidden, 4 * hidden),
        "b": rng.standard_normal((directions, 8 * hidden), dtype="float32"), "scale": scale, "zero": zero,
    }  # fmt: skip
    node = helper.make_node(
        "DynamicQuantizeLSTM", ["x", "w", "r", "b", "", "", "", "", "scale", "zero", "scale", "zero"], ["y", "h", "c"],
        domain="com.microsoft", hidden_size=hidden, direction="bidirectional" if directions == 2 else "forward",
    )  # fmt: skip
    x = helper.make_tensor_value_info("x", 1, [length, 1, inputs])
    outputs = [helper.make_tensor_value_info(o, 1, None) for o in "yhc"]
    graph = helper.make_graph([node], "lstm", [x], outputs, [numpy_helper.from_array(v, k) for k, v in held.items()])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    return model.SerializeToString(), {"x": rng.standard_normal((length, 1, inputs), dtype="float32")}


@pytest.mark.parametrize(("directions", "zero_point", "length"), [(1, 0, 4), (2, 3, 7)])
def test_quantized_lstm(directions, zero_point, length):
    runtime = pytest.importorskip("onnxruntime")
    model, feed = quantized_lstm(np.random.default_rng(0), directions, zero_point, length)
    want = runtime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feed)
    for got, expected in zip(fx.onnx.session(model).run(feed), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)  # below a hundredth of a rounding to 8 bits
