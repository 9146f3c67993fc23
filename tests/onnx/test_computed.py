"""Models whose sizes depend on values, as programs: they give what a session gives."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper  # noqa: E402

import fluidx as fx  # noqa: E402

F, I64, B = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def model(nodes, inputs, outputs, weights=()):
    """`inputs` and `outputs` are name -> (type, shape)."""
    sides = [[helper.make_tensor_value_info(n, t, s) for n, (t, s) in some.items()] for some in (inputs, outputs)]
    graph = helper.make_graph(nodes, "computed", *sides, [onnx.numpy_helper.from_array(a, n) for n, a in dict(weights).items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def agree(proto, *feeds):
    """Run the loaded program on each feed, and a session; the program's values."""
    loaded, session, exe, scope = fx.onnx.load(proto), fx.onnx.session(proto), fx.Executor(), fx.Scope()
    exe.run(loaded.startup, scope=scope)
    found = []
    for feed in feeds:
        made = exe.run(loaded.program, feed=feed, fetch_list=loaded.fetches, scope=scope)
        for a, b in zip(made, session.run(feed), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_array_equal(a, b)
        found.append(made)
    return found


X = np.float32([[1, -2, 3], [-4, 5, -6]])


def test_non_zero():
    proto = model([helper.make_node("NonZero", ["x"], ["y"])], {"x": (F, ["n", 3])}, {"y": (I64, [2, "k"])})
    found = agree(proto, {"x": np.float32([[0, 2, 0], [3, 0, 4]])}, {"x": np.zeros((1, 3), "float32")})
    assert found[0][0].tolist() == [[0, 1, 1], [1, 0, 2]] and found[1][0].shape == (2, 0)


@pytest.mark.parametrize("axis, want", [(None, [1, 5]), (0, [[1, -2, 3]]), (1, [[1], [-4]])])
def test_compress(axis, want):
    attrs = {} if axis is None else {"axis": axis}
    proto = model(
        [helper.make_node("Compress", ["x", "c"], ["y"], **attrs)],
        {"x": (F, ["n", 3]), "c": (B, ["k"])}, {"y": (F, ["a"] if axis is None else ["a", "b"])},
    )  # fmt: skip
    chosen = [True, False, False, False, True] if axis is None else [True, False]
    assert agree(proto, {"x": X, "c": np.array(chosen)})[0][0].tolist() == want


@pytest.mark.parametrize("attrs", [{}, {"sorted": 0}, {"axis": 1}])
def test_unique(attrs):
    shape = ["a", "b"] if "axis" in attrs else ["a"]
    proto = model(
        [helper.make_node("Unique", ["x"], ["y", "first", "inverse", "counts"], **attrs)],
        {"x": (F, ["n", 3])}, {"y": (F, shape), "first": (I64, ["k"]), "inverse": (I64, ["m"]), "counts": (I64, ["k"])},
    )  # fmt: skip
    agree(proto, {"x": np.float32([[2, 1, 2], [2, 0, 2]])}, {"x": X})


def test_the_boxes_that_non_max_suppression_leaves_are_gathered():
    nodes = [
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "overlap"], ["chosen"]),
        helper.make_node("Gather", ["chosen", "two"], ["at"], axis=1),
        helper.make_node("Squeeze", ["boxes", "zero"], ["flat"]),
        helper.make_node("Gather", ["flat", "at"], ["y"]),
    ]
    weights = {"most": np.array([3]), "overlap": np.float32([0.5]), "two": np.array(2), "zero": np.array([0])}
    proto = model(nodes, {"boxes": (F, [1, "n", 4]), "scores": (F, [1, 1, "n"])}, {"y": (F, ["k", 4])}, weights)
    boxes = np.float32([[[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, 10, 1, 11]]])
    (y,), _ = agree(
        proto, {"boxes": boxes, "scores": np.float32([[[0.9, 0.8, 0.7]]])}, {"boxes": boxes[:, :1], "scores": np.float32([[[0.5]]])}
    )
    assert y.tolist() == boxes[0, [0, 2]].tolist()


def test_what_is_computed_of_chosen_elements_is_trained():
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["m"]),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Compress", ["h", "flat"], ["c"]),
        helper.make_node("Reshape", ["m", "line"], ["flat"]),
        helper.make_node("ReduceSum", ["c"], ["y"], keepdims=0),
    ]
    weights = {"zero": np.float32(0), "w": np.eye(3, dtype="float32"), "line": np.array([-1])}
    proto = model([nodes[0], nodes[1], nodes[3], nodes[2], nodes[4]], {"x": (F, ["n", 3])}, {"y": (F, [])}, weights)
    (y,) = agree(proto, {"x": X})[0]
    assert y == 9
    loaded = fx.onnx.load(proto)
    with fx.program_guard(loaded.program, loaded.startup):
        (grad,) = fx.gradients(loaded.fetches, loaded.parameters)
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(loaded.startup, scope=scope)
    (found,) = exe.run(loaded.program, feed={"x": X}, fetch_list=[grad], scope=scope)
    # the sum of h[i, j] where x[i, j] > 0 is linear in w[k, j] with factor x[i, k]
    assert found.tolist() == (X.T @ (X > 0)).tolist()


def whole(op, *operands, outputs=("y",), more=(), out=(F, ["a", "b"]), weights=(), **attrs):
    """A model of x [n, 3] and k, a vector of two numbers: one node, behind others that make its operands."""
    nodes = [*more, helper.make_node(op, list(operands), list(outputs), **attrs)]
    return model(nodes, {"x": (F, ["n", 3]), "k": (I64, [2])}, dict.fromkeys(outputs, out) if isinstance(out, tuple) else out, weights)


K = np.array([2, 3])


@pytest.mark.parametrize(
    "proto, want",
    [
        (whole("Reshape", "x", "k"), X.reshape(2, 3)),
        (whole("Tile", "x", "k"), np.tile(X, (2, 3))),
        (whole("Expand", "one", "k", weights={"one": np.float32([[7]])}), np.full((2, 3), 7, "float32")),
        (whole("ConstantOfShape", "k"), np.zeros((2, 3), "float32")),
        (whole("Slice", "x", "zeros", "k", weights={"zeros": np.array([0, 1])}), X[0:2, 1:3]),
        (whole("Slice", "x", "k", "ends", "", "steps", weights={"ends": np.array([-9, 0]), "steps": np.array([-1, -2])}), X[2::-1, 3:0:-2]),
    ],
    ids=["Reshape", "Tile", "Expand", "ConstantOfShape", "Slice", "Slice backwards"],
)
def test_sizes_that_are_fed_or_computed(proto, want):
    ((found,),) = agree(proto, {"x": X, "k": K})
    np.testing.assert_array_equal(found, want)


def test_range_and_top_k_by_computed_numbers():
    first = helper.make_node("Gather", ["k", "zero"], ["limit"])
    proto = whole("Range", "zero", "limit", "one", more=[first], out=(I64, ["n"]), weights={"zero": np.array(0), "one": np.array(1)})
    assert agree(proto, {"x": X, "k": K}, {"x": X, "k": K * 2})[1][0].tolist() == [0, 1, 2, 3]
    cut = helper.make_node("Slice", ["k", "z", "o"], ["top"])
    proto = whole(
        "TopK", "x", "top", outputs=("y", "at"), more=[cut], out={"y": (F, ["n", "m"]), "at": (I64, ["n", "m"])},
        weights={"z": np.array([0]), "o": np.array([1])},
    )  # fmt: skip
    values, at = agree(proto, {"x": X, "k": K})[0]
    assert values.tolist() == [[3, 1], [5, -4]] and at.tolist() == [[2, 0], [1, 0]]
    for k in (-1, 4):
        with pytest.raises(fx.ExecutionError, match=f"K is {k}; it must be from 0 to 3"):
            agree(proto, {"x": X, "k": np.int64([k, 0])})


def test_the_number_of_chosen_elements_is_computed_with():
    nodes = [
        helper.make_node("NonZero", ["x"], ["at"]),
        helper.make_node("Shape", ["at"], ["shape"]),
        helper.make_node("Gather", ["shape", "last"], ["count"]),
        helper.make_node("Cast", ["count"], ["number"], to=F),
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Div", ["total", "number"], ["y"]),
        helper.make_node("Range", ["zero", "count", "last"], ["all"]),
    ]
    weights = {"last": np.array(1), "zero": np.array(0)}
    proto = model(nodes, {"x": (F, ["n", 3])}, {"y": (F, []), "all": (I64, ["k"])}, weights)
    y, every = agree(proto, {"x": np.float32([[0, 2, 0], [3, 0, 4]])}, {"x": X})[0]
    assert y == 3 and every.tolist() == [0, 1, 2]


def test_whether_nothing_was_chosen_is_not_taken_for_known():
    nodes = [
        helper.make_node("NonZero", ["x"], ["at"]),
        helper.make_node("Shape", ["at"], ["shape"]),
        helper.make_node("Gather", ["shape", "last"], ["count"]),
        helper.make_node("Equal", ["count", "zero"], ["y"]),
    ]
    proto = model(nodes, {"x": (F, ["n", 3])}, {"y": (B, [])}, {"last": np.array(1), "zero": np.array(0)})
    none, some = agree(proto, {"x": np.zeros((2, 3), "float32")}, {"x": X})
    assert none[0].item() is True and some[0].item() is False


def test_elements_behind_a_mask_as_exporters_write_them():
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["m"]),
        helper.make_node("NonZero", ["m"], ["where"]),
        helper.make_node("Transpose", ["where"], ["at"], perm=[1, 0]),
        helper.make_node("GatherND", ["x", "at"], ["y"]),
        helper.make_node("GatherND", ["x", "last"], ["row"]),
    ]
    outputs = {"y": (F, ["k"]), "row": (F, [1, 3])}
    proto = model(nodes, {"x": (F, ["n", 3])}, outputs, {"zero": np.float32(0), "last": np.array([[-1]])})
    y, row = agree(proto, {"x": X})[0]
    assert y.tolist() == [1, 3, 5] and row.tolist() == [X[-1].tolist()]
