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
    own_threads: int | None = None  # that its kernels have in a process of its own

    @property
    def threads(self) -> int:
        """That its kernels have."""
        return threads_of(self.ranks) if self.own_threads is None else self.own_threads

    @property
    def span(self) -> tuple[int, int]:
        """When its first step began, and when its last one ended: of two threads, each has its own order."""
        return min(start for _, start, _ in self.times), max(stop for _, _, stop in self.times)


def rate(amount: int, seconds: float) -> float:
    """10^9 of something a second; 0 where no time passed."""
    return amount / seconds / 1e9 if seconds > 0 else 0.0
