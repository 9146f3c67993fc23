"""Resize: each axis by itself, as a choice of its slices or as a product with a matrix of weights, both known."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...ir import Variable
from ...ir.dtypes import FLOATS
from ..limits import room
from ..node import Node
from . import face


class _Axis(NamedTuple):
    """How one axis is resized: `out` of `size`; `span` is the region of interest."""

    axis: int
    size: int
    out: int
    scale: float
    span: tuple[float, float]


_NEAREST: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


@face("Resize")
def resize(n: Node) -> object:
    mode = n.attr("mode", "nearest")
    if mode not in ("nearest", "linear", "cubic"):
        raise n.wrong(f"mode is nearest, linear or cubic, found {mode!r}")
    dtype = n.dtype()
    y = n.x()
    work = dtype
    if mode != "nearest" and dtype not in ("float32", "float64"):
        work = "float32" if dtype in FLOATS else "float64"
    if work != dtype:
        y = n.b.cast(y, dtype=work)
    for a in _axes(n):
        x = _coordinates(n, a)
        if a.out == a.size and np.array_equal(x, np.arange(a.size)):
            continue
        y = _chosen(n, y, a, x) if mode == "nearest" else _weighed(n, y, a, x)
        if n.attr("coordinate_transformation_mode") == "tf_crop_and_resize":
            y = _extrapolated(n, y, a, x)
    return _back(n, y, dtype)


def _axes(n: Node) -> list[_Axis]:
    """The axes to resize, with sizes and scales."""
    shape = n.shape()
    axes = [a % len(shape) for a in n.attr("axes", range(len(shape)))]
    roi = [float(v) for v in np.asarray(n.value(1)).ravel()] if n.has(1) else []
    roi = roi or [0.0] * len(axes) + [1.0] * len(axes)
    spans = list(zip(roi[: len(axes)], roi[len(axes) :]))
    sizes = n.ints(3)
    if not sizes:
        given = np.asarray(n.value(2), np.float32).ravel()
        if len(given) != len(axes):
            raise n.wrong(f"expected {len(axes)} scales, one for each axis, found {len(given)}; or sizes")
        scales, outs = given.tolist(), [int(np.floor(np.float32(shape[a]) * s)) for a, s in zip(axes, given)]
    else:
        scales, outs = [s / shape[a] for a, s in zip(axes, sizes)], sizes
        policy = n.attr("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            scale = min(scales) if policy == "not_larger" else max(scales)
            scales, outs = [scale] * len(axes), [int(scale * shape[a] + 0.5) for a in axes]
    room([max(outs, default=0), max(shape, default=0)])  # a matrix says what is made of what
    return [_Axis(a, shape[a], out, s, span) for a, out, s, span in zip(axes, outs, scales, spans)]


def _coordinates(n: Node, a: _Axis) -> np.ndarray:
    """Where in the input each element of the output lies."""
    mode, at, length = n.attr("coordinate_transformation_mode", "half_pixel"), np.arange(a.out, dtype=np.float64), a.scale * a.size
    if mode == "align_corners":
        return at * (a.size - 1) / (length - 1) if length != 1 else 0 * at
    if mode == "asymmetric":
        return at / a.scale
    if mode == "tf_crop_and_resize":
        first, last = (end * (a.size - 1) for end in a.span)
        return first + at * (last - first) / (length - 1) if length != 1 else 0 * at + (first + last) / 2
    found = (at + 0.5) / a.scale - 0.5
    if mode == "half_pixel":
        return found
    if mode == "pytorch_half_pixel":
        return found if a.out > 1 else 0 * at
    if mode == "half_pixel_symmetric":
        return found + a.size / 2 * (1 - a.out / length)
    raise n.wrong(f"unknown coordinate_transformation_mode {mode!r}")


def _chosen(n: Node, y: Variable, a: _Axis, x: np.ndarray) -> Variable:
    """The slices of y that lie nearest to x."""
    nearest = _NEAREST[n.attr("nearest_mode", "round_prefer_floor")](x)
    return n.b.index_select(y, n.const(np.clip(nearest, 0, a.size - 1), np.int64), dim=a.axis)


def _weighed(n: Node, y: Variable, a: _Axis, x: np.ndarray) -> Variable:
    """The product of y with the weights of each element of the output."""
    matrix = n.const(_weights(n, a, x), y.dtype)
    rank = len(y.shape)
    if rank > 1 and a.axis == rank - 2:
        return n.b.matmul(matrix, y)
    if a.axis == rank - 1:
        return n.b.matmul(y, matrix, transpose_y=True)
    perm = [*(k for k in range(rank) if k != a.axis), a.axis]
    y = n.b.matmul(n.b.transpose(y, axis=tuple(perm)), matrix, transpose_y=True)
    return n.b.transpose(y, axis=tuple(np.argsort(perm).tolist()))


def _weights(n: Node, a: _Axis, x: np.ndarray) -> np.ndarray:
    """[out, size]: a filter around each coordinate; what falls outside belongs to the element at the border."""
    filters = {"linear": (1, _linear), "cubic": (2, lambda t: _cubic(t, n.attr("cubic_coeff_a", -0.75)))}
    reach, weigh = filters[n.attr("mode")]
    narrow = min(a.scale, 1.0) if n.attr("antialias", 0) else 1.0
    taps = int(np.ceil(reach / narrow))
    at = np.floor(x)[:, None] + np.arange(1 - taps, 1 + taps)
    weight = weigh(np.abs(at - x[:, None]) * narrow)
    if n.attr("exclude_outside", 0):
        weight = weight * ((at >= 0) & (at < a.size))
    if narrow < 1 or n.attr("exclude_outside", 0):
        total = weight.sum(1, keepdims=True)
        weight = weight / np.where(total == 0, 1, total)
    out = np.zeros((a.out, a.size))
    np.add.at(out, (np.arange(a.out)[:, None], np.clip(at, 0, a.size - 1).astype(int)), weight)
    return out


def _linear(t: np.ndarray) -> np.ndarray:
    return np.maximum(1 - t, 0)


def _cubic(t: np.ndarray, c: float) -> np.ndarray:
    """Keys' kernel (https://ieeexplore.ieee.org/document/1163711, equation 4) at distance t."""
    near = ((c + 2) * t - (c + 3)) * t * t + 1
    far = ((t - 5) * t + 8) * t * c - 4 * c
    return np.where(t <= 1, near, np.where(t < 2, far, 0.0))


def _extrapolated(n: Node, y: Variable, a: _Axis, x: np.ndarray) -> Variable:
    """y with `extrapolation_value` where x lies outside of the input."""
    outside = (x < 0) | (x > a.size - 1)
    if not outside.any():
        return y
    column = outside.reshape(-1, *[1] * (len(y.shape) - 1 - a.axis))
    value = n.b.fill_constant(shape=(1,), dtype=y.dtype, value=n.attr("extrapolation_value", 0.0))
    return n.b.where(n.const(column), value, y)


def _back(n: Node, y: Variable, dtype: str) -> Variable:
    """y in the dtype of the input; integers rounded and cut to what it can hold."""
    if y.dtype == dtype:
        return y
    if dtype not in FLOATS:
        info = np.iinfo(dtype)
        y = n.b.clip(n.b.round(y), min=float(info.min), max=float(info.max))
    return n.b.cast(y, dtype=dtype)
