"""Placement rules (rows): how the operands of an op may be placed over one mesh axis, and the placement of the results that follows.

A row is one lemma: "operands with these entries give results with those entries". The placement pass chooses among the rows of an
operator, and the proof checks that one of them allows the declared placements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from .entries import At, Entry, Own, Partial, Pieces, Shard, axis_of
from .offsets import Offsets
from .parts import bounds
from .pattern import Pattern, Types
from .types import ANY

# In a row: the same root, or the same flat ranges, for all operands that have the entry.
ROOT = At(-1, "")
FLAT = Pieces(Offsets(), "")
OWN = Own("")


class PlacementRow(NamedTuple):
    """Entries of the operands over one mesh axis, and the entries of the outputs that follow. Their group is ""."""

    kind: str  # "cut", "flat", "laid", "root", "whole", "linear", "monotone", "own", or "meet" if ranks communicate
    why: str
    ins: tuple[Entry | None, ...]
    outs: tuple[Entry | None, ...]
    factor: str = ""  # what is cut
    runs: int = 0  # the number of runs between which it is cut: the number of ranks of the one group that cuts it must divide this; 0: any

    def among(self, n: int) -> bool:
        """Can n ranks cut what the row cuts?"""
        return not self.runs or self.runs % n == 0

    @property
    def owes(self) -> bool:
        """Does an output become partial?"""
        return any(e is not None and e.op for e in self.outs)

    @property
    def flat(self) -> bool:
        """Does the row have flat ranges? A placement with flat ranges has no other entries."""
        return any(e is FLAT for e in (*self.ins, *self.outs))


def _cut(operands: Sequence[list[tuple[str, ...]] | None], f: str, sizes: Mapping[str, int], runs: str) -> tuple[Shard | None, ...] | None:
    """The entries of operands when factor f, or the axis of its runs, is cut; None for an operand without it. None if an operand cannot be
    cut so."""
    out: list[Shard | None] = []
    for axes in operands:
        found = [(k, factors) for k, factors in enumerate(axes or ()) if f in factors or runs in factors]
        if not found:
            out.append(None)
            continue
        axis, factors = found[0]
        unit = prod(max(sizes.get(inner, ANY), 0) for inner in factors[1:])
        if len(found) > 1 or factors[0] not in (f, runs) or not unit:
            return None
        out.append(Shard(axis, "", unit))
    return tuple(out)


def rows(p: Pattern) -> list[PlacementRow]:
    """Every row that follows from a pattern, in the order of preference among equally cheap ones:
    cut, flat ranges, at a root, whole, cuts that leave a sum to be finished, linear, monotone, each rank its own."""
    if p.placement_rows is None:
        p.placement_rows = _rows(p)
    return p.placement_rows


def _rows(p: Pattern) -> list[PlacementRow]:
    cuts: list[PlacementRow] = []
    for f in p.sizes:
        if f in p.whole or "/" in f:
            continue
        count = p.runs.get(f, 0)
        runs = f"{f}/{count}" if count else ""
        ins, outs = _cut(p.ins, f, p.sizes, runs), _cut(p.outs, f, p.sizes, runs)
        if ins is None or outs is None or not any((*ins, *outs)):
            continue
        monoid = p.reduced.get(f)
        lacking = any(o is None and axes is not None for o, axes in zip(outs, p.outs, strict=True))
        if lacking and monoid is None and f not in p.ignored:
            continue
        rest = None if f in p.ignored or monoid is None else Partial(monoid, "")
        filled = tuple(o or (None if axes is None else rest) for o, axes in zip(outs, p.outs, strict=True))
        cuts.append(PlacementRow("cut", f"cut {runs or f}", ins, filled, f, count))
    whole = PlacementRow("whole", "whole", (None,) * len(p.ins), (None,) * len(p.outs))
    root = PlacementRow("root", "at a root", _all(ROOT, p.ins), _all(ROOT, p.outs))
    settled = [r for r in cuts if not r.owes]
    owing = [r for r in cuts if r.owes]
    flat = _flat_row(p)
    last = [*_linear_rows(p), *_monotone_rows(p), _own_row(p)]
    if flat is not None:
        (owing if flat.owes else settled).append(flat)
    if p.flat_ranges:
        settled.append(PlacementRow("laid", "flat ranges, one behind the other", _all(FLAT, p.ins), _all(FLAT, p.outs)))
    return [*settled, root, whole, *owing, *last]


def _all(entry: Entry, operands: Sequence[object]) -> tuple[Entry | None, ...]:
    return tuple(None if o is None else entry for o in operands)


def _flat_row(p: Pattern) -> PlacementRow | None:
    """The row for flat ranges, for a pattern that names no axis: each operand has all elements, or a single one."""
    if not p.no_axes or p.whole - {f for f in p.whole if f[0] == "."} or not p.outs:
        return None
    flat = [None if axes is None else tuple(f for a in axes for f in a) for axes in (*p.ins, *p.outs)]
    full = max((t for t in flat if t is not None), key=len, default=())
    if not full or any(t not in (None, full, ()) for t in flat) or any(f[0] == "." for f in full):
        return None
    monoids = {p.reduced.get(f) for f in full}
    monoid = monoids.pop() if len(monoids) == 1 else ""
    place: list[Entry | None] = [FLAT if t else None for t in flat]
    outs = place[len(p.ins) :]
    if not all(e is not None or axes is None for e, axes in zip(outs, p.outs, strict=True)):
        if not monoid:
            return None
        outs = [e if e is not None or axes is None else Partial(monoid, "") for e, axes in zip(outs, p.outs, strict=True)]
    elif monoid:
        return None
    return PlacementRow("flat", "flat ranges", tuple(place[: len(p.ins)]), tuple(outs))


def _linear_rows(p: Pattern) -> Iterator[PlacementRow]:
    term = Partial("sum", "")
    for group, into in p.linear:
        ins = tuple(term if k in group else None for k in range(len(p.ins)))
        outs = tuple(None if axes is None else term if into is None or k in into else None for k, axes in enumerate(p.outs))
        yield PlacementRow("linear", f"linear in {', '.join(map(str, group))}" if group else "zero", ins, outs)


def _own_row(p: Pattern) -> PlacementRow:
    """Each rank computes of its own values what one device computes of one."""
    if p.from_replicas:
        return PlacementRow("meet", "of all ranks' own values", _all(OWN, p.ins), (None,) * len(p.outs))
    return PlacementRow("own", "each rank its own", _all(OWN, p.ins), _all(OWN, p.outs))


def _monotone_rows(p: Pattern) -> Iterator[PlacementRow]:
    for k, kinds in p.monotone:
        for before, after in kinds:
            ins = tuple(Partial(before, "") if j == k else None for j in range(len(p.ins)))
            yield PlacementRow("monotone", f"monotone in {k}", ins, _all(Partial(after, ""), p.outs))


def laid_out(ins: Sequence[Entry | None], types: Types, group: str) -> tuple[Pieces, ...] | None:
    """The flat ranges of the results of a row "laid"; None if the parts of a rank are no range of the concatenated operands.

    Of the concatenated operands rank k has elements b[k] to b[k + 1]; of each result it has those elements that belong to it.
    """
    held = [e.bounds for e in ins if e is not None and e.bounds is not None]
    sizes = [ANY if t is None else t.numel for t in types]
    if len(held) < len(ins) or ANY in sizes or len(set(map(len, held))) != 1:
        return None
    marks = Offsets.joined(held)
    before, after = sizes[: len(ins)], sizes[len(ins) :]
    if any(bounds != part for bounds, part in zip(held, Offsets.within(marks, before), strict=True)):
        return None
    return tuple(Pieces(part, group) for part in Offsets.within(marks, after))


@lru_cache(maxsize=4096)
def _rebound(size: int, n: int, unit: int) -> tuple[int, ...] | int:
    return tuple(bounds(size, n, unit)) if size >= 0 else unit


def same_cut(a: Entry | None, b: Entry | None, shape: Sequence[int], n: int) -> bool:
    """Do two entries of one group of n ranks mean the same? Two shards do if their bounds are equal; on an open axis, if the units are."""
    if a == b:
        return True
    if a is None or b is None or a.axis is None or a.axis != b.axis or a.group != b.group or a.axis >= len(shape):
        return False
    return _rebound(shape[a.axis], n, a.unit) == _rebound(shape[a.axis], n, b.unit)


# -- a row for operands that lie somewhere ----------------------------------------------------------------------------------------


def fits(
    row: PlacementRow, p: Pattern, ins: Sequence[Entry | None], outs: Sequence[Entry | None] | None, types: Types, group: str, n: int
) -> tuple[Entry | None, ...] | None:
    """The entries of the outputs by `row` when the operands have the entries `ins` over `group`, of n ranks; None if it does not apply.

    If `outs` is given, the results must be equal to it. `types` are those of operands and outputs. An operand of which only the shape is
    read may have any entry.
    """
    if not row.among(n):
        return None
    if any(e is not None and e.is_own for e in (*ins, *(outs or ()))) is not (row.kind in ("own", "meet")):
        return None
    if row.kind == "laid":
        laid = laid_out(ins, types, group)
        return laid if laid is None or outs is None or laid == tuple(outs) else None
    scale = 0
    for k, (want, have) in enumerate(zip(row.ins, ins, strict=True)):
        if k in p.shape_only or p.ins[k] is None:
            continue
        if not (have is None if want is None else want.admits(have, types[k])):
            return None
        if not scale and want is not None and have is not None and want.axis is not None and have.unit % want.unit == 0:
            scale = have.unit // want.unit
    free = next((e for e in ins if e is not None and (e.root is not None or e.bounds is not None)), None)
    if free is None and outs is not None and (row.kind == "root" or row.kind == "flat" and not any(e is FLAT for e in row.ins)):
        kind = ROOT if row.kind == "root" else FLAT
        free = next((e for e in outs if e is not None and kind.admits(e, None)), None)
    if row.kind == "cut" and not scale:
        cut_in = any(axis_of(e) is not None for k, e in enumerate(row.ins) if k not in p.shape_only)
        made = next((e for e, w in zip(outs or (), row.outs, strict=False) if axis_of(e) is not None and axis_of(w) is not None), None)
        if not cut_in and outs is not None and made is None:
            return None
        wanted = next((w for w in row.outs if w is not None and w.axis is not None), None)
        scale = made.unit // wanted.unit if made is not None and wanted is not None and made.unit % wanted.unit == 0 else 1
    if row.kind in ("root", "flat") and free is None:
        return None
    place = [_concrete(e, free, 1 if row.runs else scale, group) for e in (*row.ins, *row.outs)]
    for k, have in enumerate(ins):
        if k in p.shape_only or have is None or p.ins[k] is None:
            continue
        t = types[k]
        if place[k] is not None and not same_cut(place[k], have, t.shape if t is not None else (), n):
            return None
    made_at = tuple(place[len(row.ins) :])
    if outs is not None:
        for k, (got, said) in enumerate(zip(made_at, outs, strict=True)):
            t = types[len(row.ins) + k]
            if t is not None and not same_cut(got, said, t.shape, n):
                return None
    return made_at


def _concrete(e: Entry | None, free: Entry | None, scale: int, group: str) -> Entry | None:
    if e is None:
        return None
    if e is ROOT or e is FLAT:
        return free
    return e.over(group, max(scale, 1))


def find_row(
    table: Sequence[PlacementRow], p: Pattern, ins: Sequence[Entry | None], outs: Sequence[Entry | None], types: Types, group: str, n: int
) -> PlacementRow | None:
    """The first row that allows these entries over `group`; None when no lemma does."""
    for row in table:
        if fits(row, p, ins, outs, types, group, n) is not None:
            return row
    return None


def cut_twice(found: Iterable[PlacementRow]) -> str:
    """The factor in runs that more than one of these rows cuts, each over a group of its own; "" for none.

    The parts of the inner one of two groups begin at runs only by chance, so no row covers that.
    """
    cuts = [row.factor for row in found if row.runs]
    return next((f for f in cuts if cuts.count(f) > 1), "")
