"""Models in float16 and bfloat16: trained with float32 parameters, written in their own dtypes."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import fluidx as fx  # noqa: E402
from fluidx.onnx import report  # noqa: E402

CODES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
HALVES = ["float16", "bfloat16"]
rng = np.random.default_rng(0)
X = rng.standard_normal((16, 8)).astype(np.float32)
LABEL = rng.integers(0, 4, (16, 1))
WEIGHTS = {
    "w": rng.standard_normal((8, 16)) / 3,
    "b": rng.standard_normal(16) / 10,
    "g": np.ones(16),
    "h": np.zeros(16),
    "v": rng.standard_normal((16, 4)) / 4,
}


def in_dtype(array, dtype):
    return np.asarray(array, np.float32).astype(helper.tensor_dtype_to_np_dtype(CODES[dtype]))


def proto(dtype):
    """softmax(tanh(norm(x w + b)) v), with tanh in float32, as exporters of mixed models write it."""
    code = CODES[dtype]
    x, y = (helper.make_tensor_value_info(n, code, ["rows", size]) for n, size in (("x", 8), ("y", 4)))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["q"]),
        helper.make_node("LayerNormalization", ["q", "g", "h"], ["n"], axis=-1),
        helper.make_node("Cast", ["n"], ["n32"], to=TensorProto.FLOAT),
        helper.make_node("Tanh", ["n32"], ["t32"]),
        helper.make_node("Cast", ["t32"], ["t"], to=code),
        helper.make_node("MatMul", ["t", "v"], ["z"]),
        helper.make_node("Softmax", ["z"], ["y"], axis=-1),
    ]
    tensors = [numpy_helper.from_array(in_dtype(a, dtype), n) for n, a in WEIGHTS.items()]
    graph = helper.make_graph(nodes, "half", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


class Trained:
    """A model, trained for some steps of Adam on one device."""

    def __init__(self, source, steps=20, optimizer=None, feed=None, **options):
        self.model = fx.onnx.load(source)
        options.setdefault("loss", "softmax_with_cross_entropy")
        self.loss = fx.onnx.set_training(self.model, **options)
        self.optimizer = self.model.in_own_precision(optimizer or fx.optimizer.Adam(1e-2))
        with fx.program_guard(self.model.program, self.model.startup):
            self.optimizer.minimize(self.loss)
        self.scope, exe = fx.Scope(), fx.Executor(fx.CPUPlace())
        exe.run(self.model.startup, scope=self.scope)
        feed = feed or {"x": X, "label": LABEL}
        self.losses = [exe.run(self.model.program, feed=feed, fetch_list=[self.loss], scope=self.scope)[0].item() for _ in range(steps)]

    def saved(self, path, **options):
        fx.onnx.save(self.model.program, path, fetches=self.model.fetches, scope=self.scope, **options)
        onnx.checker.check_model(str(path), full_check=True)
        return onnx.load(path)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_loss_is_close_to_that_of_float32_and_the_file_has_its_dtypes_again(tmp_path, dtype):
    wide, half = Trained(proto("float32")), Trained(proto(dtype))
    np.testing.assert_allclose(half.losses, wide.losses, rtol=5e-3)
    assert half.losses[-1] < 0.6 * half.losses[0] and half.loss.dtype == "float32"
    assert {half.scope.get(n).dtype.name for n in WEIGHTS} == {"float32"}
    given, found = proto(dtype), half.saved(tmp_path / "m.onnx")
    assert [n.op_type for n in found.graph.node] == [n.op_type for n in given.graph.node]
    assert {t.name: t.data_type for t in found.graph.initializer} == dict.fromkeys(WEIGHTS, CODES[dtype])
    assert [v.type.tensor_type.elem_type for v in (*found.graph.input, *found.graph.output)] == [CODES[dtype]] * 2
    np.testing.assert_array_equal(numpy_helper.to_array(found.graph.initializer[0]), in_dtype(half.scope.get("w"), dtype))


def test_onnx_runtime_runs_the_trained_file(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    half = Trained(proto("float16"))
    half.saved(tmp_path / "m.onnx")
    x = X.astype(np.float16)
    (found,) = runtime.InferenceSession(str(tmp_path / "m.onnx")).run(None, {"x": x})
    (own,) = fx.onnx.load(tmp_path / "m.onnx").run([x])
    assert found.dtype == own.dtype == np.float16
    np.testing.assert_allclose(found.astype(np.float32), own.astype(np.float32), atol=4e-3)  # of numbers up to 1: 4 steps of float16


@pytest.mark.parametrize("dtype, step", [("float16", 1e-4), ("bfloat16", 1e-3)])
def test_updates_that_16_bits_would_round_away_add_up(dtype, step):
    """loss = mean(x w) with x = 1, so each step takes `step` from w = 1, less than half the distance to the next smaller number of 16 bits
    (2**-11 and 2**-8). After 40 steps w is 1 - 40 steps."""
    x, y = (helper.make_tensor_value_info(n, CODES[dtype], [1, 1]) for n in "xy")
    tensor = numpy_helper.from_array(in_dtype([[1.0]], dtype), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "one", [x], [y], [tensor])
    source = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    one = Trained(source, 40, fx.optimizer.SGD(step), {"x": np.ones((1, 1), np.float32)}, loss=fx.layers.mean)
    np.testing.assert_allclose(one.scope.get("w"), [[1 - 40 * step]], rtol=1e-5)


def test_float16_scales_its_loss_and_bfloat16_does_not():
    half, other = Trained(proto("float16"), 1), Trained(proto("bfloat16"), 1)
    assert half.scope.get(half.optimizer.get_loss_scaling().name).item() == 2.0**15
    assert not other.optimizer.scales


def test_products_work_in_16_bits_in_training():
    made = Trained(proto("float16"), 0).model.program
    block = made.global_block()
    dtypes = {block.desc(n).type.dtype for op in made.ops if op.type == "matmul" for n in op.input_arg_names}
    assert dtypes == {"float16"}


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_ranks_give_what_one_device_gives(strategy, tmp_path):
    one = Trained(proto("bfloat16"), 4)
    model = one.model
    t = fx.DistributeTranspiler(strategy).transpile(program=model.program, startup_program=model.startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as ranks:
        ranks.run_startup()
        losses = [ranks.run([one.loss], feed={"x": X, "label": LABEL})[0].item() for _ in range(4)]
        fx.onnx.save(model.program, tmp_path / "m.onnx", fetches=model.fetches, executor=ranks)
    np.testing.assert_allclose(losses, one.losses, rtol=1e-3)
    assert {t.data_type for t in onnx.load(tmp_path / "m.onnx").graph.initializer} == {TensorProto.BFLOAT16}


def test_a_new_head_works_in_the_dtype_of_the_file(tmp_path):
    def head(model):
        return fx.layers.fc(model["t"], 3, param_attr="head.w", bias_attr="head.b")

    half = Trained(proto("float16"), 3, head=head, feed={"x": X, "label": LABEL % 3})
    found = half.saved(tmp_path / "m.onnx")
    assert found.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT16
    types = {t.name: t.data_type for t in found.graph.initializer}
    assert types["w"] == TensorProto.FLOAT16 and types["head.w"] == TensorProto.FLOAT
    assert fx.onnx.load(tmp_path / "m.onnx").run([X.astype(np.float16)])[0].shape == (16, 3)


def test_adapters_of_a_model_in_16_bits_are_merged_in_its_dtype(tmp_path):
    half = Trained(proto("float16"), 3, lora=fx.onnx.Lora(rank=2, targets=["w", "v"]))
    for merge in (False, True):
        found = half.saved(tmp_path / "m.onnx", merge=merge)
        assert {t.data_type for t in found.graph.initializer if t.name in WEIGHTS} == {TensorProto.FLOAT16}
        assert fx.onnx.load(tmp_path / "m.onnx").run([X.astype(np.float16)])[0].dtype == np.float16


def test_a_value_that_float16_does_not_have_is_named(tmp_path):
    half = Trained(proto("float16"), 1)
    half.scope.set("b", np.full(16, 70000, np.float32))
    with pytest.raises(fx.onnx.OnnxError) as e:
        half.saved(tmp_path / "m.onnx")
    assert str(e.value) == "cannot save 'b' in float16, the dtype of its file: it has the value 70000, which is too large"
    assert not (tmp_path / "m.onnx").exists()


def test_a_training_step_in_the_file_is_float32(tmp_path):
    half = Trained(proto("bfloat16"), 1)
    found = half.saved(tmp_path / "m.onnx", loss=half.loss)
    assert {t.data_type for t in found.graph.initializer if t.name in WEIGHTS} == {TensorProto.FLOAT}


@pytest.mark.parametrize("dtype, scaled", [("float16", ", and the loss is scaled"), ("bfloat16", "")])
def test_info_and_check_say_how_it_is_trained(tmp_path, dtype, scaled):
    path = tmp_path / "m.onnx"
    onnx.save(proto(dtype), path)
    said = f"  weights in {dtype}: products are trained in {dtype}, parameters and loss in float32{scaled}"
    assert said in report.info(str(path)).splitlines() and said in report.check(str(path)).splitlines()


def test_a_model_of_float32_is_trained_as_before():
    model, own = fx.onnx.load(proto("float32")), fx.optimizer.SGD(0.1)
    assert model.half == model.precision == "" and model.in_own_precision(own) is own
