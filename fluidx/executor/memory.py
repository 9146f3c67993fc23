"""Assign buffers to values by lifetime: two values that never live at the same time share memory."""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

ALIGN = 64  # bytes: a cache line, and what vector loads like


@dataclass
class Interval:
    """Bytes needed from operator `start` to operator `stop`, both included."""

    nbytes: int
    start: int
    stop: int


def assign(intervals: list[Interval]) -> tuple[list[int], int]:
    """Offsets for the intervals in one arena, and the arena's size. Best fit among the gaps free at the moment, in order of start.

    >>> assign([Interval(100, 0, 1), Interval(100, 1, 2), Interval(100, 2, 3)])
    ([0, 128, 0], 256)
    """
    order = sorted(range(len(intervals)), key=lambda i: intervals[i].start)
    ends: list[tuple[int, int]] = []  # (stop, block index), kept as a heap
    free: list[tuple[int, int]] = []  # (size, offset), sorted
    top = 0
    offsets = [0] * len(intervals)
    sizes: dict[int, int] = {}
    for i in order:
        it = intervals[i]
        while ends and ends[0][0] < it.start:
            _, j = heapq.heappop(ends)
            bisect.insort(free, (sizes[j], offsets[j]))
        need = max(ALIGN, -(-it.nbytes // ALIGN) * ALIGN)
        k = bisect.bisect_left(free, (need, -1))
        # a block more than twice too large stays for a larger value
        if k < len(free) and free[k][0] <= max(2 * need, 4096):
            size, offset = free.pop(k)
        else:
            size, offset, top = need, top, top + need
        offsets[i], sizes[i] = offset, size
        heapq.heappush(ends, (it.stop, i))
    return offsets, top


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that begin on a line of the cache. NumPy's own begin anywhere, and then half the loads of a vector kernel touch two lines.

    >>> zeros((3, 5), np.dtype("float32")).ctypes.data % ALIGN
    0
    """
    n, spare = prod(shape), ALIGN // dtype.itemsize
    raw = np.zeros(n + spare, dtype)
    start = -raw.ctypes.data % ALIGN // dtype.itemsize
    return raw[start : start + n].reshape(shape)


def copied(a: np.ndarray) -> np.ndarray:
    """A copy that begins on a line of the cache."""
    out = zeros(a.shape, a.dtype)
    out[...] = a
    return out


def carve(arena: Any, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array of `shape` and `dtype` in the arena's bytes at `offset`."""
    n = dtype.itemsize
    for d in shape:
        n *= d
    return arena[offset : offset + n].view(dtype).reshape(shape)


def carve_strided(xp: Any, arena: Any, offset: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]) -> Any:
    """The same with these distances, in bytes, between the elements of a value that has some."""
    stop = offset + dtype.itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return xp.lib.stride_tricks.as_strided(arena[offset:stop].view(dtype), shape, strides)
