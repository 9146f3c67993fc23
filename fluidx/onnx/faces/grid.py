"""GridSample: values of an image at points that another value names, each a weighted sum of those around it.

Along each axis a point has taps, places of elements, and their weights. All combinations of them are gathered at once, and summed by one
product; so gradients reach the image by the gather and the points by the weights.
"""

from __future__ import annotations

from math import prod

from ...ir import Builder, Variable
from ..node import Node
from . import face


@face("GridSample")
def grid_sample(n: Node) -> object:
    b, shape, grid = n.b, n.shape(0), n.shape(1)
    if len(shape) != len(grid) or grid[-1] != len(shape) - 2 or min(*shape, *grid) < 0:
        raise n.wrong(f"expected a grid [N, ..., {len(shape) - 2}] for an image {list(shape)}, of known sizes, found {list(grid)}")
    work = "float64" if n.dtype(0) == "float64" else "float32"
    size, images, points = shape[2:], shape[0], prod(grid[1:-1])
    out = (images, shape[1], *grid[1:-1])
    if not prod(out):
        return b.fill_constant(shape=out, dtype=n.dtype(0), value=0.0)
    coordinates = b.unstack(b.reshape(_as(b, n.x(1), work), shape=(images, points, len(size))), axis=2, n_out=len(size))
    places, weights = _combined(n, coordinates[::-1], size)
    rows = b.reshape(b.transpose(_as(b, n.x(0), work), axis=(0, *range(2, len(shape)), 1)), shape=(images * prod(size), shape[1]))
    first = n.const([[[k * prod(size)]] for k in range(images)], "int64")
    found = b.gather(rows, b.reshape(b.elementwise_add(places, first), shape=(-1,)))
    y = b.matmul(b.unsqueeze(weights, axes=(2,)), b.reshape(found, shape=(images, points, -1, shape[1])))
    y = b.transpose(b.squeeze(y, axes=(2,)), axis=(0, 2, 1))
    return _as(b, b.reshape(y, shape=out), n.dtype(0))


def _combined(n: Node, coordinates: list[Variable], size: tuple[int, ...]) -> tuple[Variable, Variable]:
    """[N, points, taps]: the places among all elements of an image that each point is made of, and their weights."""
    mode, padding = n.attr("mode", "linear"), n.attr("padding_mode", "zeros")
    if mode not in _TAPS or padding not in ("zeros", "border", "reflection"):
        raise n.wrong(f"mode {mode!r} or padding_mode {padding!r} is not known; modes are {', '.join(_TAPS)}")
    found = [_taps(n.b, x, d, mode, padding, bool(n.attr("align_corners", 0))) for x, d in zip(coordinates, size)]
    places, weights = found[0]
    for (at, weight), d in zip(found[1:], size[1:]):
        places = _outer(n.b, n.b.elementwise_mul(places, n.const([d], "int64")), at, "add")
        weights = _outer(n.b, weights, weight, "mul")
    return places, weights


def _taps(b: Builder, x: Variable, d: int, mode: str, padding: str, corners: bool) -> tuple[Variable, Variable]:
    """[N, points, taps]: the places along one axis of size d that points at x in [-1, 1] are made of, and their weights."""
    low, high = (0.0, d - 1.0) if corners else (-0.5, d - 0.5)
    x = b.scale(x, scale=(high - low) / 2, bias=(high + low) / 2)
    if mode == "nearest":
        x = b.round(x)
    # Where all taps lie outside it does not matter how far, and floats that are not too large hold fractions.
    x = _reflected(b, x, low, high) if padding == "reflection" else b.clip(x, min=-3.0, max=d + 2.0)
    x = b.unsqueeze(x, axes=(2,))
    base = x if mode == "nearest" else b.floor(x)
    offsets, weigh = _TAPS[mode]
    at = b.elementwise_add(base, b.assign_value(shape=(len(offsets),), dtype=x.dtype, values=offsets))
    weight = weigh(b, b.abs(b.elementwise_sub(at, x)))
    if padding == "reflection":
        at = _reflected(b, at, low, high)
    inside = b.clip(at, min=0.0, max=d - 1.0)
    if padding == "zeros":
        weight = b.elementwise_mul(weight, b.cast(b.equal(at, inside), dtype=x.dtype))
    return b.cast(inside, dtype="int64"), weight


def _reflected(b: Builder, x: Variable, low: float, high: float) -> Variable:
    """x thrown back at `low` and `high` until it lies between them: a wave of triangles."""
    span = high - low
    if span <= 0:
        return b.scale(x, scale=0.0, bias=low)
    turn = b.scale(x, bias=-low)
    turn = b.elementwise_sub(turn, b.scale(b.floor(b.scale(turn, scale=0.5 / span)), scale=2 * span))
    return b.scale(b.abs(b.scale(turn, bias=-span)), scale=-1.0, bias=high)


def _linear(b: Builder, t: Variable) -> Variable:
    return b.scale(t, scale=-1.0, bias=1.0)


def _cubic(b: Builder, t: Variable, c: float = -0.75) -> Variable:
    """Keys' kernel (https://ieeexplore.ieee.org/document/1163711, equation 4) at distance t <= 2."""
    near = _polynomial(b, t, (c + 2, -(c + 3), 0.0, 1.0))
    far = _polynomial(b, t, (c, -5 * c, 8 * c, -4 * c))
    return b.where(b.less_equal(t, b.fill_constant(shape=(1,), dtype=t.dtype, value=1.0)), near, far)


def _polynomial(b: Builder, t: Variable, numbers: tuple[float, ...]) -> Variable:
    found = b.scale(t, scale=numbers[0], bias=numbers[1])
    for k in numbers[2:]:
        found = b.scale(b.elementwise_mul(found, t), bias=k)
    return found


_TAPS = {
    "nearest": ((0.0,), _linear),
    "linear": ((0.0, 1.0), _linear),
    "cubic": ((-1.0, 0.0, 1.0, 2.0), _cubic),
}


def _outer(b: Builder, x: Variable, y: Variable, op: str) -> Variable:
    """All pairs of taps: [N, points, taps of x * taps of y]."""
    pairs = b.emit(f"elementwise_{op}", b.unsqueeze(x, axes=(3,)), b.unsqueeze(y, axes=(2,)))
    return b.reshape(pairs, shape=(*x.shape[:2], x.shape[2] * y.shape[2]))


def _as(b: Builder, x: Variable, dtype: str) -> Variable:
    return x if x.dtype == dtype else b.cast(x, dtype=dtype)
