"""Convolutions in C against loops in float64, in every way of computing them, and the same bits for any number of threads."""

from importlib import import_module
from threading import Thread

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.ir import TensorType, opdef
from fluidx.ops.nn import conv_native as cn
from tests.each import each


@pytest.fixture(autouse=True)
def blas(two_threads):
    if not native.has_products():
        pytest.skip(native.describe())


# -- the definition, NCHW -----------------------------------------------------------------------------------------------------------


def taps(x, w, attrs, out):
    """(tap, padded pixels that it reads) for an image whose windows give `out`."""
    (sh, sw), (dh, dw), (top, bottom, left, right) = attrs["strides"], attrs["dilations"], attrs["paddings"]
    padded = np.zeros((*x.shape[:2], x.shape[2] + top + bottom, x.shape[3] + left + right))
    padded[:, :, top : top + x.shape[2], left : left + x.shape[3]] = x
    for i in range(w.shape[2]):
        for j in range(w.shape[3]):
            yield i, j, padded[:, :, i * dh : i * dh + (out[0] - 1) * sh + 1 : sh, j * dw : j * dw + (out[1] - 1) * sw + 1 : sw], padded


def forward(x, w, attrs, out):
    n, groups = len(x), attrs["groups"]
    y = np.zeros((n, groups, w.shape[0] // groups, *out))
    grouped = w.astype(float).reshape(groups, -1, *w.shape[1:])
    for i, j, seen, _ in taps(x, w, attrs, out):
        y += np.einsum("ngchw,goc->ngohw", seen.reshape(n, groups, -1, *out), grouped[..., i, j])
    return y.reshape(n, -1, *out)


def backward(x, w, g, attrs):
    n, groups, out = len(x), attrs["groups"], g.shape[2:]
    grouped, gg = w.astype(float).reshape(groups, -1, *w.shape[1:]), g.astype(float).reshape(n, groups, -1, *g.shape[2:])
    dw, dp = np.zeros_like(grouped), None
    for i, j, seen, padded in taps(x, w, attrs, out):
        dp = np.zeros_like(padded) if dp is None else dp
        dw[..., i, j] = np.einsum("ngchw,ngohw->goc", seen.reshape(n, groups, -1, *out), gg)
        (sh, sw), (dh, dwid) = attrs["strides"], attrs["dilations"]
        rows, columns = slice(i * dh, i * dh + (out[0] - 1) * sh + 1, sh), slice(j * dwid, j * dwid + (out[1] - 1) * sw + 1, sw)
        dp[:, :, rows, columns] += np.einsum("ngohw,goc->ngchw", gg, grouped[..., i, j]).reshape(seen.shape)
    (top, _, left, _), (h, wd) = attrs["paddings"], x.shape[2:]
    return dp[:, :, top : top + h, left : left + wd], dw.reshape(w.shape)


# -- running ------------------------------------------------------------------------------------------------------------------------


def to(fmt, x):
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if fmt == "NHWC" else x


def back_to_nchw(fmt, x):
    return x.transpose(0, 3, 1, 2) if fmt == "NHWC" else x


def run(name, ins, attrs, keep=(True, True)):
    """The outputs of an op by its C kernels, into arrays full of NaN, in scratch full of NaN."""
    op = opdef(name)
    attrs = op.complete_attrs(attrs)
    types = op.infer(*(TensorType(a.dtype.name, a.shape) for a in ins), **attrs)
    types = [t if k else None for t, k in zip(types if isinstance(types, tuple) else (types,), keep, strict=False)]
    outs = [None if t is None else np.full(t.shape, np.nan, t.dtype) for t in types]
    asked = op.native.scratch([TensorType(a.dtype.name, a.shape) for a in ins], types, attrs)
    rooms = [np.full(t.shape[0] + 64, np.nan, t.dtype) for t in asked]
    for room in rooms:
        room[-64:] = 7
    assert op.native.calls(ins, outs, attrs, dry=True) is not None
    step = native.compile(op.native.calls(ins, outs, attrs, scratch=[room[:-64] for room in rooms]))
    step(), step()
    assert all((room[-64:] == 7).all() for room in rooms)
    return outs


# n, channels, outputs, groups, image, kernel, strides, dilations, paddings (top, bottom, left, right), the way in NCHW
CASES = [
    (3, 16, 16, 1, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), cn.WINOGRAD),
    (2, 17, 70, 1, (7, 5), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), cn.WINOGRAD),
    (5, 35, 18, 1, (4, 3), (3, 3), (1, 1), (1, 1), (0, 2, 1, 0), cn.WINOGRAD),
    (1, 130, 20, 1, (20, 19), (3, 3), (1, 1), (1, 1), (2, 2, 2, 2), cn.WINOGRAD),
    (40, 16, 16, 1, (3, 3), (3, 3), (1, 1), (1, 1), (0, 0, 0, 0), cn.WINOGRAD),
    (3, 16, 17, 1, (8, 8), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), cn.SHIFTED),
    (9, 140, 80, 1, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), cn.SHIFTED),
    (2, 20, 16, 1, (9, 8), (1, 1), (2, 2), (1, 1), (0, 0, 0, 0), cn.PIXEL),
    (2, 16, 16, 1, (9, 11), (2, 3), (3, 2), (2, 1), (1, 0, 2, 1), cn.SHIFTED),
    (2, 16, 19, 1, (14, 13), (5, 4), (1, 1), (1, 1), (2, 2, 0, 3), cn.SHIFTED),
    (2, 18, 16, 1, (7, 9), (3, 3), (1, 1), (2, 3), (2, 2, 3, 3), cn.SHIFTED),
    (2, 16, 16, 1, (6, 7), (2, 2), (4, 4), (1, 1), (0, 0, 0, 0), cn.SHIFTED),
    (2, 16, 16, 1, (30, 31), (3, 3), (1, 2), (1, 1), (1, 1, 1, 1), cn.SHIFTED),
    (4, 1, 6, 1, (28, 28), (5, 5), (1, 1), (1, 1), (2, 2, 2, 2), cn.COLUMNS),
    (4, 6, 16, 1, (14, 14), (5, 5), (1, 1), (1, 1), (0, 0, 0, 0), cn.COLUMNS),
    (2, 3, 32, 1, (33, 34), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), cn.COLUMNS),
    (2, 40, 33, 1, (5, 6), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0), cn.PIXEL),
    (2, 8, 6, 2, (9, 8), (3, 2), (2, 3), (1, 2), (1, 0, 2, 1), cn.COLUMNS),
    (1, 1, 2, 1, (2, 2), (4, 4), (1, 1), (1, 1), (3, 3, 3, 3), cn.COLUMNS),
    (2, 3, 8, 1, (150, 140), (7, 7), (2, 2), (1, 1), (3, 3, 3, 3), cn.COLUMNS),
    (2, 5, 5, 5, (20, 19), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), cn.DIRECT),
    (2, 3, 6, 3, (9, 40), (3, 2), (2, 3), (1, 2), (1, 0, 2, 1), cn.DIRECT),
    (3, 40, 70, 2, (9, 7), (1, 1), (2, 3), (1, 1), (0, 0, 0, 0), cn.PIXEL),
    (2, 3, 20, 1, (20, 19), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0), cn.PIXEL),
    (2, 3, 40, 1, (33, 30), (7, 7), (2, 2), (1, 1), (3, 3, 3, 3), cn.COLUMNS),
    (2, 18, 40, 1, (50, 1), (5, 1), (2, 1), (2, 1), (1, 2, 0, 0), cn.SHIFTED),
    (2, 16, 33, 1, (61, 1), (4, 1), (1, 1), (1, 1), (0, 0, 0, 0), cn.SHIFTED),
    (2, 3, 6, 3, (40, 1), (3, 1), (2, 1), (1, 1), (1, 1, 0, 0), cn.DIRECT),
]
# work enough to be cut in several pieces, by rows and by outputs
LARGE = [
    (1, 128, 200, 1, (30, 31), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0), cn.PIXEL),
    (1, 300, 460, 1, (28, 29), (1, 1), (2, 2), (1, 1), (0, 0, 0, 0), cn.PIXEL),
    (1, 43, 96, 1, (58, 57), (3, 3), (2, 2), (1, 1), (1, 0, 0, 1), cn.SHIFTED),
    (7, 33, 260, 1, (13, 12), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), cn.SHIFTED),
    (3, 48, 66, 3, (21, 22), (5, 3), (1, 1), (1, 1), (2, 2, 1, 1), cn.COLUMNS),
    (1, 16, 160, 1, (37, 36), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), cn.WINOGRAD),
    (2, 48, 200, 1, (13, 15), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), cn.WINOGRAD),
    # one image, for which threads share pieces of less work: bands of few outputs, outputs of few pixels, half the outputs of 49 tiles
    (1, 12, 20, 1, (80, 78), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), cn.COLUMNS),
    (1, 3, 24, 1, (190, 186), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), cn.COLUMNS),
    (1, 300, 300, 1, (7, 7), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0), cn.PIXEL),
    (1, 300, 70, 1, (14, 15), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0), cn.PIXEL),
    (1, 96, 128, 1, (14, 14), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), cn.WINOGRAD),
]
DEPTHWISE = [
    (2, 5, 5, 5, (20, 19), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), cn.DIRECT),
    (2, 3, 6, 3, (9, 40), (3, 2), (2, 3), (1, 2), (1, 0, 2, 1), cn.DIRECT),
    (1, 4, 8, 4, (33, 47), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), cn.DIRECT),
    (1, 3, 3, 3, (7, 7), (5, 5), (1, 1), (1, 1), (2, 2, 2, 2), cn.DIRECT),
    (1, 2, 2, 2, (15, 70), (3, 3), (1, 2), (2, 3), (2, 1, 0, 3), cn.DIRECT),
    (1, 2, 2, 2, (12, 80), (1, 4), (4, 4), (1, 1), (0, 0, 1, 2), cn.DIRECT),
    (3, 2, 2, 2, (1, 1), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), cn.DIRECT),
]


def example(case, dtype="float32", seed=0):
    n, c, o, groups, image, kernel, strides, dilations, paddings, _ = case
    attrs = {"strides": strides, "dilations": dilations, "paddings": paddings, "groups": groups}
    out = [(image[a] + paddings[2 * a] + paddings[2 * a + 1] - (kernel[a] - 1) * dilations[a] - 1) // strides[a] + 1 for a in (0, 1)]
    rng = np.random.default_rng(seed)
    x, w, g = (rng.standard_normal(s).astype(dtype) for s in ((n, c, *image), (o, c // groups, *kernel), (n, o, *out)))
    return x, w, g, attrs


def close(got, want, terms, dtype):
    """Sums of `terms` products of standard normals: errors grow like the root of the number of terms, and 16 roundings of each sum cover
    what transforms of Winograd add. What is wanted is computed in float64, so in float64 it is as wrong itself."""
    error, roundings = np.abs(got - want).max(), 32 if dtype == "float64" else 16
    assert error <= roundings * np.finfo(dtype).eps * (terms**0.5 + 4), error


@pytest.mark.parametrize("fmt", ["NCHW", "NHWC"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_three_products_equal_their_definitions(case, fmt, dtype="float32"):
    x, w, g, attrs = example(case, dtype)
    told = {**attrs, "data_format": fmt}
    want, (want_x, want_w) = forward(x, w, attrs, g.shape[2:]), backward(x, w, g, attrs)
    win = opdef("conv2d").windows("conv2d", to(fmt, x), w, opdef("conv2d").complete_attrs(told))
    if fmt == "NCHW":
        assert cn.way(win, x.shape[1], len(w), attrs["groups"], fmt) == case[-1]
    (y,) = run("conv2d", [to(fmt, x), w], told)
    close(back_to_nchw(fmt, y), want, w[0].size, dtype)
    dx, dw = run("conv2d_grad", [to(fmt, x), w, to(fmt, g)], told)
    close(back_to_nchw(fmt, dx), want_x, len(w) * w[0, 0].size, dtype)
    close(dw, want_w, g.size // g.shape[1], dtype)


@pytest.mark.parametrize("case", [c for k, c in enumerate(CASES) if k % 3 == 0], ids=str)
def test_in_float64(case):
    x, w, g, attrs = example(case, "float64")
    want, (want_x, want_w) = forward(x, w, attrs, g.shape[2:]), backward(x, w, g, attrs)
    close(run("conv2d", [x, w], attrs)[0], want, w[0].size, "float64")
    dx, dw = run("conv2d_grad", [x, w, g], attrs)
    close(dx, want_x, len(w) * w[0, 0].size, "float64")
    close(dw, want_w, g.size // g.shape[1], "float64")


@pytest.mark.parametrize("fmt", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@each("case", [*(c for c in CASES if c[-1] not in (cn.WINOGRAD, cn.DIRECT)), *LARGE, *DEPTHWISE])
def test_sums_of_whole_numbers_are_exact_at_every_level(level, case, dtype, fmt):
    """Registers hold other numbers of pixels and outputs at each, and other numbers of columns are made at a time."""
    x, w, g, attrs = (np.round(a) if isinstance(a, np.ndarray) else a for a in example(case, dtype))
    told = {**attrs, "data_format": fmt}
    assert (back_to_nchw(fmt, run("conv2d", [to(fmt, x), w], told)[0]) == forward(x, w, attrs, g.shape[2:])).all()
    dx, dw = run("conv2d_grad", [to(fmt, x), w, to(fmt, g)], told)
    want_x, want_w = backward(x, w, g, attrs)
    assert (back_to_nchw(fmt, dx) == want_x).all() and (dw == want_w).all()


def tiles(monkeypatch, size):
    """Winograd's tiles of `size` x `size` outputs, however few they are."""
    monkeypatch.setenv("FLUIDX_WINOGRAD", str(size))
    monkeypatch.setattr(cn, "LEAST_TILES", 1)


WAY = 20  # the word of a call that says it, as conv.h counts them
WITH_TILES = [((9, *c[1:]), 2) for c in CASES] + [(c, 2) for c in LARGE]
WITH_TILES += [(c, 4) for c in [*((9, *c[1:]) for c in CASES), *LARGE] if c[-1] == cn.WINOGRAD]


@pytest.mark.parametrize("case, size", WITH_TILES, ids=str)
def test_threads_do_not_change_bits(monkeypatch, case, size):
    tiles(monkeypatch, size)
    x, w, g, attrs = example(case)
    results = []
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        results.append([a.tobytes() for a in (*run("conv2d", [x, w], attrs), *run("conv2d_grad", [x, w, g], attrs))])
    assert results[0] == results[1] == results[2]


def taken(call):
    """What a new thread that does a call alone keeps of its own afterwards."""

    def alone():
        native.use_threads(1)
        native.compile([call])()
        found.append(import_module("fluidx._native").taken())

    found = []
    thread = Thread(target=alone)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("fmt", ["NCHW", "NHWC"])
@pytest.mark.parametrize("case, size", WITH_TILES, ids=str)
def test_kernels_say_what_each_thread_will_take(monkeypatch, case, size, fmt):
    """Of arrays that do not exist, to the page."""
    tiles(monkeypatch, size)
    x, w, g, attrs = example(case)
    for name, ins in (("conv2d", (x, w)), ("conv2d_grad", (x, w, g))):
        op = opdef(name)
        full = op.complete_attrs({**attrs, "data_format": fmt})
        ins = [to(fmt, a) if a is not w else a for a in ins]
        results = op.infer(*(TensorType(a.dtype.name, a.shape) for a in ins), **full)
        outs = [np.empty(t.shape, t.dtype) for t in (results if isinstance(results, tuple) else (results,))]
        for call, same in zip(op.native.calls(ins, outs, full), op.native.calls(ins, outs, full, dry=True), strict=True):
            nowhere = same._replace(args=tuple(0 if a > 1 << 32 else a for a in same.args))  # without an address
            assert taken(call) == -(-native.taken_by_threads([nowhere]) // 4096) * 4096


@pytest.mark.parametrize("keep", [(True, False), (False, True)])
def test_a_gradient_may_be_left_away(keep):
    x, w, g, attrs = example(CASES[0])
    both, one = run("conv2d_grad", [x, w, g], attrs), run("conv2d_grad", [x, w, g], attrs, keep)
    for a, b, kept in zip(both, one, keep, strict=True):
        assert (b is None) if not kept else (a.tobytes() == b.tobytes())


SAMPLES = [
    (name, k)
    for name in ("conv2d", "conv2d_grad", "depthwise_conv2d", "conv2d_transpose", "conv2d_transpose_grad")
    for k, s in enumerate(opdef(name).samples())
    if s.args[0].dtype == np.float32
]


@pytest.mark.parametrize("name, k", SAMPLES)
def test_every_sample_gives_what_numpy_gives(name, k):
    """NumPy's bodies have tests of their own against loops; sums of at most 100 products of numbers around 1."""
    op, sample = opdef(name), list(opdef(name).samples())[k]
    attrs = op.complete_attrs(sample.attrs)
    outs = run(name, [np.ascontiguousarray(a) for a in sample.args], attrs)
    want = [np.empty_like(o) for o in outs]
    op.native.bind(sample.args, want, attrs, None)()
    for a, b in zip(outs, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[13], CASES[17]], ids=str)
def test_transposed_convolution_is_the_gradient(case):
    x, w, g, attrs = example(case)
    reach = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], attrs["dilations"], strict=True)]
    told = {**attrs, "output_size": x.shape[2:]} if any(r > 1 for r in reach) else attrs
    want_x, _ = backward(x, w, g, attrs)
    close(run("conv2d_transpose", [g, w], told)[0], want_x, len(w) * w[0, 0].size, "float32")
    dg, dw = run("conv2d_transpose_grad", [g, w, x], told)
    close(dg, forward(x, w, attrs, g.shape[2:]), w[0].size, "float32")
    close(dw, backward(x, w, g, attrs)[1], g.size // g.shape[1], "float32")


def test_every_level_of_instructions(level):
    for case in (CASES[1], CASES[6], CASES[14], CASES[20]):
        x, w, g, attrs = example(case)
        close(run("conv2d", [x, w], attrs)[0], forward(x, w, attrs, g.shape[2:]), w[0].size, "float32")
        close(run("conv2d_grad", [x, w, g], attrs)[1], backward(x, w, g, attrs)[1], g.size // g.shape[1], "float32")


@pytest.mark.parametrize("fmt", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", [c for c in CASES if c[-1] == cn.WINOGRAD], ids=str)
def test_large_tiles(monkeypatch, level, case, fmt, dtype):
    """Three times the error of small tiles, with which `close` reckons, as if nine times as many terms were added."""
    tiles(monkeypatch, 4)
    x, w, g, attrs = example(case, dtype)
    told = {**attrs, "data_format": fmt}
    win = opdef("conv2d").windows("conv2d", to(fmt, x), w, opdef("conv2d").complete_attrs(told))
    (call,) = cn.calls([(cn.FORWARD, to(fmt, x), w, to(fmt, g))], win, 1, fmt, (), False)
    assert call.args[WAY] == cn.WINOGRAD_4
    close(back_to_nchw(fmt, run("conv2d", [to(fmt, x), w], told)[0]), forward(x, w, attrs, g.shape[2:]), 9 * w[0].size, dtype)
    dx, dw = run("conv2d_grad", [to(fmt, x), w, to(fmt, g)], told)
    want_x, want_w = backward(x, w, g, attrs)
    close(back_to_nchw(fmt, dx), want_x, 9 * len(w) * 9, dtype)
    close(dw, want_w, g.size // g.shape[1], dtype)


def rms(a):
    return float(np.sqrt(np.mean(np.square(a))))


@pytest.mark.parametrize("size, part", [(2, 3), (4, 1)])
def test_winograd_is_closer_than_sums_in_one_chain(monkeypatch, level, size, part):
    """Chains of 32 products err by an eighth as much as one of 9 x 256. Transforms make it 5/3 as much with small tiles, 4.8 with large
    ones, and add roundings of their own: about a quarter and three quarters are left."""
    tiles(monkeypatch, size)
    x, w, g, attrs = example((32, 256, 16, 1, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), cn.WINOGRAD))
    want = forward(x, w, attrs, g.shape[2:])
    seen = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), (2, 3))
    chain = np.zeros_like(g)
    for c, i, j in np.ndindex(256, 3, 3):
        chain += seen[:, None, c, :, :, i, j] * w[:, c, i, j, None, None]
    assert part * rms(run("conv2d", [x, w], attrs)[0] - want) < rms(chain - want)


def test_winograd_can_be_turned_off(monkeypatch):
    case = CASES[0]
    x, w, g, attrs = example(case)
    win = opdef("conv2d").windows("conv2d", x, w, opdef("conv2d").complete_attrs(attrs))
    assert cn.way(win, 16, 16, 1, "NCHW") == cn.WINOGRAD
    monkeypatch.setenv("FLUIDX_WINOGRAD", "0")
    assert cn.way(win, 16, 16, 1, "NCHW") == cn.SHIFTED
    close(run("conv2d", [x, w], attrs)[0], forward(x, w, attrs, g.shape[2:]), w[0].size, "float32")


def test_few_large_tiles_are_left_to_small_ones(monkeypatch):
    """Their filters are 36 numbers instead of 16."""
    monkeypatch.setenv("FLUIDX_WINOGRAD", "4")
    for batch, how in ((31, cn.WINOGRAD), (32, cn.WINOGRAD_4)):
        x, w, g, attrs = example((batch, 16, 16, 1, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), cn.WINOGRAD))
        win = opdef("conv2d").windows("conv2d", x, w, opdef("conv2d").complete_attrs(attrs))
        found = cn.calls([(cn.FORWARD, x, w, g), (cn.BACK, x, w, g), (cn.FILTER, x, w, g)], win, 1, "NCHW", (), False)
        assert [c.args[WAY] for c in found] == [how, how, cn.WINOGRAD]


def ways(batch, channels, side):
    """How outputs, gradient of the image and gradient of the filter of a 3x3 convolution are computed."""
    x, w, g, attrs = example((batch, channels, channels, 1, (side, side), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), None))
    win = opdef("conv2d").windows("conv2d", x, w, opdef("conv2d").complete_attrs(attrs))
    return [c.args[WAY] for c in cn.calls([(p, x, w, g) for p in (cn.FORWARD, cn.BACK, cn.FILTER)], win, 1, "NCHW", (), True)]


def test_too_few_pixels_for_transforms_of_filters():
    assert ways(1, 64, 2) == [cn.COLUMNS, cn.WINOGRAD, cn.WINOGRAD]
    assert ways(1, 512, 7) == [cn.WINOGRAD, cn.WINOGRAD, cn.SHIFTED]
    assert ways(4, 512, 7) == [cn.WINOGRAD] * 3


@pytest.mark.parametrize("fmt", ["NCHW", "NHWC"])
def test_an_image_has_the_same_results_alone_and_in_a_batch(fmt):
    """Alone its filters are transformed in passing, and its outputs are cut."""
    x, w, g, attrs = example((3, 130, 150, 1, (14, 13), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), cn.WINOGRAD))
    told = {**attrs, "data_format": fmt}
    for name, ins in (("conv2d", (x, w)), ("conv2d_grad", (x, w, g))):
        many, one = (run(name, [a if a is w else to(fmt, a[:n]) for a in ins], told, (True, False))[0] for n in (3, 1))
        assert many[:1].tobytes() == one.tobytes()


def test_small_whole_numbers_are_exact():
    """All factors of Winograd's transforms are 0, 1, 1/2 and 1/4: small whole numbers lose nothing."""
    x, w, g, attrs = (np.round(a) if isinstance(a, np.ndarray) else a for a in example(CASES[1]))
    assert (run("conv2d", [x, w], attrs)[0] == forward(x, w, attrs, g.shape[2:])).all()
    dx, dw = run("conv2d_grad", [x, w, g], attrs)
    want_x, want_w = backward(x, w, g, attrs)
    assert (dx == want_x).all() and (dw == want_w).all()


def test_what_is_not_covered_is_left_to_numpy():
    op, attrs = opdef("conv2d"), opdef("conv2d").complete_attrs({})
    x, w, y = np.ones((2, 3, 4, 4), "float32"), np.ones((2, 3, 3, 3), "float32"), np.ones((2, 2, 2, 2), "float32")
    assert op.native.calls([x, w], [y], attrs) is not None
    assert op.native.calls([a.astype("float16") for a in (x, w)], [y.astype("float16")], attrs) is None
    assert op.native.calls([x[:, :, ::-1], w], [y], attrs) is None
    assert op.native.calls([x[:0], w], [y[:0]], attrs) is None


def test_a_program_planned_by_one_setting_is_planned_anew_by_another(monkeypatch):
    """Tiles of 4x4 take more scratch for the filters than tiles of 2x2, which the plans before put aside."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((4, 16, 24, 24)).astype("float32")
    x = fx.data("x", [4, 16, 24, 24])
    y = fx.layers.conv2d(x, 32, 3, padding=1, bias_attr=False)
    made: list[np.ndarray] = []
    fx.Executor().run(fx.default_startup_program())
    for setting in ("0", "2", "4", "2"):
        tiles(monkeypatch, int(setting))
        made.append(fx.Executor().run(feed={"x": images}, fetch_list=[y])[0])
        planned = dry_plan(fx.default_main_program(), {"x": images.shape})
        scratch = sum(s.type.numel for step in planned.steps for s in step.scratch)
        assert scratch == {"0": 0, "2": 16, "4": 36}[setting] * (16 * 32 + cn.SPREAD)
        np.testing.assert_allclose(made[-1], made[0], rtol=0, atol=1e-4 * np.abs(made[0]).max())  # rounding of any of the ways
