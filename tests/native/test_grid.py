"""grid_sample by its C kernel against its definition over arrays, in every mode."""

import numpy as np
import pytest

from fluidx import native
from fluidx.ir import opdef
from fluidx.testing.reference import run_op
from tests.native.bodies import close, normal, one

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason="the extension is not built")

SIZES = [((2, 3, 5), (2, 70, 1)), ((2, 3, 5, 6), (2, 7, 9, 2)), ((1, 2, 3, 4, 1), (1, 2, 5, 6, 3))]


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_mode_around_and_outside_of_images(mode, padding, dtype):
    for (shape, points), centers in zip([*SIZES, *SIZES], [True] * 3 + [False] * 3, strict=True):
        x, grid = normal(shape, dtype), normal(points, dtype, seed=1, scale=1.5)
        grid.reshape(-1)[:4] = [-1, 1, 0, 9]  # borders, the middle, far outside
        attrs = {"mode": mode, "padding_mode": padding, "align_corners": centers}
        want = np.empty((*shape[:2], *points[1:-1]), dtype)
        opdef("grid_sample").kernel(np, x, grid, out=want, **attrs)
        close(one("grid_sample", x, grid, **attrs), want.astype("float64"), ulps=4)  # at most 64 terms, in the same order


def test_points_that_are_no_numbers_read_nothing_else():
    x, grid = normal((1, 1, 4, 4)), np.full((1, 2, 2, 2), np.nan, "float32")
    grid[0, 0] = np.inf
    for mode in ("nearest", "linear", "cubic"):
        for padding in ("zeros", "border", "reflection"):
            assert one("grid_sample", x, grid, mode=mode, padding_mode=padding).shape == (1, 1, 2, 2)


@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("v", [np.nan, np.inf, -np.inf])
def test_points_that_are_no_numbers_name_no_element(v, padding_mode):
    x, grid = np.arange(12, dtype="float32").reshape(1, 1, 3, 4), np.zeros((1, 1, 2, 2), "float32")
    grid[0, 0, 0, 0] = v
    definition = opdef("grid_sample")
    attrs = definition.complete_attrs({"padding_mode": padding_mode})
    found = [run_op(definition, [x, grid], attrs, body=b)[0].ravel() for b in ("any", "native")]
    np.testing.assert_array_equal(*found)
    # far to the left or right is a zero or the border; what is thrown back without end, or no number, is nowhere
    want = {"zeros": 0.0, "border": 4.0 if v < 0 else 7.0, "reflection": np.nan}[padding_mode]
    np.testing.assert_array_equal(found[0], [np.nan if np.isnan(v) else want, 5.5])
