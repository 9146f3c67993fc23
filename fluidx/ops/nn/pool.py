"""Two-dimensional pooling and its gradient, as passes over whole images, one for each tap of the window."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ...ir import ANY, Arithmetic, Autocast, Native, OpDef, ProgramError, Rewrite, Sample, TensorType
from ..shared.call_sequence import in_order
from ..shared.samples import apart, f32
from . import pool_native
from .windows import Windows, channels_first, image_words, join_image, need_image, pair, place_windows, split_image

_ATTRS = {
    "pooling_type": "max", "ksize": (1, 1), "strides": (1, 1), "paddings": (0, 0), "global_pooling": False, "ceil_mode": False,
    "exclusive": True, "adaptive": False, "data_format": "NCHW", "padding_algorithm": "EXPLICIT",
}  # fmt: skip


def _pool_windows(op: str, x: Any, attrs: dict[str, Any]) -> Windows:
    """The windows of a pooling whose windows all have the same size."""
    image = split_image(x, attrs["data_format"])[2]
    if attrs["global_pooling"]:
        out = tuple(ANY if s == ANY else 1 for s in image)
        return Windows(image, image, (1, 1), (1, 1), (0, 0, 0, 0), out if ANY not in image else (1, 1))
    size = pair(op, "ksize", attrs["ksize"], 1)
    if attrs["adaptive"]:
        even = tuple(s // k if s != ANY else ANY for s, k in zip(image, size))
        return Windows(image, even, even, (1, 1), (0, 0, 0, 0), size)
    win = place_windows(op, image, size, attrs["strides"], attrs["paddings"], (1, 1), attrs["padding_algorithm"], attrs["ceil_mode"])
    if attrs["padding_algorithm"] == "EXPLICIT" and any(win.pad[a] >= size[a // 2] for a in range(4)):
        raise ProgramError(f"op {op}: paddings {list(attrs['paddings'])} must be smaller than the window {list(size)}")
    return win


def _uneven(win: Windows, attrs: dict[str, Any]) -> bool:
    """True for adaptive pooling with cells of different sizes."""
    return attrs["adaptive"] and not attrs["global_pooling"] and any(i % o for i, o in zip(win.image, win.out))


def _cell(k: int, size: int, out: int) -> slice:
    """The rows of cell `k` of `out` adaptive cells; neighbouring cells may share one."""
    return slice(k * size // out, -(-(k + 1) * size // out))


def _seen(win: Windows, i: int, j: int) -> tuple[tuple[slice, slice], tuple[slice, slice]] | None:
    """For tap (i, j): the windows for which it is inside the image, and the image rows and columns that they read."""
    of_out, of_image = [], []
    for a, k in ((0, i), (1, j)):
        stride, before = win.stride[a], win.pad[2 * a]
        first = max(0, -(-(before - k) // stride))
        last = min(win.out[a] - 1, (win.image[a] - 1 + before - k) // stride)
        if first > last:
            return None
        start = first * stride + k - before
        of_out.append(slice(first, last + 1))
        of_image.append(slice(start, start + (last - first) * stride + 1, stride))
    return (of_out[0], of_out[1]), (of_image[0], of_image[1])


def _tiles(win: Windows) -> bool:
    """True if the windows cover every pixel exactly once."""
    return win.kernel == win.stride and not any(win.pad) and all(k * o == s for k, o, s in zip(win.kernel, win.out, win.image))


def _area(win: Windows, exclusive: bool, dtype: Any) -> np.ndarray | None:
    """The number of pixels that each window averages, [OH, OW]; None if it is the same for all."""
    if not exclusive:
        return None
    counts = []
    for a in (0, 1):
        starts = np.arange(win.out[a]) * win.stride[a] - win.pad[2 * a]
        counts.append(np.minimum(starts + win.kernel[a], win.image[a]) - np.maximum(starts, 0))
    area = np.maximum(np.outer(*counts), 1)
    return None if (area == win.kernel[0] * win.kernel[1]).all() else area.astype(dtype)


def pool_into(xp: Any, x: Any, out: Any, win: Windows, kind: str, exclusive: bool) -> Callable[[], None]:
    """A call that pools `x` into `out`, both NCHW views."""
    if not out.size:
        return in_order([])
    join = xp.maximum if kind == "max" else xp.add
    area = _area(win, exclusive, x.dtype) if kind == "avg" else None
    divide_by = x.dtype.type(win.kernel[0] * win.kernel[1]) if area is None else xp.asarray(area)
    calls: list[Callable[[], Any]] = []
    if win.out == (1, 1) and win.kernel == win.image and not any(win.pad):
        reduce = partial(x.max, (2, 3), out, True) if kind == "max" else partial(x.sum, (2, 3), None, out, True)
        return reduce if kind == "max" else in_order([reduce, partial(xp.divide, out, divide_by, out)])
    empty = -np.inf if kind == "max" else 0
    fresh = True
    for i, j in win.taps:
        if (seen := _seen(win, i, j)) is None:
            continue
        (r, s), (p, q) = seen
        part, source = out[:, :, r, s], x[:, :, p, q]
        if fresh and part.shape == out.shape:
            calls.append(partial(xp.copyto, part, source))
        else:
            if fresh:
                calls.append(partial(out.fill, empty))
            calls.append(partial(join, part, source, out=part))
        fresh = False
    if kind == "avg":
        calls.append(partial(xp.divide, out, divide_by, out))
    return in_order(calls)


def _whole_numbers(xp: Any, a: Any) -> Any:
    """The bits of floats as integers."""
    return a.view({2: xp.int16, 4: xp.int32, 8: xp.int64}[a.dtype.itemsize])


def pool_back(xp: Any, x: Any, out: Any, g: Any, dx: Any, win: Windows, kind: str, exclusive: bool) -> Callable[[], None]:
    """A call that writes the gradient of `pool_into` into `dx`; of equal maxima in a window, the first in row order gets it."""
    if not g.size or not dx.size:
        return partial(dx.fill, 0)
    calls: list[Callable[[], Any]] = []
    tiles = _tiles(win)
    area = _area(win, exclusive, g.dtype) if kind == "avg" else None
    divide_by = g.dtype.type(win.kernel[0] * win.kernel[1]) if area is None else xp.asarray(area)
    share = xp.empty(g.shape, g.dtype)
    mask, nan, taken = (xp.empty(g.shape, bool) for _ in range(3))
    if not tiles:
        calls.append(partial(dx.fill, 0))
    if kind == "avg":
        calls.append(partial(xp.divide, g, divide_by, share))
    else:
        calls.append(partial(taken.fill, False))
    for i, j in win.taps:
        if (seen := _seen(win, i, j)) is None:
            continue
        (r, s), (p, q) = seen
        target, part = dx[:, :, p, q], share[:, :, r, s]
        if kind == "max":
            hit, odd, before = mask[:, :, r, s], nan[:, :, r, s], taken[:, :, r, s]
            calls.append(partial(xp.equal, x[:, :, p, q], out[:, :, r, s], hit))
            # NaN is the maximum of a window that contains one. np.isnan 2.4 gives wrong values for outputs with such strides
            calls.append(partial(xp.not_equal, x[:, :, p, q], x[:, :, p, q], odd))
            calls.append(partial(xp.logical_or, hit, odd, hit))
            calls.append(partial(xp.greater, hit, before, hit))
            calls.append(partial(xp.logical_or, before, hit, before))
            to = target if tiles else part
            # all bits or none: an infinite gradient times 0 is NaN
            calls.append(partial(xp.negative, hit.view(xp.int8), odd.view(xp.int8)))
            calls.append(partial(xp.bitwise_and, _whole_numbers(xp, g[:, :, r, s]), odd.view(xp.int8), _whole_numbers(xp, to)))
            if tiles:
                continue
        calls.append(partial(xp.copyto, target, part) if tiles else partial(xp.add, target, part, target))
    return in_order(calls)


def _cells(xp: Any, x: Any, out: Any, kind: str) -> Callable[[], None]:
    """Adaptive pooling with cells of different sizes, one by one."""

    def run():
        for i in range(out.shape[2]):
            for j in range(out.shape[3]):
                part = x[:, :, _cell(i, x.shape[2], out.shape[2]), _cell(j, x.shape[3], out.shape[3])]
                out[:, :, i, j] = part.max(axis=(2, 3)) if kind == "max" else part.mean(axis=(2, 3))

    return run


def _cells_back(xp: Any, x: Any, g: Any, dx: Any, kind: str) -> Callable[[], None]:
    def run():
        dx.fill(0)
        for i in range(g.shape[2]):
            for j in range(g.shape[3]):
                r, s = _cell(i, x.shape[2], g.shape[2]), _cell(j, x.shape[3], g.shape[3])
                part, target, one = x[:, :, r, s], dx[:, :, r, s], g[:, :, i, j]
                if kind == "avg":
                    target += (one / (part.shape[2] * part.shape[3]))[:, :, None, None]
                    continue
                flat = part.reshape(*part.shape[:2], -1)
                first = flat.argmax(axis=2)[:, :, None] == xp.arange(flat.shape[2])
                target += (first * one[:, :, None]).reshape(part.shape)

    return run


def _check_pool(op: str, x: TensorType, attrs: dict[str, Any]) -> None:
    need_image(op, x, attrs["data_format"])
    if attrs["pooling_type"] not in ("max", "avg"):
        raise ProgramError(f"op {op}: pooling_type must be max or avg, got {attrs['pooling_type']!r}")


def _flops(image: Any, windows: Any, attrs: dict[str, Any]) -> int:
    """One operation for each pixel of each window; if windows do not overlap, that is one for each pixel of the image."""
    taps = 1 if attrs["global_pooling"] or attrs["adaptive"] else prod(pair("pool2d", "ksize", attrs["ksize"], 1))
    return windows.numel * taps if taps > 1 else image.numel


class Pool2d(OpDef):
    """The maximum or the mean of each window of an image.

    `ksize`, `strides` and `paddings` are (height, width); paddings may be (top, bottom, left, right). Padding is never a maximum; with
    `exclusive` a mean does not count it either. `global_pooling` uses the whole image as one window; `adaptive` makes `ksize` the size of
    the result; `ceil_mode` keeps a last window that extends beyond the edge. Source: fluid 1.8 `pool2d`.
    """

    name = "pool2d"
    autocast = Autocast(mixed="any")
    arithmetic = Arithmetic(flops=lambda ins, outs, attrs: _flops(ins[0], outs[0], attrs))
    rewrite = Rewrite(layout=("data_format", ("X", "Out")))
    inputs = ("X",)
    attrs = _ATTRS

    @staticmethod
    def pattern(ins, outs, attrs):
        image, most = image_words("c", attrs["data_format"]), attrs["pooling_type"] == "max"
        if most and attrs["global_pooling"]:
            return f"{' '.join(join_image('n', 'c', 'hw', attrs['data_format']))} -> {image} | h:max w:max U(0>max)"
        return f"{image} -> {image} | {'U(0>max)' if most else 'L(0)'}"

    @staticmethod
    def infer(x, **attrs):
        _check_pool("pool2d", x, attrs)
        n, c, image = split_image(x, attrs["data_format"])
        if attrs["adaptive"] and not attrs["global_pooling"]:
            size = pair("pool2d", "ksize", attrs["ksize"], 1)
            if any(s != ANY and s < k for s, k in zip(image, size)):
                raise ProgramError(f"op pool2d: adaptive pooling to {list(size)} needs an image at least that large, got {list(image)}")
        win = _pool_windows("pool2d", x, attrs)
        return TensorType(x.dtype, join_image(n, c, win.out, attrs["data_format"]))

    @staticmethod
    def grad(b, op, g):
        return b.pool2d_grad(op["X"], op["Out"], g, **op.attrs)

    @staticmethod
    def kernel(xp, x, *, out, **attrs):
        Pool2d._run(xp, (x,), (out,), attrs)()

    @staticmethod
    def _run(xp, ins, outs, attrs):
        x, out, fmt, kind = ins[0], outs[0], attrs["data_format"], attrs["pooling_type"]
        win = _pool_windows("pool2d", x, attrs)
        x, out = channels_first(x, fmt), channels_first(out, fmt)
        if _uneven(win, attrs):
            return _cells(xp, x, out, kind)
        return pool_into(xp, x, out, win, kind, attrs["exclusive"])

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        win = _pool_windows("pool2d", ins[0], attrs)
        return None if _uneven(win, attrs) else pool_native.call(ins[0], outs[0], None, None, win, attrs)

    native = Native(calls=_calls, any_size=lambda attrs: not attrs["adaptive"])

    @staticmethod
    def samples():
        for kind in ("max", "avg"):
            yield Sample.of(apart(2, 2, 4, 6), pooling_type=kind, ksize=(2, 2), strides=(2, 2))
            yield Sample.of(apart(1, 2, 5, 4, seed=1), pooling_type=kind, ksize=(3, 2), strides=(2, 1), paddings=(1, 1))
            yield Sample.of(apart(1, 1, 6, 5, seed=2), pooling_type=kind, ksize=(2, 2), strides=(3, 3), ceil_mode=True)
            yield Sample.of(apart(2, 3, 3, 2, seed=3), pooling_type=kind, global_pooling=True)
            yield Sample.of(apart(1, 2, 5, 6, seed=4), pooling_type=kind, ksize=(2, 3), adaptive=True)
            yield Sample.of(apart(1, 3, 4, 2, seed=5), pooling_type=kind, ksize=(2, 2), strides=(1, 1), data_format="NHWC")
            yield Sample.of(apart(1, 1, 1, 1, seed=6), pooling_type=kind)
            yield Sample.of(apart(5, 3, 2, 4, seed=8), pooling_type=kind, ksize=(2, 3))
        yield Sample.of(apart(1, 1, 4, 4, seed=7), pooling_type="avg", ksize=(3, 3), strides=(2, 2), paddings=(1, 0, 2, 1), exclusive=False)


class Pool2dGrad(OpDef):
    """Gradient of pool2d: a mean gives equal shares to all elements, a maximum gives all to the first element that equals it."""

    name = "pool2d_grad"
    arithmetic = Arithmetic(flops=lambda ins, outs, attrs: _flops(ins[0], ins[2], attrs))
    rewrite = Rewrite(layout=("data_format", ("X", "Out", "Out@GRAD", "X@GRAD")))
    inputs, outputs = ("X", "Out", "Out@GRAD"), ("X@GRAD",)
    attrs = _ATTRS

    @staticmethod
    def pattern(ins, outs, attrs):
        image = image_words("c", attrs["data_format"])
        values = f"~{image}, ~{image}" if attrs["pooling_type"] == "avg" else f"{image}, {image}"
        return f"{values}, {image} -> {image} | L(2)"

    @staticmethod
    def infer(x, out, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, x, y, g, *, out, **attrs):
        Pool2dGrad._run(xp, (x, y, g), (out,), attrs)()

    @staticmethod
    def _run(xp, ins, outs, attrs):
        fmt, kind = attrs["data_format"], attrs["pooling_type"]
        win = _pool_windows("pool2d_grad", ins[0], attrs)
        x, y, g, dx = (channels_first(a, fmt) for a in (*ins, outs[0]))
        if _uneven(win, attrs):
            return _cells_back(xp, x, g, dx, kind)
        return pool_back(xp, x, y, g, dx, win, kind, attrs["exclusive"])

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        win = _pool_windows("pool2d_grad", ins[0], attrs)
        return None if _uneven(win, attrs) else pool_native.call(ins[0], ins[1], ins[2], outs[0], win, attrs)

    native = Native(calls=_calls, any_size=lambda attrs: not attrs["adaptive"])

    @staticmethod
    def samples():
        x = apart(1, 2, 4, 4)
        top = x.reshape(1, 2, 2, 2, 2, 2).max(axis=(3, 5))
        yield Sample.of(x, top, f32(1, 2, 2, 2, seed=1), ksize=(2, 2), strides=(2, 2), grad=(), why="a gradient itself")
        x, g = apart(5, 3, 4, 3), f32(5, 2, 3, 3, seed=1)  # NHWC
        windows = np.stack([x[:, i : i + 2, j : j + 3] for i in (0, 1) for j in (0, 1)])
        attrs = dict[str, Any](ksize=(2, 2), data_format="NHWC", grad=(), why="a gradient itself")
        yield Sample.of(x, windows.max(axis=0), g, **attrs)
        yield Sample.of(x, windows.mean(axis=0), g, **attrs, pooling_type="avg")
