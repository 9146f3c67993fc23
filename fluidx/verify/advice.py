"""The next step for an operator whose operands lie as no rule of its op allows: which of them to redistribute, and to what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..ir.opdef import OpDef
from ..ir.operator import Operator
from ..ir.pattern import Pattern, Types
from ..ir.rows import Row, fits
from ..ir.types import At, Entry, Partial, Pieces, Shard

Entries = Sequence[Entry | None]


class _Way(NamedTuple):
    """The operands that have to lie elsewhere, with their new entries, and what the operator then makes."""

    moved: list[tuple[int, Entry | None]]
    made: Entries


class Advice(NamedTuple):
    """An operator's rows over one group, of n ranks, and where its operands lie."""

    table: Sequence[Row]
    pattern: Pattern
    before: Entries
    types: Types
    group: str
    n: int

    def next_step(self, op: Operator, definition: type[OpDef], after: Entries) -> str:
        """What to do where results are declared to lie at `after`."""
        names = _names(op, definition)
        if (way := self._best(after)) is not None:
            return f"{self._redistribute(way, names)} first"
        way = self._best(None)
        assert way is not None, "every pattern has the row that is whole"
        made = ", ".join(map(self._shown, way.made))
        if not way.moved:
            return f"it makes {made}: declare that, and redistribute what it makes"
        return f"{self._redistribute(way, names)} first; then it makes {made}"

    def _best(self, after: Entries | None) -> _Way | None:
        """The way with the fewest moves, of equal ones one that gathers."""
        found = [way for row in self.table if (way := self._way(row, after)) is not None]
        return min(found, key=lambda way: (len(way.moved), sum(e is not None for _, e in way.moved)), default=None)

    def _way(self, row: Row, after: Entries | None) -> _Way | None:
        """How to come to a row; None when it does not make `after`."""
        free = next((e for e in (*(after or ()), *self.before) if isinstance(e, At if row.kind == "root" else Pieces)), None)
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
        return None if any(isinstance(e, Partial) for _, e in moved) else _Way(moved, made)  # nothing is made a term of a sum

    def _makes(self, row: Row, ins: Entries, after: Entries | None) -> Entries | None:
        return fits(row, self.pattern, ins, after, self.types, self.group, self.n)

    def _over(self, e: Entry | None, free: Entry | None) -> Entry | None:
        """The entry of a row over the group; a root or flat ranges are those of `free`."""
        if isinstance(e, Shard):
            return Shard(e.axis, self.group, e.unit)
        if isinstance(e, Partial):
            return Partial(e.op, self.group)
        return None if e is None else free

    def _redistribute(self, way: _Way, names: Sequence[str]) -> str:
        return "redistribute " + " and ".join(f"{names[k]} to {self._shown(e)}" for k, e in way.moved)

    def _shown(self, e: Entry | None) -> str:
        return f"whole over {self.group}" if e is None else str(e)


def _names(op: Operator, definition: type[OpDef]) -> list[str]:
    """What an operator calls its operands, one by one."""
    out: list[str] = []
    for slot in definition.in_slots:
        out += [f"{slot.name}[{k}]" for k in range(len(op.inputs.get(slot.name, ())))] if slot.many else [slot.name]
    return out
