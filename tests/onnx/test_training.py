"""From a model file to a model file: load, train on one device and on ranks, write, run in ONNX Runtime."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Builder

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

ROWS = 12


def small_net():
    """A file with a convolution, batch normalization, pooling, dropout, a shape that is read, and a softmax at the end."""
    rng = np.random.default_rng(3)
    weights = {
        "conv.w": rng.standard_normal((4, 1, 3, 3)) / 3, "conv.b": rng.standard_normal(4) / 3,
        "bn.scale": rng.uniform(0.5, 1.5, 4), "bn.bias": rng.standard_normal(4) / 3, "bn.mean": np.zeros(4), "bn.var": np.ones(4),
        "fc.w": rng.standard_normal((5, 36)) / 6, "fc.b": np.zeros(5),
    }  # fmt: skip
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        small (float[batch, 1, 6, 6] image) => (float[batch, 5] probability) {
          a = Conv<pads=[1, 1, 1, 1]>(image, "conv.w", "conv.b")
          n = BatchNormalization<epsilon=0.001, momentum=0.8>(a, "bn.scale", "bn.bias", "bn.mean", "bn.var")
          r = Relu(n)
          p = MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(r)
          s = Shape(p)
          first = Constant<value_ints=[0]>()
          rows = Gather(s, first)
          rest = Constant<value_ints=[-1]>()
          target = Concat<axis=0>(rows, rest)
          features = Reshape(p, target)
          rate = Constant<value_float=0.25>()
          d = Dropout(features, rate)
          logits = Gemm<transB=1>(d, "fc.w", "fc.b")
          probability = Softmax<axis=1>(logits)
        }
    """)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.float32(v), k) for k, v in weights.items())
    return model


def feed(seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    return {"image": rng.standard_normal((rows, 1, 6, 6), "float32"), "label": rng.integers(0, 5, (rows, 1))}


def prepared(optimizer=None, **options):
    model = fx.onnx.load(small_net())
    loss = fx.onnx.set_training(model, loss="softmax_with_cross_entropy", **options)
    with fx.program_guard(model.program, model.startup), fx.unique_name.guard("train_"):
        (optimizer or fx.optimizer.Adam(0.01)).minimize(loss)
    return model, loss


def on_runtime(path, image):
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"image": image})[0]


def one_device(model, loss, steps):
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    losses = [exe.run(model.program, feed=feed(k), fetch_list=[loss], scope=scope)[0] for k in range(steps)]
    return np.concatenate(losses), scope


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "ring_optimizer"])
def test_a_model_trains_on_four_ranks_as_on_one_device_and_is_written_again(strategy, tmp_path):
    model, loss = prepared(fx.optimizer.Momentum(0.1, 0.9))
    expected, scope = one_device(model, loss, 3)
    t = fx.DistributeTranspiler(getattr(fx.strategies, strategy)())
    t.transpile(program=model.program, startup_program=model.startup, trainers=4)
    assert t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(4)) as ranks:
        ranks.run_startup()
        losses = np.concatenate([ranks.run(feed=feed(k), fetch_list=[loss])[0] for k in range(3)])
        # four ranks add up their parts of a sum in another order than one device does: float32 rounding, through three steps
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        fx.onnx.save(model.program, tmp_path / "ranks.onnx", fetches=[model["probability"]], executor=ranks)
    fx.onnx.save(model.program, tmp_path / "one.onnx", fetches=[model["probability"]], scope=scope)
    image = feed(9, rows=5)["image"]
    one, four = (on_runtime(tmp_path / f"{name}.onnx", image) for name in ("one", "ranks"))
    np.testing.assert_allclose(four, one, rtol=1e-5, atol=1e-6)
    assert not np.allclose(one, fx.onnx.load(small_net()).run([image])[0], atol=1e-3), "training changed nothing"


def test_what_is_written_computes_what_the_program_does(tmp_path):
    model, loss = prepared()
    _, scope = one_device(model, loss, 2)
    fx.onnx.save(model.program, tmp_path / "trained.onnx", fetches=[model["probability"]], scope=scope)
    image = feed(5)["image"]
    test = model.program.clone(for_test=True)
    (expected,) = fx.Executor(fx.CPUPlace()).run(test, feed={"image": image}, fetch_list=[model["probability"]], scope=scope)
    # both compute in float32 and add up in their own order: a few units in the last place
    np.testing.assert_allclose(on_runtime(tmp_path / "trained.onnx", image), expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(fx.onnx.load(tmp_path / "trained.onnx").run([image])[0], expected, rtol=1e-5, atol=1e-7)


def test_a_written_model_gives_an_equal_program(tmp_path):
    model, scope = fx.onnx.load(small_net()), fx.Scope()
    fx.Executor(fx.CPUPlace()).run(model.startup, scope=scope)
    fx.onnx.save(model.program, tmp_path / "again.onnx", fetches=model.fetches, scope=scope)
    again = fx.onnx.load(tmp_path / "again.onnx")
    assert str(again.program) == str(model.program)
    assert str(again.startup) == str(model.startup)


# -- set_training --------------------------------------------------------------------------------------------------------------


def ops(model, name):
    return [op for op in model.program.ops if op.type == name]


def test_batch_norm_takes_the_statistics_of_the_batch_and_updates_the_running_ones():
    model = fx.onnx.load(small_net())
    fx.onnx.set_training(model, dropout=False)
    exe, scope, image = fx.Executor(fx.CPUPlace()), fx.Scope(), feed()["image"]
    exe.run(model.startup, scope=scope)
    a, n = exe.run(model.program, feed={"image": image}, fetch_list=[model["a"], model["n"]], scope=scope)
    mean, variance = a.mean(axis=(0, 2, 3)), a.var(axis=(0, 2, 3))
    weight, bias = scope.get("bn.scale")[:, None, None], scope.get("bn.bias")[:, None, None]
    normal = (a - mean[:, None, None]) / np.sqrt(variance[:, None, None] + 1e-3)
    # the same numbers summed in another order, in float32
    np.testing.assert_allclose(n, normal * weight + bias, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scope.get("bn.mean"), 0.2 * mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(scope.get("bn.var"), 0.8 + 0.2 * variance, rtol=1e-4, atol=1e-6)
    assert ops(model, "dropout")[0].attrs["is_test"]


def test_dropout_drops_at_the_rate_of_the_model_or_another():
    model = fx.onnx.load(small_net())
    fx.onnx.set_training(model, batch_norm=False)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    x, y = exe.run(model.program, feed={"image": feed(rows=200)["image"]}, fetch_list=[model["features"], model["d"]], scope=scope)
    there = x != 0  # behind a Relu, other zeros are not told from dropped ones
    assert abs((y[there] == 0).mean() - 0.25) < 0.03, "of some thousand draws, six standard deviations"
    kept = there & (y != 0)
    np.testing.assert_allclose(y[kept], x[kept] / 0.75, rtol=1e-6)  # one rounding
    other = fx.onnx.load(small_net())
    fx.onnx.set_training(other, dropout=0.5)
    assert ops(other, "dropout")[0].attrs["dropout_prob"] == 0.5


def test_frozen_parameters_stay_and_the_others_move():
    model, loss = prepared(fx.optimizer.SGD(0.1), freeze=["conv.*", "bn.bias"])
    _, scope = one_device(model, loss, 1)
    first = fx.Scope()
    fx.Executor(fx.CPUPlace()).run(fx.onnx.load(small_net()).startup, scope=first)
    moved = {n for n in first.arrays if not np.array_equal(first.get(n), scope.get(n))}
    assert moved == {"bn.scale", "bn.mean", "bn.var", "fc.w", "fc.b"}


def test_a_new_head_takes_the_place_of_the_old_one():
    model = fx.onnx.load(small_net())
    with fx.unique_name.guard():
        loss = fx.onnx.set_training(model, head=lambda m: fx.layers.fc(m["features"], 3), loss="softmax_with_cross_entropy")
    assert [p.name for p in model.parameters] == ["conv.w", "conv.b", "bn.scale", "bn.bias", "bn.mean", "bn.var", "fc_0.w_0", "fc_0.b_0"]
    assert not ops(model, "softmax") and not ops(model, "dropout")
    with fx.program_guard(model.program, model.startup):
        fx.optimizer.SGD(0.1).minimize(loss)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    data = feed()
    data["label"] %= 3
    before = exe.run(model.program, feed=data, fetch_list=[loss], scope=scope)[0]
    for _ in range(20):
        after = exe.run(model.program, feed=data, fetch_list=[loss], scope=scope)[0]
    assert after < before


@pytest.mark.parametrize(
    "options, message",
    [
        ({"freeze": "conv_*"}, "set_training: freeze names 'conv_*', but nothing has that name; did you mean 'conv.w'?"),
        ({"batch_norm": "norm1"}, "set_training: batch_norm names 'norm1', but nothing has that name; values and parameters of batch"),
        ({"dropout": "often"}, "set_training: dropout must be True, False or a rate of at least 0 and below 1, got 'often'"),
        ({"freeze": 3}, "set_training: freeze must be a pattern of names or a list of them, got 3"),
        ({"batch_norm": 3}, "set_training: batch_norm must be a pattern of names or a list of them, got 3"),
        ({"head": "fc"}, "set_training: head must be a function of the model that returns the new output, got 'fc'"),
        ({"dropout": 1.5}, "set_training: dropout must be True, False or a rate of at least 0 and below 1, got 1.5"),
        ({"loss": "cross"}, "set_training: there is no loss 'cross'; there are: "),
        ({"loss": "cross_entropy_loss"}, "set_training: there is no loss 'cross_entropy_loss'; did you mean 'softmax_with_cross_entropy'"),
        ({"loss": "mse_loss"}, "set_training: there is no loss 'mse_loss'; did you mean 'square_error_cost'"),
        ({"head": lambda m: None}, "set_training: head must return a Variable of the model's program, got None"),
    ],
)
def test_what_cannot_be_is_said(options, message):
    with pytest.raises(fx.onnx.OnnxError) as e:
        fx.onnx.set_training(fx.onnx.load(small_net()), **options)
    assert str(e.value).startswith(message)


def test_set_training_comes_before_minimize():
    model, _ = prepared()
    with pytest.raises(fx.onnx.OnnxError, match="already computes gradients; call set_training before minimize"):
        fx.onnx.set_training(model)


def test_a_refused_call_leaves_the_program_as_it_was():
    model = fx.onnx.load(small_net())
    before = str(model.program)
    with pytest.raises(fx.onnx.OnnxError, match="freeze names 'no_such'"):
        fx.onnx.set_training(model, freeze="no_such")
    assert str(model.program) == before


def test_variables_of_the_model_stay_valid():
    model = fx.onnx.load(small_net())
    features, out = model["features"], model.fetches[0]
    fx.onnx.set_training(model, dropout=0.5)
    assert features.block is out.block is model.program.global_block()
    with fx.program_guard(model.program, model.startup):
        assert fx.layers.mean(features).block.program is model.program
    assert [op.attrs["dropout_prob"] for op in model.program.ops if op.type == "dropout"] == [0.5]



# -- what real models brought up -------------------------------------------------------------------------------------------------


def parsed(text, **weights):
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.float32(a), n) for n, a in weights.items())
    return model


def test_the_softmax_of_an_old_opset_is_found_behind_a_cross_entropy():
    """Below opset 13 Softmax works on two axes, and the converter writes Flatten and Reshape around it where it knows no shapes."""
    w = np.random.default_rng(0).standard_normal((3, 4))
    model = fx.onnx.load(parsed("""
        <ir_version: 7, opset_import: ["" : 11]>
        old (float[n, 5, 3] x) => (float[n, 5, 4] p) { l = MatMul(x, w)  p = Softmax<axis=2>(l) }
    """, w=w))  # fmt: skip
    loss = fx.onnx.set_training(model, loss="softmax_with_cross_entropy")
    x, label = np.random.default_rng(1).standard_normal((2, 5, 3)), np.arange(10).reshape(2, 5, 1) % 4
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    (found,) = exe.run(model.program, feed={"x": x.astype("float32"), "label": label}, fetch_list=[loss], scope=scope)
    scores = np.exp(x @ w)
    expected = -np.log(np.take_along_axis(scores / scores.sum(-1, keepdims=True), label, -1)).mean()
    np.testing.assert_allclose(found.item(), expected, rtol=1e-5)  # float32


def test_vectors_that_nodes_hold_are_weights_and_single_numbers_are_not():
    model = fx.onnx.load(onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        held (float[n, 2] x) => (float[n, 2] y) {
          bias = Constant<value = float[2] {1, 2}>()
          half = Constant<value = float[1] {0.5}>()
          a = Add(x, bias)
          y = Mul(a, half)
        }
    """))
    assert [p.name for p in model.parameters] == ["bias"]


QUANTIZED = """
    <ir_version: 8, opset_import: ["" : 17]>
    quantized (float[n, 2] x) => (float[n, 2] y) <float scale = {0.1}, uint8 zero = {128}> {
      a = MatMul(x, w)
      q = QuantizeLinear(a, scale, zero)
      d = Cast<to = 1>(q)
      y = MatMul(d, v)
    }
"""


def test_parameters_that_no_gradient_reaches_are_refused_unless_they_are_frozen():
    model = fx.onnx.load(parsed(QUANTIZED, w=np.eye(2), v=np.eye(2)))
    with pytest.raises(fx.onnx.OnnxError, match=r"no gradient reaches 1 of 2 parameters \(w\); .* is uint8. Train the model that it was"):
        fx.onnx.set_training(model, loss="square_error_cost")
    model = fx.onnx.load(parsed(QUANTIZED, w=np.eye(2), v=np.eye(2)))
    assert fx.onnx.set_training(model, loss="square_error_cost", freeze="w") is not None


def test_running_statistics_are_never_trained():
    model = fx.onnx.load(small_net())
    loss = fx.onnx.set_training(model, batch_norm=False, loss="softmax_with_cross_entropy")
    with fx.program_guard(model.program, model.startup):
        trained = {p.name for p, _ in fx.append_backward(loss)}
    assert trained == {"conv.w", "conv.b", "bn.scale", "bn.bias", "fc.w", "fc.b"}


def test_a_slice_to_the_end_of_an_open_axis_has_its_size():
    """2147483647 stands for the end in many files, and is less than the numbers that stand for open sizes."""
    model = fx.onnx.load(onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        ends (float[n, 4] x) => (float[n, 2, 2] y)
        <int64[2] zeros = {0, 0}, int64[2] ends = {2147483647, 2147483647}, int64[1] first = {0}, int64[2] rest = {2, 2}> {
          a = Slice(x, zeros, ends)
          s = Shape(a)
          n = Gather(s, first)
          target = Concat<axis=0>(n, rest)
          y = Reshape(a, target)
        }
    """))
    assert model["y"].shape == (-1, 2, 2)


def test_index_select_is_written_as_gather(tmp_path):
    main = fx.Program("picks")
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        x = fx.data("x", [-1, 4], "float32")
        b = Builder(main.global_block())
        y = b.index_select(x, b.assign_value(shape=(3,), dtype="int64", values=(3, 0, 0)), dim=1)
    fx.onnx.save(main, tmp_path / "picks.onnx", fetches=[y], scope=fx.Scope())
    session = ort.InferenceSession(str(tmp_path / "picks.onnx"), providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.float32([[1, 2, 3, 4]])})[0].tolist() == [[4, 1, 1]]
