"""Sampling of an image at given points: grid_sample and its gradient.

Along each axis a point has taps: element positions with weights. Each combination of taps is read in turn, for all points at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ... import native
from ...ir import Native, OpDef, ProgramError, Sample
from ...ir.dtypes import dtype_name
from ..shared.arrays import add_rows
from ..shared.native import FLOATS
from ..shared.samples import f32, points
from ..shared.types import merge_size, need_float, need_ndim, same_dtype

_OFFSETS = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}
_PADDINGS = ("zeros", "border", "reflection")
_ATTRS = {"mode": "linear", "padding_mode": "zeros", "align_corners": False}


class _Tap(NamedTuple):
    """One tap of all points [N, points] along one axis: position, weight, and the derivative of the weight by the coordinate."""

    place: Any
    weight: Any
    slope: Any


def _taps(xp: Any, x: Any, d: int, attrs: Mapping[str, Any]) -> list[_Tap]:
    """The taps along an axis of size d, for points with coordinates x in [-1, 1]."""
    mode, padding = attrs["mode"], attrs["padding_mode"]
    low, high = (0.0, d - 1.0) if attrs["align_corners"] else (-0.5, d - 0.5)
    slope = (high - low) / 2
    x = x * x.dtype.type(slope) + x.dtype.type((high + low) / 2)
    if mode == "nearest":
        x = xp.rint(x)
    padding_slope = xp.ones_like(x)
    # far outside, where all taps are outside, the distance does not matter, and floats that are not too large keep their fractions
    if padding == "reflection":
        x, padding_slope = _reflected(xp, x, low, high)
    else:
        x = xp.clip(x, -3.0, d + 2.0)
    base = xp.floor(x)
    found = []
    for offset in _OFFSETS[mode]:
        at = base + x.dtype.type(offset)
        weight, rise = _weigh(xp, at - x, mode)
        if padding == "reflection":
            at = _reflected(xp, at, low, high)[0]
        inside = xp.clip(at, 0.0, d - 1.0)
        if padding == "zeros":
            there = at == inside
            weight, rise = weight * there, rise * there
        place = xp.where(xp.isnan(inside), 0, inside).astype(xp.int64)  # a NaN gets NaN as its weight, except with mode nearest
        found.append(_Tap(place, weight, rise * padding_slope * x.dtype.type(slope)))
    return found


def _reflected(xp: Any, x: Any, low: float, high: float) -> tuple[Any, Any]:
    """x reflected at `low` and `high` until it is between them (a triangle wave), and the slope of that."""
    span = high - low
    if span <= 0:
        return xp.full_like(x, low), xp.zeros_like(x)
    turn = x - x.dtype.type(low)
    turn = turn - xp.floor(turn / x.dtype.type(2 * span)) * x.dtype.type(2 * span)
    return x.dtype.type(high) - xp.abs(turn - x.dtype.type(span)), xp.sign(x.dtype.type(span) - turn)


def _weigh(xp: Any, t: Any, mode: str, c: float = -0.75) -> tuple[Any, Any]:
    """The weight of an element at signed distance t from a point, and its derivative as the point moves.

    Cubic weights: Keys' kernel (https://ieeexplore.ieee.org/document/1163711, equation 4).
    """
    s, t = xp.sign(t), xp.abs(t)
    if mode == "nearest":
        return xp.ones_like(t), xp.zeros_like(t)
    if mode == "linear":  # at an element, the slope is that towards the next one
        return 1 - t, xp.where(s > 0, s, xp.full_like(s, -1))
    near, far = ((c + 2) * t - (c + 3)) * t * t + 1, ((t - 5) * t + 8) * t * c - 4 * c
    near_slope, far_slope = (3 * (c + 2) * t - 2 * (c + 3)) * t, ((3 * t - 10) * t + 8) * c
    return xp.where(t <= 1, near, far), -s * xp.where(t <= 1, near_slope, far_slope)


def _combined(xp: Any, grid: Any, size: tuple[int, ...], attrs: Mapping[str, Any]) -> Iterator[tuple[Any, list[_Tap]]]:
    """For each combination of taps: the positions among all elements of an image [N, points], and the tap of each axis."""
    axes = [_taps(xp, grid[..., len(size) - 1 - k].reshape(len(grid), -1), d, attrs) for k, d in enumerate(size)]
    for taps in product(*axes):
        place = taps[0].place
        for tap, d in zip(taps[1:], size[1:]):
            place = place * d + tap.place
        yield place, list(taps)


def _rows(xp: Any, x: Any) -> Any:
    """[N, ...] images as [N, elements, C]."""
    return xp.ascontiguousarray(xp.moveaxis(x.reshape(*x.shape[:2], prod(x.shape[2:])), 1, 2))


def _axes_words(ndim: int) -> tuple[str, str, str]:
    cells = " ".join(f"p{k}" for k in range(ndim - 2))
    return f"n c {' . ' * (ndim - 2)}", f"n {cells} .", f"n c {cells}"


def _product(taps: list[_Tap], but: int = -1) -> Any:
    """The weight of a combination; with `but`, its derivative along that axis."""
    weight: Any = 1
    for k, tap in enumerate(taps):
        weight = weight * (tap.slope if k == but else tap.weight)
    return weight


class GridSample(OpDef):
    """X [N, C, ...] sampled at the points of Grid [N, ..., D]; D is the number of axes after C. The result is [N, C, ...] with the axes of
    the points.

    The coordinates of a point start with the last axis. They go from -1 to 1 over an image: between the centers of its border elements with
    `align_corners`, otherwise between its edges. `mode` is nearest, linear or cubic. Outside of the image `padding_mode` gives zeros, the
    border or a reflection. Source: ONNX's GridSample, fluid's grid_sampler.
    """

    name = "grid_sample"
    inputs = ("X", "Grid")
    attrs = _ATTRS

    @staticmethod
    def pattern(ins, outs, attrs):
        x, grid, out = _axes_words(ins[0].ndim)
        return f"{x}, {grid} -> {out} | L(0)"

    @staticmethod
    def infer(x, grid, *, mode, padding_mode, align_corners):
        if mode not in _OFFSETS or padding_mode not in _PADDINGS:
            known = f"modes are {', '.join(_OFFSETS)}, padding modes {', '.join(_PADDINGS)}"
            raise ProgramError(f"op grid_sample: mode {mode!r} or padding_mode {padding_mode!r} is not known; {known}")
        need_float("grid_sample", "X", x)
        same_dtype("grid_sample", X=x, Grid=grid)
        need_ndim("grid_sample", "X", x, 3, 99)
        need_ndim("grid_sample", "Grid", grid, x.ndim)
        if grid.shape[-1] != x.ndim - 2:
            raise ProgramError(f"op grid_sample: expected a Grid [N, ..., {x.ndim - 2}] for an image {list(x.shape)}, found {grid}")
        return x.with_shape((merge_size("grid_sample", "the numbers of images and of grids", x.shape[0], grid.shape[0]), x.shape[1],
                             *grid.shape[1:-1]))  # fmt: skip

    @staticmethod
    def grad(b, op, g):
        return b.grid_sample_grad(op["X"], op["Grid"], g, **op.attrs)

    @staticmethod
    def kernel(xp, x, grid, *, out, **attrs):
        made = xp.zeros((len(x), prod(grid.shape[1:-1]), x.shape[1]), x.dtype)
        if x.size and made.size:
            rows, images = _rows(xp, x), xp.arange(len(x))[:, None]
            for place, taps in _combined(xp, grid, x.shape[2:], attrs):
                made += rows[images, place] * _product(taps)[..., None]
        out[...] = xp.moveaxis(made, 1, 2).reshape(out.shape)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        """Only for images with one to three axes."""
        (x, grid), (out,), size = ins, outs, ins[0].shape[2:]
        kind = FLOATS.get(dtype_name(x.dtype))
        if kind is None or not x.size or not out.size or len(size) > 3 or not all(a.flags.c_contiguous for a in (x, grid, out)):
            return None
        if dry:
            return []
        how = (len(_OFFSETS[attrs["mode"]]), _PADDINGS.index(attrs["padding_mode"]), int(attrs["align_corners"]))
        at = [native.address(a) for a in (x, grid, out)]
        words = (*at, *out.shape[:2], len(size), *size, *[1] * (3 - len(size)), prod(out.shape[2:]), *how)
        return [native.NativeCall(f"grid_sample_{kind}", words, (x, grid, out))]

    native = Native(calls=_calls, any_size=True)

    @staticmethod
    def samples():
        grid = points((2, 3, 4, 2), -0.9, 0.9, seed=1)
        yield Sample.of(f32(2, 3, 5, 6), grid, tolerance=2e-2, why="the slope of weights jumps at elements")
        yield Sample.of(f32(2, 3, 5, 6), grid, mode="cubic", align_corners=True, padding_mode="border")
        yield Sample.of(f32(2, 3, 5, 6), 2 * grid, mode="nearest", padding_mode="reflection", grad=("X",), why="the nearest element jumps")
        yield Sample.of(f32(2, 5, 3, 4, 6), points((2, 2, 3, 4, 3), -1.7, 1.7, seed=2), padding_mode="reflection", align_corners=True,
                        grad=("X",), why="the slope of the reflection jumps")  # fmt: skip


class GridSampleGrad(OpDef):
    """The gradients of grid_sample: for elements by the weights with which they were read, for points from the neighbouring elements."""

    name = "grid_sample_grad"
    inputs, outputs = ("X", "Grid", "Out@GRAD"), ("X@GRAD", "Grid@GRAD")
    attrs = _ATTRS

    @staticmethod
    def pattern(ins, outs, attrs):
        x, grid, out = _axes_words(ins[0].ndim)
        cells = " ".join(f"p{k}:+" for k in range(ins[0].ndim - 2))
        return f"{x}, {grid}, {out} -> {x}, {grid} | {cells} c:+ L(2) L(0>1)"

    @staticmethod
    def infer(x, grid, g, **attrs):
        return x, grid

    @staticmethod
    def kernel(xp, x, grid, g, *, out, **attrs):
        images, size = xp.arange(len(x))[:, None], x.shape[2:]
        back = xp.moveaxis(g.reshape(*g.shape[:2], prod(g.shape[2:])), 1, 2)
        to_x = xp.zeros((len(x) * prod(size), x.shape[1]), x.dtype)
        to_grid = xp.zeros((len(grid), prod(grid.shape[1:-1]), len(size)), grid.dtype)
        if x.size and g.size:
            rows = _rows(xp, x)
            for place, taps in _combined(xp, grid, size, attrs):
                shared = (back * _product(taps)[..., None]).reshape(-1, x.shape[1])
                add_rows(xp, to_x, (place + images * prod(size)).reshape(-1), shared)
                felt = (rows[images, place] * back).sum(axis=2)
                for k in range(len(size)):
                    to_grid[..., len(size) - 1 - k] += felt * _product(taps, k)
        for made, found in zip(out, (xp.moveaxis(to_x.reshape(len(x), prod(size), x.shape[1]), 1, 2), to_grid), strict=True):
            if made is not None:
                made[...] = found.reshape(made.shape)

    @staticmethod
    def samples():
        x, grid, g = f32(2, 3, 5, 6), points((2, 7, 4, 2), -0.9, 0.9, seed=1), f32(2, 3, 7, 4, seed=2)
        yield Sample.of(x, grid, g, grad=(), why="a gradient op")
        yield Sample.of(x, grid, g, mode="cubic", align_corners=True, padding_mode="border", grad=(), why="a gradient op")
        yield Sample.of(np.ones((2, 3, 4), "float32"), points((2, 5, 1), -0.9, 0.9), f32(2, 3, 5), grad=(), why="a gradient op")
