"""Turns: axes of time. What a program cuts over one, each rank computes part after part, in turn.

A program says `turns mb = 4`, and its values lie over the turns of `mb` as they lie over groups of ranks. `mb.2` is turn 2: a group in
which every rank has index 2 of 4. `mb.0-2` are turns 0 to 2 together: so lies a sum to which these have added their terms. A variable over
`mb` itself lies over all turns: what %h, `shard(0) over mb`, is in turn 2 lies under the name %h.mb2, `shard(0) over mb.2`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .types import Placement

MAX_TURNS = 1024


class Turn(NamedTuple):
    """Turns `first` to `last` of an axis of time."""

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
    """Every name that speaks of turns: each turn by itself, and the first ones together.

    >>> [name for name, _ in turn_groups({"mb": 3})]
    ['mb.0', 'mb.1', 'mb.2', 'mb.0-1', 'mb.0-2']
    """
    for axis, n in turns.items():
        for k in range(n):
            yield turn_group(axis, k), Turn(axis, k, k)
        for k in range(1, n):
            yield turn_group(axis, 0, k), Turn(axis, 0, k)


def seats(turns: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """{turn: (index, number of turns)}: where every rank stands in it. Of several turns together a rank has all, as of an axis itself.

    >>> seats({"mb": 2})
    {'mb': (0, 1), 'mb.0': (0, 2), 'mb.1': (1, 2), 'mb.0-1': (0, 1)}
    """
    found = dict.fromkeys(turns, (0, 1))
    for name, turn in turn_groups(turns):
        found[name] = (turn.first, turns[turn.axis]) if turn.first == turn.last else (0, 1)
    return found


def in_turn(name: str, axis: str, k: int) -> str:
    """The name of what a variable is in a turn."""
    return f"{name}.{axis}{k}"


def over_turns(placement: Placement, turns: Mapping[str, int]) -> str:
    """The axis of time of which a value lies over all turns; "" where it does not."""
    return next((e.group for e in placement if e.group in turns), "") if turns else ""


def taken_in_turn(placement: Placement, axis: str, k: int) -> Placement:
    """How what a variable is in a turn lies, of a placement over all turns."""
    return tuple([e.over(turn_group(axis, k)) if e.group == axis else e for e in placement])
