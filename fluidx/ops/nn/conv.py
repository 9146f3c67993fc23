"""conv2d, depthwise_conv2d and conv2d_transpose, with their gradients: types, access patterns, and the product of im2col for each."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, ClassVar

import numpy as np

from ...ir import ANY, Arithmetic, Autocast, Comm, Native, OpDef, ProgramError, Rewrite, Sample, TensorType
from ...ir.axis_letters import fold
from ..shared.call_sequence import in_order
from ..shared.samples import f32, ints
from ..shared.types import empty_arrays, meet, same_dtype
from .conv_native import BACK, FILTER, FORWARD, any_size, calls, scratch_types
from .im2col import AT_LARGE, IN_CACHE, Room, convolve, convolve_back, convolve_filter, pixel_gradient
from .windows import Windows, channels_first, four_pads, image_words, join_image, need_image, pair, place_windows, split_image

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


def _words(w: TensorType, attrs: dict[str, Any], transposed: bool = False) -> tuple[str, str, str, dict[str, int]]:
    """The axis words for input, filter and output, and the sizes of its axes; a channel of g groups is (group, index in the group)."""
    fmt, groups = attrs["data_format"], attrs["groups"]
    if groups == 1:
        return image_words("c", fmt), "c o . ." if transposed else "o c . .", image_words("o", fmt), {}
    first, second = (d if d == ANY else d // n for d, n in zip(w.shape, (groups, 1)))
    c, o = (first, second) if transposed else (second, first)
    inner, outer = fold("g c", (groups, c)), fold("g o", (groups, o))
    filters = f"{inner} {fold('o', (o,))} . ." if transposed else f"{outer} {fold('c', (c,))} . ."
    return image_words(inner, fmt), filters, image_words(outer, fmt), {"g": groups, "c": c, "o": o}


def _pattern(transposed: bool) -> Any:
    def pattern(ins, outs, attrs):
        x, w, y, sizes = _words(ins[1], attrs, transposed)
        return f"{x}, {w} -> {y} | c:+ L(0) L(1)", sizes

    return staticmethod(pattern)


def _grad_pattern(transposed: bool) -> Any:
    def pattern(ins, outs, attrs):
        x, w, y, sizes = _words(ins[1], attrs, transposed)
        # each operand is read for the gradient of the other one
        read_x, read_w = ("~" if outs[k] is None else "" for k in (1, 0))
        linear = " ".join(f"L({k}>{1 - k})" for k in (0, 1) if outs[1 - k] is not None)
        return f"{read_x}{x}, {read_w}{w}, {y} -> {x}, {w} | n:+ o:+ L(2) {linear}", sizes

    return staticmethod(pattern)


def _flops(transposed: bool) -> Any:
    """Every pixel of the result, or of the input of a transposed convolution, is multiplied with the filters of its group; in a gradient
    too.
    """

    def flops(ins, outs, attrs):
        pixels = ins[0] if transposed else (*ins, *outs)[2]
        return 2 * pixels.numel * prod(ins[1].shape[1:]) * sum(t is not None for t in outs)

    return staticmethod(flops)


def _local_groups(in_groups_of: int) -> Any:
    """Attributes of a shard of whole groups, which has fewer groups; axis 1 of the filter is inside one group of the value at
    `in_groups_of`.
    """

    def local_attrs(attrs, ins, outs):
        if attrs["groups"] == 1:
            return attrs
        channels = (*ins, *outs)[in_groups_of][1 if attrs["data_format"] == "NCHW" else 3]
        return {**attrs, "groups": channels // ins[1][1]}

    return staticmethod(local_attrs)


def _scratch_types(run: Any, ins: list[TensorType], outs: list[TensorType | None], attrs: Any) -> list[TensorType]:
    """The scratch types that a NumPy kernel needs: found by binding it to arrays that are not written."""
    dtype = ins[0].dtype
    room = Room(np, dtype, IN_CACHE)
    run(np, empty_arrays(ins), [None if t is None else empty_arrays([t])[0] for t in outs], attrs, room)
    return [TensorType(dtype, (room.used,))] if room.used else []


class _Conv(OpDef):
    """Base of the convolutions of an input with a filter."""

    autocast = Autocast(mixed="half")
    arithmetic = Arithmetic(sums_products="convolution")
    inputs, outputs = ("Input", "Filter"), ("Output",)
    rewrite = Rewrite(layout=("data_format", ("Input", "Output")))
    product: ClassVar[Callable[..., Any]]  # (xp, x, w, out, windows, groups, room) -> the call that fills `out`; images are views in NCHW
    windows: ClassVar[Callable[..., Windows]]  # (op, x, w, attrs)
    gradient: ClassVar[str]
    transposed: ClassVar[bool] = False  # the windows are placed over the result

    @classmethod
    def grad(cls, b, op, g):
        skip = {f"{slot}@GRAD": None for slot in cls.inputs if not op.needs(slot)}
        return b.emit(cls.gradient, op["Input"], op["Filter"], g, out=skip, **op.attrs)

    @classmethod
    def kernel(cls, xp, x, w, *, out, **attrs):
        cls._run(xp, (x, w), (out,), attrs, Room(xp, x.dtype, AT_LARGE))()

    @classmethod
    def _bind(cls, ins, outs, attrs, ctx, scratch=()):
        return cls._run(np, ins, outs, attrs, Room(np, ins[0].dtype, IN_CACHE, scratch))

    @classmethod
    def _run(cls, xp, ins, outs, attrs, room):
        (x, w), out, fmt = ins, outs[0], attrs["data_format"]
        win = cls.windows(cls.name, x, w, attrs)
        return cls.product(xp, channels_first(x, fmt), w, channels_first(out, fmt), win, attrs["groups"], room)

    @classmethod
    def _bind_scratch(cls, ins, outs, attrs):
        return _scratch_types(cls._run, ins, outs, attrs)

    @classmethod
    def _calls(cls, ins, outs, attrs, dry=False, scratch=()):
        (x, w), out = ins, outs[0]
        product = (BACK, out, w, x) if cls.transposed else (FORWARD, x, w, out)
        return calls([product], cls.windows(cls.name, x, w, attrs), attrs["groups"], attrs["data_format"], scratch, dry)

    @classmethod
    def _scratch(cls, ins, outs, attrs):
        (x, w), out, fmt = ins, outs[0], attrs["data_format"]
        n, c, _ = split_image(out if cls.transposed else x, fmt)
        return scratch_types([BACK if cls.transposed else FORWARD], n, c, w, cls.windows(cls.name, x, w, attrs), attrs["groups"], fmt)

    native = Native(
        calls=_calls, halves=True, scratch=_scratch, any_size=any_size, tail=True, memory_per_thread=True,
        bind=_bind, bind_scratch=_bind_scratch,
    )  # fmt: skip


class Conv2d(_Conv):
    """Two-dimensional convolution (cross-correlation) of images with OIHW filters.

    Input is [N, C, H, W] (or NHWC by `data_format`), Filter [O, C / groups, kh, kw]; the result keeps Input's layout. `paddings` are
    (height, width) or (top, bottom, left, right); `padding_algorithm` SAME or VALID overrides them. Source: fluid 1.8 `conv2d`.
    """

    name, gradient = "conv2d", "conv2d_grad"
    attrs = _ATTRS
    pattern = _pattern(transposed=False)
    arithmetic = Arithmetic(flops=_flops(transposed=False))
    comm = Comm(local_attrs=_local_groups(0))
    product, windows = staticmethod(convolve), staticmethod(_conv_windows)

    @staticmethod
    def infer(x, w, **attrs):
        return _infer_conv("conv2d", x, w, attrs)

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3, 5, 4), f32(2, 3, 3, 3, seed=1))
        yield Sample.of(f32(2, 3, 5, 4), f32(2, 3, 3, 3, seed=1), paddings=(1, 1))
        yield Sample.of(f32(1, 1, 7, 6, seed=2), f32(2, 1, 2, 3, seed=3), strides=(2, 3), paddings=(1, 0, 2, 1))
        yield Sample.of(f32(1, 2, 6, 6, seed=4), f32(1, 2, 2, 2, seed=5), strides=(3, 3))
        yield Sample.of(f32(1, 2, 6, 6, seed=4), f32(1, 2, 2, 2, seed=5), dilations=(2, 3), paddings=(1, 1))
        yield Sample.of(f32(1, 4, 4, 4, seed=6), f32(6, 2, 3, 3, seed=7), groups=2, paddings=(1, 1))
        yield Sample.of(f32(2, 4, 3, 3, seed=8), f32(3, 4, 1, 1, seed=9))
        yield Sample.of(f32(1, 5, 4, 2, seed=10), f32(3, 2, 3, 3, seed=11), data_format="NHWC", padding_algorithm="SAME", strides=(2, 2))
        yield Sample.of(f32(1, 2, 4, 4, seed=12), f32(1, 2, 3, 3, seed=13), padding_algorithm="VALID", paddings=(5, 5))
        yield Sample.of(f32(1, 17, 3, 3, seed=14), f32(1, 17, 2, 2, seed=15), strides=(2, 1))
        yield Sample.of(f32(4, 3, 3, 5), f32(5, 3, 2, 2, seed=1), paddings=(0, 1))
        yield Sample.of(f32(4, 3, 4, 6), f32(9, 2, 2, 2, seed=1), groups=3, data_format="NHWC")
        half = ints(1, 2, 4, 4, low=-3, high=4, seed=16).astype("float16")
        yield Sample.of(half, half[:, :, :3, :3], grad=(), why="central differences are not accurate in float16")


class _ConvGrad(OpDef):
    """Base of the gradients with respect to the input and the filter, of which one may be absent."""

    inputs, outputs = ("Input", "Filter", "Output@GRAD"), ("Input@GRAD?", "Filter@GRAD?")
    rewrite = Rewrite(layout=("data_format", ("Input", "Output@GRAD", "Input@GRAD")))
    arithmetic = Arithmetic(sums_products="convolution")
    forward: ClassVar[type[OpDef]]  # the convolution
    windows: ClassVar[Callable[..., Windows]]  # (op, x, w, attrs)
    # (xp, x, w, g, dx, dw, windows, groups, room) -> the calls that fill `dw` and `dx`, if they are not None; images are views in NCHW
    products: ClassVar[Callable[..., list[Callable[[], None]]]]
    transposed: ClassVar[bool] = False

    @classmethod
    def infer(cls, x, w, g, **attrs):
        y = cls.forward.infer(x, w, **attrs)
        if not y.accepts(g):
            raise ProgramError(f"op {cls.name}: Input {x} with Filter {w} gives {y}, and Output@GRAD is {g}")
        return x, w

    @classmethod
    def kernel(cls, xp, x, w, g, *, out, **attrs):
        cls._run(xp, (x, w, g), out, attrs, Room(xp, x.dtype, AT_LARGE))()

    @classmethod
    def _bind(cls, ins, outs, attrs, ctx, scratch=()):
        return cls._run(np, ins, outs, attrs, Room(np, ins[0].dtype, IN_CACHE, scratch))

    @classmethod
    def _run(cls, xp, ins, outs, attrs, room):
        (x, w, g), (dx, dw), fmt = ins, outs, attrs["data_format"]
        win = cls.windows(cls.name, x, w, attrs)
        x, g, dx = (None if a is None else channels_first(a, fmt) for a in (x, g, dx))
        return in_order(cls.products(xp, x, w, g, dx, dw, win, attrs["groups"], room))

    @classmethod
    def _bind_scratch(cls, ins, outs, attrs):
        return _scratch_types(cls._run, ins, outs, attrs)

    @classmethod
    def _calls(cls, ins, outs, attrs, dry=False, scratch=()):
        (x, w, g), (dx, dw) = ins, outs
        image, y = (g, x) if cls.transposed else (x, g)
        products = [] if dw is None else [(FILTER, image, dw, y)]
        if dx is not None:  # last, so that the next kernel can be the tail of this call
            products.append((FORWARD, g, w, dx) if cls.transposed else (BACK, dx, w, g))
        return calls(products, cls.windows(cls.name, x, w, attrs), attrs["groups"], attrs["data_format"], scratch, dry)

    @classmethod
    def _scratch(cls, ins, outs, attrs):
        (x, w, g), (dx, dw), fmt = ins, outs, attrs["data_format"]
        n, c, _ = split_image(g if cls.transposed else x, fmt)
        products = [FILTER] * (dw is not None) + [FORWARD if cls.transposed else BACK] * (dx is not None)
        return scratch_types(products, n, c, w, cls.windows(cls.name, x, w, attrs), attrs["groups"], fmt)

    native = Native(
        calls=_calls, halves=True, scratch=_scratch, any_size=any_size, tail=True, memory_per_thread=True,
        bind=_bind, bind_scratch=_bind_scratch,
    )  # fmt: skip


class Conv2dGrad(_ConvGrad):
    """Gradients of conv2d with respect to its input and its filter; either may be absent."""

    name, forward = "conv2d_grad", Conv2d
    attrs = _ATTRS
    pattern = _grad_pattern(transposed=False)
    arithmetic = Arithmetic(flops=_flops(transposed=False))
    comm = Comm(local_attrs=_local_groups(0))
    windows = staticmethod(_conv_windows)

    @staticmethod
    def products(xp, x, w, g, dx, dw, win, groups, room):
        calls: list[Callable[[], None]] = []
        if dx is not None and dw is not None:
            g = pixel_gradient(xp, x, g, win, groups, room, calls)
        mark = room.at
        if dw is not None:
            calls.append(convolve_filter(xp, x, g, dw, win, groups, room))
        room.at = mark
        return calls if dx is None else [*calls, convolve_back(xp, g, w, dx, win, groups, room)]

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3, 5, 4), f32(2, 3, 3, 3, seed=1), f32(2, 2, 3, 2, seed=2), grad=(), why="a gradient itself")
        yield Sample.of(f32(1, 1, 5, 5), f32(1, 1, 2, 2, seed=1), f32(1, 1, 2, 2, seed=2), strides=(2, 2), grad=(), why="a gradient itself")
        yield Sample.of(f32(4, 3, 3, 5), f32(5, 3, 2, 2, seed=1), f32(4, 5, 2, 4, seed=2), grad=(), why="a gradient itself")
        x, w, g = f32(4, 3, 4, 6), f32(9, 2, 2, 2, seed=1), f32(4, 2, 3, 9, seed=2)
        yield Sample.of(x, w, g, groups=3, data_format="NHWC", grad=(), why="a gradient itself")


class DepthwiseConv2d(Conv2d):
    """conv2d with separate filters for each channel: groups equals the number of channels. Source: fluid 1.8."""

    name = "depthwise_conv2d"

    @staticmethod
    def infer(x, w, **attrs):
        result = _infer_conv("depthwise_conv2d", x, w, attrs)
        if w.shape[1] != 1:
            raise ProgramError(f"op depthwise_conv2d needs one input channel per filter and groups equal to the channels; Filter is {w}")
        return result

    @staticmethod
    def samples():
        yield Sample.of(f32(1, 3, 5, 4), f32(3, 1, 3, 3, seed=1), groups=3, paddings=(1, 1))
        yield Sample.of(f32(2, 2, 5, 5, seed=2), f32(4, 1, 2, 2, seed=3), groups=2, strides=(2, 2))
        yield Sample.of(f32(4, 3, 3, 5), f32(6, 1, 2, 3, seed=1), groups=3)
        yield Sample.of(f32(1, 5, 5, 2, seed=2), f32(2, 1, 3, 3, seed=3), groups=2, dilations=(2, 1), data_format="NHWC")


_TRANSPOSE_ATTRS = {**_ATTRS, "output_size": ()}


def _transposed_windows(op: str, x: Any, w: Any, attrs: dict[str, Any]) -> Windows:
    """The windows of the convolution whose gradient is conv2d_transpose: its image is the result here."""
    stride, dilation = pair(op, "strides", attrs["strides"], 1), pair(op, "dilations", attrs["dilations"], 1)
    algorithm = attrs["padding_algorithm"]
    if algorithm not in ("EXPLICIT", "SAME", "VALID"):
        raise ProgramError(f"op {op}: padding_algorithm must be EXPLICIT, SAME or VALID, got {algorithm!r}")
    pads = list(four_pads(op, attrs["paddings"])) if algorithm == "EXPLICIT" else [0, 0, 0, 0]
    wanted = pair(op, "output_size", attrs["output_size"], 1) if attrs["output_size"] else None
    size, result = split_image(x, attrs["data_format"])[2], []
    for a in (0, 1):
        if size[a] == ANY or w.shape[2 + a] == ANY:
            result.append(wanted[a] if wanted else ANY)
            continue
        reach = (w.shape[2 + a] - 1) * dilation[a] + 1
        full = (size[a] - 1) * stride[a] + reach
        if algorithm == "SAME":
            extra = max(full - size[a] * stride[a], 0)
            pads[2 * a], pads[2 * a + 1] = extra // 2, extra - extra // 2
        least = full - pads[2 * a] - pads[2 * a + 1]
        if algorithm == "SAME" and not wanted:
            least = size[a] * stride[a]
        if wanted and not least <= wanted[a] < least + stride[a]:
            raise ProgramError(f"op {op}: output_size {list(wanted)} is not possible; axis {a} can be {least} to {least + stride[a] - 1}")
        if least < 1:
            raise ProgramError(f"op {op}: padding {pads[2 * a]} and {pads[2 * a + 1]} leaves nothing of a result of {full} along axis {a}")
        result.append(wanted[a] if wanted else least)
    return Windows(tuple(result), tuple(w.shape[2:]), stride, dilation, tuple(pads), tuple(size))


class Conv2dTranspose(_Conv):
    """Transposed convolution: the filter, scaled by each input pixel, is added to the result at the position of the pixel.

    Input is [N, C, H, W], Filter [C, O / groups, kh, kw]; the result has (H - 1) * stride - padding + dilation * (kh - 1) + 1 rows, or
    `output_size`, which may be up to stride - 1 larger. It is the gradient of conv2d with respect to its input. Source: fluid 1.8.
    """

    name, gradient, transposed = "conv2d_transpose", "conv2d_transpose_grad", True
    attrs = _TRANSPOSE_ATTRS
    pattern = _pattern(transposed=True)
    arithmetic = Arithmetic(flops=_flops(transposed=True))
    comm = Comm(local_attrs=_local_groups(2))
    product, windows = staticmethod(convolve_back), staticmethod(_transposed_windows)

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
    def samples():
        yield Sample.of(f32(2, 3, 4, 3), f32(3, 2, 3, 3, seed=1))
        yield Sample.of(f32(1, 2, 3, 3), f32(2, 2, 3, 2, seed=1), strides=(2, 3), paddings=(1, 0))
        yield Sample.of(f32(1, 2, 3, 3), f32(2, 1, 3, 3, seed=1), strides=(2, 2), paddings=(1, 1), output_size=(6, 5))
        yield Sample.of(f32(1, 4, 3, 3, seed=2), f32(4, 2, 2, 2, seed=3), groups=2, dilations=(2, 1), paddings=(0, 1, 1, 0))
        yield Sample.of(f32(1, 3, 3, 2, seed=4), f32(2, 3, 3, 3, seed=5), data_format="NHWC", padding_algorithm="SAME", strides=(2, 2))
        yield Sample.of(f32(4, 3, 1, 2), f32(3, 5, 2, 2, seed=1), strides=(1, 2))
        yield Sample.of(f32(4, 6, 1, 2), f32(6, 2, 2, 1, seed=1), groups=3)


class Conv2dTransposeGrad(_ConvGrad):
    """Gradients of conv2d_transpose with respect to its input and its filter; either may be absent."""

    name, forward, transposed = "conv2d_transpose_grad", Conv2dTranspose, True
    attrs = _TRANSPOSE_ATTRS
    pattern = _grad_pattern(transposed=True)
    arithmetic = Arithmetic(flops=_flops(transposed=True))
    comm = Comm(local_attrs=_local_groups(2))
    windows = staticmethod(_transposed_windows)

    @staticmethod
    def products(xp, x, w, g, dx, dw, win, groups, room):
        calls = [] if dw is None else [convolve_filter(xp, g, x, dw, win, groups, room)]
        room.at = 0
        return calls if dx is None else [*calls, convolve(xp, g, w, dx, win, groups, room)]

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3, 4, 3), f32(3, 2, 3, 3, seed=1), f32(2, 2, 6, 5, seed=2), grad=(), why="a gradient itself")
        yield Sample.of(f32(4, 3, 1, 2), f32(3, 5, 2, 3, seed=1), f32(4, 5, 2, 4, seed=2), grad=(), why="a gradient itself")
        yield Sample.of(f32(4, 6, 1, 2), f32(6, 2, 2, 1, seed=1), f32(4, 6, 2, 2, seed=2), groups=3, grad=(), why="a gradient itself")
