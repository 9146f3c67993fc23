"""Choose the placement rule (a row) for an operator: the placements that its operands need, and those of its results. Greedy, no search.

Rows are tried in the order of the pattern; the cheapest wins, and the first of equal ones. Four restrictions keep the result predictable. A
row that shards needs an operand that is sharded so already (shards come from annotations and spread). A linear row needs an operand that is
partial already, and makes no more partial elements than it reads. No operand is gathered only to continue a partial sum. A free move still
costs more than no move. Source: facts measured on a prototype over seven models; shards are spread, not searched, as in Shardy and
OneFlow's first mode.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...ir.entries import axis_of
from ...ir.opdef import OpDef
from ...ir.operator import attrs_key
from ...ir.parts import entry_of
from ...ir.pattern import Pattern
from ...ir.rows import FLAT, ROOT, PlacementRow, cut_twice, find_row, laid_out, rows, same_cut
from ...ir.types import At, Entry, Own, Partial, Placement, Shard, TensorType
from ...ops.comm.volume import PASSES

NOMINAL = 1024  # the size that an open axis counts as when bytes are compared; the choices do not depend on it
NEVER = 1e30
_FREE = 1e-3
_STAYS = 1e15  # the cost factor for a value that should not be moved


def nominal_bytes(t: TensorType | None) -> int:
    """Bytes of a value, with NOMINAL for open axes."""
    if t is None:
        return 0
    return t.nbytes * NOMINAL ** sum(1 for d in t.shape if d < 0)


def _nominal_numel(t: TensorType | None) -> int:
    return 0 if t is None else prod(NOMINAL if d < 0 else d for d in t.shape)


def move_cost(old: Entry | None, new: Entry | None, nbytes: int) -> float:
    """About how many bytes one rank moves over one group. A change without communication costs more than no change."""
    if old == new:
        return 0.0
    if old is None or (new == Partial("sum", old.group) and (old.root is not None or old.bounds is not None)):
        return _FREE
    if old.is_own:
        return NEVER  # replica-local values are different values
    if new is not None and new.op:
        return NEVER  # a shard padded with zeros would have to be reduced again
    if old.op:
        return PASSES["all_reduce" if new is None else "reduce"] * nbytes
    return PASSES["spread"] * nbytes  # resharding sends less than gathering, but a gathered value serves all later readers


@dataclass(eq=False)
class PatternClass:
    """A class of operators with the same type, pattern and operand types: the pattern, its rows, and the sizes of the values."""

    pattern: Pattern
    table: list[PlacementRow]
    types: list[TensorType | None]
    sizes: list[int]  # bytes of each operand
    elements: list[int]  # elements of each operand and result


class PatternClasses:
    """The classes of a program's operators. Operators with different attributes are in different classes only if the pattern depends on
    them."""

    def __init__(self) -> None:
        self._known: dict[tuple, PatternClass] = {}

    def of(self, definition: type[OpDef], ins: Sequence[TensorType | None], outs: Sequence[TensorType | None], attrs: Any) -> PatternClass:
        key = definition, attrs_key(attrs) if callable(definition.pattern) else "", tuple(ins), tuple(outs)
        kind = self._known.get(key)
        if kind is None:
            p, types = definition.pattern_of(ins, outs, attrs), [*ins, *outs]
            kind = self._known[key] = PatternClass(p, rows(p), types, [nominal_bytes(t) for t in ins], [_nominal_numel(t) for t in types])
        return kind


def may_write(kind: PatternClass, places: Sequence[Placement | None], axes: Iterable[tuple[str, int]]) -> bool:
    """Can an operator that reads no elements of its operands write its results in these placements? None is an absent result."""
    p, chosen = kind.pattern, []
    for group, n in axes:
        entries = [None if q is None else entry_of(q, group) for q in places]
        if not any(entries):
            continue
        row = find_row(kind.table, p, [None] * len(p.ins), entries, kind.types, group, n)
        if row is None:
            return False
        chosen.append(row)
    return not cut_twice(chosen)


Chosen = tuple[PlacementRow, list[Entry | None], list[Entry | None]]  # a row, and the entries of operands and results over one group
Options = Sequence[tuple[Entry | None, ...]]  # per operand, the available entries over one group; () if it is read in any placement


def choose(kind: PatternClass, have: Options, group: str, n: int, taken: Container[str] = (), stays: Container[int] = ()) -> Chosen:
    """The row with the cheapest moves of operands. `taken` are the factors that another group cuts (for rows with runs); `stays` are the
    numbers of operands that are moved only if every row moves one."""
    best: tuple[float, PlacementRow, list[Entry | None], list[Entry | None]] | None = None
    p = kind.pattern
    of_own = any(e is not None and e.is_own for options in have for e in options)
    for row in kind.table:
        if (row.kind in ("own", "meet")) is not of_own:
            continue
        if row.kind == "cut" and not _any_cut(row, have) or row.kind == "linear" and not _carries_on(row, have, kind):
            continue
        if row.runs and (not row.among(n) or row.factor in taken):
            continue
        for ins, outs in _forms(row, have, kind, group, n):
            if row.kind == "linear" and _gathers(ins, have, p):
                continue
            cost = 0.0
            for k, (want, options) in enumerate(zip(ins, have, strict=True)):
                if k in p.shape_only or not options or (want is not None and want.root is not None and None in options):
                    continue
                moved = min(move_cost(e, want, kind.sizes[k]) for e in options)
                cost += moved * _STAYS if moved > _FREE and k in stays else moved
            if best is None or cost < best[0]:
                best = cost, row, ins, outs
                if cost == 0.0:
                    break
        if best is not None and best[0] == 0.0:
            break
    assert best is not None, "every pattern has the row in which all values are replicated"
    return best[1:]


def annotated(kind: PatternClass, have: Options, entry: Entry | None, n: int) -> Chosen:
    """The row of an operator that gives its operand a placement."""
    t = kind.types[0]
    assert t is not None
    e = next((e for e in have[0] if same_cut(e, entry, t.shape, n)), entry)
    rest = [None] * (len(have) - 1)
    return PlacementRow("annotated", "as annotated", (e, *rest), (e,)), [e, *rest], [e]


def cut_across(p: Pattern, have: Sequence[tuple[Placement, ...]], group: str) -> bool:
    """Does a group cut an axis that an operand must not have cut, in every available placement?"""
    for k, (axes, places) in enumerate(zip(p.ins, have, strict=True)):
        if axes is None or k in p.shape_only or not places:
            continue
        entries = [entry_of(q, group) for q in places]
        if all(e is not None and e.axis is not None and not p.whole.isdisjoint(axes[e.axis]) for e in entries):
            return True
    return False


def at_root(kind: PatternClass, e: At) -> Chosen:
    """The row of an operator that runs at one root, for any placements of its operands."""
    row = next(row for row in kind.table if row.kind == "root")
    return row, [_filled(x, e, e.group) for x in row.ins], [_filled(x, e, e.group) for x in row.outs]


def _any_cut(row: PlacementRow, have: Options) -> bool:
    for want, options in zip(row.ins, have, strict=True):
        if axis_of(want) is not None and any(axis_of(e) == axis_of(want) for e in options):
            return True
    return False


def _carries_on(row: PlacementRow, have: Options, kind: PatternClass) -> bool:
    """Is an operand partial already, and does a linear row not increase the number of elements to be reduced?"""
    given = [
        size
        for want, options, size in zip(row.ins, have, kind.elements, strict=False)
        if want is not None and any(e is not None and (e.op or e.root is not None) for e in options)
    ]
    made = [size for e, size in zip(row.outs, kind.elements[len(row.ins) :], strict=True) if e is not None]
    return bool(given) and sum(made) <= sum(given)


def _gathers(ins: Sequence[Entry | None], have: Options, p: Pattern) -> bool:
    """Would an operand be gathered only to continue a partial sum?"""
    return any(
        want is None and k not in p.shape_only and None not in options and any(e is not None and e.is_cut for e in options)
        for k, (want, options) in enumerate(zip(ins, have, strict=True))
    )


def _forms(
    row: PlacementRow, have: Options, kind: PatternClass, group: str, n: int
) -> Iterator[tuple[list[Entry | None], list[Entry | None]]]:
    """The row with concrete entries: its unit, pieces or root come from the placements of the operands."""
    if row.kind in ("own", "meet"):
        own = Own(group)
        yield [own if own in options else None for options in have], [None if x is None else own for x in row.outs]
        return
    if row.kind == "laid":
        ranges: list[Entry | None] = [next((e for e in options if e is not None and FLAT.admits(e, None)), None) for options in have]
        made = laid_out(ranges, kind.types, group)
        if made is not None:
            yield ranges, list(made)
        return
    if row.kind in ("flat", "root"):
        wanted = ROOT if row.kind == "root" else FLAT
        for held in dict.fromkeys(e for options in have for e in options if e is not None and wanted.admits(e, None)):
            yield [_filled(x, held, group) for x in row.ins], [_filled(x, held, group) for x in row.outs]
        return
    yield from _cut_forms(row, have, kind, group, n)


def _cut_forms(
    row: PlacementRow, have: Options, kind: PatternClass, group: str, n: int
) -> Iterator[tuple[list[Entry | None], list[Entry | None]]]:
    """The same for a row that cuts axes: one form for each unit of the operands, and one with unit 1."""
    units: dict[int, None] = {}
    for want, options in zip(row.ins, have, strict=True):
        if want is not None and want.axis is not None and not row.runs:
            for e in options:
                if e is not None and e.axis == want.axis and e.unit % want.unit == 0:
                    units[e.unit // want.unit] = None
    units[1] = None
    for u in units:
        ins = [_scaled(x, u, group) for x in row.ins]
        for k, (want, options) in enumerate(zip(ins, have, strict=True)):  # another unit may cut at the same bounds
            t = kind.types[k]
            if axis_of(want) is not None and want not in options and t is not None:
                ins[k] = next((e for e in options if same_cut(e, want, t.shape, n)), want)
        outs = [_scaled(x, u, group) for x in row.outs]
        for k, out in enumerate(outs):  # a normal form: units that change nothing become 1
            t = kind.types[len(ins) + k]
            if out is None or out.axis is None or out.unit == 1 or t is None:
                continue
            plain = Shard(out.axis, group)
            if same_cut(out, plain, t.shape, n):
                outs[k] = plain
        yield ins, outs


def _filled(x: Entry | None, e: Entry, group: str) -> Entry | None:
    return e if x is ROOT or x is FLAT else _scaled(x, 1, group)


def _scaled(x: Entry | None, unit: int, group: str) -> Entry | None:
    return None if x is None else x.over(group, unit)
