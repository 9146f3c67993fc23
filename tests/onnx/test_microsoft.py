"""Operators of ONNX Runtime's own domain, compared with it."""

import numpy as np
import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx")

from fluidx.onnx.table import IMPORTERS  # noqa: E402 (after the check for onnx)
from tests.onnx import one_node  # noqa: E402 (after the check for onnx)


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


# -- one operator at a time, as ONNX Runtime computes it ----------------------------------------------------------------------------------

F = "float32"


def same(op, inputs, outputs=1, known=(), atol=2e-6, **attrs):
    """fluidx and ONNX Runtime give the same for a node of `com.microsoft`."""
    pytest.importorskip("onnxruntime")
    attrs.setdefault("domain", "com.microsoft")
    want = one_node.by_runtime(op, inputs, outputs, known, **attrs)
    got = one_node.ran(op, inputs, outputs, known, **attrs)
    for g, w in zip(got, want, strict=True) if outputs > 1 else [(got, want)]:
        assert g.shape == w.shape and g.dtype == w.dtype
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=atol)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=F)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("Gelu", [normal(3, 4)], {}),
        ("QuickGelu", [normal(3, 4)], {}),
        ("QuickGelu", [normal(3, 4)], {"alpha": 0.7}),
        ("BiasGelu", [normal(3, 4), normal(4)], {}),
        ("FastGelu", [normal(3, 4)], {}),
        ("FastGelu", [normal(3, 4), normal(4)], {}),
        ("SkipLayerNormalization", [normal(2, 3, 4), normal(2, 3, 4, seed=1), normal(4)], {}),
        ("SkipLayerNormalization", [normal(2, 3, 4), normal(3, 4), normal(4), normal(4, seed=1), normal(4, seed=2)], {"epsilon": 0.1}),
        ("SkipSimplifiedLayerNormalization", [normal(2, 3, 4), normal(2, 3, 4, seed=1), normal(4)], {"epsilon": 0.1}),
        ("SkipSimplifiedLayerNormalization", [normal(2, 3, 4), normal(2, 3, 4, seed=1), normal(4), normal(4, seed=1)], {}),
        ("SimplifiedLayerNormalization", [normal(2, 3, 4), normal(4)], {"domain": "", "epsilon": 0.1}),
        ("LayerNormalization", [normal(2, 3, 4), normal(4), normal(4, seed=1)], {"domain": "", "epsilon": 0.1}),
        ("FusedMatMul", [normal(2, 3, 4), normal(2, 4, 5)], {"alpha": 0.5}),
        ("FusedMatMul", [normal(4, 3), normal(5, 4)], {"transA": 1, "transB": 1}),
        ("FusedMatMul", [normal(3, 2, 4), normal(4, 2, 5)], {"transBatchA": 1, "transBatchB": 1}),
        ("FusedMatMul", [normal(4, 2, 3), normal(5, 2, 4)], {"transBatchA": 1, "transBatchB": 1, "transA": 1, "transB": 1}),
        ("FusedGemm", [normal(3, 4), normal(4, 5), normal(5)], {"activation": "Relu", "alpha": 0.5, "beta": 2.0}),
        ("FusedGemm", [normal(3, 4), normal(5, 4)], {"activation": "LeakyRelu", "activation_alpha": 0.3, "transB": 1}),
        ("FusedConv", [normal(1, 2, 5, 5), normal(3, 2, 3, 3), normal(3)], {"activation": "Relu", "pads": [1, 1, 1, 1]}),
        ("FusedConv", [normal(1, 2, 5, 5), normal(3, 2, 3, 3), normal(3), normal(1, 3, 3, 3)], {"activation": "Sigmoid"}),
        ("FusedConv", [normal(1, 2, 5, 5), normal(3, 2, 3, 3)], {"activation": "LeakyRelu", "activation_params": [0.3]}),
        ("FusedConv", [normal(1, 2, 5, 5), normal(3, 2, 3, 3)], {"activation": "Clip", "activation_params": [-0.5, 1.0]}),
        ("Trilu", [normal(3, 4), np.array(1, "int64")], {"upper": 0}),
        ("CDist", [normal(3, 4), normal(5, 4)], {"metric": "euclidean"}),
        ("CDist", [normal(3, 4), normal(5, 4)], {}),
        ("Inverse", [normal(2, 3, 3)], {}),
        ("ExpandDims", [normal(3, 4), np.array(-1, "int32")], {}),
        ("TransposeMatMul", [normal(4, 3), normal(4, 5)], {"transA": 1, "alpha": 3.0}),
    ],
)  # fmt: skip
def test_floats(op, inputs, attrs):
    known = tuple(k for k, v in enumerate(inputs) if v.dtype.kind == "i")
    same(op, inputs, known=known, atol=1e-5, **attrs)


@pytest.mark.parametrize("given", ["all", "no segments", "positions"])
def test_embedding(given):
    rng = np.random.default_rng(0)
    ids, kinds = rng.integers(0, 9, (2, 3)).astype("int32"), rng.integers(0, 2, (2, 3)).astype("int32")
    mask, at = np.array([[1, 1, 0], [1, 1, 1]], "int32"), np.array([[4, 1, 0]], "int32")
    tables = [normal(9, 4), normal(6, 4), normal(2, 4), normal(4), normal(4, seed=1)]
    inputs = [ids, kinds, *tables, mask]
    if given == "no segments":
        inputs = [ids, None, tables[0], tables[1], None, *tables[3:]]
    same("EmbedLayerNormalization", [*inputs, at] if given == "positions" else inputs, outputs=3, known=(2, 3, 4, 5, 6), epsilon=1e-3)


def test_sum_of_skip():
    """The fourth output is the sum before the normalization."""
    x, skip, scale, bias = normal(2, 3, 4), normal(2, 3, 4, seed=1), normal(4), normal(4, seed=1)
    got = one_node.ran("SkipLayerNormalization", [x, skip, scale, None, bias], 4, domain="com.microsoft")
    np.testing.assert_allclose(got[3], x + skip + bias, rtol=1e-6)
    np.testing.assert_allclose(got[1][..., 0], (x + skip + bias).mean(-1), rtol=1e-4, atol=1e-6)


def test_split_gelu():
    """CPUs of ONNX Runtime lack it: the gelu of 0 is 0, of large numbers they themselves."""
    x = np.array([[[1.0, 2.0, 3.0, 99.0, -1.0, -99.0]]], F)
    got = one_node.ran("BiasSplitGelu", [x, np.array([1, 1, 1, 1, 1, 0], F)], domain="com.microsoft")
    np.testing.assert_allclose(got, [[[200.0, 0.0, 0.0]]], atol=1e-6)


def test_other_operators():
    """The message has an importer, which works as it stands."""
    model = one_node.model("LongformerAttention", [normal(2, 3)], domain="com.microsoft")
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y0", 1, [2, 3]))
    with pytest.raises(fx.onnx.OnnxError, match="fluidx has no operator for one node") as refused:
        fx.onnx.load(model)
    example = str(refused.value).split("load the model:\n")[1].replace("\n    ", "\n").removeprefix("    ")
    try:
        exec(example, {"fx": fx})
        assert [op.type for op in fx.onnx.load(model).program.ops] == ["relu"]
    finally:
        IMPORTERS.pop(("com.microsoft", "LongformerAttention"), None)
