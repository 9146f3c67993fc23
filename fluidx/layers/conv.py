"""Convolution and pooling layers for images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._checks import one_of, unsupported, whole, wholes, wrong
from ..initializer import Normal
from ..ir import Variable
from .helper import LayerWriter


def _paddings(helper: LayerWriter, padding: Any, layout: str) -> dict[str, Any]:
    """The attributes for a padding in one of fluid's forms: sizes for (height, width) or (top, bottom, left, right), or an algorithm."""
    if isinstance(padding, str):
        return {"padding_algorithm": one_of(helper.label, "padding", padding.upper(), ("SAME", "VALID"))}
    if isinstance(padding, (list, tuple)) and len(padding) == 4 and all(isinstance(p, (list, tuple)) for p in padding):
        pairs = [wholes(helper.label, f"padding[{i}]", p, 2, 0) for i, p in enumerate(padding)]
        image = pairs[2:] if layout == "NCHW" else pairs[1:3]
        if sum(map(sum, pairs)) != sum(map(sum, image)):
            raise wrong(f"{helper.label}: the batch and channel axes cannot be padded, got padding={padding!r}")
        padding = [*image[0], *image[1]]
    if isinstance(padding, (list, tuple)) and len(padding) == 4:
        top, bottom, left, right = wholes(helper.label, "padding", padding, least=0)
        return {"paddings": (top, left) if top == bottom and left == right else (top, bottom, left, right)}
    return {"paddings": wholes(helper.label, "padding", padding, 2, 0)}


def _groups(helper: LayerWriter, groups: int | None, channels: int, num_filters: int) -> int:
    groups = 1 if groups is None else whole(helper.label, "groups", groups, 1)
    if channels % groups or num_filters % groups:
        raise wrong(f"{helper.label}: {channels} channels and {num_filters} filters do not both divide into {groups} groups")
    return groups


def conv2d(
    input: Variable,
    num_filters: int,
    filter_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: Any = 0,
    dilation: int | Sequence[int] = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCHW",
) -> Variable:
    """A 2-D convolution (cross-correlation, as in every framework) of [n, c, h, w] with [num_filters, c / groups, kh, kw], plus a bias.

    `padding` is one size, (height, width), (top, bottom, left, right), fluid's list of pairs, "SAME" or "VALID". With as many groups
    as channels it is a depthwise convolution. Weights start as Normal(0, sqrt(2 / (kh * kw * c))). `use_cudnn` has no effect.

    Shapes: [n, c, h, w] gives [n, num_filters, h', w'], h' = (h + padding above and below - dilation * (kh - 1) - 1) // stride + 1.

    Types: input is float16, bfloat16, float32 or float64, and so is the result.

    Raises ProgramError if input does not have four axes, its channel axis is open, or `groups` does not divide the channels.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.conv2d(fx.data("x", [-1, 1, 28, 28], "float32"), 20, 5, act="relu")
    <Variable conv2d_0.tmp_2: f32[-1,20,24,24]>
    """
    helper = LayerWriter("conv2d", name)
    x = helper.variable(input, "input")
    layout = helper.layout(data_format)
    helper.rank(x, "input", 4)
    channel_axis = 1 if layout == "NCHW" else 3
    channels = helper.known(x, "input", channel_axis)
    num_filters = whole(helper.label, "num_filters", num_filters, 1)
    kernel = wholes(helper.label, "filter_size", filter_size, 2, 1)
    strides = wholes(helper.label, "stride", stride, 2, 1)
    dilations = wholes(helper.label, "dilation", dilation, 2, 1)
    groups = _groups(helper, groups, channels, num_filters)
    padded = _paddings(helper, padding, layout)
    spread = (2.0 / (kernel[0] * kernel[1] * channels)) ** 0.5
    w = helper.parameter(param_attr, (num_filters, channels // groups, *kernel), x.dtype, default=Normal(0.0, spread))
    if w is None:
        raise wrong(f"{helper.label}: param_attr=False leaves no filter")
    op_type = "depthwise_conv2d" if groups == channels and groups > 1 else "conv2d"
    y = helper.op(op_type, x, w, strides=strides, dilations=dilations, groups=groups, data_format=layout, **padded)
    return helper.activate(helper.add_bias(y, bias_attr, num_filters, axis=channel_axis), act)


def conv2d_transpose(
    input: Variable,
    num_filters: int,
    output_size: int | Sequence[int] | None = None,
    filter_size: int | Sequence[int] | None = None,
    padding: Any = 0,
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCHW",
) -> Variable:
    """The transposed convolution (the gradient of conv2d with respect to its input): [n, c, h, w] becomes [n, num_filters, h', w'].

    h' is (h - 1) * stride - 2 * padding + dilation * (kh - 1) + 1, or `output_size`, which may be up to stride - 1 larger. Give
    `filter_size` or `output_size`, which determines the size of the filter. `use_cudnn` has no effect.

    Types: input is float16, bfloat16, float32 or float64, and so is the result.

    Raises ProgramError if neither `filter_size` nor `output_size` is given, or `output_size` is not possible.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.conv2d_transpose(fx.data("x", [-1, 8, 14, 14], "float32"), 4, filter_size=2, stride=2)
    <Variable conv2d_transpose_0.tmp_1: f32[-1,4,28,28]>
    """
    helper = LayerWriter("conv2d_transpose", name)
    x = helper.variable(input, "input")
    layout = helper.layout(data_format)
    helper.rank(x, "input", 4)
    channel_axis = 1 if layout == "NCHW" else 3
    channels = helper.known(x, "input", channel_axis)
    num_filters = whole(helper.label, "num_filters", num_filters, 1)
    strides = wholes(helper.label, "stride", stride, 2, 1)
    dilations = wholes(helper.label, "dilation", dilation, 2, 1)
    out = None if output_size is None else wholes(helper.label, "output_size", output_size, 2, 1)
    padded = _paddings(helper, padding, layout)
    if filter_size is not None:
        kernel = wholes(helper.label, "filter_size", filter_size, 2, 1)
    elif out is not None:
        if padded.get("padding_algorithm") == "SAME":
            raise wrong(f"{helper.label}: padding='SAME' does not determine the filter size; give filter_size")
        p = padded.get("paddings", (0, 0))
        sides = [2 * p[0], 2 * p[1]] if len(p) == 2 else [p[0] + p[1], p[2] + p[3]]
        sizes = [helper.known(x, "input (to find filter_size)", a) for a in ((2, 3) if layout == "NCHW" else (1, 2))]
        kernel = tuple((o - (h - 1) * s + p - 1) // d + 1 for o, h, s, p, d in zip(out, sizes, strides, sides, dilations))
        if min(kernel) < 1:
            raise wrong(f"{helper.label}: output_size {list(out)} is too small for an input of {sizes} with stride {list(strides)}")
    else:
        raise wrong(f"{helper.label}: give filter_size or output_size")
    groups = _groups(helper, groups, channels, num_filters)
    w = helper.parameter(param_attr, (channels, num_filters // groups, *kernel), x.dtype)
    if w is None:
        raise wrong(f"{helper.label}: param_attr=False leaves no filter")
    attrs = {"strides": strides, "dilations": dilations, "groups": groups, "output_size": out or (), "data_format": layout, **padded}
    y = helper.op("conv2d_transpose", x, w, **attrs)
    return helper.activate(helper.add_bias(y, bias_attr, num_filters, axis=channel_axis), act)


# -- pooling -------------------------------------------------------------------------------------------------------------------


def pool2d(
    input: Variable,
    pool_size: int | Sequence[int] = -1,
    pool_type: str = "max",
    pool_stride: int | Sequence[int] = 1,
    pool_padding: Any = 0,
    global_pooling: bool = False,
    use_cudnn: bool = True,
    ceil_mode: bool = False,
    name: str | None = None,
    exclusive: bool = True,
    data_format: str = "NCHW",
) -> Variable:
    """The maximum ("max") or mean ("avg") of windows of [n, c, h, w].

    `global_pooling` has one window over all of h and w. `ceil_mode` adds windows that extend beyond the end; `exclusive` leaves padding out
    of the mean. `use_cudnn` has no effect.

    Shapes: [n, c, h, w] gives [n, c, h', w'], h' = (h + padding above and below - size) // stride + 1, rounded up with `ceil_mode`.

    Types: input is float16, bfloat16, float32 or float64, and so is the result.

    Raises ProgramError if input does not have four axes, or neither `pool_size` nor `global_pooling` is given.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.pool2d(fx.data("x", [-1, 20, 24, 24], "float32"), 2, "max", pool_stride=2)
    <Variable pool2d_0.tmp_0: f32[-1,20,12,12]>
    """
    helper = LayerWriter("pool2d", name)
    x = helper.variable(input, "input")
    one_of(helper.label, "pool_type", pool_type, ("max", "avg"))
    layout = helper.layout(data_format)
    helper.rank(x, "input", 4)
    if not global_pooling and isinstance(pool_size, int) and pool_size == -1:
        raise wrong(f"{helper.label}: give pool_size, or global_pooling=True for one window over the whole image")
    size = (1, 1) if global_pooling else wholes(helper.label, "pool_size", pool_size, 2, 1)
    strides = wholes(helper.label, "pool_stride", pool_stride, 2, 1)
    return helper.op(
        "pool2d",
        x,
        pooling_type=pool_type,
        ksize=size,
        strides=strides,
        data_format=layout,
        **({} if global_pooling else _paddings(helper, pool_padding, layout)),
        global_pooling=bool(global_pooling),
        ceil_mode=bool(ceil_mode),
        exclusive=bool(exclusive),
    )


def adaptive_pool2d(
    input: Variable, pool_size: int | Sequence[int], pool_type: str = "max", require_index: bool = False, name: str | None = None
) -> Variable:
    """The maximum or mean of windows whose sizes are chosen so that [n, c, h, w] becomes [n, c, *pool_size]. `require_index` raises
    ProgramError."""
    helper = LayerWriter("adaptive_pool2d", name)
    x = helper.variable(input, "input")
    one_of(helper.label, "pool_type", pool_type, ("max", "avg"))
    unsupported(helper.label, require_index=require_index)
    helper.rank(x, "input", 4)
    size = wholes(helper.label, "pool_size", pool_size, 2, 1)
    return helper.op("pool2d", x, pooling_type=pool_type, ksize=size, adaptive=True)


__all__ = ["adaptive_pool2d", "conv2d", "conv2d_transpose", "pool2d"]
