"""Stand-ins for roots and flat ranges: a choice of a row does not depend on which rank or which range it is, only on which are equal.

Among many ranks parameters lie at as many places; by stand-ins one choice serves the updates of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.types import Entry, Placement

AtHand = tuple[tuple[Placement, ...], ...]  # for each operand, the placements in which it is at hand


def with_stand_ins(have: Sequence[tuple[Placement, ...]]) -> tuple[AtHand, list[Entry]]:
    """The placements with numbered stand-ins for roots and flat ranges, and the entries that they stand for.

    >>> from fluidx.ir import At
    >>> with_stand_ins([((At(7, "dp"),),), ((At(7, "dp"),), ())])
    ((((At(root=-2, group='dp'),),), ((At(root=-2, group='dp'),), ())), [At(root=7, group='dp')])
    """
    found: list[Entry] = []

    def stand_in(e: Entry) -> Entry:
        if e.root is None and e.bounds is None:
            return e
        if e not in found:
            found.append(e)
        return e.stand_in(found.index(e))

    return tuple([tuple([tuple([stand_in(e) for e in q]) for q in qs]) for qs in have]), found


def filled_in(placement: Placement, found: Sequence[Entry]) -> Placement:
    """A placement with the entries for which there are stand-ins in it."""
    return tuple([e if (k := e.stands_for) is None else found[k] for e in placement])
