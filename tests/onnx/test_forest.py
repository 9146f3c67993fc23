"""Forests: rows go down by the C kernel as they do by NumPy, and what is damaged ends."""

import numpy as np
import pytest

from fluidx import native
from fluidx.onnx.errors import OnnxError
from fluidx.onnx.tree_ensemble import MODES, Forest


def forest(rng, trees, depth, targets, modes, dtype="float32"):
    """Whole trees of so many levels; leaves say nothing, one thing or two."""
    size = 2 ** (depth + 1) - 1
    here = np.arange(size)
    leaf = np.tile(here >= size // 2, trees)
    base = np.repeat(np.arange(trees) * size, size)
    counts = np.where(leaf, rng.integers(0, 3, trees * size), 0)
    child = np.where(leaf, 0, 2 * np.tile(here, trees) + base + 1)
    mode = np.where(leaf, -1, rng.choice(modes, trees * size))
    return Forest(
        np.arange(trees) * size, rng.integers(0, 5, trees * size), rng.integers(-2, 3, trees * size).astype(dtype), mode,
        np.unique(mode[~leaf]), child, np.where(leaf, 0, child + 1), rng.random(trees * size) < 0.5, {},
        np.cumsum(counts) - counts, counts, rng.integers(0, targets, counts.sum()), rng.standard_normal(counts.sum()),
    )  # fmt: skip


@pytest.mark.skipif(bool(native.why_not()), reason="the extension is not built")
@pytest.mark.parametrize("how", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("modes", [[0], [1, 3], range(6)])
def test_the_kernel_goes_where_numpy_goes(modes, how, monkeypatch):
    rng = np.random.default_rng(0)
    for rows, dtype, splits in ((1, "f4", "f4"), (200, "f4", "f8"), (70, "f8", "f4"), (0, "f4", "f4")):
        f = forest(rng, 7, 3, 3, list(modes), splits)
        x = rng.integers(-3, 4, (rows, 5)).astype(dtype)  # whole numbers meet the splits
        x[rng.random(x.shape) < 0.1] = np.nan
        assert f._by_c_kernel(x, 3, how) is not None
        found = f.combined(x, 3, how)
        with monkeypatch.context() as m:
            m.setenv("FLUIDX_KERNELS", "numpy")
            assert np.array_equal(f.combined(x, 3, how), found)


def test_numpy_takes_what_the_kernel_does_not():
    rng = np.random.default_rng(0)
    f = forest(rng, 2, 2, 2, [0])
    x = np.zeros((3, 5), "float32")
    assert f._by_c_kernel(x[:, :1], 2, "SUM") is None and f._by_c_kernel(x, 1, "SUM") is None
    assert f._by_c_kernel(x.astype("float16"), 2, "SUM") is None
    f = forest(rng, 2, 2, 2, [0])
    f.mode[0] = MODES.index("BRANCH_MEMBER")
    assert f._by_c_kernel(x, 2, "SUM") is None


def test_a_way_back_is_found_out():
    f = forest(np.random.default_rng(0), 1, 2, 1, [0])
    f.yes[1:3] = f.no[1:3] = 0
    with pytest.raises(OnnxError, match="has a cycle"):
        f.combined(np.zeros((2, 5), "float32"), 1, "SUM")
