"""Slices, gathers, scatters and pads: Python's bounds, ids out of range, repeated ids."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidx.ir import ExecutionError, ProgramError, TensorType, opdef
from fluidx.ops.data import indexing, slicing  # noqa: F401
from fluidx.ops.shared import arrays


def f32(*shape):
    return TensorType("float32", shape)


@given(st.integers(0, 7), st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([-3, -2, -1, 1, 2, 3]))
def test_slices_count_as_python_does(n, start, end, step):
    x = np.arange(n, dtype="float32")
    attrs = {"axes": (0,), "starts": (start,), "ends": (end,), "strides": (step,)}
    want = x[start:end:step]
    assert opdef("strided_slice").infer(f32(n), **attrs) == f32(len(want))
    assert opdef("strided_slice").storage.view(x, **attrs).tolist() == want.tolist()
    g = np.arange(1, len(want) + 1, dtype="float32")
    dx = np.full(n, 9, "float32")
    opdef("slice_grad").kernel(np, x, g, out=dx, **attrs)
    assert dx[start:end:step].tolist() == g.tolist() and dx.sum() == g.sum()


def test_a_slice_of_an_open_axis_stays_open(run_op):
    attrs = {"axes": (0, 1), "starts": (0, 1), "ends": (2**31 - 1, 3), "decrease_axis": ()}
    assert opdef("slice").infer(f32(-1, 4), **attrs) == f32(-1, 2)
    assert run_op("slice", np.arange(6).reshape(3, 2), axes=(0,), starts=(-1,), ends=(2**31 - 1,), decrease_axis=(0,)).tolist() == [4, 5]
    with pytest.raises(ProgramError, match="cut to size 2; to remove it, size 1 is needed"):
        opdef("slice").infer(f32(3, 2), axes=(0,), starts=(0,), ends=(2,), decrease_axis=(0,))


def test_ids_out_of_range_are_named(run_op):
    x = np.zeros((4, 2), "float32")
    for ids, bad in ((np.array([0, 4]), 4), (np.array([1, -1], "int32"), -1)):
        with pytest.raises(ExecutionError) as error:
            run_op("gather", x, ids)
        assert str(error.value) == f"op gather: id {bad} is out of range; X has 4 rows, ids go from 0 to 3"
    with pytest.raises(ExecutionError, match="op index_select: id 2 is out of range; axis 1 of X has 2 rows"):
        run_op("index_select", x, np.array([2]), dim=1)
    with pytest.raises(ExecutionError, match="op gather_nd: id 2 is out of range; axis 1 of X has 2 rows"):
        run_op("gather_nd", x, np.array([[3, 2]]))
    with pytest.raises(ExecutionError, match="op scatter: id 9"):
        run_op("scatter", x, np.array([9]), x[:1])


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.sampled_from(["float32", "float64", "float16"]), st.integers(0, 2**31))
def test_add_rows_adds_as_a_loop_does(n, rows, width, dtype, seed):
    rng = np.random.default_rng(seed)
    ids, values = rng.integers(0, rows, n), rng.standard_normal((n, width)).astype(dtype)
    table, want = np.ones((rows, width), dtype), np.ones((rows, width), dtype)
    for i, v in zip(ids, values):
        want[i] += v
    arrays.add_rows(np, table, ids.astype("int32"), values)
    assert table.tolist() == want.tolist()  # bitwise equal: ids are added in order


def test_add_rows_in_blocks_is_add_rows(monkeypatch):
    ids, values = np.array([2, 0, 2, 1, 2]), np.arange(20, dtype="float32").reshape(5, 4)
    want = np.zeros((3, 4), "float32")
    np.add.at(want, ids, values)
    for block in (1, 4, 7, 8):
        monkeypatch.setattr(arrays, "_BLOCK", block)
        table = np.zeros((3, 4), "float32")
        arrays.add_rows(np, table, ids, np.asfortranarray(values))
        assert table.tolist() == want.tolist()


def test_scatter_keeps_the_last_update_or_adds_them_all(run_op):
    x, ids, updates = np.full((3, 1), 9, "float32"), np.array([1, 1]), np.array([[2], [3]], "float32")
    assert run_op("scatter", x, ids, updates).tolist() == [[9], [3], [9]]
    assert run_op("scatter", x, ids, updates, overwrite=False).tolist() == [[9], [5], [9]]
    g = np.array([[1], [2], [4]], "float32")
    dx, du = run_op("scatter_grad", ids, g)
    assert dx.tolist() == [[1], [0], [4]] and du.tolist() == [[0], [2]]  # the first update was replaced
    assert run_op("scatter_grad", ids, g, overwrite=False)[1].tolist() == [[2], [2]]


def test_gather_nd_reads_elements_and_slices(run_op):
    x = np.arange(6, dtype="float32").reshape(2, 3)
    assert run_op("gather_nd", x, np.array([[1, 2], [0, 0]])).tolist() == [5, 0]
    assert run_op("gather_nd", x, np.array([[1], [1]])).tolist() == [[3, 4, 5]] * 2
    assert run_op("gather_nd_grad", x, np.array([[1], [1]]), np.ones((2, 3), "float32")).tolist() == [[0, 0, 0], [2, 2, 2]]


@pytest.mark.parametrize("mode", ["reflect", "edge", "constant"])
@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
def test_pad2d_pads_as_numpy_does(mode, data_format, run_op):
    x = np.random.default_rng(1).integers(-9, 9, (2, 4, 5, 3)).astype("float32")
    borders = [(0, 0), (0, 0), (1, 2), (3, 0)] if data_format == "NCHW" else [(0, 0), (1, 2), (3, 0), (0, 0)]
    if data_format == "NCHW":
        x = x.transpose(0, 3, 1, 2)
    extra = {"constant_values": 7} if mode == "constant" else {}
    got = run_op("pad2d", x, paddings=(1, 2, 3, 0), mode=mode, pad_value=7.0, data_format=data_format)
    assert got.tolist() == np.pad(x, borders, mode=mode, **extra).tolist()


def test_reflection_beyond_the_size_is_refused():
    with pytest.raises(ProgramError, match="reflecting 3 pixels needs more than that along axis 2, found 3"):
        opdef("pad2d").infer(f32(1, 1, 3, 3), paddings=(3, 0, 0, 0), mode="reflect", pad_value=0.0, data_format="NCHW")


def test_where_broadcasts(run_op):
    c = np.array([[True], [False]])
    assert run_op("where", c, np.array([1, 2], "float32"), np.array([9], "float32")).tolist() == [[1, 2], [9, 9]]
    assert opdef("where").infer(TensorType("bool", (-1, 1)), f32(4), f32(-1, 4)) == f32(-1, 4)
