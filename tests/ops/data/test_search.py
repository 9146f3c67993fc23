"""Sorting and selection: the first of equal elements is taken, and gradients go back to the positions of the elements."""

import numpy as np
import pytest

from fluidx.ir import ProgramError, TensorType, opdef
from fluidx.ops.data import search  # noqa: F401


def f32(*shape):
    return TensorType("float32", shape)


def test_top_k_takes_the_first_of_equal_elements(run_op):
    values, ids = run_op("top_k", np.array([[1, 5, 5, 0], [2, 2, 2, 2]], "float32"), k=3)
    assert values.tolist() == [[5, 5, 1], [2, 2, 2]] and ids.tolist() == [[1, 2, 0], [0, 1, 2]]
    values, ids = run_op("top_k", np.array([[1, 5, 5, 0], [2, 2, 2, 2]], "float32"))
    assert values.tolist() == [[5], [2]] and ids.tolist() == [[1], [0]]
    with pytest.raises(ProgramError, match=r"op top_k: k is 5; axis 1 of X f32\[-1,4\] has 4 elements"):
        opdef("top_k").infer(f32(-1, 4), k=5, axis=-1, largest=True)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "float32"])
def test_descending_order_reaches_the_ends_of_every_dtype(dtype, run_op):
    info = np.finfo(dtype) if dtype == "float32" else np.iinfo(dtype)
    x = np.array([info.min, 1, info.max, 1, info.min], dtype)
    values, ids = run_op("argsort", x, descending=True)
    assert ids.tolist() == [2, 1, 3, 0, 4] and values.tolist() == x[[2, 1, 3, 0, 4]].tolist()


def test_gradients_return_to_where_the_elements_were(run_op):
    x = np.zeros((2, 3), "float32")
    g = np.array([[1, 2], [3, 4]], "float32")
    assert run_op("argsort_grad", x, np.array([[2, 0], [1, 2]]), g).tolist() == [[2, 0, 1], [0, 3, 4]]


@pytest.mark.parametrize(
    "attrs, want",
    [({}, [1, 3, 6]), ({"exclusive": True}, [0, 1, 3]), ({"reverse": True}, [6, 5, 3]), ({"exclusive": True, "reverse": True}, [5, 3, 0])],
)
def test_running_sums(attrs, want, run_op):
    assert run_op("cumsum", np.array([1, 2, 3], "float32"), **attrs).tolist() == want
    assert run_op("cumsum", np.array([[1], [2], [3]], "int32"), flatten=True, **attrs).tolist() == want
    assert run_op("cumsum", np.array([[1], [2], [3]], "float64"), axis=0, **attrs).ravel().tolist() == want


def test_arg_max_and_arg_min(run_op):
    x = np.array([[1, 3, 3], [0, 0, -1]], "float32")
    assert run_op("arg_max", x).tolist() == [1, 0]
    assert run_op("arg_min", x, axis=0, keepdims=True, dtype="int32").tolist() == [[1, 1, 1]]
    with pytest.raises(ProgramError, match=r"op arg_max: axis 0 of f32\[0\] is empty"):
        opdef("arg_max").infer(f32(0), axis=0, keepdims=False, dtype="int64")
