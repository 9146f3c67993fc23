"""One profiled run of a program on one rank: its calls and their times."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..executor.plan.records import Plan
from ..executor.run.call_descriptions import CallDescription, RemotePlanValues
from .ceilings import threads_of


@dataclass(eq=False)
class RankRun:
    """One run of a program on one rank. `times` are (number of the call, start and stop in ns)."""

    plan: Plan | RemotePlanValues
    calls: list[CallDescription]
    rank: int | None  # None on one device
    ranks: int
    step: int
    times: list[tuple[int, int, int]] = field(default_factory=list)
    own_threads: int | None = None  # its kernel threads, if the rank is a process of its own

    @property
    def threads(self) -> int:
        """The number of its kernel threads."""
        return threads_of(self.ranks) if self.own_threads is None else self.own_threads

    @property
    def span(self) -> tuple[int, int]:
        """The start of its first step and the end of its last one. With two threads, steps are not in one order."""
        return min(start for _, start, _ in self.times), max(stop for _, _, stop in self.times)


def rate(amount: int, seconds: float) -> float:
    """A rate in 10^9 a second; 0 if no time passed."""
    return amount / seconds / 1e9 if seconds > 0 else 0.0
