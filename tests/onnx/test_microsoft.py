"""Operators of ONNX Runtime's own domain, compared with it."""

import numpy as np
import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx")

from fluidx.onnx.table import IMPORTERS  # noqa: E402 (after the check for onnx)
from tests.onnx import one_node  # noqa: E402 (after the check for onnx)


def quantized_lstm(rng, directions, zero_point, length, dtype="int8", columns=(), steps=None, inputs=6, hidden=5):
    """A model of one DynamicQuantizeLSTM, and what to feed it."""
    from onnx import helper, numpy_helper

    def eight(*shape):
        # 7 bits: on processors without VNNI, ONNX Runtime adds pairs of products of 8 bits in 16 bits, which saturate
        return (rng.integers(-64, 64, shape) + (0 if dtype == "int8" else zero_point)).astype(dtype)

    scale = rng.uniform(0.008, 0.012, (directions, *columns)).astype("float32")
    zero = np.full((directions, *columns), zero_point, dtype)
    held = {
        "w": eight(directions, inputs, 4 * hidden), "r": eight(directions, hidden, 4 * hidden),
        "b": rng.standard_normal((directions, 8 * hidden), dtype="float32"), "scale": scale, "zero": zero,
    }  # fmt: skip
    node = helper.make_node(
        "DynamicQuantizeLSTM", ["x", "w", "r", "b", "", "", "", "", "scale", "zero", "scale", "zero"], ["y", "h", "c"],
        domain="com.microsoft", hidden_size=hidden, direction="bidirectional" if directions == 2 else "forward",
    )  # fmt: skip
    x = helper.make_tensor_value_info("x", 1, [steps or length, 1, inputs])
    outputs = [helper.make_tensor_value_info(o, 1, None) for o in "yhc"]
    graph = helper.make_graph([node], "lstm", [x], outputs, [numpy_helper.from_array(v, k) for k, v in held.items()])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    return model.SerializeToString(), {"x": rng.standard_normal((length, 1, inputs), dtype="float32")}


@pytest.mark.parametrize("steps", [None, "t"])
@pytest.mark.parametrize(
    ("directions", "zero_point", "length", "dtype", "columns"),
    [(1, 0, 4, "int8", ()), (2, 3, 7, "int8", ()), (2, 130, 5, "uint8", ()), (1, 70, 3, "uint8", (20,)), (2, 0, 4, "int8", (20,))],
)
def test_quantized_lstm(directions, zero_point, length, dtype, columns, steps):
    runtime = pytest.importorskip("onnxruntime")
    model, feed = quantized_lstm(np.random.default_rng(0), directions, zero_point, length, dtype, columns, steps)
    want = runtime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feed)
    session = fx.onnx.session(model)
    for found in (session.run(feed), fx.onnx.load(onnx.load_from_string(model)).run(feed)):
        for got, expected in zip(found, want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)  # below a hundredth of a rounding to 8 bits
    (plans,) = session._plans.values()
    kinds = [op.type for block in plans[0][0].main.blocks for op in block.oplist]
    # one product for the input, and one for each step but the first, whose state is 0
    assert kinds.count("quantized_matmul") == directions * length and "matmul" not in kinds


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


def test_quantized_embedding():
    ids, kinds, mask = np.array([[1, 2, 3]], "int32"), np.array([[0, 1, 1]], "int32"), np.ones((1, 3), "int32")
    tables = [np.random.default_rng(k).integers(0, 256, s).astype("uint8") for k, s in enumerate([(9, 4), (6, 4), (2, 4), 4, 4])]
    scales, zeros = [np.array(k / 100, F) for k in range(1, 6)], [np.array(k + 100, "uint8") for k in range(5)]
    same("QEmbedLayerNormalization", [ids, kinds, *tables, mask, *scales, *zeros], 2, known=(*range(2, 7), *range(8, 18)), epsilon=1e-3)


def test_layer_norm_of_old_opset():
    """ONNX Runtime writes it in the standard's domain whatever the opset, and the standard has it from opset 17 on."""
    runtime = pytest.importorskip("onnxruntime")
    x, scale, bias = inputs = normal(2, 3, 4), normal(4), normal(4, seed=1)
    model = one_node.model("LayerNormalization", list(inputs), known=(1, 2), epsilon=0.1)
    model.opset_import[0].version = 13
    (want,) = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x0": x})
    rows = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.1)
    np.testing.assert_allclose(want, rows * scale + bias, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(fx.onnx.session(model).run({"x0": x})[0], want, rtol=1e-5, atol=1e-6)


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


# -- quantized: ONNX Runtime rounds some of these by tables or in integers, so a result may be one step off --------------------------------


def eight(*shape, signed=False, seed=0):
    found = np.random.default_rng([seed, *shape]).integers(0, 256, shape)
    return (found - 128).astype("int8") if signed else found.astype("uint8")


def f(value):
    return np.array(value, F)


U, S = np.array(120, "uint8"), np.array(-3, "int8")
X, Y = [eight(2, 3, 6, 6), f(0.02), U], [f(0.03), np.array(110, "uint8")]


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("QLinearAdd", [eight(2, 5), f(0.02), U, eight(5, seed=1), f(0.03), U, f(0.04), U], {}),
        ("QLinearAdd", [eight(2, 5, signed=True), f(0.02), S, eight(2, 5, signed=True, seed=1), f(0.03), S, f(0.04), S], {}),
        ("QLinearMul", [eight(2, 5), f(0.02), U, eight(2, 5, seed=1), f(0.03), U, f(0.04), U], {}),
        ("QLinearSigmoid", [eight(2, 20), f(0.05), U, f(0.004), np.array(0, "uint8")], {}),
        ("QLinearLeakyRelu", [*X, *Y], {"alpha": 0.3}),
        ("QLinearSoftmax", [eight(2, 20), f(0.05), U, f(0.004), np.array(0, "uint8")], {"axis": -1, "opset": 13}),
        ("QLinearAveragePool", [*X, *Y], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("QLinearAveragePool", [*X, *Y], {"kernel_shape": [2, 2], "channels_last": 1}),
        ("QLinearGlobalAveragePool", [*X, *Y], {}),
        ("QLinearGlobalAveragePool", [*X, *Y], {"channels_last": 1}),
        ("QLinearConcat", [f(0.05), U, eight(2, 5), f(0.02), U, eight(3, 5), f(0.03), np.array(4, "uint8")], {"axis": 0}),
        ("QLinearWhere", [np.array([True, False, True]), eight(3), f(0.02), U, eight(3, seed=1), f(0.03), U, f(0.04), U], {}),
    ],
)  # fmt: skip
def test_quantized(op, inputs, attrs):
    known = tuple(k for k, v in enumerate(inputs) if v is not None and v.ndim < 2 and k and v.size < 3)
    same(op, inputs, known=known, atol=1.0, **attrs)


A, B = eight(3, 8), eight(8, 5, signed=True)
COLUMN = np.arange(1, 6).astype(F) / 100


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("QGemm", [A, f(0.02), U, B, f(0.03), S], {}),
        ("QGemm", [A.T.copy(), f(0.02), U, B.T.copy(), COLUMN, np.full(5, S), np.arange(5, dtype="int32")], {"transA": 1, "transB": 1}),
        ("MatMulIntegerToFloat", [A, B, f(0.02), f(0.03), U, S, normal(5)], {}),
        ("MatMulIntegerToFloat", [A, B, f(0.02), COLUMN], {}),
        ("DynamicQuantizeMatMul", [normal(2, 3, 8), B, f(0.03), S, normal(5)], {}),
        ("DynamicQuantizeMatMul", [normal(3, 8), B, COLUMN], {}),
    ],
)  # fmt: skip
def test_products(op, inputs, attrs):
    same(op, inputs, known=tuple(range(1, len(inputs))), atol=1e-4, **attrs)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero", ["no", "packed"])
def test_few_bits(bits, zero):
    depth, columns, size = 40, 6, 16  # three blocks, the last half empty
    held = [eight(columns, 3, size * bits // 8), normal(columns, 3)]
    zeros = [eight(columns, -(-3 * bits // 8))] if zero == "packed" else []
    attrs = {"bits": bits, "block_size": size, "K": depth, "N": columns}
    same("MatMulNBits", [normal(2, 3, depth), *held, *zeros], known=(1, 2, 3)[: 2 + len(zeros)], atol=1e-3 * 4**bits, **attrs)


def test_few_bits_by_hand():
    """Byte 0x9A holds 10 and then 9, so (2, 1) after the zero point 8."""
    held, scale = np.full((1, 1, 8), 0x9A, "uint8"), np.full((1, 1), 0.5, F)
    x = np.arange(16, dtype=F)[None]
    attrs = {"bits": 4, "block_size": 16, "K": 16, "N": 1, "domain": "com.microsoft"}
    got = one_node.ran("MatMulNBits", [x, held, scale], known=(1, 2), **attrs)
    np.testing.assert_allclose(got, [[0.5 * (2 * 56 + 64)]])


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("SkipLayerNormalization", [normal(2, 3, 4), normal(2, 3, 4, seed=1), normal(4), normal(4, seed=1)], {}),
        ("SkipSimplifiedLayerNormalization", [normal(2, 3, 4), normal(2, 3, 4, seed=1), normal(4)], {"epsilon": 0.1}),
        ("FusedMatMul", [normal(4, 3), normal(5, 4)], {"transA": 1, "transB": 1, "alpha": 0.3}),
        ("QuickGelu", [normal(3, 4)], {}),
        ("BiasSplitGelu", [normal(1, 3, 4), normal(4)], {}),
    ],
)
def test_gradients(op, inputs, attrs):
    inputs = [v.astype("float64") for v in inputs]
    one_node.check_gradient(op, inputs, wrt=tuple(range(len(inputs))), domain="com.microsoft", **attrs)


# -- a model that ONNX Runtime optimized ---------------------------------------------------------------------------------------------------

BLOCK = """<ir_version: 8, opset_import: ["": 13]>
block (float[batch, rows, 8] x) => (float[batch, rows, 8] y) {
    two = Constant <value_float = 2.0> ()
    one = Constant <value_float = 1.0> ()
    half = Constant <value_float = 0.5> ()
    root = Constant <value_float = 1.4142135> ()
    little = Constant <value_float = 1e-5> ()
    p = MatMul (x, w1)
    h = Add (p, b1)
    he = Div (h, root)
    hf = Erf (he)
    hg = Add (hf, one)
    hh = Mul (h, hg)
    g = Mul (hh, half)
    q = MatMul (g, w2)
    qb = Add (q, b2)
    s = Add (qb, x)
    m = ReduceMean <axes = [-1]> (s)
    d = Sub (s, m)
    dd = Pow (d, two)
    v = ReduceMean <axes = [-1]> (dd)
    ve = Add (v, little)
    r = Sqrt (ve)
    z = Div (d, r)
    zg = Mul (z, scale)
    y = Add (zg, shift)
}"""


def block():
    """A part of a transformer as an exporter of opset 13 writes it: gelu and layer normalization in simple operators."""
    model, shapes = onnx.parser.parse_model(BLOCK), {"w1": (8, 16), "b1": (16,), "w2": (16, 8), "b2": (8,), "scale": (8,), "shift": (8,)}
    held = {name: normal(*shape, seed=k) for k, (name, shape) in enumerate(shapes.items())}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in held.items())
    return model.SerializeToString()


def losses(model, x, steps=3):
    loaded = fx.onnx.load(model)
    loss = fx.onnx.set_training(loaded, loss="square_error_cost")
    with fx.program_guard(loaded.program, loaded.startup):
        fx.optimizer.SGD(0.05).minimize(loss)
    executor, scope = fx.Executor(), fx.Scope()
    executor.run(loaded.startup, scope=scope)
    feed = {loaded.feeds[0].name: x, "label": np.ones_like(x)}
    return [executor.run(loaded.program, feed=feed, fetch_list=[loss], scope=scope)[0].item() for _ in range(steps)]


def test_optimized_model_trains(tmp_path):
    """It has other operators, and takes the same steps."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 3
    x = normal(2, 3, 8)
    (want,) = runtime.InferenceSession(block(), options, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    optimized = onnx.load(tmp_path / "optimized.onnx")
    assert {"BiasGelu", "SkipLayerNormalization"} < {node.op_type for node in optimized.graph.node}
    np.testing.assert_allclose(fx.onnx.session(optimized).run({"x": x})[0], want, rtol=1e-5, atol=1e-5)
    found = losses(optimized, x)
    np.testing.assert_allclose(found, losses(block(), x), rtol=1e-5)
    assert found[-1] < found[0]


def test_rounded_product_trains():
    """The first loss is that of the product which ONNX Runtime computes, and gradients pass the rounding."""
    inputs, known = [x := normal(3, 8), eight(8, 8, signed=True), f(0.03), S], (1, 2, 3)
    want = one_node.by_runtime("DynamicQuantizeMatMul", inputs, known=known, domain="com.microsoft")
    model = one_node.model("DynamicQuantizeMatMul", inputs, known=known, domain="com.microsoft")
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y0", 1, [3, 8]))
    found = losses(model, x)
    np.testing.assert_allclose(found[0], np.square(want - 1).mean(), rtol=1e-5)
    assert found[-1] < 0.9 * found[0]
