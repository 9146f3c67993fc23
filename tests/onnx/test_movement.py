"""Shapes, movement and positions, by the words of the ONNX specification; values that only the host holds move like all others."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

import ml_dtypes  # noqa: E402

import fluidx as fx  # noqa: E402
from fluidx.onnx import OnnxError  # noqa: E402
from fluidx.onnx.backend import run_node  # noqa: E402
from fluidx.onnx.importer import Importer  # noqa: E402
from tests.onnx.one_node import by_runtime, check_gradient, model, ran  # noqa: E402


def ints(*values: object) -> np.ndarray:
    return np.array(values, np.int64)


def counting(*shape: int, dtype: object = np.float32) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


# -- shapes ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old, target, allowzero, new", [
    ((2, 3, 4), (0, -1), 0, (2, 12)), ((2, 3, 4), (4, 0, -1), 0, (4, 3, 2)), ((0, 3), (0, 3), 0, (0, 3)), ((0, 3), (3, 0), 1, (3, 0)),
    ((0, 3), (-1, 7), 0, (0, 7)), ((1, 1), (), 0, ()), ((), (-1,), 0, (1,)),
])  # fmt: skip
def test_reshape_copies_works_out_and_takes_zeros(old, target, allowzero, new):
    x = counting(*old)
    y = ran("Reshape", [x, np.array(target, np.int64)], allowzero=allowzero)
    assert y.shape == new and y.ravel().tolist() == x.ravel().tolist()


def test_new_axes_are_counted_in_the_result_in_any_order():
    assert ran("Unsqueeze", [counting(2, 3), ints(-1, 0)]).shape == (1, 2, 3, 1)
    assert ran("Squeeze", [counting(1, 2, 1), ints(-1)]).shape == (1, 2)
    assert ran("Squeeze", [counting(1, 2, 1)]).shape == (2,)


# -- cuts and borders -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start, end, step, expected", [
    (3, -(2**63), -1, [3, 2, 1, 0]), (2**63 - 1, 0, -2, [4, 2]), (-9, -9, -1, [0]), (-9, 9, 2, [0, 2, 4]), (3, 1, 1, []),
])  # fmt: skip
def test_slice_goes_backwards_and_over_the_ends(start, end, step, expected):
    for known in ((), (1, 2, 3, 4)):
        y = ran("Slice", [counting(5), ints(start), ints(end), ints(0), ints(step)], known=known)
        assert y.tolist() == expected


def test_the_last_part_of_a_split_may_be_smaller():
    parts = ran("Split", [counting(7, 2)], outputs=3, num_outputs=3)
    assert [p.shape for p in parts] == [(3, 2), (3, 2), (1, 2)]


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_borders_of_chosen_axes_as_numpy_makes_them(mode):
    x = counting(3, 4)
    y = ran("Pad", [x, ints(2, 1), None, ints(-1)], mode=mode)
    assert y.tolist() == np.pad(x, ((0, 0), (2, 1)), mode=mode).tolist()


def test_negative_borders_cut():
    x = counting(4, 3, dtype=np.int64)
    y = ran("Pad", [x, ints(-1, 1, 2, 0), np.array(7, np.int64)])
    assert y.tolist() == np.pad(x[1:], ((0, 2), (1, 0)), constant_values=7).tolist()


def test_an_unknown_mode_of_borders_is_refused():
    with pytest.raises(OnnxError, match="there is no mode 'mirror'; it has: constant, reflect, edge, wrap"):
        ran("Pad", [counting(3), ints(1, 1)], mode="mirror")


# -- positions ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [(), (1,)])
def test_positions_count_from_the_end(known):
    x = counting(4, 3)
    assert ran("Gather", [x, np.array(-1, np.int32)], known=known).tolist() == x[-1].tolist()
    assert ran("Gather", [x, ints([0, -3], [2, 1])], known=known, axis=1).tolist() == x[:, [[0, 0], [2, 1]]].tolist()
    assert ran("GatherElements", [x, ints([-4, 1, -1])], known=known).tolist() == [[0, 4, 11]]
    assert ran("GatherND", [x, ints([-1, -1], [0, 1])], known=known).tolist() == [11, 1]


def test_gather_nd_shares_batches():
    x = counting(2, 3, 4)
    y = ran("GatherND", [x, ints([[2, 1]], [[0, -1]])], batch_dims=1)
    assert y.tolist() == [[x[0, 2, 1]], [x[1, 0, -1]]]


@pytest.mark.parametrize("how, expected", [
    ("none", [0, 9, 2, 8]), ("add", [0, 10, 2, 16]), ("mul", [0, 9, 2, 120]), ("max", [0, 9, 2, 8]), ("min", [0, 1, 2, 3]),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "int64", "float16"])
def test_scatters_fold_what_they_meet(how, expected, dtype):
    x, rows = counting(4, dtype=dtype), np.array([9, 5, 8], dtype)
    assert ran("ScatterElements", [x, ints(1, 3, -1), rows], reduction=how).tolist() == expected
    assert ran("ScatterND", [x, ints([1], [3], [-1]), rows], reduction=how).tolist() == expected


def test_a_cache_is_written_round():
    cache, update = np.zeros((2, 1, 3, 2), np.float32), counting(2, 1, 2, 2) + 1
    node = onnx.helper.make_node("TensorScatter", ["cache", "update", "at"], ["y"], mode="circular")
    (y,) = run_node(node, [cache, update, ints(0, 2)])
    assert y[0, 0].tolist() == [[1, 2], [3, 4], [0, 0]] and y[1, 0].tolist() == [[7, 8], [0, 0], [5, 6]]


# -- gradients ------------------------------------------------------------------------------------------------------------------------

_AT = ints([0, -1], [2, 0], [0, 3])


@pytest.mark.parametrize("op, inputs, wrt, attrs", [
    ("Gather", [noise(4, 3), ints([0, -1], [0, 2])], (0,), {"axis": 1}),
    ("GatherElements", [noise(4, 3), ints([0, 3], [-1, 3])], (0,), {}),
    ("GatherND", [noise(3, 4, 2), _AT], (0,), {}),
    ("GatherND", [noise(2, 3, 4), ints([[2, 1]], [[0, -1]])], (0,), {"batch_dims": 1}),
    *(("ScatterElements", [noise(4, 3), ints([0, 1, -1], [0, 2, 1]), noise(2, 3) + 0.1], (0, 2), {"reduction": how})
      for how in ("add", "mul", "max", "min")),
    ("ScatterElements", [noise(4, 3), ints([0, 1, 3], [1, 2, 1]), noise(2, 3)], (0, 2), {"reduction": "none"}),
    ("ScatterND", [noise(3, 4, 2), _AT, noise(3, 2)], (0, 2), {"reduction": "none"}),
    ("ScatterND", [noise(3, 4, 2), ints([0, 1], [0, 1]), noise(2, 2) + 0.1], (0, 2), {"reduction": "mul"}),
    ("TensorScatter", [noise(2, 4, 3), noise(2, 2, 3), ints(3, 1)], (0, 1), {"mode": "circular"}),
    ("ReverseSequence", [noise(4, 2, 3), ints(4, 2)], (0,), {}),
    ("Slice", [noise(5, 4), ints(4, 0), ints(-9, 3), ints(0, 1), ints(-2, 1)], (0,), {}),
    *(("Pad", [noise(3, 4), ints(1, -1, 2, 2)], (0,), {"mode": how}) for how in ("constant", "edge", "reflect", "wrap")),
    ("Expand", [noise(3, 1), ints(2, 1, 4)], (0,), {}),
    ("Tile", [noise(2, 3), ints(2, 2)], (0,), {}),
    ("DepthToSpace", [noise(1, 8, 2, 1)], (0,), {"blocksize": 2, "mode": "CRD"}),
    ("SpaceToDepth", [noise(1, 2, 2, 4)], (0,), {"blocksize": 2}),
    ("Trilu", [noise(2, 3, 4), np.array(1, np.int64)], (0,), {"upper": 0}),
    ("Compress", [noise(3, 4), np.array([True, False, True])], (0,), {"axis": 1}),
])  # fmt: skip
def test_gradients(op, inputs, wrt, attrs):
    known = () if op == "TensorScatter" else tuple(k for k in range(1, len(inputs)) if inputs[k].dtype.kind in "ib")
    check_gradient(op, inputs, wrt=wrt, known=known, **attrs)


# -- beside programs, and beside ONNX Runtime -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.int4, object])
def test_what_programs_cannot_hold_moves_too(dtype):
    x = np.array([["a", "b"], ["c", ""], ["d", "e"]], object) if dtype is object else counting(3, 2).astype(dtype)
    for op, rest, expected in (
        ("Transpose", [], x.T), ("Concat", [x], np.concatenate([x, x])), ("Gather", [ints(-1, 0)], x[[2, 0]]),
        ("Slice", [ints(2), ints(-9), ints(0), ints(-1)], x[::-1]), ("Reshape", [ints(2, -1)], x.reshape(2, 3)),
        ("Tile", [ints(1, 2)], np.tile(x, 2)),
        ("ScatterND", [ints([0]), x[1:2]], x[[1, 1, 2]]), ("Pad", [ints(0, 0, 0, 1)], None),
    ):  # fmt: skip
        attrs = {"axis": 0} if op == "Concat" else {}  # which has no default
        y = ran(op, [x, *rest], known=tuple(range(1, 1 + len(rest))), **attrs)
        if expected is None:
            y, expected = y[:, :2], x
        assert y.shape == expected.shape and (y == expected).all(), op


@pytest.mark.parametrize("op, inputs, attrs", [
    ("ReverseSequence", [counting(3, 4), ints(1, 4, 2)], {"time_axis": 1, "batch_axis": 0}),
    ("ScatterElements", [counting(3, 4), ints([0, 3], [2, 1]), counting(2, 2) - 9], {"axis": 1}),
    ("GatherElements", [counting(3, 4), ints([0], [2], [-1])], {"axis": 1}),
    ("DepthToSpace", [counting(2, 8, 2, 3)], {"blocksize": 2, "mode": "DCR"}),
    ("Expand", [counting(3, 1), ints(2, 1, 4)], {}),
    ("Range", [np.float32(4), np.float32(-3), np.float32(-2.5)], {}),
])  # fmt: skip
def test_as_in_onnx_runtime(op, inputs, attrs):
    inputs = [np.asarray(v) for v in inputs]
    y, z = ran(op, inputs, **attrs), by_runtime(op, inputs, **attrs)
    assert y.dtype == z.dtype and y.tolist() == z.tolist()


# -- batches that are open ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op, rest, attrs", [
    ("Transpose", [], {}), ("Reshape", [ints(0, -1)], {}), ("Flatten", [], {"axis": 2}), ("Unsqueeze", [ints(1)], {}),
    ("Slice", [ints(-1), ints(-9), ints(2), ints(-2)], {}), ("Pad", [ints(0, 1, -1, 0, 0, -2)], {}), ("Tile", [ints(1, 2, 1)], {}),
    ("Pad", [ints(1, 1), None, ints(-1)], {"mode": "reflect"}), ("Gather", [ints([0, -1])], {"axis": 1}), ("Trilu", [], {}),
    ("Compress", [np.array([True, False, True])], {"axis": 1}), ("ReduceMean", [ints(-1, 0)], {}), ("ReduceL2", [], {"keepdims": 0}),
    ("ArgMax", [], {"axis": 2, "select_last_index": 1}), ("Hardmax", [], {}), ("TopK", [ints(2)], {"axis": 1, "largest": 0}),
    ("CumSum", [np.array(1)], {}), ("Einsum", [], {"equation": "bij->bi"}), ("Split", [ints(1, 2)], {"axis": 1}),
])  # fmt: skip
def test_the_batch_may_stay_open(op, rest, attrs):
    outputs = 2 if op in ("TopK", "Split") else 1
    node = model(op, [counting(2, 3, 4), *rest], outputs, **attrs).graph.node[0]
    main = fx.Program("open")
    importer = Importer(main, fx.Program("open_startup"), {"": 28})
    importer.env.update({f"x{k}": v for k, v in enumerate(rest, 1) if v is not None})
    x = importer.data("x0", (-1, 3, 4), "float32")
    importer.run_nodes([node])
    for batch in (2, 5):
        values = noise(batch, 3, 4).astype("float32")
        found = fx.Executor().run(main, feed={x.name: values}, fetch_list=[importer.lookup(f"y{k}") for k in range(outputs)])
        expected = ran(op, [values, *rest], outputs, known=tuple(k for k, v in enumerate(rest, 1) if v is not None), **attrs)
        for y, z in zip(found, expected if outputs > 1 else [expected], strict=True):
            assert np.array_equal(y, z)


def test_a_size_that_has_to_be_known_is_asked_for():
    node = onnx.helper.make_node("ReverseSequence", ["x0", "x1"], ["y"], batch_axis=0, time_axis=1)
    importer = Importer(fx.Program("open"), fx.Program("open_startup"), {"": 28})
    importer.data("x0", (-1, 3), "float32"), importer.data("x1", (-1,), "int64")
    with pytest.raises(OnnxError, match=r"fluidx must know these sizes, .*; give the inputs of the model fixed sizes"):
        importer.run_nodes([node])
