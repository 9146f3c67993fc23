"""Reductions, searches, running and summed products, by the words of the ONNX specification."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from fluidx.ir import ProgramError  # noqa: E402
from fluidx.onnx.backend import run_node  # noqa: E402
from tests.onnx.one_node import check_gradient, ran  # noqa: E402


def ints(*values: object) -> np.ndarray:
    return np.array(values, np.int64)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


X = np.float32([[[1, 2], [3, 4]], [[5, 7], [6, 8]]])


def test_axes_and_what_is_left_of_them():
    assert ran("ReduceSum", [X]).tolist() == [[[36]]]
    assert ran("ReduceSum", [X, ints(-1, 0)], keepdims=0).tolist() == [15, 21]
    total = ran("ReduceSum", [X], keepdims=0)
    assert total.shape == () and total == 36
    assert ran("ReduceMax", [X, ints(1)]).tolist() == [[[3, 4]], [[6, 8]]]


def test_no_axes_are_all_or_none():
    none = np.zeros(0, np.int64)
    assert ran("ReduceProd", [X[0], none]).tolist() == [[24]]
    assert ran("ReduceProd", [X[0], none], noop_with_empty_axes=1).tolist() == X[0].tolist()
    assert ran("ReduceLogSumExp", [X[0], none], noop_with_empty_axes=1).tolist() == X[0].tolist()
    assert ran("ReduceSum", [np.float32(3)]) == 3


@pytest.mark.parametrize("op, dtype, expected", [
    ("ReduceSum", "float32", 0), ("ReduceProd", "int64", 1), ("ReduceMax", "float32", -np.inf), ("ReduceMin", "float64", np.inf),
    ("ReduceMax", "int32", -(2**31)), ("ReduceMin", "uint8", 255), ("ReduceMax", "bool", False), ("ReduceMin", "bool", True),
    ("ReduceLogSumExp", "float32", -np.inf),
])  # fmt: skip
def test_empty_sets(op, dtype, expected):
    y = ran(op, [np.zeros((2, 0, 3), dtype), ints(1)], keepdims=0)
    assert y.dtype == dtype and y.tolist() == [[expected] * 3] * 2


def test_whole_numbers_and_truth():
    assert ran("ReduceL2", [ints(3, -4)]).tolist() == [5] and ran("ReduceL1", [ints(3, -4)]).tolist() == [7]
    assert ran("ReduceL2", [np.array([3, 4], np.uint32)]).dtype == np.uint32
    assert ran("ReduceMean", [ints([-3, -4], [3, 4]), ints(1)], keepdims=0).tolist() == [-3, 3]
    assert ran("ReduceMax", [np.array([[True, False], [False, False]]), ints(1)], keepdims=0).tolist() == [True, False]


def test_log_sum_exp_does_not_overflow():
    assert ran("ReduceLogSumExp", [np.float32([1000, 1000])], keepdims=0) == pytest.approx(1000 + np.log(2))


def test_which_of_equal_ones():
    x = np.float32([[2, 2, 1], [0, 3, 3]])
    assert ran("ArgMax", [x], axis=1, keepdims=0).tolist() == [0, 1]
    assert ran("ArgMax", [x], axis=1, keepdims=0, select_last_index=1).tolist() == [1, 2]
    assert ran("ArgMin", [x], axis=0, select_last_index=1).tolist() == [[1, 0, 0]]
    assert ran("Hardmax", [x]).tolist() == [[1, 0, 0], [0, 1, 0]]


def test_top_k_of_any_axis_and_end():
    values, at = ran("TopK", [np.float32([[3, 1], [3, 5], [2, 0]]), ints(2)], outputs=2, axis=0)
    assert values.tolist() == [[3, 5], [3, 1]] and at.tolist() == [[0, 1], [1, 0]]
    values, at = ran("TopK", [ints(3, 1, 1, 2), ints(2)], outputs=2, largest=0)
    assert values.tolist() == [1, 1] and at.tolist() == [1, 2]
    values, at = ran("TopK", [np.float32([3, 1]), ints(0)], outputs=2)
    assert values.shape == at.shape == (0,)
    for k, largest in itertools.product((-1, 3), (0, 1)):
        with pytest.raises(ProgramError, match=rf"op top_k: (k is {k}|attribute k must be 0 or more, found {k})"):
            ran("TopK", [np.float32([3, 1]), ints(k)], outputs=2, largest=largest)


def test_one_hot_counts_from_the_end_and_leaves_out_what_is_beyond():
    y = ran("OneHot", [ints(0, -1, 3, -4), np.array(3), np.float32([2, 5])], known=(1,))
    assert y.tolist() == [[5, 2, 2], [2, 2, 5], [2, 2, 2], [2, 2, 2]]
    assert ran("OneHot", [np.float32([1]), np.array(2), np.array([False, True])], known=(1,), axis=0).tolist() == [[False], [True]]


def test_unique_rows_in_order_of_value_or_of_place():
    x = np.float32([[2, 3], [1, 0], [2, 3]])
    for ordered, rows, first, inverse in ((1, [[1, 0], [2, 3]], [1, 0], [1, 0, 1]), (0, [[2, 3], [1, 0]], [0, 1], [0, 1, 0])):
        y, at, back, counts = ran("Unique", [x], outputs=4, axis=0, sorted=ordered)
        assert (y.tolist(), at.tolist(), back.tolist()) == (rows, first, inverse) and sorted(counts.tolist()) == [1, 2]


@pytest.mark.parametrize("exclusive, reverse, expected", [(0, 0, [2, 0, 0]), (1, 0, [1, 2, 0]), (0, 1, [0, 0, 3]), (1, 1, [0, 3, 1])])
def test_running_products(exclusive, reverse, expected):
    node = onnx.helper.make_node("CumProd", ["x", "axis"], ["y"], exclusive=exclusive, reverse=reverse)
    assert run_node(node, [np.float32([2, 0, 3]), np.array(0)])[0].tolist() == expected


@pytest.mark.parametrize("equation, shapes", [
    ("ij,jk", [(2, 3), (3, 4)]), ("...ij,...kj->...ik", [(5, 2, 3), (1, 4, 3)]), ("...ij,jk", [(2, 5, 2, 3), (3, 4)]), ("b a", [(2, 3)]),
    ("iij->j", [(3, 3, 2)]), ("ii", [(3, 3)]), ("iji->ij", [(2, 3, 2)]), ("i,i,j->", [(3,), (3,), (2,)]), ("bA,bB->AB", [(2, 3), (2, 4)]),
])  # fmt: skip
def test_einsum_as_numpy_does_it(equation, shapes):
    xs = [noise(*s) for s in shapes]
    np.testing.assert_allclose(ran("Einsum", xs, equation=equation), np.einsum(equation, *xs), rtol=1e-12, atol=1e-12)  # float64
    check_gradient("Einsum", xs, wrt=tuple(range(len(xs))), equation=equation)


@pytest.mark.parametrize("op, inputs, attrs", [
    ("ReduceSum", [noise(2, 3, 2), ints(0, -1)], {}), ("ReduceMean", [noise(2, 3)], {"keepdims": 0}),
    ("ReduceMax", [noise(2, 3), ints(1)], {}), ("ReduceProd", [noise(2, 3), ints(0)], {}), ("ReduceLogSumExp", [noise(2, 3)], {}),
    ("ReduceL1", [noise(2, 3), ints(1)], {}), ("ReduceL2", [noise(2, 3), ints(1)], {}), ("ReduceLogSum", [noise(2, 3) ** 2 + 0.1], {}),
    ("ReduceSumSquare", [noise(2, 3), ints(0)], {}), ("CumSum", [noise(3, 2), np.array(0)], {"exclusive": 1}),
    ("CumProd", [noise(3, 2), np.array(0)], {"reverse": 1}), ("Det", [noise(2, 3, 3)], {}),
])  # fmt: skip
def test_gradients(op, inputs, attrs):
    check_gradient(op, inputs, known=tuple(range(1, len(inputs))), **attrs)


def test_gradients_go_back_to_the_smallest():
    check_gradient("TopK", [noise(3, 4), ints(2)], outputs=1, known=(1,), axis=0, largest=0)


def test_a_singular_matrix_has_a_gradient():
    check_gradient("Det", [np.array([[1.0, 2.0, 0.0], [2.0, 4.0, 1.0], [3.0, 6.0, 5.0]])])
