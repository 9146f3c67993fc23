"""Ids along an axis, and rows combined with others: positions by hand, ids out of range, repeated ids."""

import numpy as np
import pytest

from fluidx.ir import ExecutionError, ProgramError, TensorType, opdef


def test_take_along_axis_keeps_the_positions_in_all_other_axes(run_op):
    x = np.float32([[1, 2, 3], [4, 5, 6]])
    assert run_op("take_along_axis", x, np.array([[2, 0], [1, 1]]), axis=1).tolist() == [[3, 1], [5, 5]]
    assert run_op("take_along_axis", x, np.array([[1, 0, 1]], "int32"), axis=0).tolist() == [[4, 2, 6]]


def test_take_along_axis_checks_its_ids(run_op):
    with pytest.raises(ExecutionError, match="op take_along_axis: id -1 is out of range; axis 1 of X has 2 rows"):
        run_op("take_along_axis", np.zeros((1, 2), "float32"), np.array([[-1]]), axis=1)
    with pytest.raises(ProgramError, match="op take_along_axis: axis 0 of X and Index must be equal, found 3 and 2"):
        opdef("take_along_axis").infer(TensorType("float32", (3, 4)), TensorType("int64", (2, 4)), axis=1)


def test_the_gradient_adds_for_elements_read_twice(run_op):
    g = run_op("take_along_axis_grad", np.zeros((2, 3), "float32"), np.array([[2, 2], [0, 1]]), np.float32([[1, 2], [3, 4]]), axis=1)
    assert g.tolist() == [[0, 0, 3], [3, 4, 0]]


@pytest.mark.parametrize("op, expected", [("prod", [[2, 0], [90, 4]]), ("max", [[2, 1], [6, 4]]), ("min", [[1, 0], [3, 1]])])
def test_scatter_fold_combines_all_updates_of_a_row(op, expected, run_op):
    x, updates = np.float32([[2, 1], [3, 1]]), np.float32([[5, 4], [1, 0], [6, 1]])
    made = run_op("scatter_fold", x, np.array([1, 0, 1]), updates, op=op)
    assert made.tolist() == expected


def test_scatter_fold_refuses_an_unknown_op():
    x, ids = TensorType("float32", (3, 4)), TensorType("int64", (2,))
    with pytest.raises(ProgramError, match="op scatter_fold: op must be one of prod, max, min, found 'sum'"):
        opdef("scatter_fold").infer(x, ids, TensorType("float32", (2, 4)), op="sum")


@pytest.mark.parametrize("x, updates, dx, du", [
    ([2], [3, 5], [15], [10, 6]),  # the product of all others
    ([0], [3, 5], [15], [0, 0]), ([2], [0, 5], [0], [10, 0]), ([0], [0, 5], [0], [0, 0]),
])  # fmt: skip
def test_the_gradient_of_a_product_is_exact_with_zeros(x, updates, dx, du, run_op):
    x, updates, ids = np.float32(x), np.float32(updates), np.array([0, 0])
    found = run_op("scatter_fold_grad", x, ids, updates, np.float32([0]), np.float32([1]), op="prod")
    assert [f.tolist() for f in found] == [dx, du]
