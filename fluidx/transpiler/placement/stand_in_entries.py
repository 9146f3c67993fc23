"""Stand-in entries for roots and flat ranges, for cache keys: the choice of a row depends only on which of them are equal.

On many ranks, parameters have many different roots; with stand-ins, one cached choice serves the updates of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.types import Entry, Placement

_STAND_INS: dict[tuple[type[Entry], str, int], Entry] = {}  # groups are few, and so are different entries of one operator

AtHand = tuple[tuple[Placement, ...], ...]  # for each operand, the placements in which it is available


def with_stand_ins(have: Sequence[tuple[Placement, ...]]) -> tuple[AtHand, list[Entry]]:
    """The placements with numbered stand-ins for roots and flat ranges, and the entries that these replace.

    >>> from fluidx.ir import At
    >>> with_stand_ins([((At(7, "dp"),),), ((At(7, "dp"),), ())])
    ((((At(root=-2, group='dp'),),), ((At(root=-2, group='dp'),), ())), [At(root=7, group='dp')])
    """
    found: list[Entry] = []
    return tuple([tuple([_general(q, found) if q else q for q in qs]) for qs in have]), found


def _general(place: Placement, found: list[Entry]) -> Placement:
    """A placement with stand-ins; what they stand for is added to `found`, if it is not in it."""
    made = []
    for e in place:
        if e.root is None and e.bounds is None:
            made.append(e)
            continue
        if e not in found:
            found.append(e)
        key = e.__class__, e.group, found.index(e)
        if key not in _STAND_INS:
            _STAND_INS[key] = e.stand_in(key[2])
        made.append(_STAND_INS[key])
    return tuple(made)


def filled_in(placement: Placement, found: Sequence[Entry]) -> Placement:
    """A placement with its stand-ins replaced by the entries in `found`."""
    return tuple([e if (k := e.stands_for) is None else found[k] for e in placement]) if placement else placement
