"""The three matrix products of a convolution: forward, for the gradient of its input, for the gradient of its filter.

All of them are products with the columns of an image (im2col), which are made for a block of images at a time in scratch memory (`Room`).
There are two layouts of a block; the faster one for copies and products on a CPU is used (on other devices always by channel):

- by channel, [n, C, kh, kw, OH, OW]: one product per image and group writes an NCHW result in place. For few channels, any groups. - by
pixel, [n, OH, OW, kh, kw, C]: the copied runs are kw * C long, and one product computes the whole block. For many channels, no groups.

The gradient with respect to the input is, at stride 1, a convolution with the flipped filter; otherwise columns are added back (col2im).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

from ..shared.call_sequence import in_order
from .windows import Windows


class Blocks(NamedTuple):
    """The number of bytes of columns that are made at a time, for each layout; 0: the layout is not used."""

    by_channel: int
    by_pixel: int


IN_CACHE, AT_LARGE = Blocks(1 << 20, 2 << 20), Blocks(256 << 20, 0)


class Room:
    """Scratch memory for the products of one operator: parts of one array from a plan, otherwise new arrays.

    `used` is the size of the parts in use, in elements of `dtype`. Products that run one after the other start at the same `mark`.
    """

    def __init__(self, xp: Any, dtype: Any, blocks: Blocks, scratch: Sequence[Any] = ()):
        self.xp, self.dtype, self.blocks = xp, dtype, blocks
        self._whole = scratch[0] if scratch else None
        self.at = self.used = 0

    def empty(self, shape: tuple[int, ...]) -> Any:
        start, size = self.at, prod(shape)
        self.at += -(-size // 16) * 16
        self.used = max(self.used, self.at)
        if self._whole is None or start + size > self._whole.size:
            return self.xp.empty(shape, self.dtype)
        return self._whole[start : start + size].reshape(shape)


def copies(xp: Any, to: Any, source: Any) -> list[Callable[[], Any]]:
    """Calls that copy between images with the channels last and NCHW images, both as views with the channels last.

    NumPy makes such a copy along one axis, with strides that use the same few cache lines; copying a few channels at a time keeps them in
    cache.
    """
    n, h, w, c = to.shape
    tile = max(8, 8192 // max(1, h * w))
    if tile >= c or to.strides[3] == source.strides[3]:
        return [partial(xp.copyto, to, source)]
    return [partial(xp.copyto, to[..., k : k + tile], source[..., k : k + tile]) for k in range(0, c, tile)]


def _nhwc(x: Any) -> Any:
    return x.transpose(0, 2, 3, 1)


class _Columns:
    """The columns of an image batch in one of the two layouts, block by block.

    `blocks` lists (start, stop, calls that fill it, columns): columns are [n, groups, C / groups * taps, pixels] by channel, [n * pixels,
    taps * C] by pixel.
    """

    def __init__(self, xp: Any, x: Any, win: Windows, groups: int, by_pixel: bool, room: Room):
        n, c = x.shape[:2]
        taps, pixels = win.kernel[0] * win.kernel[1], win.out[0] * win.out[1]
        self.by_pixel = by_pixel
        self.blocks: list[tuple[int, int, list[Callable[[], Any]], Any]] = []
        whole = _nhwc(x) if by_pixel else x
        if win.is_pixel and whole.flags.c_contiguous:
            columns = whole.reshape(n * pixels, c) if by_pixel else whole.reshape(n, groups, c // groups, pixels)
            self.blocks.append((0, n, [], columns))
            return
        limit = room.blocks.by_pixel if by_pixel else room.blocks.by_channel
        step = max(1, min(n, limit // max(1, c * taps * pixels * x.itemsize)))
        shape = (step, *win.out, *win.kernel, c) if by_pixel else (step, c, *win.kernel, *win.out)
        scratch = room.empty(shape)
        (t, _, left, _), (h, w) = win.pad, win.image
        padded = None
        if any(win.pad):
            hp, wp = win.padded
            padded = room.empty((step, hp, wp, c) if by_pixel else (step, c, hp, wp))
        for start in range(0, n, step):
            stop = min(n, start + step)
            m, source = stop - start, whole[start:stop]
            calls: list[Callable[[], Any]] = []
            if padded is not None:
                inner = padded[:m, t : t + h, left : left + w] if by_pixel else padded[:m, :, t : t + h, left : left + w]
                if not start:
                    calls += [partial(edge.fill, 0) for edge in _edges(padded, win, by_pixel)]
                calls += copies(xp, inner, source) if by_pixel else [partial(xp.copyto, inner, source)]
                source = padded[:m]
            calls.append(partial(xp.copyto, scratch[:m], self._windows(xp, source, win)))
            block = scratch[:m]
            columns = block.reshape(m * pixels, taps * c) if by_pixel else block.reshape(m, groups, c // groups * taps, pixels)
            self.blocks.append((start, stop, calls, columns))

    def _windows(self, xp: Any, image: Any, win: Windows) -> Any:
        (sh, sw), (dh, dw) = win.stride, win.dilation
        if self.by_pixel:
            n, y, x, c = image.strides
            shape, strides = (len(image), *win.out, *win.kernel, image.shape[3]), (n, y * sh, x * sw, y * dh, x * dw, c)
            return xp.lib.stride_tricks.as_strided(image, shape, strides)
        n, c, y, x = image.strides
        shape, strides = (len(image), image.shape[1], *win.kernel, *win.out), (n, c, y * dh, x * dw, y * sh, x * sw)
        return xp.lib.stride_tricks.as_strided(image, shape, strides)


def _edges(padded: Any, win: Windows, by_pixel: bool) -> list[Any]:
    """The parts of padded images that are padding."""
    (t, _, left, _), (h, w), rows = win.pad, win.image, padded if by_pixel else padded.transpose(0, 2, 3, 1)
    return [a for a in (rows[:, :t], rows[:, t + h :], rows[:, :, :left], rows[:, :, left + w :]) if a.size]


def _by_pixel(room: Room, x: Any, win: Windows, groups: int) -> bool:
    """Is the by-pixel layout faster for the columns of this array, a view as NCHW?"""
    if groups > 1 or not room.blocks.by_pixel:
        return False
    if win.is_pixel:
        return not x.flags.c_contiguous
    return x.shape[1] >= 16 and win.kernel != (1, 1) or not x.flags.c_contiguous and _nhwc(x).flags.c_contiguous


def _contiguous(xp: Any, a: Any, calls: list[Callable[[], Any]], room: Room) -> Any:
    """The array itself if it is contiguous, otherwise a scratch array that `calls` refresh from it."""
    if a.flags.c_contiguous:
        return a
    copy = room.empty(a.shape)
    calls.append(partial(xp.copyto, copy, a))
    return copy


def _pixel_filter(xp: Any, w: Any, calls: list[Callable[[], Any]], room: Room) -> Any:
    """The filter as [O, taps * C], in the order of by-pixel columns."""
    o, c, kh, kw = w.shape
    transposed = room.empty((o, kh, kw, c))
    calls.append(partial(xp.copyto, transposed, w.transpose(0, 2, 3, 1)))
    return transposed.reshape(o, kh * kw * c)


def pixel_gradient(xp: Any, x: Any, g: Any, win: Windows, groups: int, room: Room, calls: list[Callable[[], Any]]) -> Any:
    """The output gradient as an NCHW view, for both gradients. If both use the by-pixel layout, `calls` convert it once."""
    (n, o), out = g.shape[:2], win.out
    small = min(o, x.shape[1]) < 16 or win.kernel == (1, 1)
    if small or groups > 1 or not room.blocks.by_pixel or not g.flags.c_contiguous:
        return g
    rows = room.empty((n, *out, o))
    calls += copies(xp, rows, _nhwc(g))
    return rows.transpose(0, 3, 1, 2)


def convolve(xp: Any, x: Any, w: Any, out: Any, win: Windows, groups: int, room: Room) -> Callable[[], None]:
    """A call that writes the convolution of `x` with the OIHW filter `w` into `out`; `x` and `out` are NCHW views.

    Source: Chellapilla, Puri and Simard, "High performance convolutional neural networks for document processing", 2006.
    """
    if not out.size:
        return in_order([])
    calls: list[Callable[[], Any]] = []
    o, pixels = w.shape[0], win.out[0] * win.out[1]
    columns = _Columns(xp, x, win, groups, _by_pixel(room, x, win, groups), room)
    if columns.by_pixel:
        flat_w = _pixel_filter(xp, w, calls, room).T
        direct = _nhwc(out).flags.c_contiguous
        longest = max(stop - start for start, stop, _, _ in columns.blocks)
        scratch: Any = None if direct else room.empty((longest * pixels, o))
        for start, stop, fill, block in columns.blocks:
            rows = _nhwc(out).reshape(-1, o)[start * pixels : stop * pixels] if direct else scratch[: (stop - start) * pixels]
            calls += [*fill, partial(xp.dot, block, flat_w, rows)]
            if not direct:
                calls += copies(xp, _nhwc(out[start:stop]), rows.reshape(stop - start, *win.out, o))
        return in_order(calls)
    flat_w = _contiguous(xp, w, calls, room).reshape(groups, o // groups, -1)
    direct = out.flags.c_contiguous
    longest = max(stop - start for start, stop, _, _ in columns.blocks)
    scratch = None if direct else room.empty((longest, *out.shape[1:]))
    for start, stop, fill, block in columns.blocks:
        target = out[start:stop] if direct else scratch[: stop - start]
        calls += [*fill, partial(xp.matmul, flat_w, block, out=target.reshape(stop - start, groups, o // groups, pixels))]
        if not direct:
            calls.append(partial(xp.copyto, out[start:stop], target))
    return in_order(calls)


def convolve_back(xp: Any, g: Any, w: Any, dx: Any, win: Windows, groups: int, room: Room) -> Callable[[], None]:
    """A call that writes the gradient of `convolve`'s input, from its output gradient `g`, into `dx`; all are NCHW views."""
    if not dx.size or not g.size:
        return partial(dx.fill, 0)
    o, cg, kh, kw = w.shape
    reach = [(k - 1) * d for k, d in zip(win.kernel, win.dilation)]
    pads = tuple(reach[a // 2] - win.pad[a] for a in range(4))
    grown = win.image[0] * win.image[1] / (win.out[0] * win.out[1])
    if win.is_pixel or (win.stride == (1, 1) and min(pads) >= 0 and grown <= 1.35):
        transposed = room.empty((groups, cg, o // groups, kh, kw))
        flip: list[Callable[[], Any]] = []
        grouped_w = _contiguous(xp, w, flip, room).reshape(groups, o // groups, cg, kh, kw)
        flip.append(partial(xp.copyto, transposed, grouped_w[..., ::-1, ::-1].transpose(0, 2, 1, 3, 4)))
        back = Windows(win.out, win.kernel, (1, 1), win.dilation, pads, win.image)
        run = convolve(xp, g, transposed.reshape(groups * cg, o // groups, kh, kw), dx, back, groups, room)
        return in_order([*flip, run])
    n, c = dx.shape[:2]
    taps, pixels = kh * kw, win.out[0] * win.out[1]
    by_pixel = groups == 1 and c >= 16 and taps > 1 and room.blocks.by_pixel > 0
    limit = room.blocks.by_pixel if by_pixel else room.blocks.by_channel
    step = max(1, min(n, limit // max(1, c * taps * pixels * g.itemsize)))
    calls: list[Callable[[], Any]] = []
    hp, wp = win.padded
    (t, _, left, _), (h, wd) = win.pad, win.image
    flat_w = _pixel_filter(xp, w, calls, room) if by_pixel else _contiguous(xp, w, calls, room).reshape(groups, o // groups, cg * taps)
    columns = room.empty((step, *win.out, kh, kw, c) if by_pixel else (step, c, kh, kw, *win.out))
    summed = room.empty((step, hp, wp, c) if by_pixel else (step, c, hp, wp))
    rows_g = room.empty((step, *win.out, o) if by_pixel else (step, o, *win.out))
    for start in range(0, n, step):
        stop = min(n, start + step)
        m, source = stop - start, g[start:stop]
        source = _nhwc(source) if by_pixel else source
        if not source.flags.c_contiguous:
            calls += copies(xp, rows_g[:m], source) if by_pixel else [partial(xp.copyto, rows_g[:m], source)]
            source = rows_g[:m]
        cols, total = columns[:m], summed[:m]
        if by_pixel:
            calls.append(partial(xp.dot, source.reshape(m * pixels, o), flat_w, cols.reshape(m * pixels, taps * c)))
        else:
            grouped = source.reshape(m, groups, o // groups, pixels)
            calls.append(partial(xp.matmul, flat_w.swapaxes(1, 2), grouped, out=cols.reshape(m, groups, cg * taps, pixels)))
        calls.append(partial(total.fill, 0))
        for i, j in win.taps:
            r, s = win.tap(i, j)
            seen, part = (total[:, r, s], cols[:, :, :, i, j]) if by_pixel else (total[:, :, r, s], cols[:, :, i, j])
            calls.append(partial(xp.add, seen, part, seen))
        if by_pixel:
            calls += copies(xp, _nhwc(dx[start:stop]), total[:, t : t + h, left : left + wd])
        else:
            calls.append(partial(xp.copyto, dx[start:stop], total[:, :, t : t + h, left : left + wd]))
    return in_order(calls)


def convolve_filter(xp: Any, x: Any, g: Any, dw: Any, win: Windows, groups: int, room: Room) -> Callable[[], None]:
    """A call that writes the filter gradient of `convolve`, from the output gradient, into `dw` (OIHW); `x` and `g` are NCHW views."""
    if not g.size or not x.size:
        return partial(dw.fill, 0)
    o, cg, kh, kw = dw.shape
    pixels = win.out[0] * win.out[1]
    by_pixel = groups == 1 and (x.shape[1] >= 16 or not x.flags.c_contiguous and _nhwc(x).flags.c_contiguous)
    by_pixel = by_pixel and room.blocks.by_pixel > 0
    columns = _Columns(xp, x, win, groups, by_pixel, room)
    longest = max(stop - start for start, stop, _, _ in columns.blocks)
    calls: list[Callable[[], Any]] = []
    rows_g = room.empty((longest, *win.out, o) if by_pixel else (longest, o, *win.out))
    shape = (o, kh * kw * cg) if by_pixel else (groups, o // groups, cg * kh * kw)
    total, part = room.empty(shape), room.empty(shape)
    terms: Any = None if by_pixel else room.empty((longest, *shape))
    for start, stop, fill, block in columns.blocks:
        calls += fill
        m, source, into = stop - start, g[start:stop], part if start else total
        source = _nhwc(source) if by_pixel else source
        if not source.flags.c_contiguous:
            calls += copies(xp, rows_g[:m], source) if by_pixel else [partial(xp.copyto, rows_g[:m], source)]
            source = rows_g[:m]
        if by_pixel:
            calls.append(partial(xp.dot, source.reshape(m * pixels, o).T, block, into))
        else:
            grouped = source.reshape(m, groups, o // groups, pixels)
            calls.append(partial(xp.matmul, grouped, block.swapaxes(2, 3), out=terms[:m]))
            calls.append(partial(terms[:m].sum, 0, None, into))
        if start:
            calls.append(partial(xp.add, total, part, total))
    if by_pixel:
        calls.append(partial(xp.copyto, dw.transpose(0, 2, 3, 1), total.reshape(o, kh, kw, cg)))
    else:
        calls.append(partial(xp.copyto, dw, total.reshape(dw.shape)))
    return in_order(calls)
