"""The schedule of one rank: what it does in a run, in order, with the seconds of each part. The event simulation runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Item:
    """A part of a schedule. `steps` are the numbers of its plan steps. `beside`: it runs on the communication stream. `dispatch`: seconds
    in which the host issues it, in the order of the items and ahead of the device."""

    steps: tuple[int, ...]
    beside: bool = field(default=False, kw_only=True)
    dispatch: float = field(default=0.0, kw_only=True)


@dataclass(eq=False)
class Compute(Item):
    """Steps without communication, with the seconds of each."""

    seconds: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.seconds)


@dataclass(eq=False)
class Meeting(Item):
    """A collective: it begins when the last of `members` has come, and ends for all of them `seconds` later."""

    group: str
    members: tuple[int, ...]
    seconds: float
    nbytes: int = 0


@dataclass(eq=False)
class Exchange(Item):
    """Messages that start together, as (the other rank, bytes)."""

    sends: tuple[tuple[int, int], ...] = ()
    receives: tuple[tuple[int, int], ...] = ()


@dataclass(eq=False)
class Wait(Item):
    """The compute stream waits until the item with number `item` has ended, and with it all earlier ones of the communication stream."""

    item: int = 0


@dataclass(eq=False)
class RankSchedule:
    """The items of a rank, in program order, and the factor on the time of its compute. `rank` is the lowest of `ranks`, which do the same
    at the same times."""

    items: Sequence[Item]
    ranks: tuple[int, ...]
    slow: float = 1.0

    @property
    def rank(self) -> int:
        return self.ranks[0]

    @property
    def compute_seconds(self) -> float:
        """The seconds of what the compute stream computes, if nothing slows it down."""
        return self.slow * sum(item.total for item in self.items if isinstance(item, Compute) and not item.beside)
