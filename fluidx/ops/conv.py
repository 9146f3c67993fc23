"""Two-dimensional convolution and its transpose, with their gradients.

All of them are products with the columns of an image (im2col), made for a block of images at a time in scratch that `bind` allocates once.
Two layouts of a block are in use, chosen by what copies and multiplies fastest on NumPy:

- by channel, [n, C, kh, kw, OH, OW]: one product per image and group writes an NCHW result in place. Few channels, any groups.
- by pixel, [n, OH, OW, kh, kw, C]: the copied runs are kw * C long and one product serves the whole block. Many channels, no groups.

The gradient with respect to the input is, at stride 1, a convolution with the flipped filter; otherwise columns added back (col2im).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..ir import ANY, OpDef, Partial, ProgramError, Sample, Shard, TensorType
from ..ir.placement import PlaceError, by_group, place_rowwise
from .blocked import in_order
from .matmul import _f32, is_half, meet, same_dtype
from .softmax import check_float

BY_CHANNEL_BYTES, BY_PIXEL_BYTES, GPU_BYTES = 1 << 20, 2 << 20, 256 << 20


# -- window arithmetic, shared with pooling ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Windows:
    """How windows lie over an image: sizes as (height, width), `pad` as (top, bottom, left, right)."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pad: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def padded(self) -> tuple[int, int]:
        t, b, left, right = self.pad
        return self.image[0] + t + b, self.image[1] + left + right

    @property
    def taps(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(self.kernel[0]) for j in range(self.kernel[1])]

    def tap(self, i: int, j: int) -> tuple[slice, slice]:
        """The padded rows and columns that tap (i, j) of all windows reads."""
        r, c = i * self.dilation[0], j * self.dilation[1]
        return (slice(r, r + (self.out[0] - 1) * self.stride[0] + 1, self.stride[0]),
                slice(c, c + (self.out[1] - 1) * self.stride[1] + 1, self.stride[1]))  # fmt: skip

    @property
    def is_pixel(self) -> bool:
        """A 1x1 window at stride 1 without padding: the columns are the image itself."""
        return self.kernel == (1, 1) and self.stride == (1, 1) and self.pad == (0, 0, 0, 0)


def pair(op: str, name: str, value: Sequence[int], least: int) -> tuple[int, int]:
    """An attribute of one or two integers as (height, width)."""
    if len(value) not in (1, 2) or any(not isinstance(v, int) or v < least for v in value):
        raise ProgramError(f"op {op}: {name} must be one or two integers of at least {least}, got {list(value)}")
    return (value[0], value[-1])


def four_pads(op: str, paddings: Sequence[int]) -> tuple[int, ...]:
    """`paddings` of 1, 2 (height, width) or 4 (top, bottom, left, right) integers as the latter."""
    if len(paddings) not in (1, 2, 4) or any(not isinstance(p, int) or p < 0 for p in paddings):
        raise ProgramError(f"op {op}: paddings must be 1, 2 or 4 integers of at least 0, got {list(paddings)}")
    if len(paddings) == 4:
        return tuple(paddings)
    return paddings[0], paddings[0], paddings[-1], paddings[-1]


def place_windows(op: str, image: Sequence[int], kernel: Sequence[int], strides: Sequence[int], paddings: Sequence[int],
                  dilations: Sequence[int] = (1, 1), algorithm: str = "EXPLICIT", ceil_mode: bool = False) -> Windows:  # fmt: skip
    """The windows of a convolution or a pooling; an open image size gives an open result size.

    `algorithm` SAME pads so that the result has ceil(size / stride), the odd element at the end; VALID does not pad. Raises ProgramError
    for attributes out of range and for a window larger than the padded image.
    """
    stride, dilation = pair(op, "strides", strides, 1), pair(op, "dilations", dilations, 1)
    if algorithm not in ("EXPLICIT", "SAME", "VALID"):
        raise ProgramError(f"op {op}: padding_algorithm must be EXPLICIT, SAME or VALID, got {algorithm!r}")
    pads = list(four_pads(op, paddings)) if algorithm == "EXPLICIT" else [0, 0, 0, 0]
    out = []
    for a in (0, 1):
        size, reach = image[a], (kernel[a] - 1) * dilation[a] + 1
        if size == ANY or kernel[a] == ANY:
            out.append(ANY)
            continue
        if algorithm == "SAME":
            need = max((-(-size // stride[a]) - 1) * stride[a] + reach - size, 0)
            pads[2 * a], pads[2 * a + 1] = need // 2, need - need // 2
        room = size + pads[2 * a] + pads[2 * a + 1] - reach
        if room < 0:
            side, around = ("height", "width")[a], f"{pads[2 * a]} and {pads[2 * a + 1]}"
            raise ProgramError(f"op {op}: a window of {reach} does not fit {side} {size} with padding {around}")
        count = (room + (stride[a] - 1 if ceil_mode else 0)) // stride[a] + 1
        # a window that lies in the padding alone has no elements
        out.append(count - 1 if ceil_mode and (count - 1) * stride[a] >= size + pads[2 * a] else count)
    return Windows(tuple(image), tuple(kernel), stride, dilation, tuple(pads), tuple(out))


def need_image(op: str, x: TensorType, data_format: str) -> None:
    """ProgramError unless the type is a float image batch and the layout a known one."""
    if data_format not in ("NCHW", "NHWC"):
        raise ProgramError(f"op {op}: data_format must be NCHW or NHWC, got {data_format!r}")
    if x.ndim != 4:
        raise ProgramError(f"op {op} needs an input of 4 axes ({data_format}), got {x}")
    check_float(op, "input", x)


def split_image(x: Any, data_format: str) -> tuple[int, int, tuple[int, int]]:
    """(batch, channels, (height, width)) of a type or an array."""
    n, a, b, c = x.shape
    return (n, a, (b, c)) if data_format == "NCHW" else (n, c, (a, b))


def join_image(n: int, channels: int, size: Sequence[int], data_format: str) -> tuple[int, ...]:
    return (n, channels, *size) if data_format == "NCHW" else (n, *size, channels)


def channels_first(x: Any, data_format: str) -> Any:
    """The array seen as NCHW."""
    return x if data_format == "NCHW" else x.transpose(0, 3, 1, 2)


# -- the three products ----------------------------------------------------------------------------------------------------------


def _as_strided(xp: Any) -> Any:
    return np.lib.stride_tricks.as_strided if xp is np else xp.lib.stride_tricks.as_strided


def _nhwc(x: Any) -> Any:
    return x.transpose(0, 2, 3, 1)


class _Columns:
    """The columns of an image batch in one of the two layouts, block by block.

    `blocks` lists (start, stop, calls that fill it, columns): columns are [n, groups, C / groups * taps, pixels] by channel,
    [n * pixels, taps * C] by pixel.
    """

    def __init__(self, xp: Any, x: Any, win: Windows, groups: int, by_pixel: bool):
        n, c = x.shape[:2]
        taps, pixels = win.kernel[0] * win.kernel[1], win.out[0] * win.out[1]
        self.by_pixel = by_pixel
        self.blocks: list[tuple[int, int, list[Callable[[], Any]], Any]] = []
        whole = _nhwc(x) if by_pixel else x
        if win.is_pixel and whole.flags.c_contiguous:
            columns = whole.reshape(n * pixels, c) if by_pixel else whole.reshape(n, groups, c // groups, pixels)
            self.blocks.append((0, n, [], columns))
            return
        limit = GPU_BYTES if xp is not np else BY_PIXEL_BYTES if by_pixel else BY_CHANNEL_BYTES
        step = max(1, min(n, limit // max(1, c * taps * pixels * x.itemsize)))
        shape = (step, *win.out, *win.kernel, c) if by_pixel else (step, c, *win.kernel, *win.out)
        scratch = xp.empty(shape, x.dtype)
        (t, _, left, _), (h, w) = win.pad, win.image
        padded = None
        if any(win.pad):
            hp, wp = win.padded
            padded = xp.zeros((step, hp, wp, c) if by_pixel else (step, c, hp, wp), x.dtype)
        for start in range(0, n, step):
            stop = min(n, start + step)
            m, source = stop - start, whole[start:stop]
            calls: list[Callable[[], Any]] = []
            if padded is not None:
                inner = padded[:m, t : t + h, left : left + w] if by_pixel else padded[:m, :, t : t + h, left : left + w]
                calls.append(partial(xp.copyto, inner, source))
                source = padded[:m]
            calls.append(partial(xp.copyto, scratch[:m], self._windows(xp, source, win)))
            block = scratch[:m]
            columns = block.reshape(m * pixels, taps * c) if by_pixel else block.reshape(m, groups, c // groups * taps, pixels)
            self.blocks.append((start, stop, calls, columns))

    def _windows(self, xp: Any, image: Any, win: Windows) -> Any:
        (sh, sw), (dh, dw) = win.stride, win.dilation
        if self.by_pixel:
            n, y, x, c = image.strides
            return _as_strided(xp)(image, (len(image), *win.out, *win.kernel, image.shape[3]), (n, y * sh, x * sw, y * dh, x * dw, c))
        n, c, y, x = image.strides
        return _as_strided(xp)(image, (len(image), image.shape[1], *win.kernel, *win.out), (n, c, y * dh, x * dw, y * sh, x * sw))


def _by_pixel(xp: Any, x: Any, win: Windows, groups: int) -> bool:
    """Whether the by-pixel layout is the faster one for columns of this NCHW-seen array."""
    if groups > 1 or xp is not np:
        return False
    if win.is_pixel:
        return not x.flags.c_contiguous
    return x.shape[1] >= 16 and win.kernel != (1, 1) or not x.flags.c_contiguous and _nhwc(x).flags.c_contiguous


def _still(xp: Any, a: Any, calls: list[Callable[[], Any]]) -> Any:
    """The array itself when contiguous, else scratch that `calls` refresh from it."""
    if a.flags.c_contiguous:
        return a
    copy = xp.empty(a.shape, a.dtype)
    calls.append(partial(xp.copyto, copy, a))
    return copy


def _pixel_filter(xp: Any, w: Any, calls: list[Callable[[], Any]]) -> Any:
    """The filter as [O, taps * C], in the order of by-pixel columns."""
    o, c, kh, kw = w.shape
    turned = xp.empty((o, kh, kw, c), w.dtype)
    calls.append(partial(xp.copyto, turned, w.transpose(0, 2, 3, 1)))
    return turned.reshape(o, kh * kw * c)


def convolve(xp: Any, x: Any, w: Any, out: Any, win: Windows, groups: int) -> Callable[[], None]:
    """A call that puts the convolution of `x` with the OIHW filter `w` into `out`; `x` and `out` are seen as NCHW.

    Source: Chellapilla, Puri and Simard, "High performance convolutional neural networks for document processing", 2006.
    """
    if not out.size:
        return in_order([])
    calls: list[Callable[[], Any]] = []
    o, pixels = w.shape[0], win.out[0] * win.out[1]
    columns = _Columns(xp, x, win, groups, _by_pixel(xp, x, win, groups))
    if columns.by_pixel:
        flat_w = _pixel_filter(xp, w, calls).T
        direct = _nhwc(out).flags.c_contiguous
        longest = max(stop - start for start, stop, _, _ in columns.blocks)
        scratch: Any = None if direct else xp.empty((longest * pixels, o), out.dtype)
        for start, stop, fill, block in columns.blocks:
            rows = _nhwc(out).reshape(-1, o)[start * pixels : stop * pixels] if direct else scratch[: (stop - start) * pixels]
            calls += [*fill, partial(xp.dot, block, flat_w, rows)]
            if not direct:
                calls.append(partial(xp.copyto, _nhwc(out[start:stop]), rows.reshape(stop - start, *win.out, o)))
        return in_order(calls)
    flat_w = _still(xp, w, calls).reshape(groups, o // groups, -1)
    direct = out.flags.c_contiguous
    longest = max(stop - start for start, stop, _, _ in columns.blocks)
    scratch = None if direct else xp.empty((longest, *out.shape[1:]), out.dtype)
    for start, stop, fill, block in columns.blocks:
        target = out[start:stop] if direct else scratch[: stop - start]
        calls += [*fill, partial(xp.matmul, flat_w, block, out=target.reshape(stop - start, groups, o // groups, pixels))]
        if not direct:
            calls.append(partial(xp.copyto, out[start:stop], target))
    return in_order(calls)


def convolve_back(xp: Any, g: Any, w: Any, dx: Any, win: Windows, groups: int) -> Callable[[], None]:
    """A call that puts into `dx` what `convolve`'s output gradient `g` gives for its input; all seen as NCHW."""
    if not dx.size or not g.size:
        return partial(dx.fill, 0)
    o, cg, kh, kw = w.shape
    reach = [(k - 1) * d for k, d in zip(win.kernel, win.dilation)]
    pads = tuple(reach[a // 2] - win.pad[a] for a in range(4))
    grown = win.image[0] * win.image[1] / (win.out[0] * win.out[1])
    if win.is_pixel or (win.stride == (1, 1) and min(pads) >= 0 and grown <= 1.35):
        turned = xp.empty((groups, cg, o // groups, kh, kw), w.dtype)
        flip: list[Callable[[], Any]] = []
        grouped_w = _still(xp, w, flip).reshape(groups, o // groups, cg, kh, kw)
        flip.append(partial(xp.copyto, turned, grouped_w[..., ::-1, ::-1].transpose(0, 2, 1, 3, 4)))
        back = Windows(win.out, win.kernel, (1, 1), win.dilation, pads, win.image)
        run = convolve(xp, g, turned.reshape(groups * cg, o // groups, kh, kw), dx, back, groups)
        return in_order([*flip, run])
    n, c = dx.shape[:2]
    taps, pixels = kh * kw, win.out[0] * win.out[1]
    by_pixel = groups == 1 and c >= 16 and taps > 1 and xp is np
    limit = GPU_BYTES if xp is not np else BY_PIXEL_BYTES if by_pixel else BY_CHANNEL_BYTES
    step = max(1, min(n, limit // max(1, c * taps * pixels * g.itemsize)))
    calls: list[Callable[[], Any]] = []
    hp, wp = win.padded
    (t, _, left, _), (h, wd) = win.pad, win.image
    flat_w = _pixel_filter(xp, w, calls) if by_pixel else _still(xp, w, calls).reshape(groups, o // groups, cg * taps)
    columns = xp.empty((step, *win.out, kh, kw, c) if by_pixel else (step, c, kh, kw, *win.out), g.dtype)
    summed = xp.empty((step, hp, wp, c) if by_pixel else (step, c, hp, wp), g.dtype)
    rows_g = xp.empty((step, *win.out, o) if by_pixel else (step, o, *win.out), g.dtype)
    for start in range(0, n, step):
        stop = min(n, start + step)
        m, source = stop - start, g[start:stop]
        source = _nhwc(source) if by_pixel else source
        if not source.flags.c_contiguous:
            calls.append(partial(xp.copyto, rows_g[:m], source))
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
            calls.append(partial(xp.copyto, _nhwc(dx[start:stop]), total[:, t : t + h, left : left + wd]))
        else:
            calls.append(partial(xp.copyto, dx[start:stop], total[:, :, t : t + h, left : left + wd]))
    return in_order(calls)


def convolve_filter(xp: Any, x: Any, g: Any, dw: Any, win: Windows, groups: int) -> Callable[[], None]:
    """A call that puts into `dw` (OIHW) what `convolve`'s output gradient `g` gives for its filter; `x` and `g` are seen as NCHW."""
    if not g.size or not x.size:
        return partial(dw.fill, 0)
    o, cg, kh, kw = dw.shape
    pixels = win.out[0] * win.out[1]
    by_pixel = groups == 1 and xp is np and (x.shape[1] >= 16 or not x.flags.c_contiguous and _nhwc(x).flags.c_contiguous)
    columns = _Columns(xp, x, win, groups, by_pixel)
    longest = max(stop - start for start, stop, _, _ in columns.blocks)
    calls: list[Callable[[], Any]] = []
    rows_g = xp.empty((longest, *win.out, o) if by_pixel else (longest, o, *win.out), g.dtype)
    shape = (o, kh * kw * cg) if by_pixel else (groups, o // groups, cg * kh * kw)
    total, part = xp.empty(shape, dw.dtype), xp.empty(shape, dw.dtype)
    terms: Any = None if by_pixel else xp.empty((longest, *shape), dw.dtype)
    for start, stop, fill, block in columns.blocks:
        calls += fill
        m, source, into = stop - start, g[start:stop], part if start else total
        source = _nhwc(source) if by_pixel else source
        if not source.flags.c_contiguous:
            calls.append(partial(xp.copyto, rows_g[:m], source))
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


def _wide(xp: Any, arrays: Sequence[Any]) -> list[Any]:
    """16-bit floats as float32; others as they are."""
    return [a if a is None or not is_half(a.dtype) else a.astype("float32") for a in arrays]


def _run_bound(bind: Any, xp: Any, ins: Sequence[Any], outs: Sequence[Any], attrs: dict[str, Any]) -> None:
    """A kernel by way of `bind`; 16-bit floats are worked on in float32."""
    if not is_half(ins[0].dtype):
        bind(xp, ins, outs, attrs, None)()
        return
    wide = [None if o is None else xp.empty(o.shape, "float32") for o in outs]
    bind(xp, _wide(xp, ins), wide, attrs, None)()
    for narrow, o in zip(outs, wide):
        if narrow is not None:
            narrow[...] = o


# -- ops -------------------------------------------------------------------------------------------------------------------------

_ATTRS = {"strides": (1, 1), "paddings": (0, 0), "dilations": (1, 1), "groups": 1, "data_format": "NCHW", "padding_algorithm": "EXPLICIT"}


def _conv_windows(op: str, x: Any, w: Any, attrs: dict[str, Any]) -> Windows:
    return place_windows(op, split_image(x, attrs["data_format"])[2], w.shape[2:], attrs["strides"], attrs["paddings"],
                         attrs["dilations"], attrs["padding_algorithm"])  # fmt: skip


def _infer_conv(op: str, x: TensorType, w: TensorType, attrs: dict[str, Any]) -> TensorType:
    need_image(op, x, attrs["data_format"])
    same_dtype(op, Input=x, Filter=w)
    if w.ndim != 4:
        raise ProgramError(f"op {op} needs a Filter of 4 axes (out, in / groups, height, width), got {w}")
    n, c, _ = split_image(x, attrs["data_format"])
    groups, o = attrs["groups"], w.shape[0]
    if groups < 1 or (o != ANY and o % groups):
        raise ProgramError(f"op {op}: groups {groups} must divide the {o} filters")
    if w.shape[1] != ANY and not meet(c, w.shape[1] * groups):
        raise ProgramError(f"op {op}: Input {x} has {c} channels, Filter {w} with groups {groups} expects {w.shape[1] * groups}")
    return TensorType(x.dtype, join_image(n, o, _conv_windows(op, x, w, attrs).out, attrs["data_format"]))


def _place_conv_grad(x: Any, w: Any, g: Any, **attrs: Any) -> Any:
    def rule(which, group, x, w, g):
        ex, ew, eg = x.on(group), w.on(group), g.on(group)
        if ew is None and isinstance(eg, Shard) and ex == eg and eg.axis == 0:
            return (eg, Partial("sum", group))[which]
        if ew is None and ex is None and isinstance(eg, Partial) and eg.op in ("sum", "avg"):
            return eg
        raise PlaceError(f"conv2d's gradient cannot combine %{x.name}, %{w.name}, %{g.name}, which are {ex}, {ew}, {eg} over {group}")

    return tuple(by_group(partial(rule, which))(x, w, g) for which in (0, 1))


class Conv2d(OpDef):
    """Two-dimensional convolution (cross-correlation) of images with OIHW filters.

    Input is [N, C, H, W] (or NHWC by `data_format`), Filter [O, C / groups, kh, kw]; the result keeps Input's layout. `paddings` are
    (height, width) or (top, bottom, left, right); `padding_algorithm` SAME or VALID overrides them. Source: fluid 1.8 `conv2d`.
    """

    name = "conv2d"
    inputs, outputs = ("Input", "Filter"), ("Output",)
    attrs = _ATTRS
    onnx = "Conv"
    place = staticmethod(place_rowwise)

    @staticmethod
    def infer(x, w, **attrs):
        return _infer_conv("conv2d", x, w, attrs)

    @staticmethod
    def grad(b, op, g):
        return _emit_grad(b, "conv2d_grad", op, g)

    @staticmethod
    def kernel(xp, x, w, *, out, **attrs):
        _run_bound(Conv2d.bind, xp, (x, w), (out,), attrs)

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (x, w), out, fmt = ins, outs[0], attrs["data_format"]
        if is_half(x.dtype):
            return partial(Conv2d.kernel, xp, x, w, out=out, **attrs)
        win = _conv_windows("conv2d", x, w, attrs)
        return convolve(xp, channels_first(x, fmt), w, channels_first(out, fmt), win, attrs["groups"])

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 2, 3, 5, 4), _f32(1, 2, 3, 3, 3))
        yield Sample.of(_f32(0, 2, 3, 5, 4), _f32(1, 2, 3, 3, 3), paddings=(1, 1))
        yield Sample.of(_f32(2, 1, 1, 7, 6), _f32(3, 2, 1, 2, 3), strides=(2, 3), paddings=(1, 0, 2, 1))
        yield Sample.of(_f32(4, 1, 2, 6, 6), _f32(5, 1, 2, 2, 2), strides=(3, 3))
        yield Sample.of(_f32(4, 1, 2, 6, 6), _f32(5, 1, 2, 2, 2), dilations=(2, 3), paddings=(1, 1))
        yield Sample.of(_f32(6, 1, 4, 4, 4), _f32(7, 6, 2, 3, 3), groups=2, paddings=(1, 1))
        yield Sample.of(_f32(8, 2, 4, 3, 3), _f32(9, 3, 4, 1, 1))
        yield Sample.of(_f32(10, 1, 5, 4, 2), _f32(11, 3, 2, 3, 3), data_format="NHWC", padding_algorithm="SAME", strides=(2, 2))
        yield Sample.of(_f32(12, 1, 2, 4, 4), _f32(13, 1, 2, 3, 3), padding_algorithm="VALID", paddings=(5, 5))
        yield Sample.of(_f32(14, 1, 17, 3, 3), _f32(15, 1, 17, 2, 2), strides=(2, 1))
        half = np.random.default_rng(16).integers(-3, 4, (1, 2, 4, 4)).astype("float16")
        yield Sample.of(half, half[:, :, :3, :3], grad=(), why="central differences drown in float16")


def _emit_grad(b: Any, name: str, op: Any, g: Any) -> Any:
    x, w = op["Input"], op["Filter"]
    skip = {slot: None for slot, v in (("InputGrad", x), ("FilterGrad", w)) if v.stop_gradient}
    return b.emit(name, x, w, g, out=skip, **op.attrs)


class Conv2dGrad(OpDef):
    """Gradients of conv2d with respect to its input and its filter; either may be left away."""

    name = "conv2d_grad"
    inputs, outputs = ("Input", "Filter", "OutputGrad"), ("InputGrad?", "FilterGrad?")
    attrs = _ATTRS
    place = staticmethod(_place_conv_grad)

    @staticmethod
    def infer(x, w, g, **attrs):
        return x, w

    @staticmethod
    def kernel(xp, x, w, g, *, out, **attrs):
        _run_bound(Conv2dGrad.bind, xp, (x, w, g), out, attrs)

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (x, w, g), (dx, dw), fmt, groups = ins, outs, attrs["data_format"], attrs["groups"]
        if is_half(x.dtype):
            return partial(Conv2dGrad.kernel, xp, x, w, g, out=outs, **attrs)
        win = _conv_windows("conv2d_grad", x, w, attrs)
        g, calls = channels_first(g, fmt), []
        if dw is not None:
            calls.append(convolve_filter(xp, channels_first(x, fmt), g, dw, win, groups))
        if dx is not None:
            calls.append(convolve_back(xp, g, w, channels_first(dx, fmt), win, groups))
        return in_order(calls)

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 2, 3, 5, 4), _f32(1, 2, 3, 3, 3), _f32(2, 2, 2, 3, 2), grad=(), why="a gradient itself")
        yield Sample.of(_f32(0, 1, 1, 5, 5), _f32(1, 1, 1, 2, 2), _f32(2, 1, 1, 2, 2), strides=(2, 2), grad=(), why="a gradient itself")


class DepthwiseConv2d(OpDef):
    """conv2d in which every channel has filters of its own: groups equals the number of channels. Source: fluid 1.8."""

    name = "depthwise_conv2d"
    inputs, outputs = ("Input", "Filter"), ("Output",)
    attrs = _ATTRS
    onnx = "Conv"
    place = staticmethod(place_rowwise)
    kernel = staticmethod(Conv2d.kernel)
    bind = staticmethod(Conv2d.bind)

    @staticmethod
    def infer(x, w, **attrs):
        result = _infer_conv("depthwise_conv2d", x, w, attrs)
        if w.shape[1] != 1:
            raise ProgramError(f"op depthwise_conv2d needs one input channel per filter and groups equal to the channels; Filter is {w}")
        return result

    @staticmethod
    def grad(b, op, g):
        return _emit_grad(b, "conv2d_grad", op, g)

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 1, 3, 5, 4), _f32(1, 3, 1, 3, 3), groups=3, paddings=(1, 1))
        yield Sample.of(_f32(2, 2, 2, 5, 5), _f32(3, 4, 1, 2, 2), groups=2, strides=(2, 2))
        yield Sample.of(_f32(2, 1, 5, 5, 2), _f32(3, 2, 1, 3, 3), groups=2, dilations=(2, 1), data_format="NHWC")


_TRANSPOSE_ATTRS = {**_ATTRS, "output_size": ()}


def _transposed_windows(op: str, x: Any, w: Any, attrs: dict[str, Any]) -> Windows:
    """The windows of the convolution whose gradient conv2d_transpose is: its image is our result."""
    stride, dilation = pair(op, "strides", attrs["strides"], 1), pair(op, "dilations", attrs["dilations"], 1)
    algorithm = attrs["padding_algorithm"]
    if algorithm not in ("EXPLICIT", "SAME", "VALID"):
        raise ProgramError(f"op {op}: padding_algorithm must be EXPLICIT, SAME or VALID, got {algorithm!r}")
    pads = list(four_pads(op, attrs["paddings"])) if algorithm == "EXPLICIT" else [0, 0, 0, 0]
    asked = pair(op, "output_size", attrs["output_size"], 1) if attrs["output_size"] else None
    size, result = split_image(x, attrs["data_format"])[2], []
    for a in (0, 1):
        if size[a] == ANY or w.shape[2 + a] == ANY:
            result.append(asked[a] if asked else ANY)
            continue
        reach = (w.shape[2 + a] - 1) * dilation[a] + 1
        full = (size[a] - 1) * stride[a] + reach
        if algorithm == "SAME":
            extra = max(full - size[a] * stride[a], 0)
            pads[2 * a], pads[2 * a + 1] = extra // 2, extra - extra // 2
        least = full - pads[2 * a] - pads[2 * a + 1]
        if algorithm == "SAME" and not asked:
            least = size[a] * stride[a]
        if asked and not least <= asked[a] < least + stride[a]:
            raise ProgramError(f"op {op}: output_size {list(asked)} is out of reach; axis {a} can be {least} to {least + stride[a] - 1}")
        if least < 1:
            raise ProgramError(f"op {op}: padding {pads[2 * a]} and {pads[2 * a + 1]} leaves nothing of a result of {full} along axis {a}")
        result.append(asked[a] if asked else least)
    return Windows(tuple(result), tuple(w.shape[2:]), stride, dilation, tuple(pads), tuple(size))


class Conv2dTranspose(OpDef):
    """Transposed convolution: each input pixel adds a filter, scaled by it, to the result.

    Input is [N, C, H, W], Filter [C, O / groups, kh, kw]; the result has (H - 1) * stride - padding + dilation * (kh - 1) + 1 rows, or
    `output_size`, which may be up to stride - 1 larger. It is the gradient of conv2d with respect to its input. Source: fluid 1.8.
    """

    name = "conv2d_transpose"
    inputs, outputs = ("Input", "Filter"), ("Output",)
    attrs = _TRANSPOSE_ATTRS
    onnx = "ConvTranspose"
    place = staticmethod(place_rowwise)

    @staticmethod
    def infer(x, w, **attrs):
        need_image("conv2d_transpose", x, attrs["data_format"])
        same_dtype("conv2d_transpose", Input=x, Filter=w)
        n, c, _ = split_image(x, attrs["data_format"])
        if w.ndim != 4:
            raise ProgramError(f"op conv2d_transpose needs a Filter of 4 axes (in, out / groups, height, width), got {w}")
        groups = attrs["groups"]
        if groups < 1 or (w.shape[0] != ANY and w.shape[0] % groups):
            raise ProgramError(f"op conv2d_transpose: groups {groups} must divide the {w.shape[0]} input channels of Filter {w}")
        if not meet(c, w.shape[0]):
            raise ProgramError(f"op conv2d_transpose: Input {x} has {c} channels, Filter {w} expects {w.shape[0]}")
        win = _transposed_windows("conv2d_transpose", x, w, attrs)
        out = ANY if w.shape[1] == ANY else w.shape[1] * groups
        return TensorType(x.dtype, join_image(n, out, win.image, attrs["data_format"]))

    @staticmethod
    def grad(b, op, g):
        return _emit_grad(b, "conv2d_transpose_grad", op, g)

    @staticmethod
    def kernel(xp, x, w, *, out, **attrs):
        _run_bound(Conv2dTranspose.bind, xp, (x, w), (out,), attrs)

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (x, w), out, fmt = ins, outs[0], attrs["data_format"]
        if is_half(x.dtype):
            return partial(Conv2dTranspose.kernel, xp, x, w, out=out, **attrs)
        win = _transposed_windows("conv2d_transpose", x, w, attrs)
        return convolve_back(xp, channels_first(x, fmt), w, channels_first(out, fmt), win, attrs["groups"])

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 2, 3, 4, 3), _f32(1, 3, 2, 3, 3))
        yield Sample.of(_f32(0, 1, 2, 3, 3), _f32(1, 2, 2, 3, 2), strides=(2, 3), paddings=(1, 0))
        yield Sample.of(_f32(0, 1, 2, 3, 3), _f32(1, 2, 1, 3, 3), strides=(2, 2), paddings=(1, 1), output_size=(6, 5))
        yield Sample.of(_f32(2, 1, 4, 3, 3), _f32(3, 4, 2, 2, 2), groups=2, dilations=(2, 1), paddings=(0, 1, 1, 0))
        yield Sample.of(_f32(4, 1, 3, 3, 2), _f32(5, 2, 3, 3, 3), data_format="NHWC", padding_algorithm="SAME", strides=(2, 2))


class Conv2dTransposeGrad(OpDef):
    """Gradients of conv2d_transpose with respect to its input and its filter; either may be left away."""

    name = "conv2d_transpose_grad"
    inputs, outputs = ("Input", "Filter", "OutputGrad"), ("InputGrad?", "FilterGrad?")
    attrs = _TRANSPOSE_ATTRS
    place = staticmethod(_place_conv_grad)

    @staticmethod
    def infer(x, w, g, **attrs):
        return x, w

    @staticmethod
    def kernel(xp, x, w, g, *, out, **attrs):
        _run_bound(Conv2dTransposeGrad.bind, xp, (x, w, g), out, attrs)

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (x, w, g), (dx, dw), fmt, groups = ins, outs, attrs["data_format"], attrs["groups"]
        if is_half(x.dtype):
            return partial(Conv2dTransposeGrad.kernel, xp, x, w, g, out=outs, **attrs)
        win = _transposed_windows("conv2d_transpose_grad", x, w, attrs)
        g, calls = channels_first(g, fmt), []
        if dw is not None:
            calls.append(convolve_filter(xp, g, channels_first(x, fmt), dw, win, groups))
        if dx is not None:
            calls.append(convolve(xp, g, w, channels_first(dx, fmt), win, groups))
        return in_order(calls)

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 2, 3, 4, 3), _f32(1, 3, 2, 3, 3), _f32(2, 2, 2, 6, 5), grad=(), why="a gradient itself")
