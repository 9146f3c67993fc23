"""Pools: imported as `pool2d` where it has such windows, else with a table of the elements that each window reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Any

import numpy as np

from ...ir.dtypes import FLOATS, np_dtype
from ...ir.types import ANY
from ...ops.nn.windows import pair, place_windows
from ...ops.quantized.products import BYTES
from ..export_graph import Op
from ..node import Node
from ..table import exports, imports
from ..window_geometry import AxisWindows, extent, identity_window, pad_pairs, paddings_of, require_sizes, window_table, windows
from .conv import channels_first, image_of, pads_of, steps_of


@imports("MaxPool")
def max_pool(n: Node) -> object:
    at = _windows(n)
    if not n.wants(1) and _is_plain(n, at):
        return _pooled(n.b, n.x(), at, "max")
    if n.importer.integers and n.dtype(0) in BYTES and not n.wants(1) and _is_plain(n, at, BYTES):
        # floats with steps of 1, of which a session takes the integers
        y = _pooled(n.b, n.b.dequantize_linear(n.x(), scale=1.0), at, "max")
        return n.b.quantize_linear(y, scale=1.0, dtype=n.dtype(0))
    rows = lowest_outside(n, _gather_windows(n, n.x(), at), window_table(at).inside)
    y = _image_of(n, n.b.reduce_max(rows, dim=(1,)), at)
    return (y, _positions_of_largest(n, rows, at)) if n.wants(1) else y


@imports("AveragePool")
def average_pool(n: Node) -> object:
    at, padding_counts = _windows(n), bool(n.attr("count_include_pad", 0))
    over = any(a.size != ANY and (a.out - 1) * a.stride + extent(a.kernel, a.dilation) > a.padded for a in at)
    if _is_plain(n, at) and not (padding_counts and over):
        return _pooled(n.b, n.x(), at, "avg", exclusive=not padding_counts)
    counts = np.ones((), np.int64)
    for a in at:
        there = a.reads + a.before < a.padded if padding_counts else (a.reads >= 0) & (a.reads < a.size)
        counts = np.multiply.outer(counts, there.sum(axis=1))
    return n.b.elementwise_mul(_sums(n, n.x(), at), n.const(1 / np.maximum(counts, 1), np_dtype(n.dtype(0))))


@imports("LpPool")
def lp_pool(n: Node) -> object:
    p = n.attr("p", 2)
    return _root(n.b, _sums(n, _power(n.b, n.x(), p), _windows(n)), p)


@imports("GlobalAveragePool")
def global_average_pool(n: Node) -> object:
    if n.rank() == 4:
        return n.b.pool2d(n.x(), ksize=(1, 1), pooling_type="avg", global_pooling=True)
    return n.b.reduce_mean(n.x(), dim=_spatial(n), keep_dim=True)


@imports("GlobalMaxPool")
def global_max_pool(n: Node) -> object:
    if n.rank() == 4:
        return n.b.pool2d(n.x(), ksize=(1, 1), pooling_type="max", global_pooling=True)
    return n.b.reduce_max(n.x(), dim=_spatial(n), keep_dim=True)


@imports("GlobalLpPool")
def global_lp_pool(n: Node) -> object:
    p = n.attr("p", 2)
    return _root(n.b, n.b.reduce_sum(_power(n.b, n.x(), p), dim=_spatial(n), keep_dim=True), p)


@imports("MaxUnpool")
def max_unpool(n: Node) -> object:
    kernel, rank = n.attr("kernel_shape"), n.rank() - 2
    strides, pads = n.attr("strides", [1] * rank), pad_pairs(n.attr("pads", [0] * (2 * rank)))
    sizes = [(d - 1) * s - sum(p) + k for d, s, p, k in zip(n.shape(0)[2:], strides, pads, kernel)]
    shape = (*n.shape(0)[:2], *sizes)
    require_sizes(n, "MaxUnpool", n.shape(0))
    empty = n.b.fill_constant(shape=(prod(shape), 1), dtype=n.dtype(0), value=0.0)
    y = n.b.scatter(empty, n.b.reshape(n.x(1), shape=(-1,)), n.b.reshape(n.x(0), shape=(-1, 1)))
    y, asked = n.b.reshape(y, shape=shape), n.ints(2)
    if asked is None or tuple(asked) == shape:
        return y
    return n.b.pad(y, paddings=tuple(p for want, has in zip(asked, shape) for p in (0, want - has)))


def _windows(n: Node) -> list[AxisWindows]:
    at = windows(n, n.attr("kernel_shape"))
    if len(at) > 2:
        require_sizes(n, "a pool over more than two axes", n.shape(0)[1:])
    return at


def _spatial(n: Node) -> tuple[int, ...]:
    if n.rank() < 3:
        raise n.wrong(f"X must be [N, C, ...] with at least one axis to pool over, found {n.type()}")
    return tuple(range(2, n.rank()))


def _power(b: Any, x: Any, p: int) -> Any:
    """|x| to the power of p."""
    return b.square(x) if p == 2 else b.abs(x) if p == 1 else b.pow(b.abs(x), factor=float(p))


def _root(b: Any, x: Any, p: int) -> Any:
    return b.sqrt(x) if p == 2 else x if p == 1 else b.pow(x, factor=1 / p)


# -- with pool2d ------------------------------------------------------------------------------------------------------------------


def _is_plain(n: Node, at: Sequence[AxisWindows], dtypes: Collection[str] = FLOATS) -> bool:
    """Can pool2d compute it?"""
    return n.dtype(0) in dtypes and all(a.dilation == 1 and max(a.before, a.after) < a.kernel for a in at)


def _pooled(b: Any, x: Any, at: Sequence[AxisWindows], kind: str, exclusive: bool = True) -> Any:
    """Pool two axes at a time, which gives the largest, or the mean, of all: the count along an axis does not depend on the others."""
    if len(at) == 1:
        return b.squeeze(_pooled(b, b.unsqueeze(x, axes=(2,)), [identity_window(1), *at], kind, exclusive), axes=(2,))
    if len(at) == 2:
        return b.pool2d(x, ksize=tuple(a.kernel for a in at), strides=tuple(a.stride for a in at), **paddings_of(at),
                        pooling_type=kind, exclusive=exclusive)  # fmt: skip
    c, lead, (h, w) = x.shape[1], [a.size for a in at[:-2]], (at[-2].out, at[-1].out)
    x = b.reshape(x, shape=(-1, prod([c, *lead]), *x.shape[-2:]))
    x = b.reshape(_pooled(b, x, at[-2:], kind, exclusive), shape=(-1, c, *lead, h * w))
    x = _pooled(b, x, [*at[:-2], identity_window(h * w)], kind, exclusive)
    return b.reshape(x, shape=(-1, c, *(a.out for a in at)))


def _sums(n: Node, x: Any, at: Sequence[AxisWindows]) -> Any:
    """The sum of each window; padding counts as 0."""
    if _is_plain(n, at):
        return n.b.scale(_pooled(n.b, x, at, "avg", exclusive=False), scale=float(prod(a.kernel for a in at)))
    inside = window_table(at).inside
    rows = _gather_windows(n, x, at)
    if not inside.all():
        rows = n.b.elementwise_mul(rows, n.const(inside[:, :, None], np_dtype(n.dtype(0))))
    return _image_of(n, n.b.reduce_sum(rows, dim=(1,)), at)


# -- with a table -------------------------------------------------------------------------------------------------------------------


def _gather_windows(n: Node, x: Any, at: Sequence[AxisWindows]) -> Any:
    """[windows, taps, N * C]: the elements that the taps of each window read."""
    require_sizes(n, "a pool with dilations, with indices or of integers", [a.size for a in at])
    place = window_table(at).place
    rows = n.b.transpose(n.b.reshape(x, shape=(-1, prod(a.size for a in at))), axis=(1, 0))
    return n.b.reshape(n.b.gather(rows, n.const(place.reshape(-1))), shape=(*place.shape, -1))


def lowest_outside(n: Node, rows: Any, there: np.ndarray) -> Any:
    """`rows` [windows, taps, C], with the lowest value where a tap is not `there`, so that it is not the largest."""
    if there.all():
        return rows
    low = -np.inf if n.dtype(0) in FLOATS else np.iinfo(n.dtype(0)).min
    return n.b.where(n.const(there[:, :, None]), rows, n.const(low, np_dtype(n.dtype(0))))


def _image_of(n: Node, rows: Any, at: Sequence[AxisWindows]) -> Any:
    """[windows, N * C] as [N, C, ...]."""
    return n.b.reshape(n.b.transpose(rows, axis=(1, 0)), shape=(-1, n.shape(0)[1], *(a.out for a in at)))


def _positions_of_largest(n: Node, rows: Any, at: Sequence[AxisWindows]) -> Any:
    """The position of the largest element of each window in the flattened X, int64."""
    require_sizes(n, "a pool with indices", n.shape(0))
    place, images = window_table(at, column_major=bool(n.attr("storage_order", 0))).place, prod(n.shape(0)[:2])
    windows, taps = place.shape
    tap = n.b.elementwise_add(n.b.arg_max(rows, axis=1), n.const(np.arange(windows)[:, None] * taps))
    found = n.b.gather(n.const(place.reshape(-1, 1)), n.b.reshape(tap, shape=(-1,)))
    begin = n.const(np.arange(images) * prod(a.size for a in at))
    return _image_of(n, n.b.elementwise_add(n.b.reshape(found, shape=(windows, images)), begin), at)


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("pool2d")
def pool(op: Op) -> str:
    a, layout = op.attrs, op.attrs["data_format"]
    kind = {"max": "Max", "avg": "Average"}[a["pooling_type"]]
    if a["global_pooling"] or (a["adaptive"] and tuple(pair(op.type, "ksize", a["ksize"], 1)) == (1, 1)):
        return channels_first(op, "X", layout, lambda x: op.emit(f"Global{kind}Pool", x))
    attrs: dict[str, Any] = {"count_include_pad": int(not a["exclusive"])} if kind == "Average" else {}
    size = pair(op.type, "ksize", a["ksize"], 1)
    attrs |= _adaptive_windows(op) if a["adaptive"] else {"kernel_shape": list(size), **steps_of(op, "strides"), **pads_of(op)}
    if a["ceil_mode"]:
        attrs |= _last_windows(op)
    return channels_first(op, "X", layout, lambda x: op.emit(f"{kind}Pool", x, **attrs))


def _last_windows(op: Op) -> dict[str, Any]:
    """A window that begins after the image does not count. ceil_mode has this meaning from opset 22 on; explicit padding has it in all
    opsets."""
    a, image = op.attrs, image_of(op, "X")
    if ANY in image:
        return {"ceil_mode": 1}
    size = pair(op.type, "ksize", a["ksize"], 1)
    win = place_windows(op.type, image, size, a["strides"], a["paddings"], (1, 1), a["padding_algorithm"], True)
    top, bottom, left, right = win.pad
    return {"pads": [top, left, bottom, right], "auto_pad": "NOTSET"}


def _adaptive_windows(op: Op) -> dict[str, Any]:
    """Adaptive pooling whose windows all have the same size."""
    image = image_of(op, "X")
    cells = pair(op.type, "ksize", op.attrs["ksize"], 1)
    if ANY in image or any(d % n for d, n in zip(image, cells)):
        raise op.wrong(f"adaptive pooling of an image of {list(image)} to {list(cells)} has windows of several sizes, which ONNX lacks")
    size = [d // n for d, n in zip(image, cells)]
    return {"kernel_shape": size, "strides": size}
