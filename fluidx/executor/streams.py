"""Where the compute stream must wait for the communication stream, derived from what the operators read and write.

Communication runs on a stream of its own, in program order. It starts when the compute stream has reached it; compute goes on
meanwhile, until the first operator that reads what is being received, or overwrites what is being sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """What one step of a plan touches: the storage that it reads and that it writes."""

    reads: frozenset[Hashable]
    writes: frozenset[Hashable]
    communicates: bool = False


def waits(steps: Sequence[Access]) -> dict[int, list[int]]:
    """For each step that must wait: the communication steps that are finished then, the last being the one it waits for.

    Key len(steps) stands for the end of the run.

    >>> a, b = frozenset("a"), frozenset("b")
    >>> waits([Access(a, b, True), Access(a, frozenset("c")), Access(b, a)])
    {2: [0]}
    """
    readers: dict[Hashable, list[int]] = {}  # storage -> running communication that reads it
    writers: dict[Hashable, list[int]] = {}
    running: set[int] = set()
    out: dict[int, list[int]] = {}
    for j, step in enumerate(steps):
        if not step.communicates:  # communication follows communication in order, by its stream
            met = {i for s in step.reads | step.writes for i in writers.get(s, ())}
            met |= {i for s in step.writes for i in readers.get(s, ())}
            met &= running
            if met:
                last = max(met)  # what was started earlier on the stream is finished then too
                out[j] = sorted(i for i in running if i <= last)
                running = {i for i in running if i > last}
            continue
        running.add(j)
        for s in step.reads:
            readers.setdefault(s, []).append(j)
        for s in step.writes:
            writers.setdefault(s, []).append(j)
    if running:
        out[len(steps)] = sorted(running)
    return out
