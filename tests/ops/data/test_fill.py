"""Constants, ranges and one-hot rows: exact values, sizes from a batch, and refused arguments."""

import numpy as np
import pytest

from fluidx.ir import ExecutionError, ProgramError, TensorType, opdef
from fluidx.ops.data import fill  # noqa: F401


def infer(name, *types, **attrs):
    return opdef(name).infer(*types, **opdef(name).complete_attrs(attrs))


def test_the_batch_comes_from_another_variable(run_op):
    x = np.zeros((5, 2), "float32")
    assert run_op("fill_constant_batch_size_like", x, shape=(-1, 3), value=2.0).tolist() == [[2] * 3] * 5
    assert infer("fill_constant_batch_size_like", TensorType("float32", (-1, 2)), shape=(7, 3)) == TensorType("float32", (-1, 3))
    with pytest.raises(ProgramError, match=r"shape \[-1, 3\] must hold sizes of 0 or more"):
        infer("fill_constant", shape=(-1, 3))


def test_values_keep_their_digits(run_op):
    assert run_op("assign_value", shape=(1,), dtype="int64", values=(2**53 + 1,)).tolist() == [2**53 + 1]
    with pytest.raises(ProgramError, match=r"op assign_value: shape \[2\] holds 2 values, found 3"):
        infer("assign_value", shape=(2,), values=(1, 2, 3))


def test_integer_dtypes_round_the_value_towards_zero(run_op):
    assert run_op("fill_constant", shape=(2,), dtype="uint8", value=255.5).tolist() == [255, 255]
    assert run_op("fill_constant", shape=(2,), dtype="uint8", value=-0.5).tolist() == [0, 0]
    for value in (-1.0, 256.0, float("inf"), float("nan")):
        for name, types in (("fill_constant", ()), ("fill_constant_batch_size_like", (TensorType("float32", (2,)),))):
            with pytest.raises(ProgramError, match=f"op {name}: value is {value}, but uint8 holds integers from 0 to 255"):
                infer(name, *types, shape=(2,), dtype="uint8", value=value)
        with pytest.raises(ProgramError, match=f"op fill_any_like: value is {value}, but uint8 holds"):
            infer("fill_any_like", TensorType("uint8", (2,)), value=value)


@pytest.mark.parametrize("start, end, step", [(0, 5, 1), (3, -2, -2), (0, 1, 0.25), (1, 0, 1), (0, 1, 0.3)])
def test_range_stops_before_its_end(start, end, step, run_op):
    assert run_op("range", start=start, end=end, step=step, dtype="float64").tolist() == pytest.approx(np.arange(start, end, step).tolist())


def test_one_hot_rows(run_op):
    assert run_op("one_hot", np.array([[2], [0]]), depth=3).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert run_op("one_hot_v2", np.array([[2, 0]]), depth=3).tolist() == [[[0, 0, 1], [1, 0, 0]]]
    assert run_op("one_hot_v2", np.array([3, -1, 1]), depth=3, allow_out_of_range=True).tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]
    with pytest.raises(ExecutionError, match="op one_hot: id 3 is out of range; the one-hot depth has 3 rows"):
        run_op("one_hot", np.array([[3]]), depth=3)
    with pytest.raises(ProgramError, match="one_hot_v2 takes ids without it"):
        infer("one_hot", TensorType("int64", (-1, 4)), depth=3)


def test_the_gradient_of_diag_is_the_diagonal(run_op):
    m = run_op("diag", np.array([1, 2], "float32"))
    assert m.tolist() == [[1, 0], [0, 2]]
    assert run_op("diag_grad", np.array([[3, 4], [5, 6]], "float32")).tolist() == [3, 6]
    assert run_op("eye", num_rows=2, num_columns=3, dtype="int32").tolist() == [[1, 0, 0], [0, 1, 0]]
    assert run_op("linspace", start=0, stop=1, num=3).tolist() == [0, 0.5, 1]
