"""Adapters of convolutions in PEFT's form: A has the window of the filter, B is 1 x 1."""

import numpy as np
import pytest

import fluidx as fx
from tests.onnx.test_lora_weights import on_runtime, written

onnx = pytest.importorskip("onnx")

LORA = fx.onnx.Lora(rank=2, alpha=6, targets=["body.0", "body.2"])
X = np.float32(np.random.default_rng(2).integers(-2, 3, (2, 3, 7, 6)))


def net():
    """3 x 3 with strides, pads and dilations, then 1 x 1, then one of two groups."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]> net (float[n, 3, 7, 6] x) => (float[n, 4, h, w] y) {
            a = Conv <strides = [2, 1], pads = [1, 2, 1, 2], dilations = [1, 2]> (x, "body.0.weight", "body.0.bias")
            r = Relu (a)
            b = Conv (r, "body.2.weight")
            y = Conv <group = 2> (b, "body.3.weight") }""")
    rng = np.random.default_rng(0)
    shapes = {"body.0.weight": (5, 3, 3, 3), "body.0.bias": (5,), "body.2.weight": (4, 5, 1, 1), "body.3.weight": (4, 2, 1, 1)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.float32(rng.integers(-2, 3, s)), n) for n, s in shapes.items())
    return model


def adapted(lora=LORA, loss=None):
    with fx.unique_name.guard():
        model = fx.onnx.load(net())
        found = fx.onnx.set_training(model, lora=lora, loss=loss)
        if loss is not None:
            with fx.program_guard(model.program, model.startup):
                fx.optimizer.SGD(0.01).minimize(found)
    scope, rng = fx.Scope(), np.random.default_rng(1)
    fx.Executor(fx.CPUPlace()).run(model.startup, scope=scope)
    for name in [n for n in scope.arrays if ".lora_" in n and isinstance(lora, fx.onnx.Lora)]:
        scope.set(name, np.float32(rng.integers(-2, 3, scope.get(name).shape)))
    return model, scope, found


def outputs(model, scope):
    return fx.Executor(fx.CPUPlace()).run(model.program.clone(for_test=True), feed={"x": X}, fetch_list=model.fetches, scope=scope)[0]


def test_the_sum_of_a_convolution_and_its_adapter_is_one_with_the_sum_of_filters(tmp_path):
    """W [o, i, h, w] + alpha / rank * sum over r of B [o, r] A [r, i, h, w]"""
    model, scope, _ = adapted()
    assert sorted(p.name for p in model.parameters if p.trainable) == [f"body.{k}.lora_{x}.weight" for k in (0, 2) for x in "AB"]
    summed = net()
    for t in summed.graph.initializer:
        module = t.name.removesuffix(".weight")
        if module in ("body.0", "body.2"):
            a, b = (scope.get(f"{module}.lora_{x}.weight") for x in "AB")
            w = onnx.numpy_helper.to_array(t) + 3 * np.einsum("or,rihw->oihw", b[:, :, 0, 0], a)
            assert a.shape[2:] == w.shape[2:] and b.shape[2:] == (1, 1)
            t.CopyFrom(onnx.numpy_helper.from_array(w, t.name))
    expected = fx.onnx.load(summed).run([X])[0]
    np.testing.assert_array_equal(outputs(model, scope), expected)  # small integers add up exactly
    fx.onnx.save_adapters(model.program, tmp_path / "adapters", scope=scope)
    assert fx.onnx.merge(net(), tmp_path / "adapters", tmp_path / "merged.onnx") == 2
    fx.onnx.save(model.program, tmp_path / "nodes.onnx", fetches=model.fetches, scope=scope)
    fx.onnx.save(model.program, tmp_path / "saved.onnx", fetches=model.fetches, scope=scope, merge=True)
    for name in ("merged", "nodes", "saved"):
        np.testing.assert_array_equal(on_runtime(tmp_path / f"{name}.onnx", X), expected)
    again, scope, _ = adapted(str(tmp_path / "adapters"))
    np.testing.assert_array_equal(outputs(again, scope), expected)


def test_adapters_of_convolutions_train_on_ranks_as_on_one_device():
    model, scope, loss = adapted(loss=fx.layers.reduce_mean)
    expected = [fx.Executor(fx.CPUPlace()).run(model.program, feed={"x": X}, fetch_list=[loss], scope=scope)[0].item() for _ in range(2)]
    t = fx.DistributeTranspiler(fx.strategies.fsdp())
    t.transpile(program=model.program, startup_program=model.startup, trainers=2)
    assert t.verify() and expected[0] != expected[1]


def test_convolutions_are_adapted_only_where_a_target_names_them():
    with pytest.raises(fx.onnx.OnnxError, match="convolutions are adapted where targets names them"):
        adapted(fx.onnx.Lora())
    with pytest.raises(fx.onnx.OnnxError, match="targets names 'body.3', but no product has a module of that name"):
        adapted(fx.onnx.Lora(targets="body.3"))  # it has groups


def test_files_of_other_shapes_are_named(tmp_path):
    folder = written(tmp_path / "a", {"body.0": (np.ones((1, 3, 3, 3), "float32"), np.ones((5, 1, 3, 3), "float32"))})
    with pytest.raises(fx.onnx.OnnxError, match=r"or of a convolution \[rank, in, height, width\] and \[out, rank, 1, 1\], found"):
        fx.onnx.merge(net(), folder, tmp_path / "m.onnx")
    folder = written(tmp_path / "b", {"body.0": (np.ones((1, 3, 1, 1), "float32"), np.ones((5, 1, 1, 1), "float32"))})
    with pytest.raises(fx.onnx.OnnxError, match=r"for a weight of \[5, 3, 1, 1\], but 'body.0.weight' is float32\[5, 3, 3, 3\]"):
        fx.onnx.merge(net(), folder, tmp_path / "m.onnx")
