"""The base class CollectiveSequence: carry out a collective over all ranks of several hosts by collectives over smaller groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..cluster import DATA, NODE, RAIL
from .schedule import Refused

SEQUENCED = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")  # the collectives that a sequence may carry out


class SequenceStage(NamedTuple):
    """A collective over a group: NODE (the ranks of a host), RAIL (the ranks with the same position on every host) or DATA (all ranks).

    `root` is an index into the group. `algorithm` is the name of an algorithm. With "", collectives inside a host are left to the
    communicator, and collectives on rails use the strategy's `algorithm=`. With "direct/", the strategy's algorithm is used between hosts,
    and "direct" inside them. The result of the stage is named after `word`.
    """

    collective: str
    group: str
    algorithm: str = ""
    root: int = 0
    word: str = ""


class Grid(NamedTuple):
    """The arguments of a recipe: the number of hosts and of devices per host, the `root` of a reduce or broadcast, the rows of the
    value."""

    hosts: int
    devices: int
    root: int = 0
    rows: int = 1 << 30


class Slicing(NamedTuple):
    """Values travel in slices of at most `nbytes` bytes; `in_flight` slices are in flight at a time."""

    nbytes: int
    in_flight: int


@dataclass(frozen=True)
class CollectiveSequence:
    """A recipe that carries out collectives over all ranks in stages. A subclass has a method for each collective that it can carry out;
    the others raise Refused.

    >>> class ThroughFirst(CollectiveSequence):
    ...     name = "through_first"
    ...     def all_reduce(self, grid):
    ...         return SequenceStage("reduce", NODE), SequenceStage("all_reduce", RAIL), SequenceStage("broadcast", NODE)
    >>> ThroughFirst().stages("all_reduce", Grid(hosts=2, devices=4))[1].group
    'rail'
    """

    name = ""

    def stages(self, collective: str, grid: Grid) -> tuple[SequenceStage, ...]:
        """The stages of a collective. Raises Refused if the recipe does not carry it out."""
        return tuple(getattr(self, collective)(grid))

    def slicing(self, hosts: int) -> Slicing | None:
        """How values are sliced; None if they are not."""
        return None

    def all_reduce(self, grid: Grid) -> Sequence[SequenceStage]:
        raise Refused(f"{self.name} makes no all_reduce")

    def reduce(self, grid: Grid) -> Sequence[SequenceStage]:
        raise Refused(f"{self.name} makes no reduce")

    def broadcast(self, grid: Grid) -> Sequence[SequenceStage]:
        raise Refused(f"{self.name} makes no broadcast")

    def reduce_scatter(self, grid: Grid) -> Sequence[SequenceStage]:
        raise Refused(f"{self.name} makes no reduce_scatter")

    def all_gather(self, grid: Grid) -> Sequence[SequenceStage]:
        raise Refused(f"{self.name} makes no all_gather")


def on_groups(stages: Sequence[SequenceStage], grid: Grid) -> tuple[SequenceStage, ...]:
    """The stages over groups with several ranks. If hosts have one device each, a rail has all ranks, and DATA is used for it.

    >>> on_groups((SequenceStage("reduce", NODE), SequenceStage("all_reduce", RAIL)), Grid(hosts=3, devices=1))[0].group
    'dp'
    """
    if grid.devices > 1:
        return tuple(stages)
    return tuple([s._replace(group=DATA) if s.group == RAIL else s for s in stages if s.group != NODE])
