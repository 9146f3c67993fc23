"""Stand-ins for roots and flat ranges: a choice of a row does not depend on which rank or which range it is, only on which are equal.

Among many ranks parameters lie at as many places; by stand-ins one choice serves the updates of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.offsets import Offsets
from ...ir.types import At, Entry, Pieces, Placement

AtHand = tuple[tuple[Placement, ...], ...]  # for each operand, the placements in which it is at hand


def with_stand_ins(have: Sequence[tuple[Placement, ...]]) -> tuple[AtHand, list[Entry]]:
    """The placements with numbered stand-ins for roots and flat ranges, and the entries that they stand for.

    >>> with_stand_ins([((At(7, "dp"),),), ((At(7, "dp"),), ())])
    ((((At(root=-2, group='dp'),),), ((At(root=-2, group='dp'),), ())), [At(root=7, group='dp')])
    """
    found: list[Entry] = []

    def stand_in(e: Entry) -> Entry:
        if not isinstance(e, (At, Pieces)):
            return e
        if e not in found:
            found.append(e)
        k = found.index(e)
        return At(-2 - k, e.group) if isinstance(e, At) else Pieces(Offsets((k + 1,)), e.group)

    return tuple([tuple([tuple([stand_in(e) for e in q]) for q in qs]) for qs in have]), found


def filled_in(placement: Placement, found: Sequence[Entry]) -> Placement:
    """A placement with the entries for which there are stand-ins in it."""
    return tuple([_entry(e, found) for e in placement])


def _entry(e: Entry, found: Sequence[Entry]) -> Entry:
    if isinstance(e, At) and e.root < -1:
        return found[-2 - e.root]
    if isinstance(e, Pieces) and len(e.bounds) == 1:
        return found[e.bounds[0] - 1]
    return e
