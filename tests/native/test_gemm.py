"""Products by NumPy's own BLAS, split over our threads: right for every shape and layout, and the same bits for any number of threads."""

import numpy as np
import pytest

from fluidx import native


@pytest.fixture(autouse=True)
def blas():
    if not native.has_blas():
        pytest.skip(native.describe())


def matrix(shape, dtype, seed, transposed=False):
    """Small whole numbers: their products add up exactly in any order, so results can be compared with ==."""
    *batch, m, n = shape
    x = np.random.default_rng(seed).integers(-3, 4, (*batch, n, m) if transposed else shape).astype(dtype)
    return x.swapaxes(-1, -2) if transposed else x


def run(call):
    assert call is not None
    native.compile([call])()


SIZES = [(1, 1, 1), (5, 7, 3), (1, 64, 32), (64, 1, 32), (33, 17, 129), (70, 300, 40), (300, 70, 40), (257, 255, 100)]
SIZES += [(0, 3, 4), (3, 0, 4), (3, 4, 0)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("m, n, k", SIZES)
def test_a_product_is_exact(m, n, k, transposed, dtype):
    a, b = matrix((m, k), dtype, 0, transposed[0]), matrix((k, n), dtype, 1, transposed[1])
    out = np.full((m, n), np.nan, dtype)
    run(native.gemm(a, b, out))
    assert np.array_equal(out, a.astype("float64") @ b.astype("float64"))


def test_alpha_and_beta():
    a, b, out = matrix((9, 4), "float32", 0), matrix((4, 6), "float32", 1), matrix((9, 6), "float32", 2)
    expected = 2 * (a @ b) - out
    run(native.gemm(a, b, out, alpha=2.0, beta=-1.0))
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("a_batch, b_batch, batch", [(3, 3, 3), (1, 3, 3), (3, 1, 3), (3, None, 3), (100, 100, 100), (0, 0, 0)])
def test_a_batch_of_products(a_batch, b_batch, batch):
    a = matrix((a_batch, 50, 40), "float32", 0)
    b = matrix((40, 60) if b_batch is None else (b_batch, 40, 60), "float32", 1)
    out = np.empty((batch, 50, 60), "float32")
    run(native.gemm(a, b, out))
    assert np.array_equal(out, a @ b)


def test_parts_of_larger_matrices():
    a, b, out = matrix((20, 30), "float32", 0)[2:12, 5:15], matrix((30, 20), "float32", 1)[::3, :8], np.zeros((10, 16), "float32")
    run(native.gemm(a, b, out[:, 4:12]))
    assert np.array_equal(out[:, 4:12], a @ b) and not out[:, :4].any() and not out[:, 12:].any()


def test_what_does_not_fit_gives_none():
    a = np.ones((6, 6), "float32")
    assert native.gemm(a[::2, ::2], a[:3], np.ones((3, 6), "float32")) is None
    assert native.gemm(a, a.astype("float64"), a.copy()) is None
    assert native.gemm(a, a, np.ones((6, 6), "float32").T) is None
    assert native.gemm(a, a[:5], a.copy()) is None


@pytest.mark.parametrize("m, n, k", [(129, 130, 131), (300, 20, 400), (16, 2000, 64), (512, 512, 100)])
def test_threads_do_not_change_bits(m, n, k):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)).astype("float32"), rng.standard_normal((k, n)).astype("float32")
    results = []
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        out = np.empty((m, n), "float32")
        run(native.gemm(a, b, out))
        results.append(out)
    assert all(np.array_equal(results[0], r) for r in results[1:])
    np.testing.assert_allclose(results[0], a.astype("float64") @ b, atol=1e-4)
