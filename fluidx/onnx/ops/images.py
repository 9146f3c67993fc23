"""Operators on images: resizing, reading at computed positions, regions, boxes, and decoding of files."""

from __future__ import annotations

import io
from functools import partial, reduce
from math import prod
from typing import Any

import numpy as np

from ...ir import Variable
from ...ir.dtypes import FLOATS, np_dtype
from ...ops.nn.resize import size_scaled
from ..export_graph import Op
from ..limits import checked_shape
from ..node import Node
from ..open_sized_nodes import size_operands
from ..symbolic_sizes import refusal, sizes_of
from ..table import OneToOne, by_sizes, entry, exports, imports, on_numpy
from ..window_geometry import require_sizes, window_table, windows
from .shape import as_int64


def _sampled(made: OneToOne, n: Node) -> Any:
    work = "float64" if n.dtype(0) == "float64" else "float32"
    return n.cast(made.read(n, [n.cast(x, work) for x in n.xs()]), n.dtype(0))


_BEFORE_20 = {"linear": "bilinear", "cubic": "bicubic"}  # the modes of GridSample


def _at_points(made: OneToOne, op: Op) -> Any:
    if op.opset >= 20:
        return made.write(op)
    if op.type_of("X").ndim != 4:
        raise op.wrong(f"GridSample takes other values than images [N, C, H, W] in ONNX from opset 20 on, X is {op.type_of('X')}")
    return made.node(op, made.values(op), mode=_BEFORE_20.get(op.attrs["mode"], op.attrs["mode"]))


def _aligned(made: OneToOne, op: Op) -> Any:
    if op.opset < 16:
        if op.attrs["aligned"]:
            raise op.wrong("aligned regions are in ONNX from opset 16 on")
        made = made.without("coordinate_transformation_mode")
    return made.node(op, made.values(op), sampling_ratio=max(op.attrs["sampling_ratio"], 0))


entry("GridSample", "grid_sample", read=_sampled, write=_at_points, mode="linear", padding_mode="zeros", align_corners=False)
entry(
    "RoiAlign",
    "roi_align",
    operands={"BatchIndices": as_int64},
    write=_aligned,
    output_height=("pooled_height", 1),
    output_width=("pooled_width", 1),
    spatial_scale=1.0,
    sampling_ratio=0,
    coordinate_transformation_mode=("aligned", "half_pixel", {"half_pixel": True, "output_half_pixel": False}),
    mode="avg",
)


def _suppression(made: OneToOne, op: Op) -> Any:
    if op.dtype("Boxes") != "float32":
        raise op.wrong(f"NonMaxSuppression takes float32, Boxes are {op.dtype('Boxes')}")
    return made.write(op)


_LIMITS = {"MaxOutput": "int64", "IouThreshold": "float32", "ScoreThreshold": "float32"}
entry(
    "NonMaxSuppression",
    "non_max_suppression",
    computed=(0, 1, 2, 3, 4),
    operands={slot: partial(Op.scalar, dtype=dtype) for slot, dtype in _LIMITS.items()},
    write=_suppression,
    center_point_box=False,
)


_MODES = {"RGB": "RGB", "BGR": "RGB", "Grayscale": "L"}


@on_numpy("ImageDecoder", pure=True)
def image_decoder(n: Node) -> object:
    """The decoded image. Data that is not an image gives an empty array, as the standard requires."""
    data = n.value(0).tobytes()
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise n.wrong("it needs the package pillow, which is not installed") from None
    wanted = n.attr("pixel_format", "RGB")
    if wanted not in _MODES:
        raise n.wrong(f"pixel_format must be one of {', '.join(_MODES)}, found {wanted!r}")
    try:
        found = np.array(Image.open(io.BytesIO(data)).convert(_MODES[wanted]))
    except (UnidentifiedImageError, OSError, ValueError):
        return np.zeros((0, 0, 1 if wanted == "Grayscale" else 3), np.uint8)
    if wanted == "Grayscale":
        return found[..., None]
    return found[..., ::-1] if wanted == "BGR" else found


@imports("MaxRoiPool")
def max_roi_pool(n: Node) -> object:
    """MaxRoiPool. The first column of the regions is the index of the image."""
    height, width = n.attr("pooled_shape")
    image = n.b.cast(n.b.slice(n.x(1), axes=(1,), starts=(0,), ends=(1,), decrease_axis=(1,)), dtype="int64")
    rois = n.b.slice(n.x(1), axes=(1,), starts=(1,), ends=(5,))
    return n.b.roi_pool(n.x(), rois, image, pooled_height=height, pooled_width=width, spatial_scale=n.attr("spatial_scale", 1.0))


# -- columns --------------------------------------------------------------------------------------------------------------------------


@imports("Col2Im")
def col2im(n: Node) -> object:
    require_sizes(n, "Col2Im", n.shape(0))
    sizes, kernel = n.ints(1) or [], n.ints(2) or []
    place, inside = window_table(windows(n, kernel, sizes))
    cells, taps = place.shape
    rows = n.b.transpose(n.b.reshape(n.x(), shape=(-1, taps, cells)), axis=(2, 1, 0))
    if not inside.all():
        rows = n.b.elementwise_mul(rows, n.const(inside[:, :, None], np_dtype(n.dtype(0))))
    channels = n.shape(0)[1] // taps
    empty = n.b.fill_constant(shape=(prod(sizes), rows.shape[2]), dtype=n.dtype(0), value=0.0)
    sums = n.b.scatter_nd_add(empty, n.const(place.reshape(-1, 1)), n.b.reshape(rows, shape=(cells * taps, -1)))
    return n.b.reshape(n.b.transpose(sums, axis=(1, 0)), shape=(-1, channels, *sizes))


@imports("DeformConv")
def deform_conv(n: Node) -> object:
    b, x, w, groups, parts = n.b, n.x(0), n.x(1), n.attr("group", 1), n.attr("offset_group", 1)
    (images, c, h, width), kernel = x.shape, tuple(w.shape[2:])
    if len(kernel) != 2:
        raise n.wrong(f"X must be images [N, C, H, W], found {n.type()}")
    require_sizes(n, "DeformConv", x.shape)
    down, right = windows(n, kernel)
    taps, cells = prod(kernel), down.out * right.out
    offset = b.reshape(n.x(2), shape=(images, parts, taps, 2, cells))
    grid = np.broadcast_arrays(down.reads.T[:, None, :, None], right.reads.T[None, :, None, :])
    y, x_at = (
        b.elementwise_add(b.slice(offset, axes=(3,), starts=(k,), ends=(k + 1,), decrease_axis=(3,)),
                          n.const(grid[k].reshape(taps, cells), np_dtype(n.dtype(0)))) for k in (0, 1)
    )  # fmt: skip
    channels = b.reshape(x, shape=(images * parts, c // parts, h * width))
    pixels = b.reshape(b.transpose(channels, axis=(0, 2, 1)), shape=(-1, c // parts))
    begin = n.const((np.arange(images * parts) * h * width).reshape(images, parts, 1, 1))
    terms = []
    for row, row_weight in _neighbouring_pixels(n, y, h):
        for column, column_weight in _neighbouring_pixels(n, x_at, width):
            place = b.elementwise_add(b.elementwise_add(b.scale(row, scale=float(width)), column), begin)
            read = b.reshape(b.gather(pixels, b.reshape(place, shape=(-1,))), shape=(images, parts, taps, cells, -1))
            terms.append(b.elementwise_mul(read, b.unsqueeze(b.elementwise_mul(row_weight, column_weight), axes=(4,))))
    columns = reduce(b.elementwise_add, terms)
    if n.has(4):
        columns = b.elementwise_mul(columns, b.reshape(n.x(4), shape=(images, parts, taps, cells, 1)))
    columns = b.reshape(b.transpose(columns, axis=(0, 1, 4, 2, 3)), shape=(images, groups, -1, cells))
    filters = b.reshape(w, shape=(groups, w.shape[0] // groups, -1))
    made = b.reshape(b.matmul(filters, columns), shape=(images, w.shape[0], down.out, right.out))
    return b.elementwise_add(made, n.x(3), axis=1) if n.has(3) else made


def _neighbouring_pixels(n: Node, at: Any, size: int) -> list[tuple[Any, Any]]:
    """The two pixels next to a position along one axis, as integers, and their weights, which are 0 outside of the image."""
    b = n.b
    low = b.floor(at)
    share = b.elementwise_sub(at, low)
    found = []
    for pixel, weight in ((low, b.scale(share, scale=-1.0, bias=1.0)), (b.scale(low, bias=1.0), share)):
        held = b.clip(pixel, min=0.0, max=float(size - 1))
        inside = b.cast(b.equal(held, pixel), dtype=n.dtype(0))
        found.append((b.cast(held, dtype="int64"), b.elementwise_mul(weight, inside)))
    return found


@imports("Resize")
def resize(n: Node) -> object:
    return _resized(n, [(None, _sizes(n))])


@by_sizes("Resize", 3)
def resize_to_open_sizes(n: Node) -> object:
    """A Resize to sizes of which some are open, axis by axis. An axis that keeps its size is left out."""
    if n.attr("keep_aspect_ratio_policy", "stretch") != "stretch" or n.attr("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise refusal(n, "it keeps the ratio of open sizes, or crops")
    have, sizes = sizes_of(n, n.x()), size_operands(n, 3)
    axes = [a % len(have) for a in n.attr("axes", range(len(have)))]
    changed = [(a, s) for a, s in zip(axes, sizes, strict=True) if not (s.exact and s.number == have[a])]
    known = [(a, s.number) for a, s in changed if not s.is_open]
    plain: dict[str, Any] = {"scales": (), "spans": ()}
    steps: list[tuple[Any, dict[str, Any]]] = []
    if known:
        steps.append((None, {"axes": tuple(a for a, _ in known), "sizes": tuple(s for _, s in known), **plain}))
    for a, s in changed:
        if s.is_open:
            like, axis = s.axis(n)
            steps.append((like, {"axes": (a,), "sizes": (), "like_axes": (axis,), **plain}))
    return _resized(n, steps)


def _resized(n: Node, steps: list[tuple[Any, dict[str, Any]]]) -> Variable:
    """Operand 0 resized in steps: a value whose sizes the result has, or None, and the attributes about axes and sizes."""
    mode, dtype = n.attr("mode", "nearest"), n.dtype()
    y = n.x()
    work = dtype
    if mode != "nearest" and dtype not in ("float32", "float64"):
        work = "float32" if dtype in FLOATS else "float64"
    if work != dtype:
        y = n.b.cast(y, dtype=work)
    for like, said in steps:
        y = n.b.resize(
            y,
            like,
            mode=mode,
            coordinates=n.attr("coordinate_transformation_mode", "half_pixel"),
            nearest=n.attr("nearest_mode", "round_prefer_floor"),
            cubic_coeff_a=n.attr("cubic_coeff_a", -0.75),
            antialias=bool(n.attr("antialias", 0)),
            exclude_outside=bool(n.attr("exclude_outside", 0)),
            extrapolation_value=n.attr("extrapolation_value", 0.0),
            **said,
        )
    return _as_dtype(n, y, dtype)


def _sizes(n: Node) -> dict[str, Any]:
    """The axes to resize, with sizes, scales and regions of interest."""
    shape = n.shape()
    axes = [a % len(shape) for a in n.attr("axes", range(len(shape)))]
    spans = [float(v) for v in np.asarray(n.value(1)).ravel()] if n.has(1) else []
    sizes = n.ints(3) or []
    scales: list[float] = []
    if not sizes:
        given = np.asarray(n.value(2), np.float32).ravel()
        if len(given) != len(axes):
            raise n.wrong(f"expected {len(axes)} scales, one for each axis, found {len(given)}; or sizes")
        scales = given.tolist()
    elif (policy := n.attr("keep_aspect_ratio_policy", "stretch")) != "stretch":
        ratios = [s / shape[a] for a, s in zip(axes, sizes)]
        scale = min(ratios) if policy == "not_larger" else max(ratios)
        scales, sizes = [scale] * len(axes), [int(scale * shape[a] + 0.5) for a in axes]
    outs = sizes or [size_scaled(shape[a], s) for a, s in zip(axes, scales)]
    checked_shape([max(outs, default=0), max(shape, default=0)])  # an interpolation matrix has these sizes
    crops = n.attr("coordinate_transformation_mode") == "tf_crop_and_resize"
    return {"axes": tuple(axes), "sizes": tuple(sizes), "scales": tuple(scales), "spans": tuple(spans) if crops else ()}


def _as_dtype(n: Node, y: Variable, dtype: str) -> Variable:
    """y in the dtype of the input; integers are rounded and clipped to its range."""
    if y.dtype == dtype:
        return y
    if dtype not in FLOATS:
        info = np.iinfo(dtype)
        y = n.b.clip(n.b.round(y, ties_to_even=True), min=float(info.min), max=float(info.max))
    return n.b.cast(y, dtype=dtype)


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("resize")
def export_resize(op: Op) -> str:
    a = op.attrs
    if a["sizes"] and a["scales"]:
        raise op.wrong("ONNX has no Resize with both sizes and scales; give one of them")
    if a["coordinates"] == "half_pixel_symmetric" and op.opset < 19:
        raise op.wrong("coordinates half_pixel_symmetric are in ONNX from opset 19 on")
    operands = _of_axes(op) if op.opset >= 18 else _of_all_axes(op)
    attrs: dict[str, Any] = {"mode": a["mode"], "coordinate_transformation_mode": a["coordinates"]}
    if op.opset >= 18:
        attrs["axes"] = list(a["axes"])
    if a["mode"] == "nearest":
        attrs["nearest_mode"] = a["nearest"]
    if a["mode"] == "cubic":
        attrs["cubic_coeff_a"] = a["cubic_coeff_a"]
    if a["extrapolation_value"]:
        attrs["extrapolation_value"] = a["extrapolation_value"]
    flags = {name: 1 for name in ("antialias", "exclude_outside") if a[name]}
    return op.emit("Resize", op["X"], *operands, **attrs, **flags)


def _of_axes(op: Op) -> list[str]:
    """The operands of Resize after the first, for the resized axes: spans and scales or sizes."""
    a = op.attrs
    spans = op.const(np.array(a["spans"], np.float32)) if a["spans"] else ""
    if op.has("Like"):
        sizes = [op.sizes(op["Like"], k, k + 1) for k in (axis % op.type_of("Like").ndim for axis in a["like_axes"])]
        return [spans, "", op.emit("Concat", *sizes, axis=0) if len(sizes) > 1 else sizes[0]]
    return [spans, "", op.ints(a["sizes"])] if a["sizes"] else [spans, op.const(np.array(a["scales"], np.float32))]


def _of_all_axes(op: Op) -> list[str]:
    """The same for all axes: before opset 18, Resize has neither `axes` nor `antialias`."""
    a, ndim = op.attrs, op.type_of("X").ndim
    if a["antialias"]:
        raise op.wrong("antialias is in ONNX from opset 18 on")
    axes, spans = [k % ndim for k in a["axes"]], ""
    if a["spans"]:
        first, last = (dict(zip(axes, part, strict=True)) for part in (a["spans"][: len(axes)], a["spans"][len(axes) :]))
        whole = [*(first.get(k, 0.0) for k in range(ndim)), *(last.get(k, 1.0) for k in range(ndim))]
        spans = op.const(np.array(whole, np.float32))
    if not a["sizes"] and not op.has("Like"):
        scales = dict(zip(axes, a["scales"], strict=True))
        return [spans, op.const(np.array([scales.get(k, 1.0) for k in range(ndim)], np.float32))]
    sizes = dict(zip(axes, a["sizes"] or a["like_axes"], strict=True))
    resized = (lambda k: op.sizes(op["Like"], k, k + 1)) if op.has("Like") else (lambda size: op.ints([size]))
    parts = [resized(sizes[k]) if k in sizes else op.sizes(op["X"], k, k + 1) for k in range(ndim)]
    return [spans, "", op.emit("Concat", *parts, axis=0)]


@exports("roi_pool")
def roi_pool(op: Op) -> str:
    """Each region begins with the index of its image."""
    a = op.attrs
    images = op.emit("Cast", op["BatchIndices"], to=op.code(np_dtype(op.dtype("Rois")).name))
    rois = op.emit("Concat", op.emit("Unsqueeze", images, op.ints([1])), op["Rois"], axis=1)
    return op.emit("MaxRoiPool", op["X"], rois, pooled_shape=[a["pooled_height"], a["pooled_width"]], spatial_scale=a["spatial_scale"])
