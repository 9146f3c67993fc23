"""Memory of a plan: offsets in an arena by lifetime (values that are not live at the same time share memory), and aligned arrays."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import prod
from typing import Any

import numpy as np

ALIGN = 64  # bytes: a cache line, and the alignment of vector loads


@dataclass(slots=True)
class Interval:
    """Bytes that are live from operator `start` to operator `stop`, both included. Operators of sub-blocks have fractional numbers."""

    nbytes: int
    start: float
    stop: float


def assign(intervals: Sequence[Interval]) -> tuple[list[int], int]:
    """Offsets for the intervals in one arena, and the arena's size. In order of start, each gets the best fit among the free gaps.

    >>> assign([Interval(100, 0, 1), Interval(100, 1, 2), Interval(100, 2, 3)])
    ([0, 128, 0], 256)
    """
    starts = [it.start for it in intervals]
    ends: list[tuple[float, int]] = []  # (stop, block index), kept as a heap
    free: list[tuple[int, int]] = []  # (size, offset), sorted
    top = 0
    offsets = [0] * len(intervals)
    sizes = [max(ALIGN, -(-it.nbytes // ALIGN) * ALIGN) for it in intervals]
    for i in sorted(range(len(intervals)), key=starts.__getitem__):
        start, need = starts[i], sizes[i]
        while ends and ends[0][0] < start:
            _, j = heappop(ends)
            insort(free, (sizes[j], offsets[j]))
        k = bisect_left(free, (need, -1))
        # a gap of at least twice the size stays free for a larger value: for a parameter that two ranks share, not for its half
        if k < len(free) and (free[k][0] < 2 * need or free[k][0] <= 4096):
            sizes[i], offsets[i] = free.pop(k)
        else:
            offsets[i], top = top, top + need
        heappush(ends, (intervals[i].stop, i))
    return offsets, top


def _own_bytes(nbytes: int) -> np.ndarray:
    try:
        return np.zeros(nbytes, np.uint8)
    except (ValueError, OverflowError):  # more bytes than an array can have
        raise MemoryError(f"{nbytes} bytes") from None


new_bytes: Callable[[int], np.ndarray] = _own_bytes  # zeros; the process of a rank replaces it by memory that other ranks see


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros aligned to a cache line. NumPy's are not aligned, so that half the loads of a vector kernel would touch two lines.

    >>> zeros((3, 5), np.dtype("float32")).ctypes.data % ALIGN
    0
    """
    return aligned_bytes(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def aligned_bytes(nbytes: int) -> np.ndarray:
    """Zero bytes that begin on a cache line."""
    raw = new_bytes(nbytes + ALIGN)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + nbytes]


def copied(a: np.ndarray) -> np.ndarray:
    """A copy aligned to a cache line."""
    out = zeros(a.shape, a.dtype)
    out[...] = a
    return out


def put(a: Any, value: np.ndarray) -> None:
    """Copy a host array into an array of the host or of a GPU."""
    if type(a) is np.ndarray:
        np.copyto(a, value)
    else:
        with a.device:  # the current device of this thread may be another one
            a.set(np.asarray(value, order="C"))


def fetched(a: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Copy a GPU array to the host, into the contiguous array `out` if it is given."""
    with a.device:
        return a.get(out=out)


def carve(arena: Any, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array of `shape` and `dtype` over the arena's bytes at `offset`."""
    n = dtype.itemsize
    for d in shape:
        n *= d
    return arena[offset : offset + n].view(dtype).reshape(shape)


def carve_strided(xp: Any, arena: Any, offset: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]) -> Any:
    """The same for a non-empty value with strides, in bytes."""
    stop = offset + dtype.itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return xp.lib.stride_tricks.as_strided(arena[offset:stop].view(dtype), shape, strides)
