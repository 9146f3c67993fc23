"""Products of 16-bit floats: sums in float32, rounded once, at every level of instructions.

Levels v4_bf16 and amx take subnormal numbers for 0; the others widen them.
"""

import ml_dtypes
import numpy as np
import pytest

from fluidx import native

LEVELS = [name for name in native.levels() if name != "v4_vnni"] if native.enabled() else []  # that has those of v4
PAIRS = ("v4_bf16", "amx")  # the levels that multiply pairs of bfloat16
DTYPES = [ml_dtypes.bfloat16, np.float16]
DIGITS = {np.dtype(ml_dtypes.bfloat16): 8, np.dtype("float16"): 11, np.dtype("float32"): 24}
LAYOUTS = [(False, False), (True, False), (False, True), (True, True)]
SIZES = [(1, 1, 1), (2, 3, 1), (5, 7, 3), (1, 64, 32), (64, 1, 33), (33, 17, 129), (70, 300, 40), (15, 16, 2051), (57, 530, 65)]
EMPTY = [(0, 3, 4), (3, 0, 4), (3, 4, 0)]

pytestmark = pytest.mark.skipif(not LEVELS, reason="no native kernels")


@pytest.fixture(params=LEVELS)
def level(request):
    with native.at_level(request.param):
        if not native.has_products():
            pytest.skip(native.describe())
        yield request.param


def laid_out(x, transposed, apart=0):
    """The same numbers with the last two axes the other way round in memory, and rows further apart than they are long."""
    x = x.swapaxes(-1, -2) if transposed else x
    room = np.full((*x.shape[:-1], x.shape[-1] + apart), 77, x.dtype)
    part = room[..., : x.shape[-1]]
    part[...] = x
    return part.swapaxes(-1, -2) if transposed else part


def normal(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32").astype(dtype)


def multiply(a, b, out_dtype=None, **factors):
    out = np.full((*a.shape[:-1], b.shape[-1]), np.nan, out_dtype or a.dtype)
    call = native.gemm(a, b, out, **factors)
    assert call is not None and call.fn == "gemm_16"
    native.compile([call])()
    return out


def bound(a, b, dtype):
    """The sum of products in float64, and how far float32 sums of so many terms may be from it, rounded once to the dtype."""
    a, b = a.astype("float64"), b.astype("float64")
    exact, k = a @ b, a.shape[-1]
    return exact, (k + 2) * 2.0**-23 * (abs(a) @ abs(b)) + 2.0 ** -DIGITS[np.dtype(dtype)] * abs(exact) + (k + 1) * 2.0**-120


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n, k", SIZES + EMPTY)
def test_products_are_as_near_as_float32_sums_are(level, dtype, m, n, k):
    a, b = normal((m, k), dtype, 0), normal((k, n), dtype, 1)
    for out_dtype in (dtype, "float32"):
        exact, error = bound(a, b, out_dtype)
        for number, (ta, tb) in enumerate(LAYOUTS):
            apart = number % 2 * 3
            found = multiply(laid_out(a, ta, apart), laid_out(b, tb, 3 - apart), out_dtype)
            assert (abs(found - exact) <= error).all(), (ta, tb, out_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_nothing_are_zero_whatever_was_computed_before(level, dtype):
    for value in (np.nan, 3):
        multiply(np.full((40, 60), value, dtype), np.ones((60, 50), dtype))
        assert (multiply(np.zeros((10, 0), dtype), np.zeros((0, 20), dtype)) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_numbers_are_exact(level, dtype):
    """Sums of small whole numbers are exact in any order, so the one rounding is what is seen."""
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-3, 4, shape).astype(dtype) for shape in ((45, 300), (300, 70)))
    expected = a.astype("float32") @ b.astype("float32")
    assert np.array_equal(multiply(a, b, "float32"), expected)
    assert np.array_equal(multiply(a, b), expected.astype(dtype))
    assert np.array_equal(multiply(a, b, alpha=0.5), (expected * 0.5).astype(dtype))


@pytest.mark.parametrize("k", [7, 300, 2500])
def test_results_are_added_to_what_is_there(level, k):
    rng = np.random.default_rng(3)
    a, b, c = (rng.integers(-1, 2, shape).astype(ml_dtypes.bfloat16) for shape in ((20, k), (k, 33), (20, 33)))
    expected = a.astype("float32") @ b.astype("float32") * 2 - c.astype("float32")
    native.compile([native.gemm(a, b, c, alpha=2.0, beta=-1.0)])()
    assert np.array_equal(c, expected.astype(c.dtype))


BATCHES = [((3, 5, 6), (3, 6, 7)), ((2, 3, 5, 6), (3, 6, 7)), ((4, 9, 8), (8, 3)), ((2, 1, 5, 6), (1, 3, 6, 7))]


@pytest.mark.parametrize("shape_a, shape_b", BATCHES)
def test_batches(level, shape_a, shape_b):
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-3, 4, shape).astype(ml_dtypes.bfloat16) for shape in (shape_a, shape_b))
    expected = (a.astype("float32") @ b.astype("float32")).astype(a.dtype)
    out = np.zeros_like(expected)
    native.compile([native.gemm(a, b, out)])()
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n, k", [(150, 170, 600), (40, 12, 301), (33, 65, 7), (20, 1100, 2100)])
def test_bits_depend_on_the_factors_alone(level, dtype, m, n, k):
    """Whole or by rows and columns, and in any layout"""
    if level == "base":
        pytest.skip("a BLAS may round as the shape has it")
    a, b = normal((m, k), dtype, 5), normal((k, n), dtype, 6)
    first = multiply(a, b)
    for ta, tb in LAYOUTS:
        x, y = laid_out(a, ta, 1), laid_out(b, tb, 1)
        assert np.array_equal(multiply(x, y), first), (ta, tb)
        for rows in (slice(0, 1), slice(1, 14), slice(17, m)):
            assert np.array_equal(multiply(x[rows], y), first[rows])
        for columns in (slice(0, 1), slice(3, 9), slice(5, n)):
            assert np.array_equal(multiply(x, y[:, columns]), first[:, columns])
    for threads in (1, 3):
        native.use_threads(threads)
        assert np.array_equal(multiply(a, b), first)
    if level not in PAIRS or dtype == np.float16:  # the same sums as those of float32
        out = np.empty((m, n), "float32")
        native.compile([native.gemm(a.astype("float32"), b.astype("float32"), out)])()
        assert np.array_equal(first, out.astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nans_are_where_they_belong(level, dtype):
    a, b = normal((19, 37), dtype, 7), normal((37, 35), dtype, 8)
    a[3, 36], a[5, 2], b[4, 6], b[36, 9] = np.inf, np.nan, -np.inf, 0
    with np.errstate(invalid="ignore"):
        expected = a.astype("float32") @ b.astype("float32")
    for ta, tb in LAYOUTS:
        got = multiply(laid_out(a, ta), laid_out(b, tb)).astype("float32")
        assert np.array_equal(np.isnan(got), np.isnan(expected)) and np.array_equal(np.isinf(got), np.isinf(expected))
        assert np.array_equal(np.sign(got[np.isinf(got)]), np.sign(expected[np.isinf(got)]))
    assert np.isnan(got[5]).all() and np.isnan(got[3, 9]) and not np.isnan(got[4]).any()


def test_a_result_beyond_the_largest_number_is_infinite(level):
    a = np.array([[3e38, 0]], ml_dtypes.bfloat16)
    assert np.isposinf(multiply(a, np.array([[4], [1]], a.dtype)).astype("float32")).all()
    h = np.array([[60000, 0]], "float16")
    assert np.isposinf(multiply(h, np.array([[2], [1]], h.dtype))).all()


def test_subnormal_numbers(level):
    tiny = 2.0**-130  # of bfloat16
    a, b = np.array([[tiny, 1]], ml_dtypes.bfloat16), np.array([[2.0**30], [0]], ml_dtypes.bfloat16)
    assert multiply(a, b, "float32") == (0 if level in PAIRS else 2.0**-100)
    small = np.array([[2.0**-24, 1]], "float16")  # the smallest of float16 is a normal number of float32
    assert multiply(small, np.array([[0.5], [2.0**-23]], "float16"), "float32") == 2.0**-25 + 2.0**-23


def test_other_dtypes_have_no_such_product(level):
    a, b = np.ones((2, 2), ml_dtypes.bfloat16), np.ones((2, 2), "float16")
    assert native.gemm(a, b, np.empty((2, 2), "float32")) is None
    assert native.gemm(a, a, np.empty((2, 2), "float16")) is None
    assert native.gemm(a, a, np.empty((2, 2), "float64")) is None


@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (7, 33, 5), (29, 530, 65), (57, 18, 530), (5, 0, 3)])
def test_float32_beside_bfloat16_counts_as_rounded(level, m, n, k):
    half = DTYPES[0] if np.dtype(DTYPES[0]).name == "bfloat16" else DTYPES[1]
    a, b = normal((m, k), "float32", 2), normal((k, n), "float32", 3)
    if k > 3:
        b[1, : n // 2], b[3, n // 2 :] = np.inf, 3.4e38  # which rounds to infinity
    a_half, b_half = a.astype(half), b.astype(half)
    for ta, tb in LAYOUTS:
        for out in (half, "float32"):
            want = multiply(laid_out(a_half, ta), laid_out(b_half, tb), out)
            for x, y in ((a_half, b), (a, b_half)):
                found = multiply(laid_out(x, ta), laid_out(y, tb), out)
                np.testing.assert_array_equal(found.astype("float32"), want.astype("float32"))


def test_float32_beside_float16_is_no_product():
    a, b = np.ones((2, 3), "float32"), np.ones((3, 2), "float16")
    assert native.gemm(a, b, np.ones((2, 2), "float16")) is None
    assert native.gemm(a, b, np.ones((2, 2), "float32")) is None
