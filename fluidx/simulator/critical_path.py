"""The critical path of a simulated run: walked back from its latest end, over what each part waited for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .events import SimulatedRun
from .folding import FoldedRanks
from .schedule import Compute, RankSchedule, Wait


class PathPart(NamedTuple):
    """A part of the critical path: an item of a schedule, from `start` to `stop`. `computes`: it is no communication."""

    schedule: int
    item: int
    start: float
    stop: float
    computes: bool

    @property
    def seconds(self) -> float:
        return self.stop - self.start


def critical_path(folded: FoldedRanks, run: SimulatedRun) -> list[PathPart]:
    """The parts, the first one first. Each begins when the one before it ends, so their times add up to the time of the run.

    >>> from fluidx.simulator.events import simulate_events
    >>> from fluidx.simulator.folding import unfolded
    >>> from fluidx.simulator.network import shared_link
    >>> from fluidx.simulator.schedule import Meeting
    >>> ranks = unfolded([[Compute((0,), (work,)), Meeting((1,), "dp", (0, 1), 0.5)] for work in (1.0, 3.0)])
    >>> [(p.schedule, p.item, p.seconds) for p in critical_path(ranks, simulate_events(ranks, shared_link(0.0, 1.0)))]
    [(1, 0, 3.0), (0, 1, 0.5)]
    """
    return _Walk(folded, run).parts()


def _earlier(schedule: RankSchedule) -> Iterator[tuple[int | None, int | None]]:
    """For each item, the last one before it on the communication stream, and on the compute stream."""
    beside: int | None = None
    main: int | None = None
    for i, item in enumerate(schedule.items):
        yield beside, main
        if item.beside:
            beside = i
        else:
            main = i


class _Walk:
    def __init__(self, folded: FoldedRanks, run: SimulatedRun):
        self.schedules, self.spans = folded.schedules, run.spans
        self.earlier = [list(_earlier(s)) for s in self.schedules]

    def parts(self) -> list[PathPart]:
        ends = [(s.ended, k, i) for k, some in enumerate(self.spans) for i, s in enumerate(some)]
        if not ends:
            return []
        # of items that end at the same time, the last one of the lowest schedule
        _, k, i = max(ends, key=lambda e: (e[0], -e[1], e[2]))
        found: list[PathPart] = []
        at: tuple[int, int] | None = (k, i)
        while at is not None:
            at = self.before(*at, found)
        return found[::-1]

    def before(self, k: int, i: int, found: list[PathPart]) -> tuple[int, int] | None:
        """Note the time of an item, and return the item whose end let it begin."""
        item, span = self.schedules[k].items[i], self.spans[k][i]
        if isinstance(item, Wait):
            waited = span.ended > span.came or self.earlier[k][i][1] is None
            return (k, item.item) if waited else self.arrival(k, i)
        if span.ended > span.began:
            found.append(PathPart(k, i, span.began, span.ended, isinstance(item, Compute)))
        if span.late is not None and span.began > span.came:
            return self.arrival(*span.late)
        return self.arrival(k, i)

    def arrival(self, k: int, i: int) -> tuple[int, int] | None:
        """The item whose end let the stream of an item come to it."""
        beside, main = self.earlier[k][i]
        if self.schedules[k].items[i].beside and beside is not None and self.spans[k][beside].ended >= self.spans[k][i].came:
            return k, beside
        return None if main is None else (k, main)
