"""Stand-in entries for roots and flat ranges, for cache keys: the choice of a row depends only on which of them are equal.

On many ranks, parameters have many different roots; with stand-ins, one cached choice serves the updates of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...ir.forms import Held
from ...ir.offsets import Offsets
from ...ir.operator import Frozen
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


class GeneralPlacements:
    """Numbers for placements, and for how values are held, that leave out which roots and flat ranges these have. Each object is looked at
    once; it is known by its id."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, tuple[Entry, ...], Placement]] = {}  # with the placements, which keeps their ids unique
        self._held: dict[Held, tuple[int, tuple[Entry, ...]]] = {}
        self._numbers: dict[Any, int] = {}

    def of(self, place: Placement) -> tuple[int, tuple[Entry, ...], Placement]:
        """The number of the placement without its roots and flat ranges, the entries that have them, and the placement."""
        known = self._known.get(id(place))
        if known is None:
            entries = tuple([e for e in place if e.root is not None or e.bounds is not None])
            # the entries of one class and group are equal but for root and flat ranges
            key: Any = (place[0].__class__, place[0].group) if entries and len(place) == 1 else _general(place, [])
            known = self._known[id(place)] = self._numbers.setdefault(key, len(self._numbers)), entries, place
        return known

    def _of_held(self, held: Held) -> tuple[int, tuple[Entry, ...]]:
        """The same for how a value is held: its mark and its placements."""
        key: list[Any] = [held.mark]
        entries: tuple[Entry, ...] = ()
        for place in held.forms:
            number, more, _ = self.of(place)
            key.append(number)
            entries += more
        known = self._held[held] = self._numbers.setdefault(tuple(key), len(self._numbers)), entries
        return known

    def key(self, helds: Iterable[Held]) -> tuple[tuple[int, ...], list[Entry]]:
        """A key of how the operands of an operator are held, and the different entries with a root or flat ranges in their placements.
        Operands have equal keys if they have equal marks, and `with_stand_ins` gives the same for them.

        >>> from fluidx.ir import At
        >>> general, helds = GeneralPlacements(), [Held(((At(k, "dp"),),)) for k in (7, 2)]
        >>> a, b = helds
        >>> general.key([a, a])[0] == general.key([b, b])[0], general.key([a, a])[0] == general.key([a, b])[0]
        (True, False)
        """
        known = self._held
        return joined([known.get(held) or self._of_held(held) for held in helds])


def joined(known: Iterable[tuple[int, tuple[Entry, ...]]]) -> tuple[tuple[int, ...], list[Entry]]:
    """The numbers, with those of the entries among all different entries; and these."""
    found: list[Entry] = []
    out: list[int] = []
    for number, entries in known:
        out.append(number)
        for e in entries:
            if e not in found:
                found.append(e)
            out.append(found.index(e))
    return tuple(out), found


# an attribute that has the value of a stand-in: its name, the number of the stand-in, and the field of the entry
Hole = tuple[str, int, str]


def holes(attrs: Mapping[str, Any], entries: Sequence[Entry]) -> list[Hole]:
    """The attributes that have their values from stand-ins for these entries.

    >>> from fluidx.ir import At
    >>> holes({"group": "dp", "root": -2}, [At(7, "dp")])
    [('root', 0, 'root')]
    """
    fields = {value: (k, field) for k, e in enumerate(entries) for field, value in e.stand_in(k).attrs().items()}
    return [(name, *fields[value]) for name, value in attrs.items() if value.__class__ in (int, Offsets) and value in fields]


def filled_holes(attrs: Frozen, open_: Sequence[Hole], entries: Sequence[Entry]) -> Frozen:
    """The attributes with the values of these entries in place of those of their stand-ins.

    >>> from fluidx.ir import At
    >>> filled_holes(Frozen(group="dp", root=-2), [("root", 0, "root")], [At(7, "dp")])
    {'group': 'dp', 'root': 7}
    """
    if not open_:
        return attrs
    made = Frozen(attrs)
    for name, k, field in open_:
        dict.__setitem__(made, name, getattr(entries[k], field))  # nobody else has it yet
    return made


def filled_in(placement: Placement, found: Sequence[Entry]) -> Placement:
    """A placement with its stand-ins replaced by the entries in `found`."""
    return tuple([e if (k := e.stands_for) is None else found[k] for e in placement]) if placement else placement
