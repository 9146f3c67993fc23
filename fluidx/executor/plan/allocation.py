"""Memory of a plan: offsets in an arena by lifetime (values that are not live at the same time share memory), and aligned arrays."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
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
    """Offsets for the intervals in one arena, and the arena's size: the smaller one of two arenas, in which intervals are placed in the
    order of their starts, or backwards in the order of their stops. What lives until the end, such as gradients, lies closely in the second
    one.

    >>> assign([Interval(100, 0, 1), Interval(100, 1, 2), Interval(100, 2, 3)])
    ([0, 128, 0], 256)
    """
    sizes = [max(ALIGN, -(-it.nbytes // ALIGN) * ALIGN) for it in intervals]
    forward = _place(sizes, [it.start for it in intervals], [it.stop for it in intervals])
    if forward[1] == _most_live(sizes, intervals):
        return forward
    backward = _place(sizes, [-it.stop for it in intervals], [-it.start for it in intervals])
    return min(forward, backward, key=lambda placed: placed[1])


def _most_live(sizes: Sequence[int], intervals: Sequence[Interval]) -> int:
    """The most bytes that are live at a time: no arena is smaller."""
    changes = [(it.start, 0, size) for it, size in zip(intervals, sizes, strict=True)]
    changes += [(it.stop, 1, -size) for it, size in zip(intervals, sizes, strict=True)]
    changes.sort()
    return max(accumulate([size for _, _, size in changes]), default=0)


def _place(sizes: Sequence[int], starts: Sequence[float], stops: Sequence[float]) -> tuple[list[int], int]:
    """Offsets and the size of the arena if each interval, in order of start, gets the best fit among the free gaps, or grows the arena."""
    ends: list[tuple[float, int]] = []  # (stop, number of the interval), kept as a heap
    gaps = _Gaps()
    offsets = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=starts.__getitem__):
        while ends and ends[0][0] < starts[i]:
            _, j = heappop(ends)
            gaps.free(offsets[j], sizes[j])
        offsets[i] = gaps.take(sizes[i])
        heappush(ends, (stops[i], i))
    return offsets, gaps.top


class _Gaps:
    """The free gaps below `top`, the end of the arena, by offset and by size. Neighbouring gaps are one."""

    def __init__(self) -> None:
        self.top = 0
        self.stop_of: dict[int, int] = {}  # offset of a gap -> its end
        self.start_of: dict[int, int] = {}
        self.by_size: list[tuple[int, int]] = []  # (size, offset), sorted

    def free(self, start: int, size: int) -> None:
        """Add a gap, and join it with its neighbours."""
        stop = start + size
        if (before := self.start_of.get(start)) is not None:
            self._remove(before, start)
            start = before
        if (behind := self.stop_of.get(stop)) is not None:
            self._remove(stop, behind)
            stop = behind
        self._add(start, stop)

    def take(self, size: int) -> int:
        """The offset of `size` bytes: in the smallest gap that is large enough, or at the end of the arena."""
        k = bisect_left(self.by_size, (size, -1))
        if k < len(self.by_size):
            room, start = self.by_size[k]
            self._remove(start, start + room)
            if room > size:
                self._add(start + size, start + room)
            return start
        start = self.start_of.get(self.top, self.top)  # a gap at the end grows
        if start < self.top:
            self._remove(start, self.top)
        self.top = start + size
        return start

    def _add(self, start: int, stop: int) -> None:
        self.stop_of[start], self.start_of[stop] = stop, start
        insort(self.by_size, (stop - start, start))

    def _remove(self, start: int, stop: int) -> None:
        del self.stop_of[start], self.start_of[stop]
        del self.by_size[bisect_left(self.by_size, (stop - start, start))]


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


def may_be_elsewhere() -> bool:
    """May arrays be in other memory than that which this module allocates? Not if other ranks see it."""
    return new_bytes is _own_bytes


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
