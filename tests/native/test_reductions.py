"""Native reductions: exact on whole numbers along any axes, and more exact than NumPy's sums on others."""

import math
from itertools import combinations

import numpy as np
import pytest

from fluidx import native
from fluidx.ir.parts import Part
from tests.native.bodies import close, normal, one, run, whole_numbers

SHAPES = [(1,), (7,), (64,), (65,), (5, 3), (1, 9), (300, 257), (3, 70000), (70000, 3)]
SHAPES += [(4, 5, 6), (3, 1, 130, 2), (9, 16, 11, 13), (2, 3, 0)]


def axes_of(ndim):
    return [c for r in range(ndim + 1) for c in combinations(range(ndim), r)]


@pytest.mark.parametrize("shape", SHAPES)
def test_whole_numbers_add_up_exactly_over_all_axes(shape):
    for dtype in ("float32", "float64", "int64", "int32"):
        x = whole_numbers(shape, dtype)
        for dim in axes_of(len(shape)):
            exact = x.astype("int64").sum(axis=dim or None)
            assert np.array_equal(one("reduce_sum", x, dim=dim), np.reshape(exact, exact.shape or (1,))), (dtype, dim)
            kept = one("reduce_sum", x, dim=dim, keep_dim=True)
            assert kept.ndim == x.ndim and np.array_equal(kept.reshape(-1), exact.reshape(-1))


@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_extrema_and_products(shape):
    x = whole_numbers(shape, seed=1, low=-9, high=10)
    for dim in axes_of(len(shape)):
        for name, method in (("reduce_max", "max"), ("reduce_min", "min")):
            exact = getattr(x, method)(axis=dim or None)
            assert np.array_equal(one(name, x, dim=dim).reshape(-1), exact.reshape(-1))
    signs = np.where(x > 0, np.float32(1), np.float32(-1))
    assert one("reduce_prod", signs)[0] == (-1.0) ** int((signs < 0).sum())
    yes = x > -9
    assert one("reduce_all", yes)[0] == yes.all()
    assert np.array_equal(one("reduce_any", ~yes, dim=(0,)).reshape(-1), (~yes).any(axis=0).reshape(-1))


@pytest.mark.parametrize("where", [0, 63, 64, 300, 4095, 4096, 9999])
def test_nan_and_infinity_come_through(where):
    for value in (np.nan, np.inf, -np.inf):
        for shape, dim in (((10000,), (0,)), ((10000, 2), (0,)), ((2, 10000), (1,))):
            x = np.zeros(shape, "float32")
            x[(where,) if len(shape) == 1 else (where, 1) if dim == (0,) else (1, where)] = value
            for name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_mean"):
                expected = {"reduce_sum": np.sum, "reduce_mean": np.mean, "reduce_max": np.max, "reduce_min": np.min}[name](x, axis=dim)
                assert np.array_equal(one(name, x, dim=dim).reshape(-1), expected.reshape(-1), equal_nan=True)


def test_opposite_infinities_have_no_sum():
    x = np.zeros(5000, "float32")
    x[3], x[4000] = np.inf, -np.inf
    assert np.isnan(one("reduce_sum", x)[0])


SUMS = [((1 << 20,), (0,)), ((1000, 1000), (0,)), ((1000, 1000), (1,)), ((30, 40, 50), (1,)), ((64, 8, 99), (0, 2))]


@pytest.mark.parametrize("shape, dim", SUMS)
def test_sums_are_at_least_as_exact_as_numpy_adds_pairwise(shape, dim):
    """Against float64, over positive numbers, where roundings pile up."""
    x = np.random.default_rng(0).random(shape, "float32")
    exact = x.sum(axis=dim, dtype="float64")
    error = np.sqrt(np.square(one("reduce_sum", x, dim=dim).reshape(exact.shape) - exact).mean())
    # pairwise: NumPy's own over rows that lie in memory; where it would add one after the other, a copy with the axes at the end
    lying = np.ascontiguousarray(np.moveaxis(x, dim, range(-len(dim), 0)))
    pairwise = np.sqrt(np.square(lying.reshape(*exact.shape, -1).sum(axis=-1) - exact).mean())
    assert error <= max(pairwise, 0.51 * np.spacing(np.float32(exact.max())))  # half a unit is the rounding of the result


def test_order_of_sums_does_not_depend_on_the_level():
    x, found = normal((100, 999)), set()
    for name in native.levels():
        with native.at_level(name):
            found |= {tuple(one("reduce_sum", x, dim=(k,)).tolist()) for k in (0,)}
    assert len(found) == 1


def test_views_are_reduced_where_they_lie():
    x = whole_numbers((20, 30, 40))
    for view in (x.transpose(2, 0, 1), x[::2, ::-1], x[:, 3:9, ::3], np.broadcast_to(x[:, :1], x.shape)):
        for dim in ((0,), (1,), (2,), (0, 2)):
            got = run("reduce_sum", view, dim=dim)
            assert got is None or np.array_equal(got[0], view.sum(axis=dim))


def test_means_divide_by_the_count_of_the_whole():
    x = whole_numbers((6, 8))
    assert one("mean", x)[0] == np.float32(x.astype("float64").mean())
    close(one("reduce_mean", x, dim=(1,)), x.astype("float64").mean(axis=1), ulps=0.51, floor=0)
    assert one("mean", x, told={"part": Part(count=96)})[0] == np.float32(x.astype("float64").sum() / 96)
    g = np.array([3.0], "float32")
    assert (one("reduce_mean_grad", x, g) == np.float32(3) / np.float32(48)).all()
    assert (one("reduce_mean_grad", x, g, told={"part": Part(count=96)}) == np.float32(3) / np.float32(96)).all()


def test_gradients_of_reductions():
    x = whole_numbers((5, 6, 7))
    g = whole_numbers((5, 7), seed=1)
    assert np.array_equal(one("reduce_sum_grad", x, g, dim=(1,)), np.broadcast_to(g[:, None], x.shape))
    top = x.max(axis=1)
    assert np.array_equal(one("reduce_max_grad", x, top, g, dim=(1,)), np.where(x == top[:, None], g[:, None], 0))
    total = np.log(np.exp(x.astype("float64")).sum(axis=1))
    got = one("logsumexp_grad", x, total.astype("float32"), g, dim=(1,))
    close(got, np.exp(x - total.astype("float32").astype("float64")[:, None]) * g[:, None], ulps=8, floor=0)  # the difference is rounded


def test_logsumexp():
    for shape, dim in (((5, 7), (1,)), ((4, 3, 700), (1, 2)), ((3000,), (0,)), ((6, 1), (1,))):
        x = normal(shape, scale=9)
        wide = x.astype("float64")
        top = wide.max(axis=dim, keepdims=True)
        exact = np.log(np.exp(wide - top).sum(axis=dim)) + top.reshape(wide.sum(axis=dim).shape)
        close(one("logsumexp", x, dim=dim).reshape(exact.shape), exact, ulps=4)
    x = np.array([[-np.inf, -np.inf], [np.inf, 0], [-np.inf, 0], [np.nan, 1]], "float32")
    assert np.array_equal(one("logsumexp", x, dim=(1,)), np.array([-np.inf, np.inf, 0, np.nan], "float32"), equal_nan=True)
    assert run("logsumexp", normal((3, 4)), dim=(0,)) is None  # no rows that lie in memory


@pytest.mark.parametrize("n", [1, 7, 64, 1000, 100_003])
def test_squared_norm(n):
    x = normal(n)
    assert one("squared_l2_norm", whole_numbers(n))[0] == (whole_numbers(n, "int64") ** 2).sum()
    close(one("squared_l2_norm", x), np.array([math.fsum(float(v) ** 2 for v in x)]), ulps=4)


def test_sums_down_to_an_operand():
    cases = [((3, 5), (5,), -1), ((2, 3, 4, 5), (3,), 1), ((2, 3, 4, 5), (2, 1, 1, 5), -1), ((1024, 48), (48,), -1), ((3, 5), (3, 5), -1)]
    for x, like, axis in cases:
        a = whole_numbers(x)
        first = len(x) - len(like) if axis == -1 else axis
        gone = tuple(k for k in range(len(x)) if not first <= k < first + len(like) or like[k - first] == 1)
        assert np.array_equal(one("reduce_to", a, np.zeros(like, "float32"), axis=axis), a.sum(axis=gone).reshape(like))
