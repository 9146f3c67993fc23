"""Accuracy counts the rows whose label is among the best."""

import numpy as np
import pytest

from fluidx.ir import ProgramError, TensorType, opdef
from fluidx.ops.loss import metric  # noqa: F401


@pytest.mark.parametrize("label", [[[1], [0], [2], [9]], [1, 0, 2, 9]])
def test_a_row_counts_when_its_label_is_among_the_top_k(label, run_op):
    indices = np.array([[1, 2], [1, 0], [0, 1], [3, 4]])
    accuracy, correct, total = run_op("accuracy", np.zeros((4, 2), "float32"), indices, np.array(label))
    assert (accuracy.tolist(), correct.tolist(), total.tolist()) == ([0.5], [2], [4])
    assert (accuracy.dtype, correct.dtype, total.dtype) == ("float32", "int32", "int32")


def test_accuracy_without_rows_is_0(run_op):
    none = np.zeros((0, 1), "int64")
    assert [a.tolist() for a in run_op("accuracy", none.astype("float32"), none, none)] == [[0], [0], [0]]


def test_different_numbers_of_rows_are_refused():
    v, i, label = TensorType("float32", (8, 1)), TensorType("int64", (8, 1)), TensorType("int64", (7, 1))
    with pytest.raises(ProgramError, match="op accuracy: the rows of Indices and of Label must be equal, found 8 and 7"):
        opdef("accuracy").infer(v, i, label)
