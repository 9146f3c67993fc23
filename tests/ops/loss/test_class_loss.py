"""Losses over classes against float64 formulas and numbers worked by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidx.ir import ExecutionError, ProgramError, TensorType
from fluidx.ops import kernels
from fluidx.ops.loss import class_loss
from fluidx.ops.loss.softmax_loss import SoftmaxWithCrossEntropy, SoftmaxWithCrossEntropyGrad


def f32(*values):
    return np.array(values, "float32")


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.sampled_from([-100, 0, 2]), st.integers(0, 50))
def test_softmax_with_cross_entropy_and_its_gradient_equal_their_formulas(run_bound, rows, classes, ignore, seed):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, classes)) * 4).astype("float32")
    label = rng.integers(0, classes, (rows, 1))
    if ignore == -100:
        label[0] = -100
    g = rng.standard_normal((rows, 1)).astype("float32")
    e = np.exp(x.astype(float) - x.max(axis=1, keepdims=True))
    p = e / e.sum(axis=1, keepdims=True)
    counts = label != ignore
    safe = np.where(counts, label, 0)
    want = np.where(counts, -np.log(np.take_along_axis(p, safe, 1)), 0)
    soft, value = run_bound(SoftmaxWithCrossEntropy, x, label, ignore_index=ignore)
    np.testing.assert_allclose(soft, p, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-5)
    dx = run_bound(SoftmaxWithCrossEntropyGrad, p.astype("float32"), label, g, ignore_index=ignore)
    np.testing.assert_allclose(dx, (p - (np.arange(classes) == safe)) * g * counts, rtol=1e-4, atol=1e-5)


def test_two_equal_logits_cost_one_bit(run_bound):
    _, value = run_bound(SoftmaxWithCrossEntropy, np.zeros((2, 2), "float32"), np.array([[0], [1]]))
    np.testing.assert_allclose(value, np.log(2), rtol=1e-6)


def test_huge_logits_do_not_overflow(run_bound):
    _, value = run_bound(SoftmaxWithCrossEntropy, f32([1e4, -1e4], [1e4, -1e4]), np.array([[0], [1]]))
    assert value.tolist() == [[0], [2e4]]


def test_a_soft_label_of_one_class_is_a_hard_label(run_bound):
    x, hard = np.random.default_rng(0).standard_normal((3, 4)).astype("float32"), np.array([[2], [0], [3]])
    hot = (np.arange(4) == hard).astype("float32")
    for axis, turn in ((-1, lambda a: a), (0, lambda a: np.ascontiguousarray(a.T))):
        soft = run_bound(SoftmaxWithCrossEntropy, turn(x), turn(hot), soft_label=True, axis=axis)
        sharp = run_bound(SoftmaxWithCrossEntropy, turn(x), turn(hard), axis=axis)
        np.testing.assert_allclose(soft[1], sharp[1], rtol=1e-6)


OUT_OF_RANGE = pytest.mark.parametrize("bad", [-1, 3, 7])


@pytest.mark.parametrize("dense", [True, False])
@OUT_OF_RANGE
def test_the_error_for_a_label_out_of_range_names_it_and_the_classes(dense, bad):
    x, label = np.zeros((2, 3), "float32", "C" if dense else "F"), np.array([[1], [bad]])
    message = f"label {bad} is out of range for 3 classes; a label is 0 to 2, or -100 to ignore an example"
    loss = np.empty((2, 1), "float32")
    for op, outs in ((SoftmaxWithCrossEntropy, (np.empty_like(x), loss)), (class_loss.CrossEntropy, (loss,))):
        with pytest.raises(ExecutionError, match=message):
            kernels.bind(op, np, [x, label], list(outs), op.complete_attrs({}), None, name="numpy")()


@OUT_OF_RANGE
def test_where_nothing_is_raised_the_loss_of_a_label_out_of_range_is_nan(bad):
    p, label, loss = np.full((3, 3), 1 / 3, "float32"), np.array([[1], [bad], [-100]]), np.empty((3, 1), "float32")
    class_loss.CrossEntropy.kernel(np, p, label, out=loss, **class_loss.CrossEntropy.attrs)
    np.testing.assert_allclose(loss, [[np.log(3)], [np.nan], [0]], rtol=1e-6)
    SoftmaxWithCrossEntropy.kernel(np, p, label, out=(p.copy(), loss), **SoftmaxWithCrossEntropy.attrs)
    np.testing.assert_allclose(loss, [[np.log(3)], [np.nan], [0]], rtol=1e-6)


def test_cross_entropy_takes_probabilities(run_bound):
    p = f32([0.5, 0.25, 0.25], [0.0, 1.0, 0.0])
    value = run_bound(class_loss.CrossEntropy, p, np.array([[1], [1]]))
    np.testing.assert_allclose(value, [[np.log(4)], [0]], rtol=1e-6)
    assert run_bound(class_loss.CrossEntropy, p, np.array([[-100], [0]])).tolist() == [[0], [np.float32(1e20)]]
    assert run_bound(class_loss.CrossEntropyGrad, p, np.array([[1], [1]]), f32([1], [2])).tolist() == [[0, -4, 0], [0, -2, 0]]


def test_the_divergence_of_a_distribution_from_itself_is_0(run_bound):
    p = f32([0.5, 0.5, 0], [0.25, 0.25, 0.5])
    x = np.log(np.maximum(p, 1e-9))
    assert run_bound(class_loss.KldivLoss, x, p, reduction="sum") == 0
    halved = run_bound(class_loss.KldivLoss, x - np.float32(np.log(2)), p, reduction="batchmean")
    np.testing.assert_allclose(halved, [np.log(2)], rtol=1e-6)
    assert run_bound(class_loss.KldivLoss, x, p, reduction="none").shape == (2, 3)


def test_smooth_labels_share_epsilon_among_the_classes(run_bound):
    np.testing.assert_allclose(
        run_bound(class_loss.LabelSmooth, f32([1, 0, 0, 0]), None, epsilon=0.1), [[0.925, 0.025, 0.025, 0.025]], rtol=1e-6
    )


@pytest.mark.parametrize(
    "op, types, attrs, message",
    [
        (SoftmaxWithCrossEntropy, ["f32 8,3", "i64 8"], {}, r"Label must have shape \[8, 1\] for Logits f32\[8,3\], got \[8\]"),
        (SoftmaxWithCrossEntropy, ["f32 8,3", "f32 8,1"], {}, "Label must hold integers, got f32.8,1.; .* set soft_label=True"),
        (SoftmaxWithCrossEntropy, ["f32 8,3", "i64 8,1"], {"soft_label": True}, "with soft_label, Label must be like Logits"),
        (class_loss.CrossEntropy, ["f32 8,0", "i64 8,1"], {}, r"axis 1 of X f32\[8,0\] holds the classes: expected 1 or more, found 0"),
        (SoftmaxWithCrossEntropy, ["f32 8,0", "i64 8,1"], {}, r"axis 1 of Logits f32\[8,0\] holds the classes: .* 1 or more, found 0"),
        (class_loss.CrossEntropy, ["i64 8,3", "i64 8,1"], {}, "needs a float X, got i64.8,3."),
        (class_loss.KldivLoss, ["f32 8,1", "f32 8,1"], {"reduction": "avg"}, "reduction must be none, mean, batchmean or sum"),
        (class_loss.LabelSmooth, ["f32 8,3", None], {"epsilon": 2.0}, "epsilon must be between 0 and 1"),
    ],
)
def test_operands_that_do_not_fit_are_refused(op, types, attrs, message):
    full = {"f32": "float32", "i64": "int64"}
    args = [t and TensorType(full[t.split()[0]], tuple(map(int, t.split()[1].split(",")))) for t in types]
    with pytest.raises(ProgramError, match=message):
        op.infer(*args, **op.complete_attrs(attrs))
