"""The losses that `set_training` builds by name, against their formulas, on one device, on ranks and in micro-batches."""

import numpy as np
import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402


def model_of(shape, *nodes, output="y"):
    """x -> y = x * w + x, with w of zeros, so that the output is x and the parameter has a gradient."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("x", output))
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2], [0, 0])
    steps = [helper.make_node("ReduceSum", ["w"], ["s"], keepdims=0), helper.make_node("Mul", ["x", "s"], ["m"])]
    graph = helper.make_graph([*steps, helper.make_node("Add", ["m", "x"], ["y"]), *nodes], "net", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=9)


def prepared(shape, loss, *nodes, **options):
    with fx.unique_name.guard():
        model = fx.onnx.load(model_of(shape, *nodes, **options))
        result = fx.onnx.set_training(model, loss=loss)
        with fx.program_guard(model.program, model.startup):
            fx.optimizer.SGD(0.5).minimize(result)
    return model, result


def computed(shape, loss, x, label, *nodes, **options):
    """The loss, and the weight after a step."""
    model, result = prepared(shape, loss, *nodes, **options)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    (found,) = exe.run(model.program, feed={"x": x, "label": label}, fetch_list=[result], scope=scope)
    return found.item(), np.asarray(scope.get("w"))


def logs(x, axis=-1):
    """The logarithm of the softmax."""
    x = np.float64(x) - x.max(axis=axis, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=axis, keepdims=True))


def drawn(*shape):
    return np.random.default_rng(0).standard_normal(shape, "float32")


CLOSE = {"rtol": 1e-6}  # float32


def test_classes():
    x, label = drawn(4, 3), np.array([[0], [2], [1], [2]])
    expected = -np.mean([logs(x)[i, c] for i, (c,) in enumerate(label)])
    np.testing.assert_allclose(computed(["n", 3], "softmax_with_cross_entropy", x, label)[0], expected, **CLOSE)


def test_ignored_tokens_do_not_count():
    x, label = drawn(2, 4, 3), np.array([[0, 1, -100, 2], [-100, -100, 2, 2]])
    expected = -np.mean([logs(x)[i, t, label[i, t]] for i, t in [(0, 0), (0, 1), (0, 3), (1, 2), (1, 3)]])
    np.testing.assert_allclose(computed(["n", "t", 3], "token_classification", x, label)[0], expected, **CLOSE)


def test_a_language_model_predicts_the_next_token():
    x, label = drawn(2, 4, 5), np.array([[3, 1, 4, 2], [2, 0, -100, -100]])  # the labels are the tokens that are fed, padded
    expected = -np.mean([logs(x)[i, t, label[i, t + 1]] for i, t in [(0, 0), (0, 1), (0, 2), (1, 0)]])
    np.testing.assert_allclose(computed(["n", "t", 5], "causal_language_model", x, label)[0], expected, **CLOSE)


def test_pixels():
    x, label = drawn(2, 3, 2, 2), np.array([[[0, 1], [2, 255]], [[255, 255], [1, 1]]])
    loss = fx.onnx.Loss("segmentation", ignore_index=255)
    at = [(0, 0, 0, 0), (0, 1, 0, 1), (0, 2, 1, 0), (1, 1, 1, 0), (1, 1, 1, 1)]
    expected = -np.mean([logs(x, 1)[k] for k in at])
    np.testing.assert_allclose(computed(["n", 3, "h", "w"], loss, x, label)[0], expected, **CLOSE)


def test_the_softmax_over_channels_at_the_end_is_left_out():
    node = helper.make_node("Softmax", ["y"], ["p"], axis=1)
    x, label = 90 * drawn(2, 3, 2, 2), np.ones((2, 2, 2), "int64")  # the logarithm of its softmax would be minus infinity
    expected = -logs(x, 1)[:, 1].mean()
    np.testing.assert_allclose(computed(["n", 3, "h", "w"], "segmentation", x, label, node, output="p")[0], expected, **CLOSE)


@pytest.mark.parametrize("weight", [3.0, (3.0, 0.5, 1.0)])
def test_the_weight_of_yes(weight):
    """The mean over all, as in PyTorch: -(w y log p + (1 - y) log(1 - p)). A label of -100 has no loss."""
    x, y = drawn(4, 3), np.float32([[0, 1, 1], [1, 0, 0.25], [1, 1, 0], [-100, 0, 1]])
    p = 1 / (1 + np.exp(-np.float64(x)))
    each = np.where(y < 0, 0, -(np.array(weight) * y * np.log(p) + (1 - y) * np.log(1 - p)))
    loss = fx.onnx.Loss("sigmoid_cross_entropy_with_logits", pos_weight=weight)
    np.testing.assert_allclose(computed(["n", 3], loss, x, y)[0], each.mean(), **CLOSE)


def test_class_weights_and_smoothing():
    """As PyTorch defines both: the share of a class in a label counts with the weight of the class, the mean with that of the label."""
    x, label, weights, share = drawn(4, 3), np.array([[0], [2], [1], [-100]]), (1.0, 2.0, 0.5), 0.3
    total, norm = 0.0, 0.0
    for row, (c,) in zip(logs(x)[:3], label[:3]):
        spread = np.full(3, share / 3) + (1 - share) * np.eye(3)[c]
        total -= (spread * weights * row).sum()
        norm += weights[c]
    loss = fx.onnx.Loss("softmax_with_cross_entropy", class_weight=weights, label_smoothing=share)
    np.testing.assert_allclose(computed(["n", 3], loss, x, label)[0], total / norm, **CLOSE)


@pytest.mark.parametrize("options, expected", [
    ({"label_smoothing": 0.1}, 1.6626965999603271), ({"class_weight": (1, 2, 0.5)}, 2.0258567333221436),
    ({"class_weight": (1, 2, 0.5), "label_smoothing": 0.3}, 1.9235754013061523),
])  # fmt: skip
def test_weights_and_smoothing_are_those_of_pytorch(options, expected):
    """F.cross_entropy(x, y, weight=..., label_smoothing=...) of torch 2.14.1."""
    x, label = np.float32([[1, 2, 3], [0, -1, 1], [2, 0, 0], [0.5, 0.5, 1]]), np.array([[0], [2], [1], [-100]])
    loss = fx.onnx.Loss("softmax_with_cross_entropy", **options)
    np.testing.assert_allclose(computed(["n", 3], loss, x, label)[0], expected, rtol=1e-6)  # float32


@pytest.mark.parametrize("options, share", [({}, 2 / 3), ({"label_smoothing": 0.2}, 1), ({"class_weight": (3, 3)}, 1)])
def test_labels_that_are_ignored_count_in_the_mean_of_the_plain_loss_alone(options, share):
    """Scores that are equal: each label that is not ignored has the loss log 2, however it is spread."""
    loss = fx.onnx.Loss("softmax_with_cross_entropy", **options)
    found = computed(["n", 2], loss, np.zeros((3, 2), np.float32), np.array([[0], [1], [-100]]))[0]
    np.testing.assert_allclose(found, share * np.log(2), rtol=1e-6)


def several(text):
    return fx.onnx.load(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 3]> {text}'))


FEATURES = """g (float[n, 2] x) => (float[n, 2] h, float[n, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { h = MatMul (x, w) y = Relu (h) }"""


def test_one_of_several_outputs_is_named():
    assert fx.onnx.set_training(several(FEATURES), loss="square_error_cost", scores="h") is not None
    with pytest.raises(fx.onnx.OnnxError, match="loss takes one output, but the model has h, y; name one, scores='h' "):
        fx.onnx.set_training(several(FEATURES), loss="square_error_cost")
    with pytest.raises(fx.onnx.OnnxError, match="the model has no value 'z'; it has: "):
        fx.onnx.set_training(several(FEATURES), loss="square_error_cost", scores="z")


CLASSIFIER = """g (float[n, 2] x) => (int64[n] label, seq(map(int64, float)) probability) <float[2, 2] w = {1, 2, 3, 4}> {
    h = MatMul (x, w)  p = Softmax (h)  label = ArgMax <axis = 1, keepdims = 0> (h)
    probability = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1]> (p) }"""


def test_a_classifier_of_scikit_learn_is_trained_by_its_probabilities():
    """Its outputs are the class, here called label as the labels of a loss are, and maps of classes to probabilities."""
    model = several(CLASSIFIER)
    loss = fx.onnx.set_training(model, loss="softmax_with_cross_entropy")
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    feed = {"x": np.zeros((2, 2), "float32"), "label_1": np.array([[0], [1]])}
    np.testing.assert_allclose(exe.run(model.program, feed=feed, fetch_list=[loss], scope=scope)[0], np.log(2), rtol=1e-6)


@pytest.mark.parametrize("name, each", [
    ("square_error_cost", lambda d: d**2), ("absolute_error", abs), ("huber_loss", lambda d: np.where(abs(d) < 1, d**2 / 2, abs(d) - 0.5)),
])  # fmt: skip
def test_numbers(name, each):
    x, label = drawn(4, 2), np.float32([[0, 1], [2, 3], [-1, 0], [0.5, 0]])
    np.testing.assert_allclose(computed(["n", 2], name, x, label)[0], each(np.float64(x) - label).mean(), **CLOSE)


def test_huber_is_linear_from_delta_on():
    loss = fx.onnx.Loss("huber_loss", delta=2.0)
    x, label = np.float32([[0], [0]]), np.float32([[1], [6]])
    assert computed(["n", 1], loss, x, label)[0] == (1 / 2 + 2 * (6 - 1)) / 2


def test_a_batch_without_labels_changes_nothing():
    loss, weight = computed(["n", "t", 3], "token_classification", drawn(2, 4, 3), np.full((2, 4), -100))
    assert loss == 0 and weight.tolist() == [0, 0]


@pytest.mark.parametrize("loss", [
    "token_classification", "causal_language_model", fx.onnx.Loss("token_classification", class_weight=(1, 2, 4), label_smoothing=0.25),
])  # fmt: skip
@pytest.mark.parametrize("strategy", [
    fx.strategies.data_parallel(), fx.strategies.zero3(), fx.strategies.micro_batches(3, of=fx.strategies.zero1()),
])  # fmt: skip
def test_ranks_divide_by_the_labels_of_all_ranks(loss, strategy):
    x, label = drawn(6, 4, 3), np.random.default_rng(1).integers(0, 3, (6, 4))
    label[0], label[2, 1:], label[5, 2] = -100, -100, -100  # every rank and every micro-batch has another number of labels
    alone, after = computed(["n", "t", 3], loss, x, label)
    model, result = prepared(["n", "t", 3], loss)
    t = fx.DistributeTranspiler(strategy).transpile(program=model.program, startup_program=model.startup, trainers=2)
    assert t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as ranks:
        ranks.run_startup()
        (found,) = ranks.run(feed={"x": x, "label": label}, fetch_list=[result])
        np.testing.assert_allclose(found.item(), alone, rtol=1e-6)  # float32 sums in another order
        np.testing.assert_allclose(ranks.state("w"), after, rtol=1e-5)


@pytest.mark.parametrize("make, message", [
    (lambda: fx.onnx.Loss("cross_entropy_loss"), "there is no loss 'cross_entropy_loss'; did you mean 'softmax_with_cross_entropy'?"),
    (lambda: fx.onnx.Loss("mae"), "there is no loss 'mae'; did you mean 'absolute_error'?"),
    (lambda: fx.onnx.Loss("huber_los"), "there is no loss 'huber_los'; did you mean 'huber_loss'?"),
    (lambda: fx.onnx.Loss("square_error_cost", label_smoothing=0.1), "are for labels that are classes, and square_error_cost has numbers"),
    (lambda: fx.onnx.Loss("segmentation", label_smoothing=1), "label_smoothing must be at least 0 and below 1, got 1"),
    (lambda: fx.onnx.Loss("segmentation", class_weight=(1, -1)), "class_weight must be numbers of at least 0, and not all 0, got (1, -1)"),
    (lambda: fx.onnx.Loss("huber_loss", delta=0), "delta must be a number above 0, got 0"),
    (lambda: prepared(["n", 3], fx.onnx.Loss("softmax_with_cross_entropy", (1, 2))),
     "class_weight has 2 numbers, but the output has 3 classes"),
    (lambda: prepared(["n", 3], "segmentation"), "segmentation takes an output of 3 axes or more, and 'y' is f32[n,3]"),
])  # fmt: skip
def test_messages(make, message):
    with pytest.raises(fx.onnx.OnnxError) as caught:
        make()
    assert message in str(caught.value)
