"""What a loaded model trains: initializers by the nodes that read them."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.onnx import OnnxError

onnx = pytest.importorskip("onnx")


def model_of(text, **weights):
    model = onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 18]> ' + text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.float32(a), n) for n, a in weights.items())
    return model


def trained(model, **options):
    return [p.name for p in fx.onnx.load(model, **options).parameters]


SCALED = "g (float[n, 4] x) => (float[n, 4] y) {{ h = MatMul (x, w)  y = {} }}"


@pytest.mark.parametrize(
    "node", ["Mul (h, s)", "Div (h, s)", "Add (h, s)", "Sub (s, h)", "Pow (h, s)", "Max (h, s)", "Clip (h, s)", "Sum (h, s, h)"]
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_number_that_arithmetic_reads_is_a_constant(node, shape):
    if shape and "Clip" in node:
        pytest.skip("the limits of Clip are scalars")
    model = model_of(SCALED.format(node), w=np.eye(4), s=np.full(shape, 2.0))
    assert trained(model) == ["w"]
    x = np.float32([[1, 2, 3, 4]])
    by = {"Mul": 2 * x, "Div": x / 2, "Add": x + 2, "Sub": 2 - x, "Pow": x**2, "Max": np.maximum(x, 2), "Clip": np.maximum(x, 2)}
    expected = by.get(node.split()[0], 2 * x + 2)
    exe, loaded = fx.Executor(fx.CPUPlace()), fx.onnx.load(model)
    exe.run(loaded.startup)
    assert exe.run(loaded.program, feed={"x": x}, fetch_list=loaded.fetches)[0].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("g (float[n, 4] x) => (float[n, 1] y) { h = MatMul (x, w)  y = Add (h, s) }", {"w": np.ones((4, 1)), "s": [1]}),  # a layer's bias
        ("g (float[n, 4] x) => (float[n, 1] y) { y = Gemm (x, w, s) }", {"w": np.ones((4, 1)), "s": [1]}),
        ("g (float[n, 4] x) => (float[n, 4] y) { h = MatMul (x, w)  y = PRelu (h, s) }", {"w": np.eye(4), "s": [0.2]}),
        ("g (float[n, 4] x) => (float[n, 4] y) { h = MatMul (x, w)  z = Identity (s)  y = PRelu (h, z) }", {"w": np.eye(4), "s": [0.2]}),
        ("g (float[n, 1, 5] x) => (float[n, 1, 5] y) { h = Conv (x, w)  y = Add (s, h) }", {"w": np.ones((1, 1, 1)), "s": [[1]]}),
    ],
)
def test_one_number_that_is_a_weight_of_its_operator_is_trained(text, weights):
    assert sorted(trained(model_of(text, **weights))) == ["s", "w"]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_what_is_a_constant_is_trained_on_demand_and_after_it_was_written_again(shape, tmp_path):
    model = model_of(SCALED.format("Mul (h, s)"), w=np.eye(4), s=np.full(shape, 2.0))
    assert sorted(trained(model, also_train="s")) == sorted(trained(model, also_train=["[st]"])) == ["s", "w"]
    loaded, scope = fx.onnx.load(model, also_train="s"), fx.Scope()
    fx.Executor(fx.CPUPlace()).run(loaded.startup, scope=scope)
    fx.onnx.save(loaded.program, tmp_path / "again.onnx", fetches=loaded.fetches, scope=scope)
    assert sorted(trained(tmp_path / "again.onnx")) == ["s", "w"]
    (written,) = (t for t in onnx.load(tmp_path / "again.onnx").graph.initializer if t.name == "s")
    assert tuple(written.dims) == shape  # a state_dict of PyTorch takes no other
    with pytest.raises(OnnxError, match="also_train names 'scale', but no float of the model has that name; they are: s, w"):
        fx.onnx.load(model, also_train="scale")


def test_a_trained_model_keeps_its_constants_as_it_is_written_again(tmp_path):
    loaded, scope = fx.onnx.load(model_of(SCALED.format("Mul (h, s)"), w=np.eye(4), s=[2.0])), fx.Scope()
    fx.Executor(fx.CPUPlace()).run(loaded.startup, scope=scope)
    fx.onnx.save(loaded.program, tmp_path / "again.onnx", fetches=loaded.fetches, scope=scope)
    assert trained(tmp_path / "again.onnx") == ["w"]


# -- weights that an exporter merged -------------------------------------------------------------------------------------------------

MERGED = """net (float[n, 2, 3] x) => (float[n, 2, 3] y) {
    also = Identity (zeros)
    a = BatchNormalization (x, ones, zeros, also, ones)
    b = BatchNormalization (a, ones, zeros, zeros, ones)
    y = Conv (b, w, zeros)
}"""


def merged():
    """A fresh model, whose scales and variances are 1, whose biases and means are 0."""
    rng = np.random.default_rng(0)
    return model_of(MERGED, ones=np.ones(2), zeros=np.zeros(2), w=rng.standard_normal((2, 2, 1)))


def test_running_statistics_are_their_own_where_they_were_merged_with_weights():
    model = fx.onnx.load(merged())
    with pytest.warns(UserWarning, match="read by several nodes"):
        loss = fx.onnx.set_training(model, loss=lambda y: fx.layers.mean(fx.layers.square(y)))
    with fx.program_guard(model.program, model.startup):
        fx.optimizer.SGD(0.1).minimize(loss)
    ops = [op for op in model.program.ops if op.type == "batch_norm"]
    statistics = [op.inputs[slot][0] for op in ops for slot in ("Mean", "Variance")]
    assert statistics == ["a.running_mean", "a.running_var", "b.running_mean", "b.running_var"]
    exe, scope, x = fx.Executor(fx.CPUPlace()), fx.Scope(), np.random.default_rng(1).standard_normal((8, 2, 3), "float32") + 3
    exe.run(model.startup, scope=scope)
    exe.run(model.program, feed={"x": x}, fetch_list=[loss], scope=scope)
    np.testing.assert_allclose(scope.get("a.running_mean"), 0.1 * x.mean(axis=(0, 2)), rtol=1e-5)  # float32; a momentum of 0.9
    np.testing.assert_allclose(scope.get("b.running_mean"), 0, atol=1e-6)
    assert {p.name for p in model.parameters if p.trainable} == {"ones", "zeros", "w"}


def test_a_statistic_that_nothing_else_reads_keeps_its_name():
    text = "g (float[n, 2] x) => (float[n, 2] y) { y = BatchNormalization (x, s, b, m, v) }"
    assert trained(model_of(text, s=[1, 1], b=[0, 0], m=[0, 0], v=[1, 1])) == ["s", "b", "m", "v"]


def test_it_is_said_which_weights_several_nodes_share(tmp_path):
    from fluidx.onnx.report import check, info

    onnx.save(merged(), tmp_path / "merged.onnx")
    said = "2 weights are each read by several nodes, which train it as one: zeros by 3, ones by 2. Exporters merge equal weights"
    assert said in info(str(tmp_path / "merged.onnx")) and said in check(str(tmp_path / "merged.onnx"))
    assert "    zeros: float32[2]  BatchNormalization, Conv, 3 nodes\n" in info(str(tmp_path / "merged.onnx"))
    onnx.save(model_of(SCALED.format("Relu (h)"), w=np.eye(4)), tmp_path / "plain.onnx")
    assert "several nodes" not in info(str(tmp_path / "plain.onnx")) + check(str(tmp_path / "plain.onnx"))


def test_equal_weights_that_were_merged_are_trained_apart_on_demand():
    with pytest.warns(UserWarning, match="set_training: 2 weights are each read by several nodes, .*: zeros by 3, ones by 2"):
        fx.onnx.set_training(fx.onnx.load(merged()))
    assert trained(merged(), untie=True) == [
        "ones", "zeros", "a.running_mean", "a.running_var", "b.ones", "b.zeros", "b.running_mean", "b.running_var", "w", "y.zeros",
    ]  # fmt: skip
    assert [n for n in trained(merged(), untie="on*") if "zeros" in n] == ["zeros"]
    x = np.random.default_rng(1).standard_normal((4, 2, 3), "float32")
    found = []
    for model in (fx.onnx.load(merged()), fx.onnx.load(merged(), untie=True)):
        exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
        exe.run(model.startup, scope=scope)
        found.append(exe.run(model.program, feed={"x": x}, fetch_list=model.fetches, scope=scope)[0])
    assert np.array_equal(*found)
    with pytest.raises(OnnxError, match="untie names 'w', but no shared weight of the model has that name; they are: ones, zeros"):
        fx.onnx.load(merged(), untie="w")
