"""pool2d and its gradient against slow loops in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidx.ir import ProgramError, TensorType
from fluidx.ops.nn.pool import Pool2d, Pool2dGrad


def loop_pool(x, g, kind, k, stride, pad, ceil_mode, exclusive, adaptive):
    """(result, gradient) of NCHW images; the gradient of `g`, which is cut to the result's shape."""
    n, c, h, w = x.shape
    spans = []
    for a, size in ((0, h), (1, w)):
        if adaptive:
            spans.append([(i * size // k[a], -(-(i + 1) * size // k[a]), 0) for i in range(k[a])])
            continue
        room = size + pad[2 * a] + pad[2 * a + 1] - k[a]
        count = (-(-room // stride[a]) if ceil_mode else room // stride[a]) + 1
        count -= ceil_mode and (count - 1) * stride[a] >= size + pad[2 * a]
        spans.append([(i * stride[a] - pad[2 * a], i * stride[a] - pad[2 * a] + k[a], k[a]) for i in range(count)])
    y = np.zeros((n, c, len(spans[0]), len(spans[1])))
    dx, g = np.zeros(x.shape), g[:, :, : len(spans[0]), : len(spans[1])]
    for i, (r0, r1, _) in enumerate(spans[0]):
        for j, (s0, s1, _) in enumerate(spans[1]):
            rows, cols = slice(max(r0, 0), max(min(r1, h), 0)), slice(max(s0, 0), max(min(s1, w), 0))
            part = x[:, :, rows, cols].astype(float)
            inside = part.shape[2] * part.shape[3]
            if kind == "avg":
                area = max(inside, 1) if exclusive or adaptive else k[0] * k[1]
                y[:, :, i, j] = part.sum(axis=(2, 3)) / area
                dx[:, :, rows, cols] += g[:, :, i, j, None, None] / area
                continue
            if not inside:
                y[:, :, i, j] = -np.inf
                continue
            y[:, :, i, j] = part.max(axis=(2, 3))
            for b in range(n):
                for f in range(c):
                    p, q = np.unravel_index(part[b, f].argmax(), part.shape[2:])
                    dx[b, f, rows.start + p, cols.start + q] += g[b, f, i, j]
    return y, dx


@st.composite
def cases(draw):
    k = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    pad = tuple(draw(st.integers(0, k[a // 2] - 1)) for a in range(4))
    size = tuple(draw(st.integers(max(1, k[a]), 9)) for a in (0, 1))
    stride = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    flags = draw(st.tuples(*[st.booleans()] * 3))
    kind, fmt = draw(st.sampled_from(["max", "avg"])), draw(st.sampled_from(["NCHW", "NHWC"]))
    return kind, k, stride, pad, size, flags, fmt, draw(st.integers(0, 99))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_pooling_and_its_gradient_equal_the_loops(case):
    kind, k, stride, pad, size, (ceil_mode, exclusive, adaptive), fmt, seed = case
    rng = np.random.default_rng(seed)
    x = rng.integers(-4, 5, (2, 3, *size)).astype("float32")  # many equal elements
    g = rng.integers(-4, 5, (2, 3, 12, 12)).astype("float32")
    attrs = {**Pool2d.attrs, "pooling_type": kind, "ksize": k, "strides": stride, "paddings": pad, "ceil_mode": ceil_mode,
             "exclusive": exclusive, "adaptive": adaptive, "data_format": fmt}  # fmt: skip
    want, want_dx = loop_pool(x, g, kind, k, stride, pad, ceil_mode, exclusive, adaptive)

    def to(a):
        return np.ascontiguousarray(a.transpose(0, 2, 3, 1)) if fmt == "NHWC" else np.ascontiguousarray(a)

    inferred = Pool2d.infer(TensorType("float32", to(x).shape), **attrs)
    y = np.full(inferred.shape, np.nan, "float32")
    Pool2d.kernel(np, to(x), out=y, **attrs)
    np.testing.assert_allclose(y, to(want), rtol=1e-6)  # thirds and ninths are not exact in float32
    dx = np.full(to(x).shape, np.nan, "float32")
    Pool2dGrad.kernel(np, to(x), y, to(g[:, :, : want.shape[2], : want.shape[3]]), out=dx, **attrs)
    np.testing.assert_allclose(dx, to(want_dx), rtol=1e-5, atol=1e-5)  # the same
    if kind == "max":
        assert (y == to(want)).all() and (dx == to(want_dx)).all()


def test_of_equal_maxima_the_first_gets_the_gradient():
    x = np.array([[[[1, 7, 0, 2], [7, 7, 2, 2]]]], "float32")
    dx = np.empty_like(x)
    attrs = {**Pool2d.attrs, "ksize": (2, 2), "strides": (2, 2)}
    Pool2dGrad.kernel(np, x, np.array([[[[7, 2]]]], "float32"), np.array([[[[5, 3]]]], "float32"), out=dx, **attrs)
    assert (dx == [[[[0, 5, 0, 3], [0, 0, 0, 0]]]]).all()


def test_a_mean_excludes_padding_unless_asked():
    x = np.full((1, 1, 2, 2), 4, "float32")
    y = np.empty((1, 1, 2, 2), "float32")
    attrs = {**Pool2d.attrs, "pooling_type": "avg", "ksize": (2, 2), "strides": (2, 2), "paddings": (1, 1)}
    Pool2d.kernel(np, x, out=y, **attrs)
    assert (y == 4).all()
    Pool2d.kernel(np, x, out=y, **{**attrs, "exclusive": False})
    assert (y == 1).all()


def test_global_pooling_of_an_open_image_gives_one_pixel():
    attrs = {**Pool2d.attrs, "global_pooling": True}
    assert Pool2d.infer(TensorType("float32", (-1, 8, -1, 7)), **attrs).shape == (-1, 8, 1, 1)


@pytest.mark.parametrize(
    "attrs, message",
    [
        ({"pooling_type": "min"}, "pooling_type must be max or avg, got 'min'"),
        ({"ksize": (5, 5)}, "a window of 5 does not fit height 4"),
        ({"ksize": (2, 2), "paddings": (2, 2)}, "must be smaller than the window"),
        ({"ksize": (5, 1), "adaptive": True}, "needs an image at least that large"),
    ],
)
def test_a_pooling_that_does_not_fit_says_why(attrs, message):
    with pytest.raises(ProgramError, match=message):
        Pool2d.infer(TensorType("float32", (1, 2, 4, 4)), **{**Pool2d.attrs, **attrs})
