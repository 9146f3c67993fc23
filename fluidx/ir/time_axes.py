"""Axes of time: iterations over parts of a batch. A value that is sharded over one is computed part by part, in turn, on each rank.

A program declares `turns mb = 4`, and placements name `mb` and its turns as they name groups of ranks. `mb.2` is turn 2: a group in which
every rank has index 2 of 4. `mb.0-2` is the group of turns 0 to 2: the placement of a sum to which these have added their terms. A variable
over `mb` itself is split over all turns: for %h, `shard(0) over mb`, the part in turn 2 has the name %h.mb2 and is `shard(0) over mb.2`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .types import Placement

MAX_TURNS = 1024


class Turn(NamedTuple):
    """The turns from `first` to `last` of an axis of time."""

    axis: str
    first: int
    last: int


def turn_group(axis: str, first: int, last: int | None = None) -> str:
    """The name of a turn, or of several together, where placements and operators name groups.

    >>> turn_group("mb", 2), turn_group("mb", 0, 2)
    ('mb.2', 'mb.0-2')
    """
    return f"{axis}.{first}" if last is None or last == first else f"{axis}.{first}-{last}"


def turn_groups(turns: Mapping[str, int]) -> Iterator[tuple[str, Turn]]:
    """The group names of all turns: each turn by itself, and the first ones together.

    >>> [name for name, _ in turn_groups({"mb": 3})]
    ['mb.0', 'mb.1', 'mb.2', 'mb.0-1', 'mb.0-2']
    """
    for axis, n in turns.items():
        for k in range(n):
            yield turn_group(axis, k), Turn(axis, k, k)
        for k in range(1, n):
            yield turn_group(axis, 0, k), Turn(axis, 0, k)


def seats(turns: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """{turn: (index, number of turns)}, the coordinates of every rank. Of several turns together, or of the axis, a rank has all.

    >>> seats({"mb": 2})
    {'mb': (0, 1), 'mb.0': (0, 2), 'mb.1': (1, 2), 'mb.0-1': (0, 1)}
    """
    found = dict.fromkeys(turns, (0, 1))
    for name, turn in turn_groups(turns):
        found[name] = (turn.first, turns[turn.axis]) if turn.first == turn.last else (0, 1)
    return found


def in_turn(name: str, axis: str, k: int) -> str:
    """The name of a variable in one turn."""
    return f"{name}.{axis}{k}"


def over_turns(placement: Placement, turns: Mapping[str, int]) -> str:
    """The axis of time over which a value is placed; "" for none."""
    return next((e.group for e in placement if e.group in turns), "") if turns else ""


def taken_in_turn(placement: Placement, axis: str, k: int) -> Placement:
    """The placement of a variable in one turn, from its placement over all turns."""
    return tuple([e.over(turn_group(axis, k)) if e.group == axis else e for e in placement])
