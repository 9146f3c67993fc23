"""Import of operators that read an image at computed positions: pools over regions, deformable convolutions, and Col2Im.

The positions and their weights are computed by operators of the program.
"""

from __future__ import annotations

from functools import reduce
from math import prod
from typing import Any

import numpy as np

from ...ir.dtypes import np_dtype
from ..import_tables import imports
from ..node import Node
from ..window_geometry import require_sizes, window_table, windows


@imports("RoiAlign")
def roi_align(n: Node) -> object:
    return n.b.roi_align(
        n.x(),
        n.x(1),
        n.x(2),
        pooled_height=n.attr("output_height", 1),
        pooled_width=n.attr("output_width", 1),
        spatial_scale=n.attr("spatial_scale", 1.0),
        sampling_ratio=n.attr("sampling_ratio", 0),
        aligned=n.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel",
        mode=n.attr("mode", "avg"),
    )


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
