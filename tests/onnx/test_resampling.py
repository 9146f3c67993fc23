"""Resize and GridSample: hand-worked numbers, ONNX Runtime as the judge of all modes, gradients."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from fluidx.onnx import backend  # noqa: E402
from tests.onnx.one_node import by_runtime, check_gradient, ran  # noqa: E402

PLACES = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]
ONE_ULP = {"rtol": 1e-5, "atol": 1e-5}  # float32 weights, and sums of at most 16 terms near 1


def image(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


def sizes(*n: int) -> np.ndarray:
    return np.array(n, np.int64)


def test_twice_as_wide_by_lines():
    x = np.float32([[[0, 4]]])
    y = ran("Resize", [x, None, np.float32([1, 1, 2])], known=(2,), mode="linear")
    assert y.tolist() == [[[0, 1, 3, 4]]]  # samples at -0.25, 0.25, 0.75, 1.25


def test_half_as_wide_with_antialias_is_a_weighted_mean():
    x = np.float32([[[1, 2, 4, 8]]])
    y = ran("Resize", [x, None, np.float32([1, 1, 0.5])], known=(2,), mode="linear", antialias=1)
    # around 0.5 and 2.5, triangles of half width 2: eighths 1, 3, 3, 1, and what is outside belongs to the border
    np.testing.assert_allclose(y, [[[(4 * 1 + 3 * 2 + 4) / 8, (2 + 3 * 4 + 4 * 8) / 8]]], rtol=1e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode, out", [("nearest", (5, 6)), ("linear", (3, 9)), ("linear", (8, 2)), ("cubic", (7, 3))])
def test_resize_to_sizes_is_that_of_onnx_runtime(mode, out, place):
    operands = [image(1, 2, 4, 6), None, None, sizes(1, 2, *out)]
    attrs = {"mode": mode, "coordinate_transformation_mode": place}
    np.testing.assert_allclose(ran("Resize", operands, known=(3,), **attrs), by_runtime("Resize", operands, known=(3,), **attrs), **ONE_ULP)


def test_what_is_outside_of_the_region_is_extrapolated():
    roi, x = np.float32([0, 0, 0.5, 0, 1, 1, 1.5, 1]), np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3)
    attrs = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": -1.0}
    y = ran("Resize", [x, roi, None, sizes(1, 1, 3, 3)], known=(1, 3), **attrs)
    assert y[0, 0].tolist() == [[3, 4, 5], [6, 7, 8], [-1, -1, -1]]  # rows at 1, 2 and 3


def test_integers_are_rounded_and_kept_in_range():
    x = np.array([[0, 255]], np.uint8)
    y = ran("Resize", [x, None, None, sizes(1, 6)], known=(3,), mode="cubic")
    assert y.dtype == np.uint8 and y[0, 0] == 0 and y[0, -1] == 255  # overshoot is cut


@pytest.mark.parametrize("op, opset", [("Upsample", 9), ("Resize", 10)])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_before_opset_11_places_are_asymmetric(op, opset, mode):
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "scales"], ["y"], mode=mode)], "old",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])], [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(np.float32([1, 3]), "scales")],
    )  # fmt: skip
    old = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)
    (y,) = backend.prepare(old).run([np.float32([[0, 3]])])
    assert y.tolist() == [[0, 0, 0, 3, 3, 3] if mode == "nearest" else [0, 1, 2, 3, 3, 3]]  # samples at 0, 1/3, 2/3, 1, ...


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize_has_gradients(mode):
    check_gradient("Resize", [image(2, 3, 4, 5, dtype="float64"), None, None, sizes(2, 4, 7, 3)], known=(3,), mode=mode)


def test_an_unknown_mode_is_refused():
    with pytest.raises(Exception, match="nearest, linear, cubic"):
        ran("Resize", [image(1, 1, 2, 2), None, None, sizes(1, 1, 4, 4)], known=(3,), mode="area")


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_grid_sample_is_that_of_onnx_runtime(mode, padding, corners):
    operands = [image(2, 3, 4, 5), 1.5 * image(2, 3, 4, 2)]
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    np.testing.assert_allclose(ran("GridSample", operands, **attrs), by_runtime("GridSample", operands, **attrs), rtol=1e-4, atol=1e-5)


def test_points_far_away_are_the_border():
    y = ran("GridSample", [np.float32([[[[1, 2], [3, 4]]]]), np.float32([[[[1e9, -1e9]]]])], padding_mode="border")
    assert y.item() == 2


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_grid_sample_has_gradients_to_image_and_points(mode, padding):
    operands = [image(1, 2, 3, 4, dtype="float64"), 1.2 * image(1, 2, 3, 2, dtype="float64")]
    check_gradient("GridSample", operands, wrt=(0, 1), mode=mode, padding_mode=padding)


def test_points_of_a_volume():
    operands = [image(2, 3, 2, 4, 5), 1.5 * image(2, 2, 3, 4, 3)]
    np.testing.assert_allclose(ran("GridSample", operands), by_runtime("GridSample", operands), rtol=1e-4, atol=1e-5)
