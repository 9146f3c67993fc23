"""Contiguous buffers for parts that are strided or apart from each other: NCCL sends and receives contiguous memory.

Scratch is allocated and filled on the communication stream, because CuPy's pool reuses its memory only for later work of that stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def even(parts: Sequence[Any]) -> bool:
    return all(p.size == parts[0].size for p in parts)


def _in_a_row(parts: Sequence[Any]) -> bool:
    """Are parts of one size contiguous, each right behind the one before?"""
    at, step = parts[0].data.ptr, parts[0].nbytes
    return all(p.flags.c_contiguous and p.data.ptr == at + k * step for k, p in enumerate(parts))


class NcclParts:
    """The buffers of calls on one communication stream."""

    def __init__(self, cupy: Any, stream: Any):
        self.cupy, self.stream = cupy, stream

    def tight(self, x: Any) -> Any:
        """`x`, or a contiguous copy of it."""
        if x.flags.c_contiguous:
            return x
        with self.stream:
            return self.cupy.ascontiguousarray(x)

    def together(self, parts: Sequence[Any]) -> Any:
        """The first of the parts if they are adjacent in memory, else an array of copies of them."""
        if _in_a_row(parts):
            return parts[0]
        with self.stream:
            scratch = self.cupy.empty((len(parts), parts[0].size), parts[0].dtype)
            for row, p in zip(scratch, parts, strict=True):
                row.reshape(p.shape)[...] = p
        return scratch

    @contextmanager
    def landing(self, parts: Sequence[Any], together: bool = False) -> Iterator[list[Any]]:
        """Contiguous buffers for received data (adjacent in memory if `together`); after the block, data are copied to `parts`."""
        if _in_a_row(parts) if together else all(p.flags.c_contiguous for p in parts):
            yield list(parts)
            return
        with self.stream:
            if together:
                places = [row.reshape(p.shape) for row, p in zip(self.cupy.empty((len(parts), parts[0].size), parts[0].dtype), parts)]
            else:
                places = [p if p.flags.c_contiguous else self.cupy.empty(p.shape, p.dtype) for p in parts]
        yield places
        with self.stream:
            for place, p in zip(places, parts, strict=True):
                if place is not p:
                    p[...] = place
