"""From local expressions of one rank to atoms: used when a variable with a placement is written on one rank."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

from ..ir.types import ANY, Placement, TensorType
from .mesh import partial, without_roots, without_terms
from .refusal import Refusal
from .values import EMPTY, UNDEFINED, ProgramValues


class GlobalAtoms:
    """Finds the atom whose part or term on a rank is a local expression."""

    def __init__(self, values: ProgramValues):
        self.values, self.table, self.mesh = values, values.table, values.mesh
        self._divided: dict[tuple, bool] = {}

    def of(self, x: int, placement: Placement, type_: TensorType, rank: int) -> int:
        """The atom whose local value on this rank is x. `type_` is the type of the global value."""
        if not self.mesh.holds(placement, rank):
            return UNDEFINED
        table, bare = self.table, without_roots(placement)
        local = self.values.local_type(bare, type_, rank)
        if table.types[x] != local:
            raise Refusal(f"it is {table.types[x]}, but a part of {type_} is {local} on this rank")
        if 0 in local.shape:
            return EMPTY
        e = self._whole_of(x, bare, type_, rank)
        if isinstance(e, int):
            return self.values.atom(e, placement)
        total, key = e
        return self.values.atom(total, placement, key) if isinstance(key, int) else self.values.term(total, placement, key)

    def _whole_of(self, x: int, placement: Placement, type_: TensorType, rank: int) -> int | tuple[int, Any]:
        table = self.table
        if partial(placement):
            return self._own_terms(x, placement, type_, rank)
        span = self.mesh.flat_range(placement, type_.shape, rank)
        if not placement or (span is not None and span == (0, prod(type_.shape))):
            if table.ranked[x]:
                raise Refusal(f"it is {table.show(x)}, which differs between ranks")
            return table.shaped(x, type_.shape)
        if span is not None:
            if table.ranked[x]:
                raise Refusal(f"it is {table.show(x)}, which differs between ranks")
            return self._of_slices(x, span, type_)
        if ANY not in type_.shape and all(e.axis is not None for e in placement):
            if table.ranked[x]:
                raise Refusal(f"it is {table.show(x)}, which differs between ranks")
            box = self.mesh.intervals(placement, type_.shape, rank)
            return table.lin([(table.strided.array_of(a, box, type_.shape), w) for a, w in table.items(x)], type_)
        coords = self.mesh.coords(placement, rank)
        items = []
        for a, w in table.items(x):
            key = table.keys[a]
            if key[0] == "one":
                items.append((table.one(type_.dtype, type_.shape), w))
            elif key[0] == "part" and key[1][1] == placement and key[1][2] is None and key[2] == coords:
                items.append((key[1][0], w))
            else:
                raise Refusal(f"it is {table.show(a)}, which is not this rank's part of one value")
        return table.lin(items, type_)

    def _of_slices(self, x: int, span: tuple[int, int], type_: TensorType) -> int:
        """The array whose slice `span` is the local value x."""
        table, items = self.table, []
        x = table.flat(x)
        if (whole := self._of_rows(x, span, type_)) is not None:
            return whole
        for (base, start), w in table.slices(x).items():
            if start < 0:
                items.append((table.one(type_.dtype, type_.shape), w))
                continue
            first = start - span[0]  # the array may be a slice itself
            if first < 0 or first + type_.numel > table.types[base].numel:
                raise Refusal(f"it is {table.show(x)}, not elements {span[0]} to {span[1]} of a value of {type_.numel}")
            items.append((table.shaped(table.cut(base, first, first + type_.numel), type_.shape), w))
        return table.lin(items, type_)

    def _of_rows(self, x: int, span: tuple[int, int], type_: TensorType) -> int | None:
        """A known array made of rows whose slice `span` is the local value x; else None."""
        table = self.table
        rows = table.keys[x][1] if table.keys[x][0] == "rows" else (x,)
        known = next((a for row in rows for a in table.arrays(row)), None)
        for whole in () if known is None else table.rows_with.get(known, ()):
            if table.types[whole].numel == type_.numel and table.cut(whole, *span) == x:
                return table.shaped(whole, type_.shape)
        return None

    def _own_terms(self, x: int, placement: Placement, type_: TensorType, rank: int) -> tuple[int, Any]:
        """(the sum, its derivation or the key of a new one), if the local value x is this rank's term of the sum, or part of it."""
        table = self.table
        items, made = [], []
        for a, w in table.items(x):
            t, before = self._term_of(a, placement, type_, rank)
            key, coords = table.keys[t], self.mesh.coords(before, rank)
            if key[0] != "terms":
                raise Refusal(f"it is {table.show(a)}, which is not a term of a sum")
            e, first = self.values.spread[key[1]]
            if (
                not self._reduces_to(first, before)
                or not self._divides(key[1], before)
                or key[3] != self.values.rank_mask(key[1], coords)
                or table.types[e] != type_
            ):
                raise Refusal(f"it is {table.show(a)}, which is not this rank's term of one sum")
            items.append((e, w))
            made.append((key[1], w))
        if len(made) == 1 and made[0][1] == 1.0:
            # the term itself keeps its derivation
            return items[0][0], made[0][0]
        return table.lin(items, type_), ("sum", tuple(sorted(made)))

    def _term_of(self, a: int, placement: Placement, type_: TensorType, rank: int) -> tuple[int, Placement]:
        """(the term whose part on this rank is a, its placement before it was sharded); (a, placement) if terms are not sharded."""
        table = self.table
        t = table.keys[a][1] if table.keys[a][0] == "view" else a
        key = table.keys[t]
        term, start, size = key[1:] if key[0] == "slice" else (t, 0, table.types[t].numel)
        if table.keys[term][0] == "terms":
            cut = self.values.cut_of_terms(table.keys[term][1], placement, type_, rank)
            if cut is not None and cut[1] == (start, start + size):
                return term, cut[0]
        return a, placement

    def _reduces_to(self, first: Placement, placement: Placement) -> bool:
        placement = self.mesh.of_any_turn(placement)
        had = [e for e in first if e.op]
        return without_terms(first) == without_terms(placement) and all(
            any(e.op == o.op and (e.group == o.group or self.mesh.is_subgroup(e.group, o.group)) for o in had) for e in placement if e.op
        )

    def _divides(self, d: int, placement: Placement) -> bool:
        """True if each index in the groups of `placement` has other terms, and together they have every term once."""
        key = d, placement
        found = self._divided.get(key)
        if found is None:
            found, seen = True, 0
            groups = [e.group for e in self.mesh.of_any_turn(placement) if e.op]
            for indices in product(*(range(self.mesh.size[g]) for g in groups)):
                mask = self.values.rank_mask(d, tuple(zip(groups, indices, strict=True)))
                found = found and not mask & seen
                seen |= mask
            found = self._divided[key] = found and seen == self.values.rank_mask(d, ())
        return found
