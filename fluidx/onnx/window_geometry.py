"""Geometry of the windows of convolutions and pools along each axis, computed from ONNX attributes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..ir import ANY
from .limits import checked_shape
from .node import Node


class AxisWindows(NamedTuple):
    """Windows along one axis. `size` and `out` are ANY for an open axis.

    With `after` elements of padding at the end, exactly `out` windows fit. `depends` is how the padding of an open axis depends on its
    size: "SAME" or "CEIL", as `padding_algorithm` and `ceil_mode` of the operators on images; "" if it does not.
    """

    size: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    padded: int  # where the counted padding ends; a last window may reach beyond it
    out: int
    depends: str = ""

    @property
    def reads(self) -> np.ndarray:
        """[out, kernel]: the position that each tap of each window reads. In padding it is negative or not below `size`."""
        checked_shape([self.out, self.kernel])
        return np.arange(self.out)[:, None] * self.stride + np.arange(self.kernel) * self.dilation - self.before


def identity_window(size: int) -> AxisWindows:
    """Windows of one element, which leave an axis of `size` as it is."""
    return AxisWindows(size, 1, 1, 1, 0, 0, size, size)


def extent(kernel: int, dilation: int) -> int:
    return (kernel - 1) * dilation + 1


def pad_pairs(pads: Sequence[int]) -> list[tuple[int, int]]:
    """ONNX's list of all begins and then all ends, as (before, after) for each axis."""
    half = len(pads) // 2
    return list(zip(pads[:half], pads[half:]))


def windows(n: Node, kernel: Sequence[int], sizes: Sequence[int] | None = None) -> list[AxisWindows]:
    """The windows of a node over axes of `sizes`, by default axes 2 and later of operand 0."""
    sizes = n.shape(0)[2:] if sizes is None else sizes
    rank = len(sizes)
    strides, dilations = n.attr("strides", [1] * rank), n.attr("dilations", [1] * rank)
    pads = pad_pairs(n.attr("pads", [0] * (2 * rank)))
    if not len(sizes) == len(kernel) == len(strides) == len(dilations) == len(pads):
        raise n.wrong(f"kernel {list(kernel)}, strides {strides}, dilations {dilations} and pads do not fit an image of {list(sizes)}")
    return [_along(n, *axis) for axis in zip(sizes, kernel, strides, dilations, pads)]


def _along(n: Node, size: int, kernel: int, stride: int, dilation: int, pads: tuple[int, int]) -> AxisWindows:
    auto, span = n.attr("auto_pad", "NOTSET"), extent(kernel, dilation)
    before, after = pads if auto == "NOTSET" else (0, 0)
    if size == ANY:
        if auto == "SAME_LOWER" and stride > 1:
            require_sizes(n, f"auto_pad {auto} with strides", [size])
        depends = "SAME" if auto == "SAME_UPPER" else "CEIL" if n.attr("ceil_mode", 0) and stride > 1 and auto == "NOTSET" else ""
        before, after = _same(auto, span - 1) if auto.startswith("SAME") else (before, after)
        return AxisWindows(ANY, kernel, stride, dilation, before, after, ANY, ANY, depends if stride > 1 else "")
    if auto.startswith("SAME"):
        out = -(-size // stride)
        before, after = _same(auto, max((out - 1) * stride + span - size, 0))
        return AxisWindows(size, kernel, stride, dilation, before, after, size + before + after, out)
    room = size + before + after - span
    if room < 0:
        raise n.wrong(f"a window of {span} does not fit an axis of {size} with padding {before} and {after}")
    out = (room + (stride - 1 if n.attr("ceil_mode", 0) else 0)) // stride + 1
    if (out - 1) * stride >= size + before and n.attr("ceil_mode", 0):  # otherwise the last window would begin in the padding at the end
        out -= 1
    needed = max((out - 1) * stride + span - size - before, 0)
    return AxisWindows(size, kernel, stride, dilation, before, needed, size + before + after, out)


def _same(auto: str, total: int) -> tuple[int, int]:
    less, more = total // 2, total - total // 2
    return (less, more) if auto == "SAME_UPPER" else (more, less)


def require_sizes(n: Node, what: str, sizes: Sequence[int]) -> None:
    """Raise OnnxError if one of the sizes is open."""
    if ANY in sizes:
        raise n.wrong(f"{what} needs sizes that X {n.type()} leaves open; import the model with X of one shape")


def paddings_of(at: Sequence[AxisWindows]) -> dict[str, Any]:
    """The padding of windows along two axes, as attributes of fluidx's operators on images."""
    how = {a.depends for a in at}
    if how == {""}:
        return {"paddings": flat_paddings(at)}
    if "SAME" in how:  # by the same rule along an axis of known size, or with stride 1
        return {"padding_algorithm": "SAME"}
    return {"paddings": flat_paddings(at), "ceil_mode": True}


def flat_paddings(at: Sequence[AxisWindows]) -> tuple[int, ...]:
    """The padding before and after each axis, as fluidx's operators take it."""
    return tuple(p for a in at for p in (a.before, a.after))


class WindowIndices(NamedTuple):
    """The elements that windows read.

    `place` [windows, taps] are positions in the flattened image. If `inside` is False, the tap is in padding, and `place` names another
    element of the window.
    """

    place: np.ndarray
    inside: np.ndarray


def window_table(at: Sequence[AxisWindows], column_major: bool = False) -> WindowIndices:
    """The table of windows over axes of known sizes. Positions count by rows, or with `column_major` with the first axis fastest."""
    rank, sizes = len(at), [a.size for a in at]
    checked_shape([a.out for a in at] + [a.kernel for a in at])
    steps = [prod(sizes[:k]) if column_major else prod(sizes[k + 1 :]) for k in range(rank)]
    place, inside = np.zeros((1,) * (2 * rank), np.int64), np.ones((1,) * (2 * rank), bool)
    for k, a in enumerate(at):
        shape = [1] * (2 * rank)
        shape[k], shape[rank + k] = a.out, a.kernel
        reads = a.reads.reshape(shape)
        inside = inside & (reads >= 0) & (reads < a.size)
        place = place + reads * steps[k]
    taps = prod(a.kernel for a in at)
    place, inside = place.reshape(-1, taps), inside.reshape(-1, taps)
    first = np.take_along_axis(place, inside.argmax(axis=1)[:, None], axis=1)
    return WindowIndices(np.clip(np.where(inside, place, first), 0, prod(sizes) - 1), inside)
