"""Resizing of images: resize and its gradient, axis by axis, as a selection of slices or a product with a matrix of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...ir import ANY, OpDef, ProgramError, Sample
from ...ir.axis_letters import but
from ...ir.opdef import Required
from ..shared.arrays import copy
from ..shared.samples import f32
from ..shared.types import need_float, norm_axes

MODES = ("nearest", "linear", "cubic")
NEAREST: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


class _ResizedAxis(NamedTuple):
    """How one axis of `size` is resized to `out`; `span` is the region of interest as fractions of the axis."""

    axis: int
    size: int
    out: int
    scale: float
    span: tuple[float, float]


def _align_corners(a: _ResizedAxis, at: np.ndarray) -> np.ndarray:
    length = a.scale * a.size
    return at * (a.size - 1) / (length - 1) if length != 1 else 0 * at


def _half_pixel(a: _ResizedAxis, at: np.ndarray) -> np.ndarray:
    return (at + 0.5) / a.scale - 0.5


def _symmetric(a: _ResizedAxis, at: np.ndarray) -> np.ndarray:
    return _half_pixel(a, at) + a.size / 2 * (1 - a.out / (a.scale * a.size))


def _crop(a: _ResizedAxis, at: np.ndarray) -> np.ndarray:
    (first, last), length = (end * (a.size - 1) for end in a.span), a.scale * a.size
    return first + at * (last - first) / (length - 1) if length != 1 else 0 * at + (first + last) / 2


# the position in the input of each element of the output
COORDINATES: dict[str, Callable[[_ResizedAxis, np.ndarray], np.ndarray]] = {
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _symmetric,
    "pytorch_half_pixel": lambda a, at: _half_pixel(a, at) if a.out > 1 else 0 * at,
    "align_corners": _align_corners,
    "asymmetric": lambda a, at: at / a.scale,
    "tf_crop_and_resize": _crop,
}

_FLOATS = Required(tuple[float, ...])
_ATTRS = {
    "axes": (2, 3), "sizes": (), "like_axes": (), "scales": _FLOATS, "spans": _FLOATS, "mode": "linear", "coordinates": "half_pixel",
    "nearest": "round_prefer_floor", "cubic_coeff_a": -0.75, "antialias": False, "exclude_outside": False, "extrapolation_value": 0.0,
}  # fmt: skip
_PLAIN: dict[str, Any] = {"scales": (), "spans": ()}


def size_scaled(size: int, scale: float) -> int:
    """The size of an axis after a scale, in the precision of scales in files."""
    return ANY if size == ANY else int(np.floor(np.float32(size) * np.float32(scale)))


def _axes(shape: tuple[int, ...], outs: tuple[int, ...], attrs: Mapping[str, Any]) -> list[_ResizedAxis]:
    """The resized axes of a value of a shape, for a result of the shape `outs`."""
    axes, spans = attrs["axes"], attrs["spans"] or (0.0,) * len(attrs["axes"]) + (1.0,) * len(attrs["axes"])
    found = []
    for k, axis in enumerate(axes):
        size, out = shape[axis], outs[axis]
        scale = attrs["scales"][k] if attrs["scales"] else out / max(size, 1)
        found.append(_ResizedAxis(axis % len(shape), size, out, scale, (spans[k], spans[k + len(axes)])))
    return found


def _at(a: _ResizedAxis, attrs: Mapping[str, Any]) -> np.ndarray:
    return COORDINATES[attrs["coordinates"]](a, np.arange(a.out, dtype=np.float64))


def _outside(a: _ResizedAxis, x: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
    """The elements of the output that get `extrapolation_value`."""
    return ((x < 0) | (x > a.size - 1)) if attrs["coordinates"] == "tf_crop_and_resize" else np.zeros(a.out, bool)


def _nearest(a: _ResizedAxis, x: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
    return np.clip(NEAREST[attrs["nearest"]](x), 0, a.size - 1).astype(np.int64)


def _linear(t: np.ndarray, c: float) -> np.ndarray:
    return np.maximum(1 - t, 0)


def _cubic(t: np.ndarray, c: float) -> np.ndarray:
    """Keys' kernel (https://ieeexplore.ieee.org/document/1163711, equation 4) at distance t."""
    near = ((c + 2) * t - (c + 3)) * t * t + 1
    far = ((t - 5) * t + 8) * t * c - 4 * c
    return np.where(t <= 1, near, np.where(t < 2, far, 0.0))


def _weights(a: _ResizedAxis, x: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
    """[out, size]: a filter around each coordinate; the weight of positions outside goes to the element at the border."""
    out = np.zeros((a.out, a.size))
    if attrs["mode"] == "nearest":
        out[np.arange(a.out), _nearest(a, x, attrs)] = 1
        return out
    reach, weigh = {"linear": (1, _linear), "cubic": (2, _cubic)}[attrs["mode"]]
    narrow = min(a.scale, 1.0) if attrs["antialias"] else 1.0
    taps = int(np.ceil(reach / narrow))
    at = np.floor(x)[:, None] + np.arange(1 - taps, 1 + taps)
    weight = weigh(np.abs(at - x[:, None]) * narrow, attrs["cubic_coeff_a"])
    if attrs["exclude_outside"]:
        weight = weight * ((at >= 0) & (at < a.size))
    if narrow < 1 or attrs["exclude_outside"]:
        total = weight.sum(1, keepdims=True)
        weight = weight / np.where(total == 0, 1, total)
    np.add.at(out, (np.arange(a.out)[:, None], np.clip(at, 0, a.size - 1).astype(int)), weight)
    return out


def _times(xp: Any, matrix: np.ndarray, x: Any, axis: int) -> Any:
    """The product of a matrix with x along an axis."""
    m = xp.asarray(matrix.astype(x.dtype))
    if axis == x.ndim - 1:
        return x @ m.T
    if axis == x.ndim - 2:
        return m @ x
    return xp.moveaxis(xp.moveaxis(x, axis, -1) @ m.T, -1, axis)


def _same(a: _ResizedAxis, x: np.ndarray) -> bool:
    return a.out == a.size and np.array_equal(x, np.arange(a.size))


def _check(x: Any, attrs: Mapping[str, Any]) -> None:
    axes = norm_axes("resize", attrs["axes"], x.ndim)
    for name, known in (("mode", MODES), ("coordinates", COORDINATES), ("nearest", NEAREST)):
        if attrs[name] not in known:
            raise ProgramError(f"op resize: {name} must be one of {', '.join(known)}, found {attrs[name]!r}")
    if not (attrs["sizes"] or attrs["scales"] or attrs["like_axes"]) and axes:
        raise ProgramError("op resize: give sizes, scales, or Like and like_axes, one for each of axes")
    for name, count in (("sizes", len(axes)), ("scales", len(axes)), ("like_axes", len(axes)), ("spans", 2 * len(axes))):
        if attrs[name] and len(attrs[name]) != count:
            raise ProgramError(f"op resize: {name} needs {count} entries for axes {list(attrs['axes'])}, found {len(attrs[name])}")
    if any(s < 0 for s in attrs["sizes"]) or any(not 0 < s < np.inf for s in attrs["scales"]):
        raise ProgramError(f"op resize: sizes must be 0 or more and scales above 0, found {list(attrs['sizes'] or attrs['scales'])}")
    if attrs["mode"] != "nearest":
        need_float("resize", "X", x)


def _words(ndim: int, attrs: Mapping[str, Any]) -> str:
    return but(attrs["axes"], ndim)


class Resize(OpDef):
    """X with each of `axes` resized to `sizes` or by `scales`, with the nearest elements or by linear or cubic interpolation.

    `coordinates` defines the position in X of an element of the result, `nearest` its rounding; the attributes are those of ONNX's Resize.
    Positions outside of X use its border. With "tf_crop_and_resize", `spans` (starts, then ends, as fractions of each axis) is cut out of
    X, and positions outside of X are `extrapolation_value`. An axis of open size needs `scales`, or Like, a value whose axes `like_axes`
    have the sizes of the result; only its shape is read. Absent scales and spans are (). If both sizes and scales are given, sizes define
    the size of the result and scales the positions of its elements.
    """

    name = "resize"
    inputs = ("X", "Like?")
    attrs = _ATTRS

    @staticmethod
    def pattern(ins, outs, attrs):
        words, like = _words(ins[0].ndim, attrs), "" if ins[1] is None else "~" + but(attrs["like_axes"], ins[1].ndim, letter="x")
        affine = attrs["coordinates"] == "tf_crop_and_resize" and attrs["extrapolation_value"] != 0
        return f"{words}, {like} -> {words}{'' if affine else ' | L(0)'}"

    @staticmethod
    def infer(x, like, **attrs):
        _check(x, attrs)
        if (like is None) != (not attrs["like_axes"]):
            raise ProgramError("op resize: Like and like_axes are given together")
        shape, sizes = list(x.shape), attrs["sizes"]
        if like is not None:
            sizes = [like.shape[k] for k in norm_axes("resize", attrs["like_axes"], like.ndim)]
        for k, axis in enumerate(attrs["axes"]):
            shape[axis] = sizes[k] if sizes else size_scaled(x.shape[axis], attrs["scales"][k])
            if x.shape[axis] == 0 != shape[axis]:
                raise ProgramError(f"op resize: axis {axis} of {x} is empty and cannot be resized to {shape[axis]}")
        return x.with_shape(shape)

    @staticmethod
    def grad(b, op, g):
        return b.resize_grad(op["X"], g, **op.attrs), None

    @staticmethod
    def kernel(xp, x, like, *, out, **attrs):
        for a in _axes(x.shape, out.shape, attrs):
            at = _at(a, attrs)
            if _same(a, at):
                continue
            if attrs["mode"] == "nearest":
                x = xp.take(x, xp.asarray(_nearest(a, at, attrs)), axis=a.axis)
            else:
                x = _times(xp, _weights(a, at, attrs), x, a.axis)
            outside = _outside(a, at, attrs)
            if outside.any():
                x[(slice(None),) * a.axis + (xp.asarray(outside),)] = attrs["extrapolation_value"]
        copy(xp, out, x)

    @staticmethod
    def samples():
        x = f32(2, 3, 4, 5)
        yield Sample.of(x, None, sizes=(7, 3), **_PLAIN)
        yield Sample.of(x, f32(2, 6, 7, seed=1), like_axes=(2, 1), **_PLAIN)
        yield Sample.of(x, None, sizes=(7, 3), mode="cubic", coordinates="align_corners", **_PLAIN)
        yield Sample.of(x, None, scales=(1.3, 0.6), spans=(), mode="nearest", coordinates="asymmetric", nearest="floor")
        yield Sample.of(f32(2, 3, 4, 6), None, scales=(0.6, 0.5), spans=(), antialias=True, exclude_outside=True)
        yield Sample.of(f32(2, 4, 5, 3), None, axes=(1, 2), sizes=(3, 6), coordinates="pytorch_half_pixel", **_PLAIN)
        crop: dict[str, Any] = {"coordinates": "tf_crop_and_resize", "spans": (0.0, -0.5, 0.75, 1.0), "extrapolation_value": 2.0}
        yield Sample.of(x, None, sizes=(3, 6), scales=(), **crop)
        yield Sample.of(np.arange(24, dtype="uint8").reshape(2, 3, 4), None, axes=(2,), sizes=(6,), mode="nearest", **_PLAIN)


class ResizeGrad(OpDef):
    """The gradient of resize: each element's gradient goes to the elements of X that it was computed from, by their weights; only X's shape
    is read.
    """

    name = "resize_grad"
    inputs, outputs = ("X", "Out@GRAD"), ("X@GRAD",)
    attrs = _ATTRS

    @staticmethod
    def pattern(ins, outs, attrs):
        words = _words(ins[0].ndim, attrs)
        return f"~{words}, {words} -> {words} | L(1)"

    @staticmethod
    def infer(x, g, **attrs):
        return x

    @staticmethod
    def grad(b, op, g):
        like = op["Out@GRAD"] if op.attrs["like_axes"] else None
        return None, b.resize(g, like, **op.attrs | {"extrapolation_value": 0.0, "like_axes": op.attrs["axes"] if like is not None else ()})

    @staticmethod
    def kernel(xp, x, g, *, out, **attrs):
        for a in reversed(_axes(x.shape, g.shape, attrs)):
            at = _at(a, attrs)
            if not _same(a, at):
                matrix = _weights(a, at, attrs) * ~_outside(a, at, attrs)[:, None]
                g = _times(xp, matrix.T, g, a.axis)
        copy(xp, out, g)

    @staticmethod
    def samples():
        x = f32(2, 3, 4, 5)
        yield Sample.of(x, f32(2, 3, 7, 3, seed=1), sizes=(7, 3), grad=("Out@GRAD",), **_PLAIN)
        yield Sample.of(x, f32(2, 3, 7, 3, seed=1), like_axes=(1, 2), grad=("Out@GRAD",), **_PLAIN)
        yield Sample.of(x, f32(2, 3, 5, 3, seed=1), scales=(1.3, 0.6), spans=(), mode="nearest", grad=("Out@GRAD",))
