"""grid_sample by its C kernel against its definition over arrays, in every mode."""

import numpy as np
import pytest

from fluidx import native
from fluidx.ir import opdef
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
