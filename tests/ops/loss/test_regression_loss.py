"""Losses of a number against a number, against numbers worked by hand."""

import numpy as np
import pytest

from fluidx.ir import ProgramError, TensorType
from fluidx.ops.loss import regression_loss


def f32(*values):
    return np.array(values, "float32")


def test_losses_of_numbers_worked_by_hand(run_bound):
    x, y = f32([3], [0], [-1]), f32([1], [0.5], [-1])
    assert run_bound(regression_loss.SquareErrorCost, x, y).tolist() == [[4], [0.25], [0]]
    assert run_bound(regression_loss.HuberLoss, x, y, delta=1.0)[1].tolist() == [[1.5], [0.125], [0]]
    assert run_bound(regression_loss.SmoothL1Loss, x, y, None, None)[1].tolist() == [[1.5], [0.125], [0]]


@pytest.mark.parametrize(
    "op, types, attrs, message",
    [
        (regression_loss.SquareErrorCost, ["f32 8,1", "f32 8"], {}, "Y must have the shape of X f32.8,1., got f32.8."),
        (regression_loss.HuberLoss, ["f32 8,1", "f32 8,1"], {"delta": 0.0}, "delta must be positive"),
    ],
)
def test_operands_that_do_not_fit_are_refused(op, types, attrs, message):
    full = {"f32": "float32", "i64": "int64"}
    args = [t and TensorType(full[t.split()[0]], tuple(map(int, t.split()[1].split(",")))) for t in types]
    with pytest.raises(ProgramError, match=message):
        op.infer(*args, **op.complete_attrs(attrs))
