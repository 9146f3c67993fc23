"""Several communicators and streams of one GPU: calls on one ring run in order, and calls on two rings at the same time.

A call on one ring waits for calls on other rings that write what it reads or writes, or read what it writes.
Source: `nccl_comm_num` of fluid's DistributeTranspilerConfig.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Span = tuple[int, int]  # the first address, and the one after the last

_MOST = 64  # calls of which the addresses are kept


class StartedCall(NamedTuple):
    """A call that may still run: its ring, the event after it, and the memory that it reads and writes."""

    ring: int
    event: Any
    reads: Sequence[Span]
    writes: Sequence[Span]


class RingOrder:
    """The streams of one rank's rings, and the calls that were started on them since compute last waited."""

    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}
        self._started: list[StartedCall] = []
        self._count = 0  # of all calls that were ever noted

    def add(self, ring: int, stream: Any) -> None:
        """A new ring: its stream begins after what runs on the others."""
        for other in self.streams.values():
            stream.wait_event(other.record())
        self.streams[ring] = stream

    def before(self, ring: int, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """Make a ring's stream wait for the calls on other rings that touch what a call reads and writes."""
        if len(self.streams) == 1:
            return
        read, written = spans(reads), spans(writes)
        latest: dict[int, Any] = {}
        for call in self._started:
            if call.ring != ring and (meet(written, call.reads) or meet(written, call.writes) or meet(read, call.writes)):
                latest[call.ring] = call.event
        for event in latest.values():
            self.streams[ring].wait_event(event)

    def after(self, ring: int, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """Note a call that was started."""
        if len(self.streams) == 1:
            return
        if len(self._started) == _MOST:  # the oldest half ends before anything else begins on any ring
            old, self._started = self._started[: _MOST // 2], self._started[_MOST // 2 :]
            for number, stream in self.streams.items():
                for event in {c.ring: c.event for c in old if c.ring != number}.values():
                    stream.wait_event(event)
        self._started.append(StartedCall(ring, self.streams[ring].record(), spans(reads), spans(writes)))
        self._count += 1

    def mark(self) -> tuple[int, list[Any]]:
        """A token for all calls that were started."""
        return self._count, [stream.record() for stream in self.streams.values()]

    def reached(self, token: tuple[int, list[Any]]) -> None:
        """Compute waits for a token: calls before it are over for all that starts later, since a call waits for compute."""
        self._started = self._started[len(self._started) - min(len(self._started), self._count - token[0]) :]


def spans(arrays: Sequence[Any]) -> list[Span]:
    """The memory of arrays, from their first to their last element."""
    return [(a.data.ptr, a.data.ptr + _extent(a)) for a in arrays if a.size]


def _extent(a: Any) -> int:
    if a.flags.c_contiguous:
        return a.nbytes
    return sum((size - 1) * stride for size, stride in zip(a.shape, a.strides, strict=True)) + a.dtype.itemsize


def meet(some: Sequence[Span], others: Sequence[Span]) -> bool:
    """Do two lists of spans have an address in common?

    >>> meet([(0, 4), (8, 12)], [(4, 8)]), meet([(0, 4)], [(3, 5)])
    (False, True)
    """
    return any(a < d and c < b for a, b in some for c, d in others)
