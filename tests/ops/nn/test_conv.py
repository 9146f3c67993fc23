"""conv2d, depthwise_conv2d and conv2d_transpose against slow loops in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidx.ir import ProgramError, TensorType
from fluidx.ir.opdef import opdef
from fluidx.ops.nn import conv, im2col
from fluidx.ops.nn.windows import place_windows

SETTINGS = settings(max_examples=120, deadline=None)


def loop_conv(x, w, stride, pad, dilation, groups):
    """NCHW and OIHW, pad as (top, bottom, left, right)."""
    n, c, h, wd = x.shape
    o, cg, kh, kw = w.shape
    padded = np.pad(x.astype(float), ((0, 0), (0, 0), pad[:2], pad[2:]))
    oh = (padded.shape[2] - (kh - 1) * dilation[0] - 1) // stride[0] + 1
    ow = (padded.shape[3] - (kw - 1) * dilation[1] - 1) // stride[1] + 1
    y = np.zeros((n, o, oh, ow))
    for f in range(o):
        first = f // (o // groups) * cg
        for i in range(oh):
            for j in range(ow):
                for a in range(kh):
                    for b in range(kw):
                        seen = padded[:, first : first + cg, i * stride[0] + a * dilation[0], j * stride[1] + b * dilation[1]]
                        y[:, f, i, j] += seen @ w[f, :, a, b]
    return y


def loop_conv_grad(x, w, g, stride, pad, dilation, groups):
    n, c, h, wd = x.shape
    o, cg, kh, kw = w.shape
    padded = np.pad(x.astype(float), ((0, 0), (0, 0), pad[:2], pad[2:]))
    dp, dw = np.zeros_like(padded), np.zeros(w.shape)
    for f in range(o):
        chans = slice(f // (o // groups) * cg, f // (o // groups) * cg + cg)
        for i in range(g.shape[2]):
            for j in range(g.shape[3]):
                for a in range(kh):
                    for b in range(kw):
                        r, s = i * stride[0] + a * dilation[0], j * stride[1] + b * dilation[1]
                        dp[:, chans, r, s] += g[:, f, i, j, None] * w[f, :, a, b]
                        dw[f, :, a, b] += g[:, f, i, j] @ padded[:, chans, r, s]
    return dp[:, :, pad[0] : pad[0] + h, pad[2] : pad[2] + wd], dw


def ints(rng, *shape):
    return rng.integers(-3, 4, shape).astype("float32")


@st.composite
def cases(draw):
    k = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    stride = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    pad = draw(st.tuples(*[st.integers(0, 3)] * 4))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    cg, og = draw(st.sampled_from([1, 2, 17])), draw(st.sampled_from([1, 2, 16]))
    size = [draw(st.integers(max(1, (k[a] - 1) * dilation[a] + 1 - pad[2 * a] - pad[2 * a + 1]), 9)) for a in (0, 1)]
    n, fmt, seed = draw(st.integers(1, 3)), draw(st.sampled_from(["NCHW", "NHWC"])), draw(st.integers(0, 99))
    return k, stride, dilation, pad, groups, cg, og, size, n, fmt, seed


def to(fmt, x):
    return x if fmt == "NCHW" else np.ascontiguousarray(x.transpose(0, 2, 3, 1))


@SETTINGS
@given(cases())
def test_convolution_and_its_gradients_equal_the_loops(case):
    k, stride, dilation, pad, groups, cg, og, size, n, fmt, seed = case
    rng = np.random.default_rng(seed)
    x, w = ints(rng, n, cg * groups, *size), ints(rng, og * groups, cg, *k)
    attrs = {**conv.Conv2d.attrs, "strides": stride, "paddings": pad, "dilations": dilation, "groups": groups, "data_format": fmt}
    want = loop_conv(x, w, stride, pad, dilation, groups)
    inferred = conv.Conv2d.infer(TensorType("float32", to(fmt, x).shape), TensorType("float32", w.shape), **attrs)
    y = np.full(inferred.shape, np.nan, "float32")
    run = conv.Conv2d.native.bind((to(fmt, x), w), (y,), attrs, None)
    run(), run()
    assert (y == to(fmt, want)).all()
    g = ints(rng, *want.shape)
    want_x, want_w = loop_conv_grad(x, w, g, stride, pad, dilation, groups)
    dx, dw = np.full(to(fmt, x).shape, np.nan, "float32"), np.full(w.shape, np.nan, "float32")
    run = conv.Conv2dGrad.native.bind((to(fmt, x), w, to(fmt, g)), (dx, dw), attrs, None)
    run(), run()
    assert (dx == to(fmt, want_x)).all() and (dw == want_w).all()


@SETTINGS
@given(cases(), st.integers(0, 3))
def test_transposed_convolution_is_the_gradient_of_convolution(case, more):
    k, stride, dilation, pad, groups, cg, og, size, n, fmt, seed = case
    rng = np.random.default_rng(seed)
    x, w = ints(rng, n, og * groups, *size), ints(rng, og * groups, cg, *k)
    least = [(size[a] - 1) * stride[a] + (k[a] - 1) * dilation[a] + 1 - pad[2 * a] - pad[2 * a + 1] for a in (0, 1)]
    if min(least) < 1:
        return
    wanted = tuple(least[a] + min(more, stride[a] - 1) for a in (0, 1))
    attrs = {**conv.Conv2dTranspose.attrs, "strides": stride, "paddings": pad, "dilations": dilation, "groups": groups,
             "data_format": fmt, "output_size": wanted if more else ()}  # fmt: skip
    inferred = conv.Conv2dTranspose.infer(TensorType("float32", to(fmt, x).shape), TensorType("float32", w.shape), **attrs)
    y = np.full(inferred.shape, np.nan, "float32")
    conv.Conv2dTranspose.kernel(np, to(fmt, x), w, out=y, **attrs)
    image = np.zeros((n, cg * groups, *wanted))
    want, _ = loop_conv_grad(image, w, x, stride, pad, dilation, groups)
    assert (y == to(fmt, want)).all()
    g = ints(rng, *want.shape)
    dx, dw = np.full(to(fmt, x).shape, np.nan, "float32"), np.full(w.shape, np.nan, "float32")
    conv.Conv2dTransposeGrad.kernel(np, to(fmt, x), w, to(fmt, g), out=(dx, dw), **attrs)
    assert (dx == to(fmt, loop_conv(g, w, stride, pad, dilation, groups))).all()
    assert (dw == loop_conv_grad(g, w, x, stride, pad, dilation, groups)[1]).all()


def test_a_convolution_worked_by_hand():
    x = np.arange(9, dtype="float32").reshape(1, 1, 3, 3)
    w = np.array([[[[1, 0], [0, -1]]]], "float32")
    y = np.empty((1, 1, 2, 2), "float32")
    conv.Conv2d.kernel(np, x, w, out=y, **conv.Conv2d.attrs)
    assert (y == -4).all()


def test_many_blocks_give_what_one_block_gives(monkeypatch):
    rng = np.random.default_rng(0)
    x, w, g = ints(rng, 7, 18, 6, 5), ints(rng, 4, 18, 3, 3), ints(rng, 7, 4, 3, 3)
    attrs = {**conv.Conv2d.attrs, "strides": (2, 2), "paddings": (1, 1)}

    def all_three():
        y, dx, dw = np.empty((7, 4, 3, 3), "float32"), np.empty_like(x), np.empty_like(w)
        conv.Conv2d.kernel(np, x, w, out=y, **attrs)
        conv.Conv2dGrad.kernel(np, x, w, g, out=(dx, dw), **attrs)
        return y, dx, dw

    whole = all_three()
    monkeypatch.setattr(conv, "IN_CACHE", im2col.Blocks(20_000, 20_000))
    for a, b in zip(whole, all_three()):
        assert (a == b).all()


def test_operands_that_are_views_are_read_in_every_run():
    rng = np.random.default_rng(1)
    big_w, big_x = ints(rng, 3, 3, 2, 4), ints(rng, 2, 6, 4, 6)
    w, x = big_w.transpose(3, 2, 0, 1), big_x[:, ::3, :, ::-1]
    y = np.empty((2, 4, 2, 4), "float32")
    run = conv.Conv2d.native.bind((x, w), (y,), conv.Conv2d.attrs, None)
    for _ in range(2):
        run()
        assert (y == loop_conv(x, w, (1, 1), (0, 0, 0, 0), (1, 1), 1)).all()
        big_w += 1
        big_x -= 1


def test_same_padding_keeps_ceil_of_size_over_stride():
    win = place_windows("conv2d", (5, 4), (3, 2), (2, 2), (9, 9), (1, 1), "SAME")
    assert win.out == (3, 2) and win.pad == (1, 1, 0, 0)


def test_an_empty_batch_gives_an_empty_result_and_a_zero_filter_gradient():
    x, w, y = np.empty((0, 2, 3, 3), "float32"), np.ones((1, 2, 2, 2), "float32"), np.empty((0, 1, 2, 2), "float32")
    conv.Conv2d.kernel(np, x, w, out=y, **conv.Conv2d.attrs)
    dx, dw = np.empty_like(x), np.ones_like(w)
    conv.Conv2dGrad.kernel(np, x, w, y, out=(dx, dw), **conv.Conv2d.attrs)
    assert (dw == 0).all()


def test_open_sizes_stay_open():
    x, w = TensorType("float32", (-1, 3, -1, 8)), TensorType("float32", (4, 3, 3, 3))
    assert conv.Conv2d.infer(x, w, **conv.Conv2d.attrs).shape == (-1, 4, -1, 6)
    assert conv.Conv2dTranspose.infer(x, w.with_shape((3, 4, 3, 3)), **conv.Conv2dTranspose.attrs).shape == (-1, 4, -1, 10)


@pytest.mark.parametrize(
    "shape, filters, attrs, message",
    [
        ((1, 3, 4, 4), (2, 2, 3, 3), {}, "has 3 channels, Filter f32.2,2,3,3. with groups 1 expects 2"),
        ((1, 3, 4, 4), (2, 3, 5, 5), {}, "a window of 5 does not fit height 4 with padding 0 and 0"),
        ((1, 3, 4, 4), (2, 3, 3, 3), {"strides": (0, 1)}, "strides must be one or two integers from 1 to 2147483647"),
        ((1, 3, 4, 4), (2, 3, 3, 3), {"paddings": (1, 1, 1)}, "paddings must be 1, 2 or 4 integers"),
        ((1, 4, 4, 4), (3, 2, 3, 3), {"groups": 2}, "groups 2 must divide the 3 filters"),
        ((3, 4, 4), (2, 3, 3, 3), {}, "needs an input of 4 axes"),
        ((1, 3, 4, 4), (2, 3, 3, 3), {"data_format": "CHWN"}, "data_format must be NCHW or NHWC"),
        ((1, 3, 4, 4), (2, 3, 3, 3), {"padding_algorithm": "FULL"}, "padding_algorithm must be EXPLICIT, SAME or VALID"),
    ],
)
def test_a_convolution_that_does_not_fit_says_why(shape, filters, attrs, message):
    with pytest.raises(ProgramError, match=message):
        conv.Conv2d.infer(TensorType("float32", shape), TensorType("float32", filters), **{**conv.Conv2d.attrs, **attrs})


@pytest.mark.parametrize("op", ["conv2d_grad", "conv2d_transpose_grad"])
def test_a_gradient_of_another_shape_than_the_result_is_refused(op):
    x, w = TensorType("float32", (64, 3, 5, 4)), TensorType("float32", (6, 3, 3, 3) if op == "conv2d_grad" else (3, 6, 3, 3))
    definition = opdef(op)
    right = (64, 6, 3, 2) if op == "conv2d_grad" else (64, 6, 7, 6)
    assert definition.infer(x, w, TensorType("float32", right), **definition.defaults) == (x, w)
    with pytest.raises(ProgramError, match=rf"{op}: .* gives f32\[64,6,.*Output@GRAD is f32\[64,2,3,2\]"):
        definition.infer(x, w, TensorType("float32", (64, 2, 3, 2)), **definition.defaults)
