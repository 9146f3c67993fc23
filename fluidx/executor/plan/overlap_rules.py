"""What runs beside compute, and where the two must wait for each other, derived from what the operators read and write.

Communication runs on a stream of its own, in program order: of a GPU, or on a second thread of a CPU rank. It starts when compute has
reached it; compute goes on meanwhile, until the first operator that reads what is being received, or overwrites what is being sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Access:
    """What one step of a plan touches: the storage that it reads and that it writes, and how many bytes that is."""

    reads: frozenset[Hashable]
    writes: frozenset[Hashable]
    communicates: bool = False
    follows: bool = False  # it may run behind communication, on its stream, where compute would have to wait for that before it
    nbytes: int = 0


class Overlap(NamedTuple):
    """The steps that run beside compute. For each step that must wait: those of them that are finished then, the last being the one that
    it waits for; key len(steps) stands for the end of the run."""

    overlapped: frozenset[int]
    waits: dict[int, list[int]]


def overlap(steps: Sequence[Access]) -> Overlap:
    """What runs beside compute, and who waits for it.

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
        if step.communicates or step.follows and received:  # what is beside compute follows in order, by its stream
            running.add(j)
            started.append(j)
            for s in step.reads:
                readers.setdefault(s, []).append(j)
            for s in step.writes:
                writers.setdefault(s, []).append(j)
            continue
        met = received | running & {i for s in step.writes for i in readers.get(s, ())}
        if met:
            last = max(met)  # what was started earlier on the stream is finished then too
            out[j] = sorted(i for i in running if i <= last)
            running = {i for i in running if i > last}
    if running:
        out[len(steps)] = sorted(running)
    return Overlap(frozenset(started), out)


def hidden(steps: Sequence[Access], found: Overlap) -> int:
    """The bytes that steps touch while some of the others are at work beside them, of those that compute or those that communicate,
    whichever are fewer.

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
