"""Tables: padding, repeated ids, ids out of range, and how ids and tables may be sharded."""

import numpy as np
import pytest

from fluidx.ir import ExecutionError, ProgramError, TensorType, opdef
from fluidx.ops.nn import embedding  # noqa: F401

W = np.arange(8, dtype="float32").reshape(4, 2)


@pytest.mark.parametrize("name, ids", [("lookup_table", [[3], [0], [3]]), ("lookup_table_v2", [3, 0, 3])])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_rows_and_their_gradient(name, ids, dtype, run_op):
    ids = np.array(ids, dtype)
    assert run_op(name, W, ids).tolist() == [[6, 7], [0, 1], [6, 7]]
    g = np.array([[1, 2], [10, 20], [100, 200]], "float32")
    assert run_op("lookup_table_grad", W, ids, g).tolist() == [[10, 20], [0, 0], [0, 0], [101, 202]]


def test_the_padding_row_reads_zero_and_learns_nothing(run_op):
    ids = np.array([[3], [0]])
    assert run_op("lookup_table", W, ids, padding_idx=3).tolist() == [[0, 0], [0, 1]]
    assert run_op("lookup_table_grad", W, ids, np.ones((2, 2), "float32"), padding_idx=3).tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("bad", [4, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_an_id_out_of_range_is_named_with_the_vocabulary(bad, dtype, run_op):
    with pytest.raises(ExecutionError) as error:
        run_op("lookup_table", W, np.array([[1], [bad]], dtype))
    assert str(error.value) == f"op lookup_table: id {bad} is out of range; table W has 4 rows, ids go from 0 to 3"


def test_an_empty_list_of_ids(run_op):
    ids = np.zeros((0, 1), "int64")
    assert run_op("lookup_table", W, ids).shape == (0, 2)
    assert not run_op("lookup_table_grad", W, ids, np.zeros((0, 2), "float32")).any()


def test_types():
    w = TensorType("float32", (4, 2))
    assert opdef("lookup_table").infer(w, TensorType("int64", (-1, 7, 1)), padding_idx=-1) == TensorType("float32", (-1, 7, 2))
    assert opdef("lookup_table_v2").infer(w, TensorType("int64", (-1, 7)), padding_idx=-1) == TensorType("float32", (-1, 7, 2))
    with pytest.raises(ProgramError, match=r"last axis of Ids must have size 1, found i64\[8,7\]; lookup_table_v2 takes ids without it"):
        opdef("lookup_table").infer(w, TensorType("int64", (8, 7)), padding_idx=-1)
    with pytest.raises(ProgramError, match="Ids must be int32 or int64, found float32"):
        opdef("lookup_table_v2").infer(w, TensorType("float32", (8,)), padding_idx=-1)
    with pytest.raises(ProgramError, match=r"padding_idx must be -1 \(none\) or an id from 0 to 3, found 4"):
        opdef("lookup_table_v2").infer(w, TensorType("int64", (8,)), padding_idx=4)
