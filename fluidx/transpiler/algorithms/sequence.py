"""Recipes for collectives over all ranks of several hosts: collectives over smaller groups one behind the other, or push and pull."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..cluster import DATA, NODE, RAIL
from .schedule import Refused

SEQUENCED = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")  # the collectives that a sequence may carry out


class SequenceStage(NamedTuple):
    """A collective over a group: NODE (the ranks of a host), RAIL (the ranks of one number on all hosts) or DATA (all).

    `root` is an index into the group. `algorithm` is the name of one; "" leaves a host to the communicator and the rails to the strategy's
    `algorithm=`, and "direct/" takes that one behind "direct" inside the hosts. What the stage makes is named after `word`.
    """

    collective: str
    group: str
    algorithm: str = ""
    root: int = 0
    word: str = ""


class Grid(NamedTuple):
    """What a recipe is asked for: so many hosts with so many devices each; the `root` of a reduce or broadcast; the rows of the value."""

    hosts: int
    devices: int
    root: int = 0
    rows: int = 1 << 30


class Slicing(NamedTuple):
    """Values travel in slices of at most `nbytes` bytes, `in_flight` of which are on their way at a time."""

    nbytes: int
    in_flight: int


@dataclass(frozen=True)
class CollectiveSequence:
    """Collectives over all ranks as stages. A subclass has a method for each collective that it carries out; the others are refused.

    >>> class ThroughFirst(CollectiveSequence):
    ...     name = "through_first"
    ...     def all_reduce(self, grid):
    ...         return SequenceStage("reduce", NODE), SequenceStage("all_reduce", RAIL), SequenceStage("broadcast", NODE)
    >>> ThroughFirst().stages("all_reduce", Grid(hosts=2, devices=4))[1].group
    'rail'
    """

    name = ""

    def stages(self, collective: str, grid: Grid) -> tuple[SequenceStage, ...]:
        """The stages of a collective. Raises Refused where the recipe does not carry it out."""
        return tuple(getattr(self, collective)(grid))

    def slicing(self, hosts: int) -> Slicing | None:
        """How values are sliced; None where they travel whole."""
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
    """The stages over groups of several ranks: where hosts have one device each, a rail has all ranks and is the group of all.

    >>> on_groups((SequenceStage("reduce", NODE), SequenceStage("all_reduce", RAIL)), Grid(hosts=3, devices=1))[0].group
    'dp'
    """
    if grid.devices > 1:
        return tuple(stages)
    return tuple([s._replace(group=DATA) if s.group == RAIL else s for s in stages if s.group != NODE])
