"""Overlap rules: which steps run at the same time as compute, and where the two must wait, derived from reads and writes.

Communication runs in program order on its own stream: a GPU stream, or a second thread of a CPU rank. It starts when compute reaches it.
Compute goes on until the first operator that reads a value being received, or overwrites a value being sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Access:
    """The storage that one plan step reads and writes, and its size in bytes."""

    reads: frozenset[Hashable]
    writes: frozenset[Hashable]
    communicates: bool = False
    follows: bool = False  # it may run on the communication stream if compute would have to wait for communication before it
    nbytes: int = 0


class Overlap(NamedTuple):
    """The steps that overlap with compute. `waits`: for each step that must wait, the overlapped steps that have ended then; it waits for
    the last of them. Key len(steps) stands for the end of the run."""

    overlapped: frozenset[int]
    waits: dict[int, list[int]]


def overlap(steps: Sequence[Access]) -> Overlap:
    """The steps that overlap with compute, and the steps that wait for them.

    >>> a, b = frozenset("a"), frozenset("b")
    >>> overlap([Access(a, b, True), Access(a, frozenset("c")), Access(b, a)])
    Overlap(overlapped=frozenset({0}), waits={2: [0]})
    """
    readers: dict[Hashable, list[int]] = {}  # storage -> running communication that reads it
    writers: dict[Hashable, list[int]] = {}
    running: set[int] = set()
    started: list[int] = []
    out: dict[int, list[int]] = {}
    for j, step in enumerate(steps):
        received = running & {i for s in step.reads | step.writes for i in writers.get(s, ())}
        if step.communicates or step.follows and received:  # overlapped steps run in order, on one stream
            running.add(j)
            started.append(j)
            for s in step.reads:
                readers.setdefault(s, []).append(j)
            for s in step.writes:
                writers.setdefault(s, []).append(j)
            continue
        met = received | running & {i for s in step.writes for i in readers.get(s, ())}
        if met:
            last = max(met)  # steps that started earlier on the stream have ended too
            out[j] = sorted(i for i in running if i <= last)
            running = {i for i in running if i > last}
    if running:
        out[len(steps)] = sorted(running)
    return Overlap(frozenset(started), out)


def hidden(steps: Sequence[Access], found: Overlap) -> int:
    """The bytes that compute steps touch during overlap, or the bytes of the overlapped steps, whichever is less.

    >>> some = [Access(frozenset("a"), frozenset("b"), True, nbytes=80), Access(frozenset("x"), frozenset("y"), nbytes=30)]
    >>> hidden(some, overlap(some))
    30
    """
    running: set[int] = set()
    computed = communicated = 0
    for j, step in enumerate(steps):
        running.difference_update(found.waits.get(j, ()))
        if j in found.overlapped:
            running.add(j)
            communicated += step.nbytes
        elif running:
            computed += step.nbytes
    return min(computed, communicated)
