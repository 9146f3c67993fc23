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
    with pytest.raises(OnnxError, match="also_train names 'scale', and no float in the model is called so; they are: s, w"):
        fx.onnx.load(model, also_train="scale")


def test_a_trained_model_keeps_its_constants_as_it_is_written_again(tmp_path):
    loaded, scope = fx.onnx.load(model_of(SCALED.format("Mul (h, s)"), w=np.eye(4), s=[2.0])), fx.Scope()
    fx.Executor(fx.CPUPlace()).run(loaded.startup, scope=scope)
    fx.onnx.save(loaded.program, tmp_path / "again.onnx", fetches=loaded.fetches, scope=scope)
    assert trained(tmp_path / "again.onnx") == ["w"]
