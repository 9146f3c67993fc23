"""Hints for an operator whose placements no rule of its op allows: which operands to redistribute, and with which collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..ir.opdef import OpDef, Slot
from ..ir.operator import Operator
from ..ir.pattern import Pattern, Types
from ..ir.rows import FLAT, ROOT, PlacementRow, fits
from ..ir.types import Entry

Entries = Sequence[Entry | None]


class _Way(NamedTuple):
    """A way to fix the placements: the operands to redistribute, with their new entries, and the resulting entries of the results."""

    moved: list[tuple[int, Entry | None]]
    made: Entries


class Advice(NamedTuple):
    """The placement rules of an operator over one group of n ranks, and the entries of its operands."""

    table: Sequence[PlacementRow]
    pattern: Pattern
    before: Entries
    types: Types
    group: str
    n: int

    def why_not(self, op: Operator, definition: type[OpDef], after: Entries) -> str:
        """A message: why the operands cannot give results declared as `after`, and what to do next."""
        names = _names(definition.in_slots, op.inputs)
        ins = ", ".join(f"{name} {self._shown(e)}" for name, e in zip(names, self.before, strict=True) if name)
        results = zip(_names(definition.out_slots, op.outputs), after, strict=True)
        outs = ", ".join(f"{name} {self._shown(e)}" for name, e in results if name)
        return f"{f'{ins} cannot give' if ins else 'it cannot make'} {outs or 'nothing'}; {self._next_step(names, after)}"

    def _next_step(self, names: Sequence[str], after: Entries) -> str:
        if (way := self._best(after)) is not None:
            return f"{self._redistribute(way, names)} first"
        way = self._best(None)
        assert way is not None, "every pattern has a row with whole operands"
        made = ", ".join(map(self._shown, way.made))
        if not way.moved:
            return f"the result is {made}: declare that, and redistribute the result"
        return f"{self._redistribute(way, names)} first; then the result is {made}"

    def _best(self, after: Entries | None) -> _Way | None:
        """The way with the fewest redistributions; among equals, the one that gathers most."""
        found = [way for row in self.table if (way := self._way(row, after)) is not None]
        return min(found, key=lambda way: (len(way.moved), sum(e is not None for _, e in way.moved)), default=None)

    def _way(self, row: PlacementRow, after: Entries | None) -> _Way | None:
        """What to redistribute so that a row applies; None if the row cannot give `after`."""
        kind = ROOT if row.kind == "root" else FLAT
        free = next((e for e in (*(after or ()), *self.before) if e is not None and kind.admits(e, None)), None)
        ins = [self._over(e, free) for e in row.ins]
        made = self._makes(row, ins, after)
        if made is None or (row.kind in ("root", "flat") and free is None):
            return None
        moved = []
        for k, have in enumerate(self.before):
            want, ins[k] = ins[k], have
            if (stays := self._makes(row, ins, after)) is not None:
                made = stays
            else:
                ins[k] = want
                moved.append((k, want))
        return None if any(e is not None and e.op for _, e in moved) else _Way(moved, made)  # never redistribute a value to partial

    def _makes(self, row: PlacementRow, ins: Entries, after: Entries | None) -> Entries | None:
        return fits(row, self.pattern, ins, after, self.types, self.group, self.n)

    def _over(self, e: Entry | None, free: Entry | None) -> Entry | None:
        """An entry of a row, over the group. Rows leave roots and flat ranges open; they are taken from `free`."""
        if e is None:
            return None
        return e.over(self.group) if e.axis is not None or e.op else free

    def _redistribute(self, way: _Way, names: Sequence[str]) -> str:
        return " and ".join(self._move(names[k], self.before[k], e) for k, e in way.moved)

    def _move(self, name: str, have: Entry | None, want: Entry | None) -> str:
        """An instruction to change one entry into another, with the name of the collective if there is a common one."""
        if want is not None or have is None:
            return f"redistribute {name} to {self._shown(want)}"
        if have.op:
            rank_values = "only a partial sum" if have.op == "sum" else f"only a partial {have.op}"
            return f"all_reduce {name} over {self.group} (each rank holds {rank_values})"
        if have.axis is not None:
            return f"all_gather {name} over {self.group}"
        return f"redistribute {name} to {self._shown(want)}"

    def _shown(self, e: Entry | None) -> str:
        return f"whole over {self.group}" if e is None else str(e)


def _names(slots: Sequence[Slot], given: Mapping[str, Sequence[str]]) -> list[str]:
    """The name of each operand or result, such as `X` or `X[1]`; "" for a missing optional one."""
    out: list[str] = []
    for slot in slots:
        names = given.get(slot.name, ())
        out += [f"{slot.name}[{k}]" for k in range(len(names))] if slot.many else [slot.name if names else ""]
    return out
