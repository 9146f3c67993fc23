"""Cut parameters into chunks, and choose the root of each chunk: the rank that updates it."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...ir.errors import TranspileError, nearest

METHODS = ("greedy", "hash", "round_robin")
_SMALLEST = 16 * 1024  # bytes; a smaller chunk costs more in messages than it gains in balance


class RootChunk(NamedTuple):
    """Elements [start, stop) of a flattened parameter; `root` is the rank that updates them."""

    param: str
    start: int
    stop: int
    nbytes: int
    root: int = 0


def cut(param: str, numel: int, itemsize: int, chunk_bytes: int) -> list[RootChunk]:
    """Equal chunks of at most `chunk_bytes`.

    >>> [(c.start, c.stop) for c in cut("w", 10, 4, 16)]
    [(0, 4), (4, 7), (7, 10)]
    """
    pieces = max(1, -(-numel // max(1, int(chunk_bytes) // itemsize)))
    each, rest = divmod(numel, pieces)
    out, start = [], 0
    for k in range(pieces):
        stop = start + each + (k < rest)
        out.append(RootChunk(param, start, stop, (stop - start) * itemsize))
        start = stop
    return out


def chunk_bytes(total: int, ranks: int, chunk_mb: float) -> int:
    """The chunk size: `chunk_mb`, or less for a small model, so that every rank gets several chunks."""
    return int(min(chunk_mb * 2**20, max(_SMALLEST, total / (4 * ranks))))


def fill(nbytes: Mapping[str, int], mb: float, first_mb: float) -> list[list[str]]:
    """Names in buckets of at most `mb` MiB, the first of `first_mb`, in order. A larger value gets its own bucket.

    >>> fill({"a": 2**19, "b": 2**20, "c": 2**20, "d": 2**22, "e": 4}, 2, 1)
    [['a'], ['b', 'c'], ['d'], ['e']]
    """
    out: list[list[str]] = []
    room = 0.0
    for name, size in nbytes.items():
        if not out or size > room:
            room = (mb if out else first_mb) * 2**20
            out.append([])
        out[-1].append(name)
        room -= size
    return out


def assign(chunks: Sequence[RootChunk], ranks: int, method: str = "greedy") -> list[RootChunk]:
    """Give every chunk a root.

    "greedy": largest first, each to the least loaded rank (LPT, Graham 1969), ties by order: balanced and the same everywhere.
    "round_robin": in order, each to the next rank.
    "hash": CRC-32 of the parameter name and start, modulo ranks, as the design document's hashing; fixed across processes.
    """
    if method not in METHODS:
        raise TranspileError(f"unknown roots={method!r}; {nearest(method, METHODS, 'there are')}")
    roots = [0] * len(chunks)
    if method == "round_robin":
        roots = [i % ranks for i in range(len(chunks))]
    elif method == "hash":
        for i, c in enumerate(chunks):
            roots[i] = zlib.crc32(f"{c.param}:{c.start}".encode()) % ranks
    else:
        loads = [(0, r) for r in range(ranks)]
        for i in sorted(range(len(chunks)), key=lambda i: (-chunks[i].nbytes, i)):
            load, r = heapq.heappop(loads)
            roots[i] = r
            heapq.heappush(loads, (load + chunks[i].nbytes, r))
    return [RootChunk(c.param, c.start, c.stop, c.nbytes, r) for c, r in zip(chunks, roots, strict=True)]


def balance(chunks: Sequence[RootChunk], ranks: int) -> float:
    """The bytes of the rank with the most, divided by the mean: 1.0 is perfect.

    >>> balance(assign(cut("w", 100, 4, 40), 5), 5)
    1.0
    """
    loads = [0] * ranks
    for c in chunks:
        loads[c.root] += c.nbytes
    return max(loads) * ranks / max(1, sum(loads))
