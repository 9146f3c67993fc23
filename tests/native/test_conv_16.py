"""Convolutions of bfloat16 in C, at the levels that multiply pairs, against loops in float64."""

import ml_dtypes
import numpy as np
import pytest

from fluidx import native
from fluidx.ir import TensorType, opdef
from tests.native.test_conv import CASES, LARGE, backward, example, forward, run

MORE = [
    (3, 5, 7, 1, (1, 1), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), None),
    (40, 20, 18, 1, (3, 3), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), None),
    (2, 64, 33, 1, (7, 7), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), None),
    (1, 3, 5, 1, (9, 8), (2, 5), (1, 3), (1, 1), (0, 1, 2, 0), None),
    (1, 300, 40, 1, (4, 4), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), None),  # 2,700 products in a sum: several blocks
]
FITTING = [case for case in (*CASES, *LARGE, *MORE) if case[3] == 1]


@pytest.fixture(params=["v4_bf16", "amx"])
def pairs(request):
    if request.param not in native.levels():
        pytest.skip(f"this processor lacks {request.param}")
    with native.at_level(request.param):
        yield request.param


def taken(case):
    """Are images multiplied without float32 copies? Winograd in float32 is as fast as pairs by AVX512_BF16."""
    x, w, _, attrs = halves(case)
    out = np.empty((*x.shape[:1], w.shape[0], *example(case)[2].shape[2:]), x.dtype)
    return opdef("conv2d").native.calls([x, w], [out], opdef("conv2d").complete_attrs(attrs), dry=True) is not None


def halves(case, whole=False):
    x, w, g, attrs = example(case)
    if whole:
        x, w, g = (np.clip(np.rint(a), -2, 2) for a in (x, w, g))
    return *(a.astype(ml_dtypes.bfloat16) for a in (x, w, g)), attrs


def all_three(case, whole=False):
    """Outputs and both gradients, and what they are in float64"""
    x, w, g, attrs = halves(case, whole)
    found = run("conv2d", (x, w), attrs) + run("conv2d_grad", (x, w, g), attrs)
    x, w, g = (a.astype("float64") for a in (x, w, g))
    return found, [forward(x, w, attrs, g.shape[2:]), *backward(x, w, g, attrs)]


@pytest.mark.parametrize("case", FITTING)
def test_sums_of_whole_numbers_are_exact_and_rounded_once(pairs, case):
    if not taken(case):
        pytest.skip("Winograd in float32")
    for got, want in zip(*all_three(case, whole=True), strict=True):
        assert np.array_equal(got, want.astype("float32").astype(got.dtype))


@pytest.mark.parametrize("case", FITTING[::3])
def test_sums_are_as_near_as_float32_sums_are(pairs, case):
    if not taken(case):
        pytest.skip("Winograd in float32")
    for got, want in zip(*all_three(case), strict=True):
        terms = case[0] * want[0, 0].size + case[1] * case[5][0] * case[5][1] + case[2]
        assert (abs(got - want) <= 2.0**-8 * abs(want) + 2.0**-20 * terms**0.5).all()


def test_bits_do_not_depend_on_the_number_of_threads(pairs):
    case = LARGE[3]
    found = []
    for threads in (1, 2, 3):
        native.use_threads(threads)
        found.append(all_three(case)[0])
    assert all(np.array_equal(a, b) for one in found[1:] for a, b in zip(found[0], one, strict=True))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_pixel_that_is_not_finite_is_in_the_taps_that_see_it_and_in_no_other(pairs, value):
    """Of a filter of 3x2 over 4x4 pixels, pixel (3, 0) is seen by tap (2, 0) only. The others sum 2x3 ones of each of 5 images."""
    x, w, g = (np.ones(s, ml_dtypes.bfloat16) for s in ((5, 16, 4, 4), (16, 16, 3, 2), (5, 16, 2, 3)))
    x[3, 7, 3, 0] = value
    _, found = run("conv2d_grad", (x, w, g), {"strides": (1, 1), "paddings": (0, 0, 0, 0)})
    want = np.full(w.shape, 30.0)
    want[:, 7, 2, 0] = value
    np.testing.assert_array_equal(found.astype("float64"), want)


def test_what_has_no_such_kernel(pairs):
    """Groups, channels last, float16 and padding beyond the filter get float32 copies."""

    def calls(dtype="bfloat16", **attrs):
        attrs = opdef("conv2d").complete_attrs({"paddings": (0, 0, 0, 0), **attrs})
        x, w = (np.ones(s, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype) for s in ((1, 4, 6, 6), (4, 4 // attrs["groups"], 1, 1)))
        t = opdef("conv2d").infer(TensorType(dtype, x.shape), TensorType(dtype, w.shape), **attrs)
        return opdef("conv2d").native.calls([x, w], [np.empty(t.shape, x.dtype)], attrs, dry=True)

    assert calls() is not None
    assert calls(groups=2) is None and calls(dtype="float16") is None and calls(paddings=(1, 1, 1, 1)) is None
