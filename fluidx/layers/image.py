"""Image layers: resizing, values at points and in regions, and rearranging pixels and channels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from .._checks import number, one_of, unsupported, whole, wholes, wrong
from ..ir import ANY, Variable
from ..ir.constants import elements
from .helper import LayerWriter
from .layer_from_signature import ranked, row

# fluid's name of an interpolation -> (mode of the operator, number of image axes)
_RESAMPLE = {
    "LINEAR": ("linear", 1), "BILINEAR": ("linear", 2), "TRILINEAR": ("linear", 3), "BICUBIC": ("cubic", 2), "NEAREST": ("nearest", 2),
}  # fmt: skip
_FORMATS = {1: ("NCW", "NWC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}


# -- sizes ----------------------------------------------------------------------------------------------------------------------


def image_resize(
    input: Variable,
    out_shape: Sequence[int] | None = None,
    scale: float | None = None,
    name: str | None = None,
    resample: str = "BILINEAR",
    actual_shape: Any = None,
    align_corners: bool = True,
    align_mode: int = 1,
    data_format: str = "NCHW",
) -> Variable:
    """Resized images: the image axes get the sizes `out_shape`, or int(scale * size).

    `resample` is LINEAR (of [n, c, w]), BILINEAR, BICUBIC or NEAREST (of [n, c, h, w]) or TRILINEAR (of [n, c, d, h, w]). With
    `align_corners` the centers of the corners stay: element i is read at i * (size - 1) / (out - 1). Without, it is read at i * size / out
    for align_mode=1, and at (i + 0.5) * size / out - 0.5 for align_mode=0; NEAREST ignores `align_mode`, BICUBIC uses 0. An image with open
    sizes needs an integer `scale`. `actual_shape` raises ProgramError.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.image_resize(fx.data("x", [-1, 3, 6, 9], "float32"), out_shape=[12, 12], resample="NEAREST")
    <Variable image_resize_0.tmp_0: f32[-1,3,12,12]>
    """
    helper = LayerWriter("image_resize", name)
    return _resized(helper, input, out_shape, scale, actual_shape, align_corners, data_format, resample, align_mode)


def image_resize_short(input: Variable, out_short_len: int, resample: str = "BILINEAR") -> Variable:
    """`image_resize` of [n, c, h, w] so that the shorter of h and w becomes `out_short_len` and their ratio stays, except for rounding."""
    helper = LayerWriter("image_resize_short")
    x = helper.variable(input, "input")
    helper.rank(x, "input", 4)
    sizes = [helper.known(x, "input", axis) for axis in (2, 3)]
    short = whole(helper.label, "out_short_len", out_short_len, 1)
    out = [short if size == min(sizes) else int(size * short / min(sizes) + 0.5) for size in sizes]
    return _resized(helper, x, out, None, None, True, "NCHW", resample)


def _resized(
    helper: LayerWriter, input: Variable, out_shape: Any, scale: Any, actual_shape: Any, align_corners: bool, data_format: str,
    resample: str, align_mode: int = 1,
) -> Variable:  # fmt: skip
    unsupported(helper.label, actual_shape=actual_shape)
    x = helper.variable(input, "input")
    kind, count = _RESAMPLE[one_of(helper.label, "resample", resample.upper() if isinstance(resample, str) else resample, _RESAMPLE)]
    helper.rank(x, "input", count + 2)
    first = 2 if one_of(helper.label, "data_format", data_format, _FORMATS[count]) == _FORMATS[count][0] else 1
    axes = tuple(range(first, first + count))
    if align_mode not in (0, 1):
        raise wrong(f"{helper.label}: align_mode must be 0 or 1, got {align_mode!r}")
    if align_corners:
        coordinates, nearest = "align_corners", "round_prefer_ceil"
    else:
        coordinates, nearest = ("pytorch_half_pixel" if kind == "cubic" or kind == "linear" and align_mode == 0 else "asymmetric"), "floor"
    sizes, scales = _lengths(helper, x, axes, out_shape, scale)
    return helper.op("resize", x, axes=axes, sizes=sizes, scales=scales, spans=(), mode=kind, coordinates=coordinates, nearest=nearest)


def _lengths(
    helper: LayerWriter, x: Variable, axes: Sequence[int], out_shape: Any, scale: Any
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(sizes, ()) or ((), scales) for the axes of an image."""
    if out_shape is not None:
        return wholes(helper.label, "out_shape", out_shape, len(axes), 1), ()
    if scale is None:
        raise wrong(f"{helper.label}: give out_shape or scale")
    scale = number(helper.label, "scale", scale)
    if not scale > 0:
        raise wrong(f"{helper.label}: scale must be above 0, got {scale}")
    if all(x.shape[a] != ANY for a in axes):
        return tuple(int(x.shape[a] * scale) for a in axes), ()
    if scale != int(scale):
        raise wrong(f"{helper.label}: an image with open sizes needs an integer scale, got {scale}; variable {x.name!r} is {list(x.shape)}")
    return (), (scale,) * len(axes)


# -- points and regions ---------------------------------------------------------------------------------------------------------


def affine_grid(theta: Variable, out_shape: Any, name: str | None = None) -> Variable:
    """The points [n, h, w, 2] at which `grid_sampler` reads to transform images by theta [n, 2, 3] to `out_shape` [n, c, h, w].

    Element (i, j) is theta @ (x_j, y_i, 1), where x and y go from -1 to 1 in equal steps. Only h and w of `out_shape` are used; a Variable
    raises ProgramError.
    """
    helper = LayerWriter("affine_grid", name)
    theta = helper.variable(theta, "theta")
    if isinstance(out_shape, Variable):
        raise wrong(f"{helper.label}: out_shape must be a list of 4 integers; a Variable is not supported")
    height, width = wholes(helper.label, "out_shape", out_shape, 4)[2:]
    if min(height, width) < 1:
        raise wrong(f"{helper.label}: out_shape must have h and w of at least 1, got {list(out_shape)}")
    y, x = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    base = np.stack([x, y, np.ones_like(x)], axis=-1).reshape(1, -1, 3)
    points = helper.op("assign_value", shape=base.shape, dtype=theta.dtype, values=elements(base.astype(theta.dtype)))
    found = helper.op("matmul", points, theta, transpose_y=True)
    return helper.op("reshape", found, shape=(0, height, width, 2))


def roi_align(
    input: Variable,
    rois: Variable,
    pooled_height: int = 1,
    pooled_width: int = 1,
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    name: str | None = None,
    rois_num: Variable | None = None,
) -> Variable:
    """Each region (x1, y1, x2, y2) of rois [r, 4] as [c, pooled_height, pooled_width]: means of samples between pixels.

    `rois_num` [n] has the number of regions of each image; regions are ordered by image. Without it there is one image. A cell has
    `sampling_ratio` samples along each axis, by default one for each pixel. Regions get no gradient.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     rois, count = fx.data("rois", [-1, 4], "float32"), fx.data("count", [-1], "int32")
    ...     fx.layers.roi_align(fx.data("x", [-1, 8, 32, 32], "float32"), rois, 7, 7, 0.25, rois_num=count).shape
    (-1, 8, 7, 7)
    """
    helper = LayerWriter("roi_align", name)
    ratio = whole(helper.label, "sampling_ratio", sampling_ratio)
    return _pooled(helper, input, rois, rois_num, pooled_height, pooled_width, spatial_scale, sampling_ratio=ratio)


def roi_pool(
    input: Variable,
    rois: Variable,
    pooled_height: int = 1,
    pooled_width: int = 1,
    spatial_scale: float = 1.0,
    rois_num: Variable | None = None,
    name: str | None = None,
) -> Variable:
    """Each region (x1, y1, x2, y2) of rois [r, 4] as [c, pooled_height, pooled_width]: the largest pixel of each cell.

    `rois_num` [n] has the number of regions of each image; regions are ordered by image. Without it there is one image. Regions get no
    gradient.
    """
    return _pooled(LayerWriter("roi_pool", name), input, rois, rois_num, pooled_height, pooled_width, spatial_scale)


def _pooled(
    helper: LayerWriter, input: Variable, rois: Variable, rois_num: Variable | None, height: Any, width: Any, scale: Any, **attrs: Any
) -> Variable:
    x, rois = helper.variable(input, "input"), helper.variable(rois, "rois")
    if rois_num is None and x.shape[:1] != (1,):
        raise wrong(f"{helper.label}: variable {x.name!r} with shape {list(x.shape)} may hold several images; give rois_num")
    attrs |= {name: whole(helper.label, name, size, 1) for name, size in (("pooled_height", height), ("pooled_width", width))}
    images = _image_of(helper, rois, rois_num)
    return helper.op(helper.kind, x, rois, images, spatial_scale=number(helper.label, "spatial_scale", scale), **attrs)


def _image_of(helper: LayerWriter, rois: Variable, rois_num: Variable | None) -> Variable:
    """[r]: the image of each region: the number of images whose regions end before it."""
    zeros = helper.op("fill_constant_batch_size_like", rois, shape=(-1,), dtype="int64", value=0)
    if rois_num is None:
        return zeros
    ones = helper.op("fill_constant_batch_size_like", rois, shape=(-1, 1), dtype="int64", value=1)
    place = helper.op("cumsum", ones, axis=0)
    ends = helper.op("cumsum", helper.op("cast", helper.variable(rois_num, "rois_num"), dtype="int64"), axis=0)
    behind = helper.op("greater_than", place, helper.op("unsqueeze", ends, axes=(0,)))
    return helper.op("reduce_sum", helper.op("cast", behind, dtype="int64"), dim=(1,))


# -- pixels and channels --------------------------------------------------------------------------------------------------------


def pixel_shuffle(x: Variable, upscale_factor: int) -> Variable:
    """[n, c * r * r, h, w] as [n, c, h * r, w * r]: each r * r channels become the pixels of a square.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.pixel_shuffle(fx.data("x", [-1, 9, 4, 4], "float32"), 3).shape
    (-1, 1, 12, 12)
    """
    helper = LayerWriter("pixel_shuffle")
    x = helper.variable(x, "x")
    r = whole(helper.label, "upscale_factor", upscale_factor, 1)
    c, h, w = _image(helper, x)
    if c % (r * r):
        raise wrong(f"{helper.label}: {c} channels of variable {x.name!r} do not divide by upscale_factor {r} squared")
    parts = helper.op("reshape", x, shape=(0, c // (r * r), r, r, h, w))
    return helper.op("reshape", helper.op("transpose", parts, axis=(0, 1, 4, 2, 5, 3)), shape=(0, c // (r * r), h * r, w * r))


def shuffle_channel(x: Variable, group: int, name: str | None = None) -> Variable:
    """[n, c, h, w] with channels reordered: one of each of `group` groups in turn."""
    helper = LayerWriter("shuffle_channel", name)
    x = helper.variable(x, "x")
    group = whole(helper.label, "group", group, 1)
    c, h, w = _image(helper, x)
    if c % group:
        raise wrong(f"{helper.label}: {c} channels of variable {x.name!r} do not divide into {group} groups")
    parts = helper.op("reshape", x, shape=(0, group, c // group, h, w))
    return helper.op("reshape", helper.op("transpose", parts, axis=(0, 2, 1, 3, 4)), shape=(0, c, h, w))


def unfold(x: Variable, kernel_sizes: Any, strides: Any = 1, paddings: Any = 0, dilations: Any = 1, name: str | None = None) -> Variable:
    """The windows of images [n, c, h, w] as columns: [n, c * kh * kw, windows]. Images are padded with zeros.

    `paddings` is one size, (height, width) or (top, left, bottom, right). The layer is a convolution whose filters each select one pixel.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.unfold(fx.data("x", [-1, 3, 10, 10], "float32"), [3, 3]).shape
    (-1, 27, 64)
    """
    helper = LayerWriter("unfold", name)
    x = helper.variable(x, "x")
    c, _, _ = _image(helper, x)
    kernel = wholes(helper.label, "kernel_sizes", kernel_sizes, 2, 1)
    steps: dict[str, Any] = {
        "strides": wholes(helper.label, "strides", strides, 2, 1),
        "dilations": wholes(helper.label, "dilations", dilations, 2, 1),
    }
    pads = wholes(helper.label, "paddings", paddings, None if isinstance(paddings, (list, tuple)) and len(paddings) == 4 else 2, 0)
    if len(pads) == 4:
        top, left, bottom, right = pads
        pads = (top, bottom, left, right)
    taps = kernel[0] * kernel[1]
    choose = np.tile(np.eye(taps), (c, 1)).reshape(c * taps, 1, *kernel)
    filters = helper.op("assign_value", shape=choose.shape, dtype=x.dtype, values=elements(choose.astype(x.dtype)))
    y = helper.op("conv2d" if c == 1 else "depthwise_conv2d", x, filters, groups=c, paddings=pads, **steps)
    return helper.op("reshape", y, shape=(0, c * taps, -1))


def _image(helper: LayerWriter, x: Variable) -> tuple[int, int, int]:
    """Channels, height and width of `x`, which must be known."""
    helper.rank(x, "x", 4)
    c, h, w = (helper.known(x, "x", axis) for axis in (1, 2, 3))
    return c, h, w


# fmt: off
_RESIZED = (
    "input, out_shape: Sequence[int] | None = None, scale: float | None = None, name=None, actual_shape: Any = None, align_corners=True"
)
resize_linear = row(
    f"resize_linear({_RESIZED}, align_mode=1, data_format='NCW')",
    "`image_resize` of [n, c, w], interpolated between two elements.",
    write=partial(_resized, resample="LINEAR"),
)
resize_bilinear = row(
    f"resize_bilinear({_RESIZED}, align_mode=1, data_format='NCHW')",
    "`image_resize` of [n, c, h, w], interpolated between four elements.",
    write=partial(_resized, resample="BILINEAR"),
)
resize_trilinear = row(
    f"resize_trilinear({_RESIZED}, align_mode=1, data_format='NCDHW')",
    "`image_resize` of [n, c, d, h, w], interpolated between eight elements.",
    write=partial(_resized, resample="TRILINEAR"),
)
resize_bicubic = row(
    f"resize_bicubic({_RESIZED}, align_mode=0, data_format='NCHW')",
    "`image_resize` of [n, c, h, w] by cubic interpolation between sixteen elements: Keys' kernel with a = -0.75.",
    write=partial(_resized, resample="BICUBIC"),
)
resize_nearest = row(
    f"resize_nearest({_RESIZED}, data_format='NCHW')",
    "`image_resize` of [n, c, h, w] to the nearest element (halves are rounded up), or with align_corners=False to the one below.",
    write=partial(_resized, resample="NEAREST"),
)

grid_sampler = row("grid_sampler(x, grid, name=None)", """
    Values of images [n, c, h, w] at points: grid is [n, h', w', 2], (x, y) from -1 to 1 between the centers of the corners.

    Values between pixels are interpolated bilinearly; pixels outside of the image are 0.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     theta = fx.data("theta", [-1, 2, 3], "float32")
    ...     grid = fx.layers.affine_grid(theta, [-1, 3, 8, 9])
    ...     fx.layers.grid_sampler(fx.data("x", [-1, 3, 5, 6], "float32"), grid)
    <Variable grid_sampler_0.tmp_0: f32[-1,3,8,9]>
    """, "grid_sample", always={"align_corners": True}, x=ranked(4))
# fmt: on

__all__ = [
    "affine_grid", "grid_sampler", "image_resize", "image_resize_short", "pixel_shuffle", "resize_bicubic", "resize_bilinear",
    "resize_linear", "resize_nearest", "resize_trilinear", "roi_align", "roi_pool", "shuffle_channel", "unfold",
]  # fmt: skip
