"""Products and convolutions of 8-bit integers in C, at every level of this machine: exact sums, and what is rounded from them."""

import numpy as np
import pytest

from fluidx import native
from fluidx.ops.nn.windows import place_windows
from fluidx.ops.quantized.packing import packed
from fluidx.ops.quantized.products import packed_filter

from .bodies import one

LEVELS = native.levels() if native.enabled() else ["base"]
RANGES = {"uint8": (0, 255), "int8": (-128, 127)}


@pytest.fixture(params=LEVELS, autouse=True)
def level(request):
    with native.at_level(request.param):
        yield request.param


def drawn(shape, dtype, seed=0):
    """Integers of 8 bits, a third of them the least and the largest."""
    rng = np.random.default_rng(seed)
    x = rng.integers(*RANGES[dtype], shape, endpoint=True)
    return np.where(rng.random(shape) < 0.3, rng.choice(RANGES[dtype], shape), x).astype(dtype)


def matmul(x, w, *more, **attrs):
    operands = [*more, *[None] * (7 - len(more))]
    return one("quantized_matmul", x, packed(np.ascontiguousarray(w.T)[None]), *operands, outputs=w.shape[1], **attrs)


@pytest.mark.parametrize("dtype", RANGES)
@pytest.mark.parametrize("m, k, n", [(1, 1, 1), (1, 3, 17), (2, 4, 16), (5, 63, 33), (31, 64, 15), (33, 65, 48), (40, 130, 31)])
def test_sums_are_exact(dtype, m, k, n):
    x, w = drawn((m, k), dtype), drawn((k, n), "int8", 1)
    for zero in (RANGES[dtype][0], 3, RANGES[dtype][1]):
        expected = (x.astype(np.int64) - zero) @ w.astype(np.int64)
        assert np.array_equal(matmul(x, w, zero=zero), expected)


def test_the_largest_sums_do_not_saturate():
    x, w = np.full((3, 1000), 255, "uint8"), np.full((1000, 17), -128, "int8")
    assert (matmul(x, w) == 255 * -128 * 1000).all()
    assert (matmul(np.full((3, 1000), -128, "int8"), w, zero=127) == 255 * 128 * 1000).all()


def test_a_bias_is_added_in_32_bits_and_wraps_as_integers_do():
    x, w = np.full((1, 1), 1, "uint8"), np.ones((1, 2), "int8")
    assert matmul(x, w, np.int32([-1, 2**31 - 1])).tolist() == [[0, -(2**31)]]


@pytest.mark.parametrize("dtype", RANGES)
def test_zero_points_of_weights_are_subtracted(dtype):
    x, w, less = drawn((33, 70), dtype), drawn((70, 40), "int8", 1), np.arange(-20, 20, dtype="int32") * 6
    y = matmul(x, w, *[None] * 6, less, zero=9)
    assert np.array_equal(y, (x.astype(np.int64) - 9) @ (w.astype(np.int64) - less))
    image, filters = drawn((1, 5, 5, 12), dtype), drawn((6, 4, 3, 3), "int8", 1)
    how = {"strides": (1, 1), "paddings": (1, 1), "dilations": (1, 1), "groups": 3}
    y = one("quantized_conv", image, packed_filter(filters, 3), *[None] * 6, less[:6], outputs=6, kernel=(3, 3), zero=9, **how)
    wide = filters.astype(np.int64) - less[:6].reshape(-1, 1, 1, 1)
    assert np.array_equal(y, convolved(image, wide, 9, **how))
    each = drawn((12, 1, 3, 3), "int8", 2)
    how["groups"] = 12
    y = one("quantized_conv", image, packed_filter(each, 12), *[None] * 6, less[:12], outputs=12, kernel=(3, 3), zero=9, **how)
    wide = each.astype(np.int64) - less[:12].reshape(-1, 1, 1, 1)
    assert np.array_equal(y, convolved(image, wide, 9, **how))


def test_zero_points_and_factors_are_read_in_each_run():
    x, w = drawn((3, 5), "uint8"), drawn((5, 2), "int8", 1)
    y = matmul(x, w, None, np.float32([0.5, 0.25]), np.float32([1, -1]), None, np.uint8([7]), np.float32([2]), dtype="float32")
    sums = (x.astype(np.int64) - 7) @ w.astype(np.int64)
    assert np.array_equal(y, (sums * np.float32([1, 0.5]) + np.float32([1, -1])).astype("float32"))


@pytest.mark.parametrize("dtype", RANGES)
def test_results_are_rounded_to_the_nearest_even_and_clipped(dtype):
    low, high = RANGES[dtype]
    sums = np.array([[-9999, -5, -3, -1, 0, 1, 3, 5, 9999]])  # halves of them: ties
    x, w = np.ones((1, 1), "uint8"), np.zeros((1, 9), "int8")
    y = matmul(x, w, sums[0].astype("int32"), np.float32([0.5]), dtype=dtype, out_zero=10, lowest=low, highest=high)
    assert y.tolist() == [[low, 8, 8, 10, 10, 10, 12, 12, high]]
    y = matmul(x, w, sums[0].astype("int32"), np.float32([0.5]), dtype=dtype, out_zero=10, lowest=10, highest=11)  # a relu, and less
    assert y.tolist() == [[10, 10, 10, 10, 10, 10, 11, 11, 11]]


@pytest.mark.parametrize("other", RANGES)
def test_the_sum_with_another_value_is_rounded_twice(other):
    x, w = np.ones((1, 1), "uint8"), np.zeros((1, 4), "int8")
    # sums 3, 5, 400, -400 in halves: 2, 2, 245 and -10 after the first rounding, with zero point 10 and bounds 0 and 255
    more = np.array([[3, 4, 100, 3]]).astype(other)
    y = matmul(x, w, np.int32([3, 5, 4000, -400]), np.float32([0.5]), None, more, dtype="uint8", out_zero=10, lowest=0, highest=255,
               ratio=0.5, other_zero=3, other_ratio=0.25, sum_zero=1, sum_lowest=0, sum_highest=140)  # fmt: skip
    # 2 * .5 + 0 = 1; 1 + .25 = 1.25; 122.5 + 24.25 = 146.75; -10 * .5 + 0 = -5; plus 1, within 0 and 140
    assert y.tolist() == [[2, 2, 140, 0]]


def convolved(x, w, zero, strides, paddings, dilations, groups):
    """The sums, by loops over the taps, in int64."""
    n, h, wd, c = x.shape
    o, ci, kh, kw = w.shape
    win = place_windows("test", (h, wd), (kh, kw), strides, paddings, dilations)
    top, bottom, left, right = win.pad
    image = np.pad(x.astype(np.int64) - zero, ((0, 0), (top, bottom), (left, right), (0, 0)))
    y = np.zeros((n, *win.out, o), np.int64)
    for i, j in win.taps:
        rows, columns = win.tap(i, j)
        for g in range(groups):
            some = slice(g * o // groups, (g + 1) * o // groups)
            y[..., some] += image[:, rows, columns, g * ci : (g + 1) * ci] @ w[some, :, i, j].astype(np.int64).T
    return y


CONVOLUTIONS = {
    "pixels": ((2, 5, 3, 64), (33, 64, 1, 1), {}),
    "pixels of few channels": ((1, 4, 3, 5), (3, 5, 1, 1), {}),
    "every second pixel": ((1, 5, 4, 64), (16, 64, 1, 1), {"strides": (2, 2)}),
    "padded": ((2, 5, 4, 3), (17, 3, 3, 3), {"paddings": (1, 1)}),
    "far apart": ((1, 9, 8, 20), (8, 20, 2, 3), {"dilations": (3, 2), "paddings": (2, 0, 1, 3), "strides": (1, 2)}),
    "one row": ((1, 1, 70, 1), (1, 1, 1, 7), {"paddings": (0, 3)}),
    "groups": ((1, 6, 5, 12), (6, 4, 3, 3), {"groups": 3, "paddings": (1, 1)}),
    "groups of many": ((1, 3, 3, 128), (34, 64, 2, 2), {"groups": 2}),
    "each channel": ((2, 5, 6, 35), (35, 1, 3, 3), {"groups": 35, "paddings": (1, 0, 0, 1), "strides": (2, 1)}),
    "each channel twice": ((1, 4, 4, 3), (6, 1, 2, 2), {"groups": 3}),
    "one large window": ((1, 7, 7, 3), (2, 3, 7, 7), {}),
}


@pytest.mark.parametrize("dtype", RANGES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_exact(name, dtype):
    image, filters, how = CONVOLUTIONS[name]
    full = {"strides": (1, 1), "paddings": (0, 0), "dilations": (1, 1), "groups": 1, **how}
    x, w, zero = drawn(image, dtype), drawn(filters, "int8", 1), 5
    y = one("quantized_conv", x, packed_filter(w, full["groups"]), *[None] * 6, outputs=filters[0], kernel=filters[2:], zero=zero, **full)
    assert np.array_equal(y, convolved(x, w, zero, full["strides"], full["paddings"], full["dilations"], full["groups"]))


def test_values_are_quantized_to_the_nearest_even():
    x = np.float32([-1e9, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 1e9, np.nan, np.inf])
    assert one("quantize_linear", x, scale=1.0, zero=3).tolist() == [0, 1, 1, 3, 3, 5, 5, 255, 0, 255]
    assert one("quantize_linear", x, scale=1.0, zero=0, dtype="int8").tolist() == [-128, -2, -2, 0, 0, 2, 2, 127, -128, 127]


def test_dequantized_values_are_exact_products():
    assert one("dequantize_linear", np.uint8([0, 3, 255]), scale=0.5, zero=3).tolist() == [-1.5, 0, 126]
    assert one("dequantize_linear", np.int8([-128, 3, 127]), scale=0.5, zero=-128).tolist() == [0, 65.5, 127.5]


def test_dynamic_quantization_takes_the_range_of_the_values_and_zero():
    def run(values):
        from fluidx import native as module
        from fluidx.ir import opdef

        x = np.float32(values)
        outs = [np.empty(x.shape, "uint8"), np.empty((), "float32"), np.empty((), "uint8")]
        module.compile(opdef("dynamic_quantize_linear").native.calls([x], outs, {}))()
        return outs[0].tolist(), float(outs[1]), int(outs[2])

    assert run([-1, 0, 254]) == ([0, 1, 255], 1.0, 1)
    assert run([51, 102, 255]) == ([51, 102, 255], 1.0, 0)
    assert run([-255, -1]) == ([0, 254], 1.0, 255)
    assert run([0, 0]) == ([0, 0], 1.0, 0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal(100_003).astype("float32")
    q, scale, zero = run(x)
    assert scale == np.float32(x.max() - x.min()) / np.float32(255) and zero == round(-x.min() / scale)
    assert np.abs((np.array(q) - zero) * scale - x).max() <= scale * 0.501


def test_tables_sums_and_maxima():
    table = np.arange(255, -1, -1).astype("uint8")
    assert one("quantized_lookup", np.int8([0, 1, -1, -128]), table).tolist() == [255, 254, 0, 127]
    x, y = np.uint8([0, 128, 255]), np.int8([-128, 0, 127])
    assert one("quantized_sum", x, y, zero_x=128, ratio_x=0.5, ratio_y=1.0, zero=100).tolist() == [0, 100, 255]
    for dtype in RANGES:
        image = drawn((2, 6, 5, 33), dtype)
        best = one("quantized_max_pool", image, kernel=(3, 2), strides=(2, 1), paddings=(1, 0))
        assert best.shape == (2, 3, 4, 33)
        for i in range(3):
            for j in range(4):
                assert np.array_equal(best[:, i, j], image[:, max(2 * i - 1, 0) : 2 * i + 2, j : j + 2].max((1, 2)))
