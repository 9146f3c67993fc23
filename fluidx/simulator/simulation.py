"""Simulation: what a simulated step took on each rank, why, and what no schedule could beat."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ..executor.plan.records import Plan
from ..hardware.records import Hardware
from ..ir.errors import ExecutionError
from ..profiler.profile import Profile
from .arguments import check_most, check_rank, check_what_if
from .comparison import Comparison, compare
from .critical_path import PathPart, critical_path
from .events import SimulatedRun
from .explanation import explain, show_seconds, summary
from .folding import FoldedRanks
from .memory import RankMemory
from .schedule import Compute, Meeting, Wait
from .simulated_profile import profile_of


class RankTimes(NamedTuple):
    """The seconds of the ranks of a class in a step: computing, communicating, `exposed` (communication that the compute stream waited
    for), and of that `waiting` for other ranks that came later, by rank."""

    ranks: tuple[int, ...]
    compute: float
    communication: float
    exposed: float
    waiting: Mapping[int, float]


class Bounds(NamedTuple):
    """Seconds that no schedule of these operators beats: the compute of the busiest rank, and the bytes of the busiest link."""

    compute: float
    link: float
    busiest_link: str

    @property
    def seconds(self) -> float:
        return max(self.compute, self.link)


class LinkUse(NamedTuple):
    """The bytes that pass a link in a step, and which fraction of the step it is busy at full speed."""

    nbytes: float
    use: float


@dataclass(eq=False)
class Simulation:
    """A predicted step. `seconds` lies between `low` and `high` by the spread of the costs; `calibrated` is False where the figures come
    from sheets.

    `str()` gives the result in words, `why()` the critical path, `table()` and `save(path)` what `fluidx trace` gives of a measured run,
    `against(profile)` the steps that differ most from a measured one, and `what_if(network=2.0)` the same step on a changed machine.
    """

    name: str
    hardware: Hardware
    world_size: int
    folded: FoldedRanks
    run: SimulatedRun
    plans: Sequence[Plan]  # of each schedule
    memory_of: Sequence[RankMemory]  # of each schedule
    spread: float
    lower_bound: str  # why the result is a lower bound only; "" if it is none
    links: Mapping[str, float]  # bytes a second of each link
    again: Callable[..., Simulation]

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.run.seconds

    @property
    def calibrated(self) -> bool:
        return self.hardware.measured is not None

    @property
    def low(self) -> float:
        return self.seconds * (1 - self.spread)

    @property
    def high(self) -> float:
        return self.seconds * (1 + self.spread)

    @cached_property
    def ranks(self) -> list[RankTimes]:
        """The times of each class of ranks."""
        return [self._times(k) for k in range(len(self.folded.schedules))]

    def _times(self, k: int) -> RankTimes:
        schedule, spans = self.folded.schedules[k], self.run.spans[k]
        compute = communication = exposed = 0.0
        waiting: dict[int, float] = {}
        blocked = [(s.came, s.ended) for i, s in zip(schedule.items, spans, strict=True) if isinstance(i, Wait) and s.ended > s.came]
        free = 0.0  # from then on the communication stream has nothing before an item
        for item, span in zip(schedule.items, spans, strict=True):
            if isinstance(item, Wait):
                exposed += span.ended - span.came
            elif isinstance(item, Compute) and not item.beside:
                compute += span.ended - span.began
            else:
                communication += span.ended - span.began
                exposed += 0.0 if item.beside else span.ended - span.came
                came = max(span.came, free) if item.beside else span.came
                if span.late is not None and span.began > came:
                    rank = self.folded.schedules[span.late[0]].rank
                    late = _within(blocked, came, span.began) if item.beside else span.began - came
                    if late > 0:
                        waiting[rank] = waiting.get(rank, 0.0) + late
                free = span.ended if item.beside else free
        return RankTimes(schedule.ranks, compute, communication, exposed, waiting)

    def of_rank(self, rank: int) -> RankTimes:
        """The times of a rank."""
        return self.ranks[self.folded.class_of[check_rank(rank, self.world_size)]]

    def memory(self, rank: int = 0) -> RankMemory:
        """The memory of a rank."""
        return self.memory_of[self.folded.class_of[check_rank(rank, self.world_size)]]

    @property
    def peak_memory(self) -> int:
        """The bytes that the system shows for the rank that needs most."""
        return max(m.system for m in self.memory_of)

    @property
    def exposed(self) -> float:
        """The largest exposed communication of a rank, in seconds."""
        return max(r.exposed for r in self.ranks)

    @cached_property
    def link_use(self) -> dict[str, LinkUse]:
        """The use of each link that messages pass."""
        return {link: LinkUse(n, n / self.links[link] / self.seconds if self.seconds else 0.0) for link, n in self.run.link_bytes.items()}

    @cached_property
    def bounds(self) -> Bounds:
        compute = max((s.compute_seconds for s in self.folded.schedules), default=0.0)
        link = max(self.run.link_bytes, key=lambda n: self.run.link_bytes[n] / self.links[n], default="")
        busiest = self.run.link_bytes[link] / self.links[link] if link else 0.0
        meetings = max((self._meeting_seconds(k) for k in range(len(self.folded.schedules))), default=0.0)
        return Bounds(compute, max(busiest, meetings), link if busiest >= meetings else "collectives")

    def _meeting_seconds(self, k: int) -> float:
        """The seconds of the collectives on one stream of a rank: they are one after the other."""
        found = {True: 0.0, False: 0.0}
        for item in self.folded.schedules[k].items:
            if isinstance(item, Meeting):
                found[item.beside] += item.seconds
        return max(found.values())

    @cached_property
    def critical_path(self) -> list[PathPart]:
        """What decided the time of the step, in order; the times of the parts add up to it."""
        return critical_path(self.folded, self.run)

    def what_if(self, network: float = 1.0, compute: float = 1.0, latency: float = 1.0) -> Simulation:
        """The same step with links of `network` times the bytes a second, compute of `compute` times the speed, and `latency` times the
        seconds of a message. Raises ExecutionError for a factor of 0 or below; `latency` may be 0."""
        factors = {"network": network, "compute": compute, "latency": latency}
        check_what_if(factors)
        return self.again(**factors)

    def compared_with(self, other: Simulation) -> str:
        """The time of the step, and how it compares with another one's."""
        if not isinstance(other, Simulation):
            raise ExecutionError(f"compared_with takes another prediction, which fx.simulate returns, got {other!r}")
        return f"{show_seconds(self.seconds)} a step, {self.seconds / other.seconds - 1:+.1%}"

    def why(self) -> str:
        """The critical path in words: what binds the step, which parts take most, whom they wait for, and what would help."""
        return explain(self)

    def profile(self, most: int = 16) -> Profile:
        """The step as a profile of the first `most` ranks, like a measured one."""
        return profile_of(self.folded, self.run, self.plans, self.world_size, check_most("most", most))

    def table(self, by: str = "op", sort: str = "total", limit: int = 20) -> str:
        """The operators as a table, like that of `fluidx trace`."""
        return self.profile().table(by, sort, limit, self._ceilings)

    def _ceilings(self, threads: int) -> Any:
        from .simulated_profile import ceilings_of

        return ceilings_of(self.hardware.device, threads)

    def save(self, path: str | Path) -> None:
        """Write the timeline as JSON that https://ui.perfetto.dev opens, like that of `fluidx trace`."""
        self.profile().save(path)

    def against(self, measured: str | Path | Profile) -> Comparison:
        """The prediction beside a measured run, a Profile or a timeline of `fluidx trace`: the steps that differ most come first."""
        return compare(self.profile(), measured)

    def __str__(self) -> str:
        return summary(self)


def _within(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """The seconds from `begin` to `end` that are in one of these intervals, which are in order and apart.

    >>> _within([(0.0, 2.0), (3.0, 4.0), (6.0, 9.0)], 1.0, 7.0)
    3.0
    """
    k, total = max(0, bisect_left(intervals, (begin, begin)) - 1), 0.0
    while k < len(intervals) and intervals[k][0] < end:
        total += max(0.0, min(intervals[k][1], end) - max(intervals[k][0], begin))
        k += 1
    return total
