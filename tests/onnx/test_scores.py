"""Scores of predictions, against the definitions, in batches."""

import numpy as np
import pytest

pytest.importorskip("onnx")

from fluidx.onnx.losses import Loss
from fluidx.training.scores import Score

CLASSES = Loss("softmax_with_cross_entropy")


def score(name, loss, output, label, parts=2):
    found = Score(name, loss)
    for o, y in zip(np.array_split(np.float32(output), parts), np.array_split(np.asarray(label), parts)):
        found.update(o, y)
    return found.eval()


def test_scores_of_classes():
    """Of class 0: one found of two, both predictions of it right or not (1 of 2); of class 1: 1 of 1, and 1 of 2; of class 2: 0 of 1."""
    found, label = np.eye(3)[[0, 0, 1, 1]], [[0], [2], [1], [0]]
    assert score("accuracy", CLASSES, found, label) == 2 / 4
    assert score("precision", CLASSES, found, label) == pytest.approx((1 / 2 + 1 / 2 + 0) / 3)
    assert score("recall", CLASSES, found, label) == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert score("f1", CLASSES, found, label) == pytest.approx((1 / 2 + 2 / 3 + 0) / 3)


def test_batches_of_different_sizes_weigh_by_their_examples():
    found = Score("accuracy", CLASSES)
    found.update(np.eye(2)[[0]], np.array([[1]]))
    found.update(np.eye(2)[[0, 1, 1]], np.array([[0], [1], [1]]))
    assert found.eval() == 3 / 4


def test_positions_that_are_ignored_do_not_count():
    found = np.eye(3)[[[0, 1, 2], [2, 2, 0]]]
    assert score("accuracy", Loss("token_classification"), found, [[0, -100, 1], [2, -100, -100]]) == 2 / 3
    assert score("accuracy", Loss("causal_language_model"), found, [[9, 0, 2], [9, 2, -100]]) == 2 / 3  # of labels 0, 2 and 2
    assert score("accuracy", Loss("segmentation"), np.moveaxis(found, -1, 1), [[0, 0, 0], [-100, 0, 0]]) == 2 / 5


def test_auc_of_two_classes_and_of_one_output():
    label, rise = np.array([[1], [0], [0], [1]]), np.array([3.0, 1, -1, 0])  # of 4 pairs the positive one is higher in 3
    assert score("auc", CLASSES, np.stack([0 * rise, rise], 1), label) == 3 / 4
    assert score("auc", Loss("sigmoid_cross_entropy_with_logits"), rise[:, None], label) == 3 / 4
    with pytest.raises(ValueError, match="auc is for two classes, and the output of the model has shape"):
        score("auc", CLASSES, np.eye(3), [[0], [1], [2]])


def test_yes_and_no():
    assert score("accuracy", Loss("sigmoid_cross_entropy_with_logits"), [[2, -1], [-3, 4]], [[1.0, 1.0], [0.0, 1.0]]) == 3 / 4


def test_scores_of_numbers():
    loss, found, label = Loss("square_error_cost"), [[1.0], [2], [6]], [[0.0], [2], [4]]
    assert score("mae", loss, found, label) == 1
    assert score("mse", loss, found, label) == pytest.approx(5 / 3)
    assert score("rmse", loss, found, label) == pytest.approx((5 / 3) ** 0.5)
    assert score("r2", loss, found, label) == pytest.approx(1 - 5 / 8)  # the labels differ from their mean 2 by -2, 0 and 2


@pytest.mark.parametrize("parts", [1, 3, 100])
@pytest.mark.parametrize("shift", [0, 1.7e9])
def test_r2_of_numbers_that_are_large_beside_their_spread(parts, shift):
    """0 to 99 differ from their mean by 100 (100² - 1) / 12 in sum of squares. Each error is 50."""
    found, label = Score("r2", Loss("square_error_cost")), shift + np.arange(100.0)
    for y in np.array_split(label, parts):
        found.update(y + 50, y)
    assert found.eval() == pytest.approx(1 - 100 * 50**2 / (100 * (100**2 - 1) / 12), rel=1e-9)


def test_r2_of_labels_that_are_all_equal():
    found = Score("r2", Loss("square_error_cost"))
    for y in ([0.1, 0.1, 0.1], [], [0.1] * 7):
        found.update(np.ones(len(y)), np.array(y))
    assert found.eval() == 0
