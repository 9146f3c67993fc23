"""Convolutions, pools, normalizations and regions of ONNX: against sums written out, and against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

from fluidx.onnx.errors import OnnxError

onnx = pytest.importorskip("onnx")

from tests.onnx.one_node import by_runtime, check_gradient, ran  # noqa: E402


def whole(*shape, seed=0):
    """Small whole numbers: their products and sums are exact in float32 in any order."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def convolved(x, w, strides, pads, dilations, groups):
    """A convolution of any number of axes, element by element in float64."""
    rank = x.ndim - 2
    x = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:])])
    sizes = [(x.shape[2 + a] - (w.shape[2 + a] - 1) * dilations[a] - 1) // strides[a] + 1 for a in range(rank)]
    y, per_group = np.zeros((len(x), len(w), *sizes)), len(w) // groups
    for place in np.ndindex(*sizes):
        for tap in np.ndindex(*w.shape[2:]):
            pixel = x[(slice(None), slice(None), *(p * s + t * d for p, s, t, d in zip(place, strides, tap, dilations)))]
            for g in range(groups):
                outs = slice(g * per_group, (g + 1) * per_group)
                ins = slice(g * w.shape[1], (g + 1) * w.shape[1])
                y[(slice(None), outs, *place)] += pixel[:, ins] @ w[(outs, slice(None), *tap)].T
    return y


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_a_convolution_of_any_number_of_axes_is_the_sum_over_its_taps(rank):
    x, w = whole(2, 4, 6, 5, 4, 3, seed=1)[(..., *[0] * (4 - rank))], whole(6, 2, 2, 3, 2, 2, seed=2)[(..., *[0] * (4 - rank))]
    strides, pads, dilations = [2, 1, 2, 1][:rank], [1, 0, 2, 1][:rank] + [0, 2, 1, 1][:rank], [2, 1, 1, 2][:rank]
    y = ran("Conv", [x, w, whole(6, seed=3)], strides=strides, pads=pads, dilations=dilations, group=2)
    want = convolved(x, w, strides, pads, dilations, 2) + whole(6, seed=3).reshape(6, *[1] * rank)
    assert y.shape == want.shape and (y == want).all()


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_same_pads_the_odd_element_at_the_end_or_at_the_begin(auto_pad):
    x, w = whole(1, 2, 7, 6, seed=4), whole(3, 2, 4, 3, seed=5)
    y = ran("Conv", [x, w], auto_pad=auto_pad, strides=[2, 1])
    pads = {"SAME_UPPER": [1, 1, 2, 1], "SAME_LOWER": [2, 1, 1, 1], "VALID": [0] * 4}[auto_pad]  # 3 and 2 in all
    assert (y == convolved(x, w, [2, 1], pads, [1, 1], 1)).all()


# what comes of d elements under filters of k at stride 3, of which `full` = 3 * (d - 1) + k is all: the size, and how much goes off before
TRANSPOSED = {
    "plain": ({}, lambda d, full: (full, 0)),
    "padding behind": ({"output_padding": 1}, lambda d, full: (full + 1, 0)),
    "same upper": ({"auto_pad": "SAME_UPPER"}, lambda d, full: (3 * d, (full - 3 * d) // 2)),
    "same lower": ({"auto_pad": "SAME_LOWER"}, lambda d, full: (3 * d, full - 3 * d - (full - 3 * d) // 2)),
    "asked": ({"output_shape": 8}, lambda d, full: (8, full - 8 - (full - 8) // 2)),
    "pads": ({"pads": (1, 2)}, lambda d, full: (full - 3, 1)),
}


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("case", TRANSPOSED)
def test_a_transposed_convolution_is_the_adjoint_of_the_convolution(rank, case):
    """<convolution of z, x> = <z, result for x>, where z lies in an image of the full size."""
    more, expected = TRANSPOSED[case]
    attrs = {k: [v] * rank if isinstance(v, int) else [p for p in v for _ in range(rank)] if k == "pads" else v for k, v in more.items()}
    x, w = whole(2, 4, *[3, 4, 2][:rank], seed=6), whole(4, 3, *[3, 2, 3][:rank], seed=7)
    y = ran("ConvTranspose", [x, w], strides=[3] * rank, group=2, **attrs)
    full = [3 * (d - 1) + k for d, k in zip(x.shape[2:], w.shape[2:])]
    sizes, before = zip(*(expected(d, f) for d, f in zip(x.shape[2:], full)))
    assert y.shape == (2, 6, *sizes)
    z, image = whole(*y.shape, seed=8), np.zeros((2, 6, *full))
    for place in np.ndindex(*sizes):
        at = tuple(p + b for p, b in zip(place, before))
        if all(0 <= p < f for p, f in zip(at, full)):
            image[(..., *at)] = z[(..., *place)]
    seen = convolved(image, w, [3] * rank, [0] * 2 * rank, [1] * rank, 2)
    assert (seen * x).sum() == (z.astype(np.float64) * y).sum()


POOLS = [
    {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]},
    {"kernel_shape": [3, 3], "strides": [2, 3], "ceil_mode": 1, "pads": [1, 1, 0, 0]},
    {"kernel_shape": [2, 2], "dilations": [2, 1], "pads": [1, 0, 1, 1]},
    {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER", "strides": [2, 1]},
    {"kernel_shape": [2]}, {"kernel_shape": [2, 2, 2], "strides": [1, 2, 2], "pads": [1, 0, 0, 0, 1, 1]},
]  # fmt: skip


@pytest.mark.parametrize("attrs", POOLS)
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "AveragePool with padding", "LpPool"])
def test_pools_are_those_of_onnxruntime(op, attrs):
    x = np.random.default_rng(9).normal(size=(2, 3, 7, 6, 5)).astype(np.float32)[(..., *[0] * (3 - len(attrs["kernel_shape"])))]
    more = {"count_include_pad": 1} if op.endswith("padding") else {"p": 3} if op == "LpPool" else {}
    name = op.split()[0]
    if name == "LpPool" and "ceil_mode" in attrs:
        pytest.skip("ONNX Runtime shrinks the last window of LpPool otherwise")
    # both add up in float32, in orders of their own
    np.testing.assert_allclose(ran(name, [x], **attrs, **more), by_runtime(name, [x], **attrs, **more), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("attrs", POOLS)
@pytest.mark.parametrize("storage_order", [0, 1])
def test_the_indices_of_a_maximum_are_those_of_onnxruntime(attrs, storage_order):
    x = np.random.default_rng(10).permutation(2 * 3 * 7 * 6 * 5).reshape(2, 3, 7, 6, 5).astype(np.float32)
    x = x[(..., *[0] * (3 - len(attrs["kernel_shape"])))]
    got, want = (f("MaxPool", [x], outputs=2, storage_order=storage_order, **attrs) for f in (ran, by_runtime))
    assert (got[0] == want[0]).all() and (got[1] == want[1]).all()


def test_what_max_pool_takes_apart_max_unpool_puts_back():
    x = np.random.default_rng(11).permutation(2 * 3 * 6 * 4).reshape(2, 3, 6, 4).astype(np.float32)
    y, at = ran("MaxPool", [x], outputs=2, kernel_shape=[2, 2], strides=[2, 2])
    back = ran("MaxUnpool", [y, at], kernel_shape=[2, 2], strides=[2, 2])
    kept = np.zeros(x.size, bool)
    kept[at.ravel()] = True
    assert (back == x * kept.reshape(x.shape)).all()


def test_training_batch_norm_moves_the_running_statistics():
    x = np.array([[[1.0], [10.0]], [[3.0], [14.0]]], np.float32)  # means 2 and 12, variances 1 and 4
    mean, var = np.array([0.0, 4.0], np.float32), np.array([5.0, 8.0], np.float32)
    one, none = np.ones(2, np.float32), np.zeros(2, np.float32)
    y, running_mean, running_var = ran(
        "BatchNormalization", [x, one, none, mean, var], outputs=3, training_mode=1, momentum=0.75, epsilon=0.0
    )
    assert (y == [[[-1.0], [-1.0]], [[1.0], [1.0]]]).all()
    assert running_mean.tolist() == [0.5, 6.0] and running_var.tolist() == [4.0, 7.0]


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align_is_that_of_onnxruntime(mode, ratio):
    x = np.random.default_rng(12).normal(size=(2, 3, 9, 8)).astype(np.float32)
    rois = np.array([[0, 0, 7, 7], [2.5, 1.2, 4, 8.7], [-3, -2, 30, 4], [5, 5, 5.2, 5.1]], np.float32)
    inputs, attrs = [x, rois, np.array([1, 0, 1, 0])], {"output_height": 3, "output_width": 2, "sampling_ratio": ratio, "mode": mode}
    for kind in ("half_pixel", "output_half_pixel"):
        attrs |= {"spatial_scale": 0.75, "coordinate_transformation_mode": kind}
        got, want = (f("RoiAlign", inputs, **attrs) for f in (ran, by_runtime))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # places in float32 there, in float64 here


def test_max_roi_pool_is_that_of_onnxruntime():
    x = np.random.default_rng(13).normal(size=(2, 3, 9, 8)).astype(np.float32)
    rois = np.array([[1, 0, 0, 7, 7], [0, 2.5, 1.2, 4, 8.7], [1, 5, 5, 5, 5], [0, 20, 20, 30, 30]], np.float32)
    got, want = (f("MaxRoiPool", [x, rois], pooled_shape=[3, 2], spatial_scale=0.75) for f in (ran, by_runtime))
    assert (got == want).all()


def test_col2im_adds_up_what_windows_share():
    sizes, block = np.array([4, 5]), np.array([2, 3])
    attrs = {"strides": [1, 2], "pads": [1, 0, 1, 1], "dilations": [2, 1]}
    cells = ((4 + 2 - 3) // 1 + 1) * ((5 + 1 - 3) // 2 + 1)
    x, other = whole(2, 3 * 6, cells, seed=14), whole(2, 3, 4, 5, seed=15)
    y = ran("Col2Im", [x, sizes, block], **attrs)
    # the adjoint of cutting an image into its windows: convolving with a filter for each tap
    taps = np.eye(18, dtype=np.float32).reshape(18, 3, 2, 3)
    columns = convolved(other, taps, attrs["strides"], attrs["pads"], attrs["dilations"], 1).reshape(x.shape)
    assert (columns * x).sum() == (y.astype(np.float64) * other).sum()


def test_deform_conv_without_offsets_is_conv_and_with_whole_ones_reads_elsewhere():
    x, w = whole(1, 4, 6, 5, seed=16), whole(6, 2, 3, 2, seed=17)
    offset = np.zeros((1, 2 * 2 * 6, 4, 4), np.float32)
    want = convolved(x, w, [1, 1], [0] * 4, [1, 1], 2)
    assert (ran("DeformConv", [x, w, offset], group=2, offset_group=2) == want).all()
    offset[:, 0::2] = 1.0  # one row further down; beneath the image all is 0
    moved = convolved(np.pad(x, [(0, 0), (0, 0), (0, 1), (0, 0)])[:, :, 1:], w, [1, 1], [0] * 4, [1, 1], 2)
    assert (ran("DeformConv", [x, w, offset], group=2, offset_group=2) == moved).all()


def test_gemm_scales_both_terms_and_spreads_the_second():
    a, b, c = whole(3, 4, seed=18), whole(5, 3, seed=19), whole(4, 1, seed=20)
    assert (ran("Gemm", [a, b, c], transA=1, transB=1, alpha=2.0, beta=-1.0) == 2 * (a.T @ b.T) - c).all()
    ints = [v.astype(np.int64) for v in (a, b, c)]
    assert (ran("Gemm", [*ints], transA=1, transB=1, alpha=3.0) == 3 * (ints[0].T @ ints[1].T) + ints[2]).all()


@pytest.mark.parametrize("shapes", [((3,), (3,)), ((3,), (2, 4, 3, 2)), ((2, 4, 2, 3), (3,)), ((2, 1, 2, 3), (4, 3, 5))])
def test_products_are_those_of_numpy(shapes):
    for dtype in (np.float32, np.int32, np.uint64):
        a, b = (np.abs(whole(*s, seed=k)).astype(dtype) for k, s in enumerate(shapes))
        y = ran("MatMul", [a, b])
        assert y.dtype == dtype and y.shape == np.matmul(a, b).shape and (y == np.matmul(a, b)).all()


def test_a_window_that_does_not_fit_is_refused():
    with pytest.raises(OnnxError, match="a window of 5 does not fit an axis of 3 with padding 0 and 0"):
        ran("MaxPool", [whole(1, 1, 3, 3)], kernel_shape=[5, 1])


def test_zeros_have_no_direction():
    x = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    assert (ran("LpNormalization", [x], axis=1) == np.array([[0.6, 0.8], [0.0, 0.0]], np.float32)).all()


def distinct(*shape, seed=0):
    """Numbers no two of which are closer than 0.1: the largest of some stays the largest for small steps."""
    return np.random.default_rng(seed).permutation(np.prod(shape)).reshape(shape) * 0.1


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


GRADIENTS = {
    "conv of three axes": (
        "Conv",
        [normal(1, 2, 3, 4, 3), normal(2, 1, 2, 2, 2)],
        (0, 1),
        {"group": 2, "strides": [1, 2, 1], "pads": [1] * 6},
    ),
    "conv_transpose of three axes": ("ConvTranspose", [normal(1, 2, 2, 3, 2), normal(2, 1, 2, 2, 2)], (0, 1), {"strides": [2, 1, 2]}),
    "max of three axes": ("MaxPool", [distinct(1, 2, 4, 3, 3)], (0,), {"kernel_shape": [2, 2, 2], "strides": [2, 1, 1]}),
    "max with dilations": ("MaxPool", [distinct(1, 2, 5, 4)], (0,), {"kernel_shape": [2, 2], "dilations": [2, 1], "pads": [1, 0, 0, 1]}),
    "mean with dilations": ("AveragePool", [normal(1, 2, 5, 4)], (0,), {"kernel_shape": [2, 2], "dilations": [2, 1], "pads": [1, 0, 0, 1]}),
    "col2im": ("Col2Im", [normal(1, 8, 6), np.array([3, 4]), np.array([2, 2])], (0,), {}),
    "deform_conv": ("DeformConv", [normal(1, 2, 4, 4), normal(2, 1, 2, 2), 0.3 + 0.05 * distinct(1, 8, 3, 3)], (0, 1, 2), {"group": 2}),
    "roi_align": (
        "RoiAlign",
        [normal(1, 2, 5, 5), np.array([[0.5, 1, 4, 3.2]]), np.array([0])],
        (0,),
        {"output_height": 2, "output_width": 2},
    ),
    "roi_align, max": (
        "RoiAlign",
        [normal(1, 2, 6, 6), np.array([[0.4, 1, 4, 3.2], [1.1, 1, 2, 2]]), np.array([0, 0])],
        (0,),
        {"output_height": 1, "output_width": 2, "mode": "max"},
    ),
    "max_roi_pool": ("MaxRoiPool", [distinct(1, 2, 5, 5), np.array([[0.0, 0, 1, 4, 3], [0, 7, 7, 9, 9]])], (0,), {"pooled_shape": [2, 3]}),
    "layer norm": ("LayerNormalization", [normal(3, 4).astype(np.float64), normal(4), normal(4, seed=1)], (0, 1, 2), {"stash_type": 11}),
    "directions": ("LpNormalization", [normal(3, 4)], (0,), {"axis": 0}),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_are_central_differences(case):
    op, inputs, wrt, attrs = GRADIENTS[case]
    known = tuple(k for k in range(len(inputs)) if k not in wrt)
    check_gradient(op, inputs, wrt=wrt, known=known, **attrs)
