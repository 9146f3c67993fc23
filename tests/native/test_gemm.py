"""Products: right for every shape and layout at every level, and the same bits for any number of threads.

Where products are our own (levels v3 and v4) the bits depend on the factors alone, however a product is cut.
"""

import numpy as np
import pytest

from fluidx import native
from tests.each import each

LEVELS = native.levels() if native.enabled() else []
OWN = [name for name in LEVELS if name != "base"]
LAYOUTS = [(False, False), (True, False), (False, True), (True, True)]

pytestmark = pytest.mark.skipif(not LEVELS, reason="no native kernels")


@pytest.fixture(params=LEVELS)
def level(request):
    with native.at_level(request.param):
        if not native.has_products():
            pytest.skip(native.describe())
        yield request.param


@pytest.fixture(params=OWN)
def own(request):
    with native.at_level(request.param):
        yield request.param


def laid_out(x, transposed):
    """The same numbers with the last two axes the other way round in memory."""
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) if transposed else x


def whole(shape, dtype, seed, transposed=False):
    """Small whole numbers: their products add up exactly in any order, so results can be compared with ==."""
    return laid_out(np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype), transposed)


def normal(shape, seed, transposed=False):
    return laid_out(np.random.default_rng(seed).standard_normal(shape, "float32"), transposed)


def run(call):
    assert call is not None
    native.compile([call])()


def multiply(a, b):
    out = np.full((a.shape[0], b.shape[1]), np.nan, a.dtype)
    run(native.gemm(a, b, out))
    return out


SIZES = [(1, 1, 1), (5, 7, 3), (1, 64, 32), (64, 1, 32), (33, 17, 129), (70, 300, 40), (300, 70, 40), (257, 255, 100)]
SIZES += [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)]
SIZES += [(300, 10, 70), (2, 900, 20), (40, 1100, 300), (30, 33, 1000), (520, 16, 9)]  # few columns, few rows, several blocks
SIZES += [(20, 4099, 70)]  # few rows, and long ones that begin anywhere


@each("dtype", ["float32", "float64"])
@each("transposed", LAYOUTS)
@each("m, n, k", SIZES)
def test_a_product_is_exact(m, n, k, transposed, dtype, level):
    a, b = whole((m, k), dtype, 0, transposed[0]), whole((k, n), dtype, 1, transposed[1])
    assert np.array_equal(multiply(a, b), a.astype("float64") @ b.astype("float64"))


EDGES = (1, 2, 3, 5, 6, 7, 8, 9, 13, 14, 15, 16, 17, 29, 31, 32, 33, 47, 48, 49)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("transposed", LAYOUTS)
@pytest.mark.parametrize("k", [1, 5, 17])
def test_every_edge_of_a_tile_writes_its_part_alone(k, transposed, dtype, level):
    for m in EDGES:
        for n in EDGES:
            a, b = whole((m, k), dtype, m, transposed[0]), whole((k, n), dtype, n, transposed[1])
            around = np.full((m + 2, n + 40), 7, dtype)
            run(native.gemm(a, b, around[1:-1, 20:-20]))
            assert np.array_equal(around[1:-1, 20:-20], a @ b), (m, n)
            around[1:-1, 20:-20] = 7
            assert (around == 7).all(), (m, n)


@each("m, n, k", [(9, 6, 4), (100, 90, 600), (60, 5, 20), (64, 64, 0)])
@each("alpha, beta", [(2.0, -1.0), (0.5, 0.0), (1.0, 1.0), (-1.0, 0.5)])
def test_alpha_and_beta(alpha, beta, m, n, k, level):
    a, b, out = whole((m, k), "float32", 0), whole((k, n), "float32", 1), whole((m, n), "float32", 2)
    expected = alpha * (a @ b) + beta * out
    if beta == 0:
        out[:] = np.nan  # is overwritten, not multiplied by 0
    run(native.gemm(a, b, out, alpha=alpha, beta=beta))
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("a_batch, b_batch, batch", [(3, 3, 3), (1, 3, 3), (3, 1, 3), (3, None, 3), (100, 100, 100), (0, 0, 0)])
def test_a_batch_of_products(a_batch, b_batch, batch, level):
    a = whole((a_batch, 50, 40), "float32", 0)
    b = whole((40, 60) if b_batch is None else (b_batch, 40, 60), "float32", 1)
    out = np.empty((batch, 50, 60), "float32")
    run(native.gemm(a, b, out))
    assert np.array_equal(out, a @ b)


def test_two_axes_of_a_batch_and_operands_that_lack_one(level):
    a, b = whole((4, 1, 20, 30), "float32", 0), whole((3, 30, 40), "float32", 1)
    out = np.empty((4, 3, 20, 40), "float32")
    run(native.gemm(a, b, out))
    assert np.array_equal(out, a @ b)


def test_parts_of_larger_matrices(level):
    a, b, out = whole((20, 30), "float32", 0)[2:12, 5:15], whole((30, 20), "float32", 1)[::3, :8], np.zeros((10, 16), "float32")
    run(native.gemm(a, b, out[:, 4:12]))
    assert np.array_equal(out[:, 4:12], a @ b) and not out[:, :4].any() and not out[:, 12:].any()


def test_what_does_not_fit_gives_none():
    a = np.ones((6, 6), "float32")
    assert native.gemm(a[::2, ::2], a[:3], np.ones((3, 6), "float32")) is None
    assert native.gemm(a, a.astype("float64"), a.copy()) is None
    assert native.gemm(a, a, np.ones((6, 6), "float32").T) is None
    assert native.gemm(a, a[:5], a.copy()) is None


@pytest.mark.parametrize("transposed", LAYOUTS)
@pytest.mark.parametrize("m, n, k", [(129, 130, 131), (40, 9, 700), (3, 300, 513)])
def test_what_is_not_finite_reaches_its_row_and_column_alone(m, n, k, transposed, own):
    a, b = whole((m, k), "float32", 0), whole((k, n), "float32", 1)
    a[1, k // 2], b[k - 1, n - 1], b[0, 0] = np.inf, np.nan, 0.0
    with np.errstate(invalid="ignore"):
        wanted = (a[:, :, None].astype("float64") * b).sum(1)  # inf * 0 is NaN, and nothing else is touched
    assert np.array_equal(multiply(laid_out(a, transposed[0]), laid_out(b, transposed[1])), wanted, equal_nan=True)


def test_denormals_are_kept(own):
    tiny = np.full((20, 3), 1e-40, "float32")
    assert np.array_equal(multiply(tiny, np.eye(3, 40, dtype="float32"))[:, :3], tiny)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("m, n, k", [(50, 60, 70), (70, 40, 1000), (1, 200, 3000), (200, 3, 500)])
def test_the_error_is_that_of_a_sum_in_any_order(m, n, k, dtype, level):
    """|error| <= gamma_k |A| |B| with gamma_k = k u / (1 - k u): Higham, "Accuracy and Stability of Numerical Algorithms", 3.5. Twice that,
    because a machine without extended precision computes what is wanted no better than float64."""
    a, b = normal((m, k), 0).astype(dtype), normal((k, n), 1).astype(dtype)
    u = np.finfo(dtype).eps / 2
    exact, bound = a.astype("longdouble") @ b.astype("longdouble"), k * u / (1 - k * u) * (np.abs(a) @ np.abs(b))
    assert (np.abs(multiply(a, b) - exact) <= 2 * bound).all()


SEVERAL = [(129, 130, 131), (300, 20, 400), (16, 2000, 64), (512, 512, 100), (1, 3000, 600), (3000, 1, 600), (1000, 10, 300)]


@pytest.mark.parametrize("transposed", LAYOUTS)
@pytest.mark.parametrize("m, n, k", SEVERAL)
def test_threads_do_not_change_bits(m, n, k, transposed, level):
    a, b = normal((m, k), 0, transposed[0]), normal((k, n), 1, transposed[1])
    results, before = [], native.num_threads()
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        results.append(multiply(a, b))
    native.set_num_threads(before)
    assert all(np.array_equal(results[0], r) for r in results[1:])
    np.testing.assert_allclose(results[0], a.astype("float64") @ b, atol=1e-4)  # 600 roundings of sums of some 25


@pytest.mark.parametrize("m, n, k", [(150, 170, 600), (40, 12, 300), (33, 65, 7), (20, 4099, 60)])
def test_bits_depend_on_the_factors_alone(m, n, k):
    """Whole or by rows, columns and single elements, in any layout and at any level that multiplies and adds in one."""
    a, b = normal((m, k), 0), normal((k, n), 1)
    first = None
    for name in OWN:
        with native.at_level(name):
            for ta, tb in LAYOUTS:
                x, y = laid_out(a, ta), laid_out(b, tb)
                got = multiply(x, y)
                first = got if first is None else first
                assert np.array_equal(got, first), (name, ta, tb)
                for rows in (slice(0, 1), slice(1, 14), slice(17, m)):
                    assert np.array_equal(multiply(x[rows], y), first[rows])
                for columns in (slice(0, 1), slice(3, 9), slice(5, n)):
                    assert np.array_equal(multiply(x, y[:, columns]), first[:, columns])


def test_products_need_no_blas_where_they_are_our_own(own, monkeypatch):
    monkeypatch.setattr(native, "_state", native._load()._replace(blas="", no_blas="it is hidden"))
    assert native.has_products() and "own products" in native.describe()
    assert native.gemm(*(np.ones((2, 2), "float32") for _ in range(3))) is not None


def test_products_at_level_base_need_a_blas(monkeypatch):
    monkeypatch.setattr(native, "_state", native._load()._replace(blas="", no_blas="it is hidden"))
    with native.at_level("base"):
        assert not native.has_products() and "products by NumPy (it is hidden)" in native.describe()
        assert native.gemm(*(np.ones((2, 2), "float32") for _ in range(3))) is None
