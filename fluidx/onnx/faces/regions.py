"""What reads an image at places of its own: pools over regions, deformed convolutions, and columns put back as an image.

Where regions lie is known while the program is written; what is read there, and how it is weighed, are operators of the program.
"""

from __future__ import annotations

from functools import reduce
from math import ceil, floor, prod
from typing import Any

import numpy as np

from ...ir.dtypes import np_dtype
from ..limits import room
from ..node import Node
from ..windows import need_sizes, table, windows
from . import face
from .pool import contenders


def _pixels(n: Node) -> Any:
    """X [N, C, H, W] as rows of the channels of one pixel each."""
    x = n.x()
    return n.b.reshape(n.b.transpose(x, axis=(0, 2, 3, 1)), shape=(-1, x.shape[1]))


def _read(n: Node, place: np.ndarray, weight: np.ndarray) -> Any:
    """[cells, taps, C]: the pixels at `place` [cells, taps], times `weight`."""
    need_sizes(n, n.op_type, n.shape(0)[1:])
    rows = n.b.reshape(n.b.gather(_pixels(n), n.const(place.reshape(-1))), shape=(*place.shape, n.shape(0)[1]))
    return n.b.elementwise_mul(rows, n.const(weight[:, :, None], np_dtype(n.dtype(0))))


def _image(n: Node, cells: Any, regions: int, height: int, width: int) -> Any:
    """[regions * height * width, C] as images."""
    return n.b.transpose(n.b.reshape(cells, shape=(regions, height, width, n.shape(0)[1])), axis=(0, 3, 1, 2))


@face("RoiAlign")
def roi_align(n: Node) -> object:
    rois, batch = np.asarray(n.value(1), np.float64), np.asarray(n.value(2), np.int64)
    (h, w), size, scale = n.shape(0)[2:], (n.attr("output_height", 1), n.attr("output_width", 1)), n.attr("spatial_scale", 1.0)
    half_pixel, mean = n.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel", n.attr("mode", "avg") == "avg"
    corners = rois * scale - (0.5 if half_pixel else 0.0)
    ways = []
    for axis, image in ((1, h), (0, w)):
        start, length = corners[:, axis], corners[:, axis + 2] - corners[:, axis]
        length = length if half_pixel else np.maximum(length, 1.0)
        ways.append(_samples(start, length / size[1 - axis], size[1 - axis], n.attr("sampling_ratio", 0), image, mean))
    (py, wy, sy), (px, wx, sx) = ways
    place = batch[:, None, None, None, None] * (h * w) + py[:, :, None, :, None] * w + px[:, None, :, None, :]
    weight = wy[:, :, None, :, None] * wx[:, None, :, None, :]
    cells = len(rois) * prod(size)
    rows = _read(n, place.reshape(cells, -1), weight.reshape(cells, -1))
    if mean:
        return _image(n, n.b.reduce_sum(rows, dim=(1,)), len(rois), *size)
    sampled = np.broadcast_to(sy[:, None, None, :, None] & sx[:, None, None, None, :], place.shape).reshape(cells, -1)
    return _image(n, n.b.reduce_max(contenders(n, rows, sampled), dim=(1,)), len(rois), *size)


def _samples(start: Any, step: Any, cells: int, ratio: int, size: int, mean: bool) -> tuple[np.ndarray, ...]:
    """(places, weights), each [regions, cells, 2 * samples], of the samples along one axis, each of which lies between two pixels.

    Then which of them there are, [regions, 2 * samples]: a region that has fewer samples than another repeats its last one.
    """
    count = np.full(len(start), ratio) if ratio > 0 else np.ceil(step).astype(np.int64)
    count = np.maximum(count, 1)
    room([len(start), cells, int(count.max(initial=1)), 2])
    k = np.arange(count.max(initial=1))
    known = k < count[:, None]
    k = np.minimum(k, count[:, None] - 1)
    at = start[:, None, None] + (np.arange(cells)[:, None] + ((k + 0.5) / count[:, None])[:, None, :]) * step[:, None, None]
    inside = (at >= -1.0) & (at <= size)
    at = np.clip(at, 0, size - 1)
    low = np.floor(at).astype(np.int64)
    share = at - low
    weight = np.stack([1 - share, share], axis=-1) * inside[..., None]
    if mean:
        weight *= (known / count[:, None])[:, None, :, None]
    place = np.stack([low, np.minimum(low + 1, size - 1)], axis=-1)
    return place.reshape(*place.shape[:2], -1), weight.reshape(*weight.shape[:2], -1), known.repeat(2, axis=1)


@face("MaxRoiPool")
def max_roi_pool(n: Node) -> object:
    rois, size, scale = np.asarray(n.value(1), np.float64), tuple(n.attr("pooled_shape")), n.attr("spatial_scale", 1.0)
    h, w = n.shape(0)[2:]
    room([len(rois), *size, 8])
    cells = [
        [(int(roi[0]) * h + y) * w + x for y in rows for x in columns]
        for roi in rois
        for rows in _bins(roi[2], roi[4], scale, size[0], h)
        for columns in _bins(roi[1], roi[3], scale, size[1], w)
    ]
    most = max(map(len, cells), default=1) or 1
    place = np.array([c + [0] * (most - len(c)) for c in cells], np.int64).reshape(len(cells), most)
    there = np.arange(most) < np.array([max(len(c), 1) for c in cells], np.int64)[:, None]
    weight = np.broadcast_to(np.array([bool(c) for c in cells], float)[:, None], place.shape)  # a cell without pixels is 0
    return _image(n, n.b.reduce_max(contenders(n, _read(n, place, weight), there), dim=(1,)), len(rois), *size)


def _bins(first: float, last: float, scale: float, cells: int, size: int) -> list[range]:
    """The pixels of each cell of a region from `first` to `last`; neighbours may share one."""
    start, end = floor(first * scale + 0.5), floor(last * scale + 0.5)
    step = max(end - start + 1, 1) / cells
    edges = [(floor(k * step) + start, ceil((k + 1) * step) + start) for k in range(cells)]
    return [range(min(max(a, 0), size), min(max(b, 0), size)) for a, b in edges]


# -- columns --------------------------------------------------------------------------------------------------------------------------


@face("Col2Im")
def col2im(n: Node) -> object:
    need_sizes(n, "Col2Im", n.shape(0))
    sizes, kernel = n.ints(1) or [], n.ints(2) or []
    place, inside = table(windows(n, kernel, sizes))
    cells, taps = place.shape
    rows = n.b.transpose(n.b.reshape(n.x(), shape=(-1, taps, cells)), axis=(2, 1, 0))
    if not inside.all():
        rows = n.b.elementwise_mul(rows, n.const(inside[:, :, None], np_dtype(n.dtype(0))))
    channels = n.shape(0)[1] // taps
    empty = n.b.fill_constant(shape=(prod(sizes), rows.shape[2]), dtype=n.dtype(0), value=0.0)
    sums = n.b.scatter_nd_add(empty, n.const(place.reshape(-1, 1)), n.b.reshape(rows, shape=(cells * taps, -1)))
    return n.b.reshape(n.b.transpose(sums, axis=(1, 0)), shape=(-1, channels, *sizes))


@face("DeformConv")
def deform_conv(n: Node) -> object:
    b, x, w, groups, parts = n.b, n.x(0), n.x(1), n.attr("group", 1), n.attr("offset_group", 1)
    (images, c, h, width), kernel = x.shape, tuple(w.shape[2:])
    if len(kernel) != 2:
        raise n.wrong(f"X has to be images [N, C, H, W], found {n.type()}")
    need_sizes(n, "DeformConv", x.shape)
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
    for row, row_weight in _between(n, y, h):
        for column, column_weight in _between(n, x_at, width):
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


def _between(n: Node, at: Any, size: int) -> list[tuple[Any, Any]]:
    """The two pixels that a place along one axis lies between, as whole numbers, with their weights; outside of the image it is 0."""
    b = n.b
    low = b.floor(at)
    share = b.elementwise_sub(at, low)
    found = []
    for pixel, weight in ((low, b.scale(share, scale=-1.0, bias=1.0)), (b.scale(low, bias=1.0), share)):
        held = b.clip(pixel, min=0.0, max=float(size - 1))
        inside = b.cast(b.equal(held, pixel), dtype=n.dtype(0))
        found.append((b.cast(held, dtype="int64"), b.elementwise_mul(weight, inside)))
    return found
