"""Pooling in C against loops in float64 over the windows, and the same bits for any number of threads."""

import numpy as np
import pytest

from fluidx import native
from fluidx.ir import TensorType, opdef
from fluidx.ops.nn.pool import _pool_windows


def windows(x, attrs):
    """(row, column of the output, rows, columns of its window inside the image), NCHW."""
    win = _pool_windows("pool2d", x, attrs)
    for i in range(win.out[0]):
        for j in range(win.out[1]):
            y, c = i * win.stride[0] - win.pad[0], j * win.stride[1] - win.pad[2]
            yield i, j, slice(max(y, 0), min(y + win.kernel[0], x.shape[2])), slice(max(c, 0), min(c + win.kernel[1], x.shape[3]))


def pool(x, attrs):
    win = _pool_windows("pool2d", x, attrs)
    y = np.zeros((*x.shape[:2], *win.out))
    for i, j, rows, columns in windows(x, attrs):
        part = x[:, :, rows, columns].astype(float)
        area = part[0, 0].size if attrs["exclusive"] else win.kernel[0] * win.kernel[1]
        y[:, :, i, j] = part.max((2, 3)) if attrs["pooling_type"] == "max" else part.sum((2, 3)) / area
    return y


def pool_grad(x, g, attrs):
    win, dx = _pool_windows("pool2d", x, attrs), np.zeros(x.shape)
    for i, j, rows, columns in windows(x, attrs):
        part, to = x[:, :, rows, columns], dx[:, :, rows, columns]
        area = part[0, 0].size if attrs["exclusive"] else win.kernel[0] * win.kernel[1]
        if attrs["pooling_type"] == "avg":
            to += g[:, :, i, j, None, None] / area
            continue
        flat = part.reshape(*part.shape[:2], -1)
        first = flat.argmax(2)[..., None] == np.arange(flat.shape[2])  # the first of equal ones
        to += (first * g[:, :, i, j, None]).reshape(part.shape)
    return dx


def run(name, ins, attrs):
    op = opdef(name)
    t = op.infer(*(TensorType(a.dtype.name, a.shape) for a in ins), **attrs)
    out = np.full(t.shape, np.nan, t.dtype)
    assert op.native.calls(ins, [out], attrs, dry=True) is not None
    step = native.compile(op.native.calls(ins, [out], attrs))
    step(), step()
    return out


CASES = [
    {"ksize": (2, 2), "strides": (2, 2)},
    {"ksize": (3, 3), "strides": (2, 2), "paddings": (1, 1)},
    {"ksize": (3, 2), "strides": (1, 3), "paddings": (1, 0, 0, 1)},
    {"ksize": (2, 2), "strides": (3, 3), "ceil_mode": True},
    {"ksize": (3, 3), "strides": (2, 2), "paddings": (1, 2), "exclusive": False},
    {"ksize": (3, 4), "strides": (1, 1), "padding_algorithm": "SAME"},
    {"global_pooling": True},
    {"ksize": (2, 2), "adaptive": True},
]


def to(fmt, x):
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if fmt == "NHWC" else x


@pytest.mark.parametrize("fmt", ["NCHW", "NHWC"])
@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("size", [(8, 8), (12, 38), (6, 4)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pooling_equals_its_definition(case, size, kind, fmt):
    attrs = dict(opdef("pool2d").complete_attrs({**case, "pooling_type": kind}))
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (3, 5, *size)).astype("float32")  # many are equal
    want = pool(x, attrs)
    g = rng.standard_normal(want.shape).astype("float32")
    told = {**attrs, "data_format": fmt}
    y = run("pool2d", [to(fmt, x)], told)
    if kind == "max":
        assert (y == to(fmt, want)).all()
    else:  # sums of whole numbers are exact, and one division rounds
        np.testing.assert_allclose(y, to(fmt, want), rtol=1e-7)
    dx = run("pool2d_grad", [to(fmt, x), y, to(fmt, g)], told)
    # at most 12 numbers around 1 meet in a pixel
    np.testing.assert_allclose(dx, to(fmt, pool_grad(x, g, attrs)), atol=2e-6)


@pytest.mark.parametrize("fmt", ["NCHW", "NHWC"])
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_a_maximum_keeps_nan_and_infinity(case, fmt):
    attrs = dict(opdef("pool2d").complete_attrs({**case, "data_format": fmt}))
    x = np.random.default_rng(1).standard_normal((2, 8, 8, 24)).astype("float32")
    x.ravel()[::17], x.ravel()[5::29], x.ravel()[3::41] = np.nan, np.inf, -np.inf
    want = np.empty(opdef("pool2d").infer(TensorType("float32", x.shape), **attrs).shape, "float32")
    opdef("pool2d").kernel(np, x, out=want, **attrs)
    assert np.isnan(want).any()
    np.testing.assert_array_equal(run("pool2d", [x], attrs), want)


@pytest.mark.parametrize("fmt", ["NCHW", "NHWC"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads_do_not_change_bits(case, fmt):
    attrs = dict(opdef("pool2d").complete_attrs({**case, "data_format": fmt, "pooling_type": "avg"}))
    rng = np.random.default_rng(0)
    x = to(fmt, rng.standard_normal((7, 16, 32, 28)).astype("float32"))
    results = []
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        y = run("pool2d", [x], attrs)
        results.append((y.tobytes(), run("pool2d_grad", [x, y, y], attrs).tobytes()))
    assert results[0] == results[1] == results[2]


SAMPLES = [(n, k) for n in ("pool2d", "pool2d_grad") for k, s in enumerate(opdef(n).samples()) if s.args[0].dtype == np.float32]


@pytest.mark.parametrize("name, k", SAMPLES)
def test_every_sample_gives_what_numpy_gives(name, k):
    op, sample = opdef(name), list(opdef(name).samples())[k]
    attrs = op.complete_attrs(sample.attrs)
    want = np.empty(op.infer(*(TensorType(a.dtype.name, a.shape) for a in sample.args), **attrs).shape, "float32")
    op.kernel(np, *sample.args, out=want, **attrs)
    if op.native.calls(sample.args, [want.copy()], attrs) is None:
        assert attrs["adaptive"]  # cells that differ in size
        return
    # one rounding more or less
    np.testing.assert_allclose(run(name, [np.ascontiguousarray(a) for a in sample.args], attrs), want, rtol=3e-7, atol=1e-7)


def test_what_is_not_covered_is_left_to_numpy():
    op, x, y = opdef("pool2d"), np.ones((2, 3, 4, 4), "float32"), np.ones((2, 3, 2, 2), "float32")
    attrs = op.complete_attrs({"ksize": (2, 2), "strides": (2, 2)})
    assert op.native.calls([x.astype("float16")], [y.astype("float16")], attrs) is None
    assert op.native.calls([x[:, :, ::-1]], [y], attrs) is None
    assert op.native.calls([x[:0]], [y[:0]], attrs) is None
    assert op.native.calls([x.astype("float64")], [y.astype("float64")], attrs) is not None
