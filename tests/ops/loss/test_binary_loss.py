"""Losses of yes-or-no labels against numbers worked by hand."""

import numpy as np

from fluidx.ops.loss import binary_loss


def f32(*values):
    return np.array(values, "float32")


def test_losses_of_two_labels_worked_by_hand(run_bound):
    x, y = f32([3], [0], [-1]), f32([1], [0.5], [-1])
    assert run_bound(binary_loss.HingeLoss, x, f32([1], [0], [1])).tolist() == [[0], [1], [2]]
    assert run_bound(binary_loss.MarginRankLoss, x, y, f32([1], [1], [-1]), margin=0.5)[0].tolist() == [[0], [1], [0.5]]
    np.testing.assert_allclose(run_bound(binary_loss.LogLoss, f32([0.5]), f32([1]), epsilon=0.0), [[np.log(2)]], rtol=1e-6)


def test_sigmoid_cross_entropy_leaves_ignored_elements_out_of_the_count(run_bound):
    x, label = f32([0, 5, 0]), f32([1, -1, 0])
    op = binary_loss.SigmoidCrossEntropyWithLogits
    np.testing.assert_allclose(run_bound(op, x, label, ignore_index=-1), [[np.log(2), 0, np.log(2)]], rtol=1e-6)
    np.testing.assert_allclose(run_bound(op, x, label, ignore_index=-1, normalize=True), [[np.log(2) / 2, 0, np.log(2) / 2]], rtol=1e-6)
    assert run_bound(op, f32([1e4, -1e4]), f32([1, 0])).tolist() == [[0, 0]]


def test_bce_clips_its_logarithms_at_minus_100(run_bound):
    np.testing.assert_allclose(run_bound(binary_loss.BceLoss, f32([0, 1, 0.5]), f32([1, 0, 1])), [[100, 100, np.log(2)]], rtol=1e-5)
