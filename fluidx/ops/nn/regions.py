"""Pooling over regions of images: roi_align and roi_pool with their gradients.

A region is (x1, y1, x2, y2) in the coordinates of an image that is 1 / `spatial_scale` times as large as X, and is divided into equal
cells. Regions have no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil, floor
from typing import Any, NamedTuple

import numpy as np

from ...ir import ExecutionError, OpDef, ProgramError, Sample
from ..shared.arrays import to_host
from ..shared.samples import apart, f32, i64
from ..shared.types import check_range, merge_size, need_float, need_ids, need_ndim, need_size, same_dtype

_MOST = 1 << 22  # samples of a cell along one axis: a region with more cannot be a region of an image
_SIZE = {"pooled_height": 1, "pooled_width": 1, "spatial_scale": 1.0}
_ALIGN = {**_SIZE, "sampling_ratio": -1, "aligned": False, "mode": "avg"}
_REGIONS = ". c . ., r ., r"  # the words of X, Rois and BatchIndices: a region may be of any image


def _infer(op: str, x: Any, rois: Any, ids: Any, height: int, width: int) -> Any:
    need_float(op, "X", x)
    need_ndim(op, "X", x, 4)
    same_dtype(op, X=x, Rois=rois)
    need_ndim(op, "Rois", rois, 2)
    if rois.shape[1] != 4:
        raise ProgramError(f"op {op}: expected Rois [regions, 4], (x1, y1, x2, y2) each, found {rois}")
    need_ids(op, "BatchIndices", ids)
    need_ndim(op, "BatchIndices", ids, 1)
    for name, size in (("pooled_height", height), ("pooled_width", width)):
        need_size(op, name, size, 1)
    return x.with_shape((merge_size(op, "the numbers of Rois and of BatchIndices", rois.shape[0], ids.shape[0]), x.shape[1], height, width))


def _walk(xp: Any, op: str, x: Any, rois: Any, ids: Any) -> Iterator[tuple[int, int, np.ndarray]]:
    """(index of the region, index of its image, its corners as float64) for all regions."""
    check_range(xp, op, xp.ascontiguousarray(ids), len(x), "X")
    for r, (k, roi) in enumerate(zip(to_host(xp, ids), to_host(xp, rois).astype(np.float64))):
        if not np.isfinite(roi).all():
            raise ExecutionError(f"op {op}: region {r} is {roi.tolist()}; its corners must be finite numbers")
        yield r, int(k), roi


# -- roi_align ------------------------------------------------------------------------------------------------------------------------


class _Samples(NamedTuple):
    """The samples of all cells along one axis: [cells, samples] each, two pixels and the share of the second; samples outside have weight
    0.
    """

    low: np.ndarray
    high: np.ndarray
    share: np.ndarray
    inside: np.ndarray

    def matrix(self, size: int) -> np.ndarray:
        """[cells, size]: the weights of all pixels in the mean of each cell."""
        out = np.zeros((len(self.low), size))
        rows, count = np.arange(len(self.low))[:, None], max(self.low.shape[1], 1)
        np.add.at(out, (rows, self.low), (1 - self.share) * self.inside / count)
        np.add.at(out, (rows, self.high), self.share * self.inside / count)
        return out

    def taps(self) -> tuple[np.ndarray, np.ndarray]:
        """[cells, 2 * samples]: the pixels, and their weights."""
        place = np.concatenate([self.low, self.high], axis=1)
        return place, np.concatenate([(1 - self.share) * self.inside, self.share * self.inside], axis=1)


def _samples(first: float, last: float, cells: int, size: int, attrs: Mapping[str, Any]) -> _Samples:
    scale, shift = attrs["spatial_scale"], 0.5 if attrs["aligned"] else 0.0
    start, length = first * scale - shift, (last - first) * scale
    step = (length if attrs["aligned"] else max(length, 1.0)) / cells
    count = attrs["sampling_ratio"] if attrs["sampling_ratio"] > 0 else max(ceil(step), 1)
    if count > _MOST:
        raise ExecutionError(f"op roi_align: a region from {first} to {last} has {count} samples in a cell; set sampling_ratio")
    at = start + (np.arange(cells)[:, None] + (np.arange(count) + 0.5) / count) * step
    inside = (at >= -1.0) & (at <= size)
    at = np.clip(at, 0, size - 1)
    low = np.floor(at).astype(np.int64)
    return _Samples(low, np.minimum(low + 1, size - 1), at - low, inside)


def _both(x: Any, roi: np.ndarray, attrs: Mapping[str, Any]) -> tuple[_Samples, _Samples]:
    down = _samples(roi[1], roi[3], attrs["pooled_height"], x.shape[2], attrs)
    return down, _samples(roi[0], roi[2], attrs["pooled_width"], x.shape[3], attrs)


def _largest(xp: Any, image: Any, both: tuple[_Samples, _Samples]) -> tuple[Any, Any, Any, Any]:
    """For an image [C, H, W]: the largest weighted pixel of each cell [C, cells], its row, its column and its weight."""
    (py, wy), (px, wx) = (s.taps() for s in both)
    shape = len(py), len(px), py.shape[1], px.shape[1]
    y, x = (np.broadcast_to(p, shape).reshape(shape[0] * shape[1], -1) for p in (py[:, None, :, None], px[None, :, None, :]))
    weight = (wy[:, None, :, None] * wx[None, :, None, :]).reshape(y.shape)
    y, x, weight = xp.asarray(y), xp.asarray(x), xp.asarray(weight.astype(image.dtype))
    weighed = image[:, y, x] * weight
    best, cells = weighed.argmax(axis=2), xp.arange(len(y))
    return weighed.max(axis=2), y[cells, best], x[cells, best], weight[cells, best]


class RoiAlign(OpDef):
    """For each region of Rois [R, 4] in the image of BatchIndices [R], [C, pooled_height, pooled_width]: means of samples in cells.

    A sample is interpolated between four pixels. A cell has `sampling_ratio` samples along each axis (below 1: as many as pixels). With
    `aligned`, the coordinates of a pixel are those of its center, and regions may be smaller than one pixel. `mode` "max" takes the largest
    weighted pixel of all samples. Raises ExecutionError for a batch index without an image. Source: ONNX's RoiAlign (`aligned` is its
    half_pixel), fluid's roi_align.
    """

    name = "roi_align"
    inputs = ("X", "Rois", "BatchIndices")
    attrs = _ALIGN

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"{_REGIONS} -> r c . ." + (" | L(0)" if attrs["mode"] == "avg" else "")

    @staticmethod
    def infer(x, rois, ids, *, mode, pooled_height, pooled_width, **attrs):
        if mode not in ("avg", "max"):
            raise ProgramError(f"op roi_align: mode must be avg or max, found {mode!r}")
        return _infer("roi_align", x, rois, ids, pooled_height, pooled_width)

    @staticmethod
    def grad(b, op, g):
        return b.roi_align_grad(op["X"], op["Rois"], op["BatchIndices"], g, **op.attrs), None, None

    @staticmethod
    def kernel(xp, x, rois, ids, *, out, **attrs):
        for r, k, roi in _walk(xp, "roi_align", x, rois, ids):
            down, right = both = _both(x, roi, attrs)
            if attrs["mode"] == "max":
                out[r] = _largest(xp, x[k], both)[0].reshape(out[r].shape)
            else:
                rows = xp.asarray(down.matrix(x.shape[2]).astype(x.dtype)) @ x[k]
                out[r] = rows @ xp.asarray(right.matrix(x.shape[3]).astype(x.dtype)).T

    @staticmethod
    def samples():
        rois, ids = np.array([[0.3, 0.4, 6.1, 7.3], [2.2, 1.1, 4.7, 3.9], [-3, -2, 1, 12]], "float32"), i64(1, 0, 1)
        yield Sample.of(f32(2, 4, 6, 7), rois, ids, pooled_height=3, pooled_width=2, grad=("X",), why="regions have no gradient")
        yield Sample.of(f32(2, 4, 6, 7), rois, ids, pooled_width=5, spatial_scale=0.5, sampling_ratio=2, aligned=True, grad=("X",),
                        why="regions have no gradient")  # fmt: skip
        yield Sample.of(apart(2, 4, 5, 6), rois[:2], ids[:2].astype("int32"), pooled_height=2, mode="max", grad=("X",), tolerance=2e-2,
                        why="regions have no gradient; another pixel may become the largest")  # fmt: skip


class RoiAlignGrad(OpDef):
    """The gradient of roi_align: each cell's gradient goes to its pixels by their weights; for means only X's shape is read."""

    name = "roi_align_grad"
    inputs, outputs = ("X", "Rois", "BatchIndices", "Out@GRAD"), ("X@GRAD",)
    attrs = _ALIGN

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"{'~' if attrs['mode'] == 'avg' else ''}{_REGIONS}, r c . . -> . c . . | r:+ L(3)"

    @staticmethod
    def infer(x, rois, ids, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, x, rois, ids, g, *, out, **attrs):
        out.fill(0)
        for r, k, roi in _walk(xp, "roi_align_grad", x, rois, ids):
            down, right = both = _both(x, roi, attrs)
            if attrs["mode"] == "max":
                _, rows, columns, weight = _largest(xp, x[k], both)
                xp.add.at(out[k], (xp.arange(len(out[k]))[:, None], rows, columns), weight * g[r].reshape(weight.shape))
            else:
                columns = g[r] @ xp.asarray(right.matrix(x.shape[3]).astype(x.dtype))
                out[k] += xp.asarray(down.matrix(x.shape[2]).T.astype(x.dtype)) @ columns

    @staticmethod
    def samples():
        rois, ids = np.array([[0.3, 0.4, 6.1, 7.3], [2.2, 1.1, 4.7, 3.9], [1, 2, 3, 9]], "float32"), i64(1, 0, 1)
        g = f32(3, 4, 3, 2, seed=1)
        yield Sample.of(f32(2, 4, 6, 7), rois, ids, g, pooled_height=3, pooled_width=2, grad=(), why="a gradient op")
        yield Sample.of(apart(2, 4, 6, 7), rois, ids, g, pooled_height=3, pooled_width=2, mode="max", grad=(), why="a gradient op")


# -- roi_pool -------------------------------------------------------------------------------------------------------------------------


def _bins(first: float, last: float, scale: float, cells: int, size: int) -> list[slice]:
    """The pixels of each cell of a region from `first` to `last`; neighbouring cells may share one."""
    start, end = floor(first * scale + 0.5), floor(last * scale + 0.5)
    step = max(end - start + 1, 1) / cells
    edges = [(floor(k * step) + start, ceil((k + 1) * step) + start) for k in range(cells)]
    return [slice(min(max(a, 0), size), min(max(b, 0), size)) for a, b in edges]


def _cells(x: Any, roi: np.ndarray, attrs: Mapping[str, Any]) -> Iterator[tuple[int, int, slice, slice]]:
    """(i, j, rows, columns) of all cells with pixels."""
    columns = _bins(roi[0], roi[2], attrs["spatial_scale"], attrs["pooled_width"], x.shape[3])
    for i, down in enumerate(_bins(roi[1], roi[3], attrs["spatial_scale"], attrs["pooled_height"], x.shape[2])):
        for j, right in enumerate(columns):
            if down.start < down.stop and right.start < right.stop:
                yield i, j, down, right


class RoiPool(OpDef):
    """For each region of Rois [R, 4] in the image of BatchIndices [R], [C, pooled_height, pooled_width]: the maximum of each cell.

    Corners are rounded to pixels, and both ends belong to the region; a cell outside of the image is 0. Raises ExecutionError for a batch
    index without an image. Source: Fast R-CNN; ONNX's MaxRoiPool, fluid's roi_pool.
    """

    name = "roi_pool"
    inputs = ("X", "Rois", "BatchIndices")
    attrs = _SIZE
    pattern = f"{_REGIONS} -> r c . ."

    @staticmethod
    def infer(x, rois, ids, *, pooled_height, pooled_width, spatial_scale):
        return _infer("roi_pool", x, rois, ids, pooled_height, pooled_width)

    @staticmethod
    def grad(b, op, g):
        return b.roi_pool_grad(op["X"], op["Rois"], op["BatchIndices"], g, **op.attrs), None, None

    @staticmethod
    def kernel(xp, x, rois, ids, *, out, **attrs):
        out.fill(0)
        for r, k, roi in _walk(xp, "roi_pool", x, rois, ids):
            for i, j, down, right in _cells(x, roi, attrs):
                out[r, :, i, j] = x[k, :, down, right].max(axis=(1, 2))

    @staticmethod
    def samples():
        rois, ids = np.array([[0, 1, 6, 7], [2, 1, 4, 3], [5, 6, 30, 40]], "float32"), i64(1, 0, 1)
        why = "regions have no gradient"
        yield Sample.of(apart(2, 4, 6, 7), rois, ids, pooled_height=3, pooled_width=2, grad=("X",), why=why)
        yield Sample.of(apart(2, 4, 6, 7), rois, ids.astype("int32"), pooled_width=5, spatial_scale=0.5, grad=("X",), why=why)


class RoiPoolGrad(OpDef):
    """The gradient of roi_pool: each cell's gradient goes to its largest pixel, the first of equal ones."""

    name = "roi_pool_grad"
    inputs, outputs = ("X", "Rois", "BatchIndices", "Out@GRAD"), ("X@GRAD",)
    attrs = _SIZE
    pattern = f"{_REGIONS}, r c . . -> . c . . | r:+ L(3)"

    @staticmethod
    def infer(x, rois, ids, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, x, rois, ids, g, *, out, **attrs):
        out.fill(0)
        channels = xp.arange(x.shape[1])
        for r, k, roi in _walk(xp, "roi_pool_grad", x, rois, ids):
            for i, j, down, right in _cells(x, roi, attrs):
                cell = x[k, :, down, right]
                at = cell.reshape(len(channels), -1).argmax(axis=1)
                out[k][channels, down.start + at // cell.shape[2], right.start + at % cell.shape[2]] += g[r, :, i, j]

    @staticmethod
    def samples():
        rois, ids = np.array([[0, 1, 6, 7], [2, 1, 4, 3], [1, 2, 3, 9]], "float32"), i64(1, 0, 1)
        yield Sample.of(
            apart(2, 4, 6, 7), rois, ids, f32(3, 4, 3, 2, seed=1), pooled_height=3, pooled_width=2, grad=(), why="a gradient op"
        )
