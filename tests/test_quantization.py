"""Training for 8-bit integers: rounding and its gradient, quantized ONNX files in and out, and ranges observed in batches."""

import numpy as np
import pytest
from click.testing import CliRunner

import fluidx as fx
from fluidx.cli import main
from fluidx.ir import ProgramError

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")


def on_runtime(source, x):
    """As it is written: without the fusions that compute in integers, which round once less."""
    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL, 3
    source = source.SerializeToString() if hasattr(source, "graph") else str(source)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


# -- the operator ------------------------------------------------------------------------------------------------------------------------


def rounded(x, scale, zero, lowest, highest):
    """The value of fake_quantize and its gradient for a gradient of 1, 2, 3, ..."""
    text = f"""program p {{
        data %x: f32[{len(x)}]
        data %s: f32[]
        data %z: f32[]
        %y: f32[{len(x)}] = fake_quantize(%x, %s, %z) {{highest={highest}, lowest={lowest}}}
    }}"""
    p = fx.Program.parse_from_string(text)
    block = p.global_block()
    block.var("x").stop_gradient = False
    with fx.program_guard(p):
        weights = fx.layers.assign(np.arange(1, len(x) + 1, dtype="float32"))
        (g,) = fx.gradients([fx.layers.reduce_sum(block.var("y") * weights)], [block.var("x")])
    feed = {"x": np.float32(x), "s": np.float32(scale), "z": np.float32(zero)}
    return [v.tolist() for v in fx.Executor(fx.CPUPlace()).run(p, feed=feed, fetch_list=["y", g])]


def test_a_value_is_rounded_to_steps_and_the_gradient_passes_inside_the_range():
    # 0.25 is 0.5 steps of 0.5 and 0.75 is 1.5: halves go to the even integer; 127 steps are 63.5 and -128 are -64
    y, g = rounded([0.25, 0.75, 0.8, 63.5, 63.8, -64.0, -64.2, -70.0], 0.5, 0, -128.0, 127.0)
    assert y == [0.0, 1.0, 1.0, 63.5, 63.5, -64.0, -64.0, -64.0]
    assert g == [1, 2, 3, 4, 0, 6, 7, 0]  # 63.8 is 127.6 steps, which rounds to 128; -64.2 rounds to -128


def test_a_zero_point_moves_the_range():
    y, g = rounded([-2.0, -1.0, 252.0, 253.0, 254.0], 1.0, 2, 0.0, 255.0)
    assert (y, g) == ([-2.0, -1.0, 252.0, 253.0, 253.0], [1, 2, 3, 4, 0])


# -- quantized files ---------------------------------------------------------------------------------------------------------------------


def quantized():
    """A convolution with scales by filter and an int32 bias, and a product with one scale."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        net (float[n, 3, 6, 6] x) => (float[n, 4] y)
        <float sx = {0.02}, uint8 zx = {128}, float sh = {0.03}, uint8 zh = {3}, float sf = {0.01}> {
            xq = QuantizeLinear (x, sx, zx)
            xd = DequantizeLinear (xq, sx, zx)
            wd = DequantizeLinear <axis = 0> ("conv.w", "conv.s", "conv.z")
            bd = DequantizeLinear <axis = 0> ("conv.b", "conv.bs")
            h = Conv <pads = [1, 1, 1, 1]> (xd, wd, bd)
            hq = QuantizeLinear (h, sh, zh)
            hd = DequantizeLinear (hq, sh, zh)
            r = Relu (hd)
            p = GlobalAveragePool (r)
            f = Flatten (p)
            fd = DequantizeLinear ("fc.w", sf)
            y = MatMul (f, fd)
        }
    """)
    scales = rng.uniform(0.002, 0.004, 5).astype("float32")
    arrays = {
        "conv.w": rng.integers(-128, 128, (5, 3, 3, 3)).astype("int8"), "conv.s": scales, "conv.z": np.zeros(5, "int8"),
        "conv.b": rng.integers(-500, 500, 5).astype("int32"), "conv.bs": scales * np.float32(0.02),
        "fc.w": rng.integers(-128, 128, (5, 4)).astype("int8"),
    }  # fmt: skip
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())
    return model


def data(rows=12):
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((rows, 3, 6, 6), "float32"), "label": rng.integers(0, 4, (rows, 1))}


def prepared():
    model = fx.onnx.load(quantized())
    with fx.unique_name.guard():
        loss = fx.onnx.set_training(model, loss="softmax_with_cross_entropy")
        with fx.program_guard(model.program, model.startup):
            fx.optimizer.SGD(0.2).minimize(loss)
    return model, loss


def test_a_quantized_file_is_a_program_with_float_weights_that_are_rounded():
    model, x = fx.onnx.load(quantized()), data()["x"]
    assert {p.name: p.dtype for p in model.parameters} == dict.fromkeys(("conv.w", "conv.b", "fc.w"), "float32")
    kinds = [op.type for op in model.program.ops if op.type not in ("fill_constant", "assign_value")]
    assert kinds == [
        "fake_quantize", "fake_quantize", "fake_quantize", "conv2d", "elementwise_add", "fake_quantize", "relu", "pool2d", "flatten",
        "fake_quantize", "matmul",
    ]  # fmt: skip
    wanted = on_runtime(quantized(), x)
    for found in (model.run([x])[0], fx.onnx.session(quantized()).run([x])[0]):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)  # sums in another order; no value was next to a half


def test_integers_that_other_nodes_read_stay():
    source = quantized()
    source.graph.output.append(onnx.helper.make_tensor_value_info("hq", onnx.TensorProto.UINT8, ["n", 5, 6, 6]))
    x = data()["x"]
    found = fx.onnx.load(source).run([x])
    np.testing.assert_array_equal(found[1], fx.onnx.session(source).run([x])[1])
    assert found[1].dtype == "uint8"


def test_training_moves_integers_and_the_written_file_has_them(tmp_path):
    model, loss = prepared()
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    losses = [exe.run(model.program, feed=data(), fetch_list=[loss], scope=scope)[0].item() for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1
    fx.onnx.save(model.program, tmp_path / "trained.onnx", fetches=model.fetches, scope=scope)
    written = onnx.load(tmp_path / "trained.onnx")
    found = {t.name: onnx.numpy_helper.to_array(t) for t in written.graph.initializer}
    before = {t.name: onnx.numpy_helper.to_array(t) for t in quantized().graph.initializer}
    assert found.keys() == {"conv.w", "conv.b", "fc.w"}
    assert all((a.dtype, a.shape) == (before[n].dtype, before[n].shape) for n, a in found.items())
    assert (found["fc.w"] != before["fc.w"]).any()
    wanted = np.rint(scope.get("fc.w") / np.float32(0.01)).clip(-128, 127)
    np.testing.assert_array_equal(found["fc.w"], wanted)
    (mine,) = exe.run(model.program.clone(for_test=True), feed={"x": data()["x"]}, fetch_list=model.fetches, scope=scope)
    np.testing.assert_allclose(on_runtime(tmp_path / "trained.onnx", data()["x"]), mine, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fx.onnx.load(tmp_path / "trained.onnx").run([data()["x"]])[0], mine, rtol=1e-5, atol=1e-6)


def test_a_training_step_in_the_file_has_float_weights(tmp_path):
    model, loss = prepared()
    scope = fx.Scope()
    fx.Executor(fx.CPUPlace()).run(model.startup, scope=scope)
    fx.onnx.save(model.program, tmp_path / "step.onnx", fetches=model.fetches, scope=scope, loss=loss)
    step = fx.onnx.training_step(tmp_path / "step.onnx")
    becomes = {p.key: p.value for p in step.metadata_props}
    (moved,) = ort.InferenceSession(step.SerializeToString()).run([becomes["update:fc.w"]], data())
    fx.Executor(fx.CPUPlace()).run(model.program, feed=data(), scope=scope)
    np.testing.assert_allclose(moved, scope.get("fc.w"), rtol=1e-5, atol=1e-6)  # float32


@pytest.mark.parametrize("strategy", ["data_parallel", "fsdp"])
def test_two_ranks_train_rounded_weights_as_one_device_does(strategy):
    model, loss = prepared()
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    expected = [exe.run(model.program, feed=data(), fetch_list=[loss], scope=scope)[0].item() for _ in range(3)]
    t = fx.DistributeTranspiler(fx.strategies.get(strategy))
    t.transpile(program=model.program, startup_program=model.startup, trainers=2)
    assert t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as ranks:
        ranks.run_startup()
        found = [ranks.run(feed=data(), fetch_list=[loss])[0].item() for _ in range(3)]
    np.testing.assert_allclose(found, expected, rtol=1e-4)  # a weight next to a half may round to the other side


class Calibration:
    """Batches for ONNX Runtime's tool."""

    def __init__(self):
        self.batches = [{"x": data()["x"]}]

    def get_next(self):
        return self.batches.pop() if self.batches else None


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_file_that_the_tool_of_onnx_runtime_quantized_trains_and_stays_in_integers(per_channel, tmp_path):
    tool = pytest.importorskip("onnxruntime.quantization")
    program, startup = fx.Program("net"), fx.Program()
    program.random_seed = startup.random_seed = 1
    with fx.program_guard(program, startup), fx.unique_name.guard():
        hidden = fx.layers.conv2d(fx.data("x", [-1, 3, 6, 6], "float32"), 5, 3, padding=1, act="relu")
        scores = fx.layers.fc(fx.layers.pool2d(hidden, pool_type="avg", global_pooling=True), 4)
    scope, exe = fx.Scope(), fx.Executor(fx.CPUPlace())
    exe.run(startup, scope=scope)
    fx.onnx.save(program, tmp_path / "float.onnx", fetches=[scores], scope=scope)
    kinds = {"quant_format": tool.QuantFormat.QDQ, "activation_type": tool.QuantType.QUInt8, "weight_type": tool.QuantType.QInt8}
    tool.quantize_static(tmp_path / "float.onnx", tmp_path / "int8.onnx", Calibration(), per_channel=per_channel, **kinds)
    model, x = fx.onnx.load(tmp_path / "int8.onnx"), data()["x"]
    np.testing.assert_allclose(model.run([x])[0], on_runtime(tmp_path / "int8.onnx", x), rtol=1e-5, atol=1e-6)
    loss = fx.onnx.set_training(model, loss="softmax_with_cross_entropy")
    with fx.program_guard(model.program, model.startup):
        fx.optimizer.Adam(0.01).minimize(loss)
    exe.run(model.startup, scope=scope)
    losses = [exe.run(model.program, feed=data(), fetch_list=[loss], scope=scope)[0].item() for _ in range(5)]
    assert losses[-1] < losses[0]
    fx.onnx.save(model.program, tmp_path / "trained.onnx", fetches=model.fetches, scope=scope)
    written = onnx.load(tmp_path / "trained.onnx").graph.initializer
    # two weights, the bias of the convolution, and that of the product, which the tool takes for a value because an Add reads it
    assert sorted(t.data_type for t in written) == sorted(getattr(onnx.TensorProto, k) for k in ("INT8", "INT8", "INT32", "UINT8"))


# -- float files -------------------------------------------------------------------------------------------------------------------------


def float_net(weight):
    main_, startup = fx.Program("net"), fx.Program()
    with fx.program_guard(main_, startup), fx.unique_name.guard():
        attr = fx.ParamAttr("w", initializer=fx.initializer.NumpyArrayInitializer(np.float32(weight)))
        y = fx.layers.fc(fx.data("x", [-1, 2], "float32"), 2, param_attr=attr, bias_attr=False)
    return main_, startup, y


def ranges(program):
    """Scale and zero point of each rounding, as numbers."""
    constants = {op.output_arg_names[0]: op.attrs for op in program.ops if op.type in ("fill_constant", "assign_value")}
    numbers = {n: list(a["values"]) if "values" in a else a.get("value", 0.0) for n, a in constants.items()}
    rounded_ones = [op for op in program.ops if op.type == "fake_quantize"]
    return {op.inputs["X"][0]: (numbers[op.inputs["SCALE"][0]], numbers[op.inputs["ZERO"][0]]) for op in rounded_ones}


def test_inputs_have_the_range_of_the_batches_and_weights_one_for_each_output():
    program, startup, _ = float_net([[127, 0], [-254, 0.5]])
    fx.quantize(program, [{"x": np.float32([[-51, 100]])}, {"x": np.float32([[0, 204]])}], startup)
    assert ranges(program) == {"x": (1.0, 51.0), "w": ([2.0, np.float32(0.5) / np.float32(127)], 0.0)}


def test_a_moving_average_follows_outliers_by_a_tenth():
    program, startup, _ = float_net(np.ones((2, 2)))
    batches = [{"x": np.float32([[0, 255]])}, {"x": np.float32([[0, 2805]])}]
    fx.quantize(program, batches, startup, observer="moving_average")
    assert ranges(program)["x"] == (2.0, 0.0)  # (0.9 * 255 + 0.1 * 2805) / 255


def test_a_percentile_leaves_the_largest_values_out():
    program, startup, _ = float_net(np.ones((2, 2)))
    x = np.zeros((20_000, 2), "float32")
    x.flat[:10], x[-1, 1] = 51, 1e6  # one value in 40 000 is beyond 255 / 5
    fx.quantize(program, [{"x": x}], startup, observer="percentile")
    scale, zero = ranges(program)["x"]
    assert (round(scale * 255), zero) == (51, 0.0)


def residual_net():
    main_, startup = fx.Program("net"), fx.Program()
    main_.random_seed = startup.random_seed = 5
    with fx.program_guard(main_, startup), fx.unique_name.guard():
        x = fx.layers.conv2d(fx.data("x", [-1, 3, 8, 8], "float32"), 16, 3, padding=1, act="relu")
        y = fx.layers.conv2d(fx.layers.conv2d(x, 16, 3, padding=1, act="relu"), 16, 1)
        y = fx.layers.relu(fx.layers.elementwise_add(x, y))
        y = fx.layers.fc(fx.layers.pool2d(y, pool_type="avg", global_pooling=True), 4)
    return main_, startup, y


def test_a_network_is_quantized_after_training_and_a_session_computes_it_in_integers(tmp_path):
    program, startup, y = residual_net()
    scope, exe, rng = fx.Scope(), fx.Executor(fx.CPUPlace()), np.random.default_rng(0)
    exe.run(startup, scope=scope)
    feeds = [{"x": rng.standard_normal((4, 3, 8, 8), "float32")} for _ in range(3)]
    (exact,) = exe.run(program, feed=feeds[0], fetch_list=[y], scope=scope)
    fx.quantize(program, feeds, scope=scope, between=True)
    # four weights; their four inputs, one of which is a term of the sum too; the other term; what is pooled
    assert sum(op.type == "fake_quantize" for op in program.ops) == 4 + 4 + 1 + 1
    fx.onnx.save(program, tmp_path / "int8.onnx", fetches=[y], scope=scope)
    session = fx.onnx.session(tmp_path / "int8.onnx")
    (found,) = session.run([feeds[0]["x"]])
    wanted = on_runtime(tmp_path / "int8.onnx", feeds[0]["x"])
    np.testing.assert_allclose(found, wanted, atol=0.02 * np.abs(wanted).max())  # values in the middle of two steps
    assert np.abs(found - exact).max() < 0.05 * np.abs(exact).max()
    (plans,) = session._plans.values()
    kinds = [op.type for op in plans[0][0].main.ops]
    assert kinds.count("quantized_conv") == 3 and "quantized_matmul" in kinds and not {"conv2d", "relu", "fake_quantize"} & {*kinds}


class Residual:
    """Batches of the residual network for ONNX Runtime's tool."""

    def __init__(self):
        self.batches = iter([{"x": np.random.default_rng(k).standard_normal((4, 3, 8, 8), "float32")} for k in range(3)])

    def get_next(self):
        return next(self.batches, None)


@pytest.mark.parametrize("layout", ["QDQ", "QOperator"])
@pytest.mark.parametrize(
    ("values", "weights", "per_channel"), [("QUInt8", "QInt8", True), ("QInt8", "QInt8", False), ("QUInt8", "QUInt8", False)]
)
def test_files_of_onnx_runtimes_tool_are_computed_in_integers(layout, values, weights, per_channel, tmp_path):
    tool = pytest.importorskip("onnxruntime.quantization")
    program, startup, y = residual_net()
    scope = fx.Scope()
    fx.Executor(fx.CPUPlace()).run(startup, scope=scope)
    fx.onnx.save(program, tmp_path / "float.onnx", fetches=[y], scope=scope)
    kinds = {"activation_type": tool.QuantType[values], "weight_type": tool.QuantType[weights], "quant_format": tool.QuantFormat[layout]}
    tool.quantize_static(tmp_path / "float.onnx", tmp_path / "int8.onnx", Residual(), per_channel=per_channel, **kinds)
    session, x = fx.onnx.session(tmp_path / "int8.onnx"), Residual().get_next()["x"]
    (found,), wanted = session.run([x]), on_runtime(tmp_path / "int8.onnx", x)
    np.testing.assert_allclose(found, wanted, atol=0.03 * np.abs(wanted).max())  # a step of the result, and values between two steps
    (plans,) = session._plans.values()
    types = [op.type for op in plans[0][0].main.ops]
    assert types.count("quantized_conv") == 3 and "quantized_matmul" in types and not {"conv2d", "relu", "matmul", "mul"} & {*types}


@pytest.mark.parametrize("weights", ["QInt8", "QUInt8"])
def test_dynamically_quantized_files_are_computed_in_integers(weights, tmp_path):
    tool = pytest.importorskip("onnxruntime.quantization")
    program, startup = fx.Program("net"), fx.Program()
    program.random_seed = startup.random_seed = 1
    with fx.program_guard(program, startup), fx.unique_name.guard():
        hidden = fx.layers.fc(fx.data("x", [-1, 6, 40], "float32"), 32, num_flatten_dims=2, act="relu")
        hidden = fx.layers.conv2d(fx.layers.reshape(hidden, [0, 1, 6, 32]), 4, 3, padding=1, act="relu")
        y = fx.layers.fc(hidden, 10, num_flatten_dims=3)
    scope = fx.Scope()
    fx.Executor(fx.CPUPlace()).run(startup, scope=scope)
    fx.onnx.save(program, tmp_path / "float.onnx", fetches=[y], scope=scope)
    tool.quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx", weight_type=tool.QuantType[weights])
    session, x = fx.onnx.session(tmp_path / "int8.onnx"), np.random.default_rng(0).standard_normal((3, 6, 40), "float32")
    (found,), wanted = session.run([x]), on_runtime(tmp_path / "int8.onnx", x)
    np.testing.assert_allclose(found, wanted, atol=0.01 * np.abs(wanted).max())  # values between two steps
    (plans,) = session._plans.values()
    types = [op.type for op in plans[0][0].main.ops]
    assert types.count("quantized_matmul") == 2 and types.count("quantized_conv") == 1
    assert not {"matmul", "mul", "conv2d", "cast"} & {*types}


def test_what_is_skipped_stays_and_a_range_of_nothing_is_no_error():
    program, startup, _ = float_net(np.zeros((2, 2)))
    fx.quantize(program, [{"x": np.zeros((1, 2), "float32")}], startup, skip="x")
    assert ranges(program) == {"w": ([1.0, 1.0], 0.0)}


def test_a_rounded_network_is_written_with_int8_weights(tmp_path):
    program, startup, y = float_net(np.random.default_rng(0).standard_normal((2, 2)))
    x, scope, exe = np.random.default_rng(1).standard_normal((8, 2), "float32"), fx.Scope(), fx.Executor(fx.CPUPlace())
    exe.run(startup, scope=scope)
    (exact,) = exe.run(program, feed={"x": x}, fetch_list=[y], scope=scope)
    fx.quantize(program, [{"x": x}], scope=scope)
    (mine,) = exe.run(program, feed={"x": x}, fetch_list=[y], scope=scope)
    assert 0 < np.abs(mine - exact).max() < 0.05
    fx.onnx.save(program, tmp_path / "net.onnx", fetches=[y], scope=scope)
    (w,) = onnx.load(tmp_path / "net.onnx").graph.initializer
    assert (w.name, w.data_type) == ("w", onnx.TensorProto.INT8)
    np.testing.assert_allclose(on_runtime(tmp_path / "net.onnx", x), mine, rtol=1e-5, atol=1e-6)


def test_a_weight_of_three_axes_has_one_scale_and_runs_where_products_are_of_integers(tmp_path):
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((4, 8, 5), "float32"), rng.standard_normal((4, 3, 8), "float32")
    program, startup = fx.Program(), fx.Program()
    with fx.program_guard(program, startup), fx.unique_name.guard():
        weight = fx.layers.create_parameter([4, 8, 5], "float32", name="w", default_initializer=fx.initializer.NumpyArrayInitializer(w))
        y = fx.layers.matmul(fx.data("x", [4, 3, 8], "float32"), weight)
    scope, exe = fx.Scope(), fx.Executor(fx.CPUPlace())
    exe.run(startup, scope=scope)
    fx.quantize(program, [{"x": x}], scope=scope)
    assert ranges(program)["w"] == (np.abs(w).max() / np.float32(127), 0.0)
    (mine,) = exe.run(program, feed={"x": x}, fetch_list=[y], scope=scope)
    fx.onnx.save(program, tmp_path / "net.onnx", fetches=[y], scope=scope)
    fused = ort.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])  # its default joins it to MatMulInteger
    np.testing.assert_allclose(fused.run(None, {"x": x})[0], mine, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(on_runtime(tmp_path / "net.onnx", x), mine, rtol=1e-5, atol=1e-5)


def test_the_command_trains_for_integers(tmp_path):
    program, startup, y = float_net(np.eye(2))
    scope = fx.Scope()
    fx.Executor(fx.CPUPlace()).run(startup, scope=scope)
    fx.onnx.save(program, tmp_path / "net.onnx", fetches=[y], scope=scope)
    x = np.random.default_rng(1).standard_normal((40, 2), "float32")
    np.savez(tmp_path / "data.npz", x=x, label=(x.sum(axis=1) > 0).astype("int64"))
    options = ["--data", tmp_path / "data.npz", "--quantize", "--epochs", "2"]
    result = CliRunner().invoke(main, ["onnx", "train", *map(str, [tmp_path / "net.onnx", *options, "-o", tmp_path / "out.onnx"])])
    assert result.exit_code == 0, result.output
    assert "2 weights and inputs are rounded to 8 bits, in the ranges of 2 batches" in result.output
    assert onnx.load(tmp_path / "out.onnx").graph.initializer[0].data_type == onnx.TensorProto.INT8
    result = CliRunner().invoke(main, ["onnx", "train", *map(str, [tmp_path / "net.onnx", *options, "--lora", "1", "-o", tmp_path / "o"])])
    assert "--lora keeps the weights that --quantize would train" in result.output


def test_the_command_quantizes_after_training(tmp_path):
    program, startup, y = residual_net()
    scope, rng = fx.Scope(), np.random.default_rng(0)
    fx.Executor(fx.CPUPlace()).run(startup, scope=scope)
    fx.onnx.save(program, tmp_path / "net.onnx", fetches=[y], scope=scope)
    x = rng.standard_normal((20, 3, 8, 8), "float32")
    np.savez(tmp_path / "data.npz", x=x)
    arguments = [tmp_path / "net.onnx", "--data", tmp_path / "data.npz", "-o", tmp_path / "int8.onnx", "--observer", "percentile"]
    result = CliRunner().invoke(main, ["onnx", "quantize", *map(str, arguments)])
    assert result.output == f"{tmp_path / 'int8.onnx'}: 10 weights and values are rounded to 8 bits, in the ranges of 3 batches\n"
    found, wanted = fx.onnx.session(tmp_path / "int8.onnx").run([x])[0], fx.onnx.session(tmp_path / "net.onnx").run([x])[0]
    assert 0 < np.abs(found - wanted).max() < 0.05 * np.abs(wanted).max()
    np.savez(tmp_path / "data.npz", y=x)
    result = CliRunner().invoke(main, ["onnx", "quantize", *map(str, arguments)])
    assert "has no array 'x'; it has: y" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observer": "minmax"}, "there is no observer 'minmax'; did you mean 'min_max'?"),
        ({"feeds": []}, "feeds has no batch with rows, so nothing was observed; give one or more"),
        ({"feeds": [{"x": np.ones((0, 2), "float32")}]}, "feeds has no batch with rows"),
        ({"feeds": {"x": [[1, 1]]}}, "feeds must be a list of batches, dicts of arrays by name, got dict; a list of one batch is [feed]"),
        ({"feeds": None}, "feeds must be a list of batches, dicts of arrays by name, got NoneType"),
        ({"feeds": [np.ones((1, 2), "float32")]}, "feeds must be a list of batches, dicts of arrays by name; batch 1 is ndarray"),
        ({"startup": [1]}, "startup must be a Program or None, got list; feeds come before it"),
        ({"skip": 3}, "skip must be a pattern of names or a list of them, got 3"),
        ({"scope": fx.Scope()}, "weights have their values in scope, or those that startup gives them; give one of the two"),
        ({"program": "net.onnx"}, "expected a Program or an OnnxModel, got str; give fx.onnx.load('net.onnx')"),
        ({"feeds": [{"x": np.float32([[np.nan, 1]])}]}, "%x is not finite in a batch of feeds"),
        ({"skip": ["w", "no*"]}, "skip names 'no*', which no weight or input to quantize is called; they are: w, x"),
        ({"skip": "*"}, "program net has no product or convolution with a float32 weight that is left to quantize"),
        ({"program": 3}, "expected a Program or an OnnxModel, got int"),
    ],
)
def test_what_is_wrong_is_said(options, message):
    program, startup, _ = float_net(np.ones((2, 2)))
    with pytest.raises(ProgramError) as e:
        fx.quantize(**{"program": program, "startup": startup, "feeds": [{"x": np.ones((1, 2), "float32")}], **options})
    assert message in str(e.value)


def test_arguments_are_named():
    with pytest.raises(TypeError, match="unexpected keyword argument 'observers'; did you mean 'observer'"):
        fx.quantize(None, [], observers="min_max")


def test_a_program_is_quantized_once():
    program, startup, _ = float_net(np.ones((2, 2)))
    fx.quantize(program, [{"x": np.ones((1, 2), "float32")}], startup)
    with pytest.raises(ProgramError, match="net is quantized already, all weights of its products and convolutions are rounded; give"):
        fx.quantize(program, [{"x": np.ones((1, 2), "float32")}], startup)


def test_weights_of_a_model_have_the_values_of_a_scope_that_is_given(tmp_path):
    """The file has weights of 1, and training made them 127: 254 steps of their scale, 1, go from -127 to 127."""
    program, startup, y = float_net(np.ones((2, 2)))
    scope = fx.Scope()
    fx.Executor(fx.CPUPlace()).run(startup, scope=scope)
    fx.onnx.save(program, tmp_path / "net.onnx", fetches=[y], scope=scope)
    model = fx.onnx.load(tmp_path / "net.onnx")
    scope = fx.Scope()
    fx.Executor(fx.CPUPlace()).run(model.startup, scope=scope)
    [weight] = [p.name for p in model.parameters]
    scope.set(weight, np.full((2, 2), 127, "float32"))
    fx.quantize(model, [{"x": np.ones((1, 2), "float32")}], scope=scope)
    scales = [np.ravel(op.attrs["values"]).tolist() for op in model.program.ops if op.type == "assign_value"]
    assert scales == [[1, 1]]


def test_gradients_come_after():
    program, startup, y = float_net(np.ones((2, 2)))
    with fx.program_guard(program, startup):
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(y))
    with pytest.raises(ProgramError, match="already computes gradients; call quantize before minimize"):
        fx.quantize(program, [{"x": np.ones((1, 2), "float32")}], startup)
