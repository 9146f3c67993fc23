"""What ranks hold: parts of expressions, and terms of them.

An *atom* says it for every rank at once: the part, by a placement, of an expression; or, for a placement with `partial`, a term of it, with
the derivation that made the term: only terms of one derivation add up. A value that means something on one rank only is an expression over
parts and terms of named ranks; it is *made plain* there, and *read back* where a variable with a placement is written.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any, NamedTuple

from ..ir.types import ANY, Placement, TensorType
from .mesh import RankGroups, partial, without_roots, without_terms
from .normal_form import ExpressionTable
from .refusal import Refusal

UNDEFINED = -1  # nothing that may be read
EMPTY = -2  # a part without elements: the part of anything


class Atom(NamedTuple):
    """The part or term, by a placement, of an expression."""

    e: int
    placement: Placement
    derivation: int | None  # None: a part


class ProgramValues:
    """Atoms of one program run by all ranks, over a table of expressions."""

    def __init__(self, table: ExpressionTable, mesh: RankGroups):
        self.table, self.mesh = table, mesh
        self.ids: dict[tuple, int] = {}
        self.atoms: list[Atom] = []
        self.derivations: dict[object, int] = {}
        self.spread: list[tuple[int, Placement]] = []  # derivation -> (expression, placement of its first terms)
        table.complete, table.adaptive.ranks = self._complete, mesh.size
        self._plain: dict[tuple, int] = {}
        self._masks: dict[tuple, int] = {}
        self._divided: dict[tuple, bool] = {}

    def atom(self, e: int, placement: Placement, derivation: int | None = None) -> int:
        key = e, placement, derivation
        found = self.ids.get(key)
        if found is None:
            found = self.ids[key] = len(self.atoms)
            self.atoms.append(Atom._make(key))
        return found

    def term(self, e: int, placement: Placement, key: object) -> int:
        """Terms made in the way that `key` tells, which is the same in all turns."""
        spread = self.mesh.of_any_turn(placement)
        key = key, e, spread
        d = self.derivations.get(key)
        if d is None:
            d = self.derivations[key] = len(self.spread)
            self.spread.append((e, without_roots(spread)))
        return self.atom(e, placement, d)

    def of_any_turn(self, a: int) -> int:
        """The atom that stands for what a value is in all turns: what an operator makes of it, it makes in one way in each of them."""
        if a < 0 or not self.mesh.turns:
            return a
        e, placement, d = self.atoms[a]
        return self.atom(e, self.mesh.of_any_turn(placement), d)

    def moved(self, a: int, placement: Placement, how: object) -> int:
        """The same value in another placement: what of its terms was added up is no term any more. Terms that are new are made by `how`."""
        e, before, d = self.atoms[a]
        if placement == before:
            return a
        if not partial(placement):
            return self.atom(e, placement)
        if without_roots(before) == without_roots(placement):
            return self.atom(e, placement, d)
        groups = {x.group for x in placement if x.op}
        had = {x.group for x in before if x.op}
        if groups < had and without_terms(without_roots(before)) == without_terms(without_roots(placement)):
            return self.atom(e, placement, d)
        return self.term(e, placement, ("moved", how, self.of_any_turn(a)))

    # -- on one rank -------------------------------------------------------------------------------------------------

    def plain(self, a: int, rank: int) -> int:
        """What a rank holds of an atom, as an expression that any rank may have."""
        e, placement, d = self.atoms[a]
        if not self.mesh.holds(placement, rank):
            raise Refusal("it is on its root only")
        coords = self.mesh.coords(placement, rank)
        if not coords:
            return e
        key = a, coords
        found = self._plain.get(key)
        if found is None:
            found = self._plain[key] = self._make_plain(a, coords, rank)
        return found

    def _make_plain(self, a: int, coords: tuple, rank: int) -> int:
        e, placement, d = self.atoms[a]
        placement = without_roots(placement)
        t, table = self.table.types[e], self.table
        if d is not None and self._adds(d) and (cut := self._cut_of_terms(d, placement, t, rank)) is not None:
            lay, (start, stop) = cut
            x = table.cut(self.plain(self.atom(e, lay, d), rank), start, stop)
            return table.shaped(x, self.mesh.local_shape(placement, t.shape, rank))
        if d is not None and self._adds(d):
            others = self._others(self.mesh.of_any_turn(placement), coords)
            return table.terms(d, others, self._mask(d, coords), self._type(placement, t, rank))
        span = self.mesh.flat_range(placement, t.shape, rank)
        local = self._type(placement, t, rank)
        if span is not None:
            return table.shaped(table.cut(e, *span), local.shape)
        if d is None and ANY not in t.shape and all(x.axis is not None for x in placement):
            return table.boxes.cut(e, self.mesh.box(placement, t.shape, rank))
        return table.intern(("part", (e, placement, d), coords), local, ranked=True)

    def _cut_of_terms(self, d: int, placement: Placement, t: TensorType, rank: int) -> tuple[Placement, tuple[int, int]] | None:
        """(where terms lay before they were cut, the flat range that a rank has of them), for terms that began whole and are cut now."""
        terms, cuts = tuple([e for e in placement if e.op]), without_terms(placement)
        if not cuts or without_terms(self.spread[d][1]):
            return None
        span = self.mesh.flat_range(cuts, t.shape, rank)
        return None if span is None else (terms, span)

    def _type(self, placement: Placement, t: TensorType, rank: int) -> TensorType:
        return TensorType(t.dtype, self.mesh.local_shape(placement, t.shape, rank))

    def _adds(self, d: int) -> bool:
        return all(e.op in ("", "sum") for e in self.spread[d][1])

    @staticmethod
    def _others(placement: Placement, coords: tuple) -> tuple:
        terms = {e.group for e in placement if e.op}
        return tuple(c for c in coords if c[0] not in terms)

    def _mask(self, d: int, coords: tuple) -> int:
        """The ranks of a derivation, counted over the groups of its terms, that have these coordinates."""
        key = d, coords
        found = self._masks.get(key)
        if found is None:
            at = dict(coords)
            groups = [e.group for e in self.spread[d][1] if e.op]
            indices = [0]
            for g in groups:
                n = self.mesh.size[g]
                mine = at.get(g, range(n))
                wanted = [mine] if isinstance(mine, int) else mine
                indices = [i * n + k for i in indices for k in wanted]
            found = sum(1 << i for i in indices)
            inside = [(g, k) for g, k in coords if any(self.mesh.inside(g, whole) for whole in groups)]
            if inside:  # a host is some of the ranks of a larger group
                found &= self._mask_of_ranks(groups, inside)
            self._masks[key] = found
        return found

    def _mask_of_ranks(self, groups: list[str], coords: list[tuple[str, int]]) -> int:
        """The ranks with these coordinates, counted over the groups of a derivation's terms."""
        where, found = self.mesh.where, 0
        for r in range(self.mesh.world):
            if all(r in where[g] and where[g][r][0] == k for g, k in coords):
                indices = [0]
                for g in groups:  # a rank works in all turns
                    n = self.mesh.size[g]
                    indices = [i * n + k for i in indices for k in (range(n) if g in self.mesh.axes else (where[g][r][0],))]
                for i in indices:
                    found |= 1 << i
        return found

    def _complete(self, d: int, others: tuple, ranks: int) -> int | None:
        e, placement = self.spread[d]
        if ranks != self._mask(d, ()):
            return None
        rest = without_terms(placement)
        if not others:
            return e
        # any rank with these coordinates holds the part
        at = dict(others)
        rank = next((r for r in range(self.mesh.world) if all(self.mesh.where[g].get(r, (-1,))[0] == k for g, k in at.items())), None)
        return None if rank is None else self.plain(self.atom(e, rest), rank)

    # -- and back ----------------------------------------------------------------------------------------------------

    def read_back(self, x: int, placement: Placement, type_: TensorType, rank: int) -> int:
        """The atom whose part, on this rank, is the plain value x; `type_` is the whole value's type."""
        if not self.mesh.holds(placement, rank):
            return UNDEFINED
        table, bare = self.table, without_roots(placement)
        local = self._type(bare, type_, rank)
        if table.types[x] != local:
            raise Refusal(f"it is {table.types[x]}, but a part of {type_} is {local} on this rank")
        if 0 in local.shape:
            return EMPTY
        e = self._whole_of(x, bare, type_, rank)
        if isinstance(e, int):
            return self.atom(e, placement)
        total, key = e
        return self.atom(total, placement, key) if isinstance(key, int) else self.term(total, placement, key)

    def _whole_of(self, x: int, placement: Placement, type_: TensorType, rank: int) -> int | tuple[int, Any]:
        table = self.table
        if partial(placement):
            return self._own_terms(x, placement, type_, rank)
        span = self.mesh.flat_range(placement, type_.shape, rank)
        if not placement or (span is not None and span == (0, prod(type_.shape))):
            if table.ranked[x]:
                raise Refusal(f"it is {table.show(x)}, which ranks do not share")
            return table.shaped(x, type_.shape)
        if span is not None:
            if table.ranked[x]:
                raise Refusal(f"it is {table.show(x)}, which ranks do not share")
            return self._of_slices(x, span, type_)
        if ANY not in type_.shape and all(e.axis is not None for e in placement):
            if table.ranked[x]:
                raise Refusal(f"it is {table.show(x)}, which ranks do not share")
            box = self.mesh.box(placement, type_.shape, rank)
            return table.lin([(table.boxes.whole(a, box, type_.shape), w) for a, w in table.items(x)], type_)
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
        """The array of which the plain value is the slice `span`."""
        table, items = self.table, []
        x = table.flat(x)
        if (whole := self._of_rows(x, span, type_)) is not None:
            return whole
        for (base, start), w in table.slices(x).items():
            if start < 0:
                items.append((table.one(type_.dtype, type_.shape), w))
                continue
            first = start - span[0]  # the value may be a slice itself
            if first < 0 or first + type_.numel > table.types[base].numel:
                raise Refusal(f"it is {table.show(x)}, not elements {span[0]} to {span[1]} of a value of {type_.numel}")
            items.append((table.shaped(table.cut(base, first, first + type_.numel), type_.shape), w))
        return table.lin(items, type_)

    def _of_rows(self, x: int, span: tuple[int, int], type_: TensorType) -> int | None:
        """The array of which the plain value is the slice `span`, if that is one made of rows."""
        table = self.table
        rows = table.keys[x][1] if table.keys[x][0] == "rows" else (x,)
        known = next((a for row in rows for a in table.arrays(row)), None)
        for whole in () if known is None else table.rows_with.get(known, ()):
            if table.types[whole].numel == type_.numel and table.cut(whole, *span) == x:
                return table.shaped(whole, type_.shape)
        return None

    def _own_terms(self, x: int, placement: Placement, type_: TensorType, rank: int) -> tuple[int, Any]:
        """The sum of which the plain value is this rank's term, or its part of a term."""
        table = self.table
        items, made = [], []
        for a, w in table.items(x):
            t, lay = self._term_of(a, placement, type_, rank)
            key, coords = table.keys[t], self.mesh.coords(lay, rank)
            if key[0] != "terms":
                raise Refusal(f"it is {table.show(a)}, which is no term of a sum")
            e, first = self.spread[key[1]]
            if (
                not self._reduces_to(first, lay)
                or not self._divides(key[1], lay)
                or key[3] != self._mask(key[1], coords)
                or table.types[e] != type_
            ):
                raise Refusal(f"it is {table.show(a)}, which is not this rank's term of one sum")
            items.append((e, w))
            made.append((key[1], w))
        if len(made) == 1 and made[0][1] == 1.0:
            # the term itself, and not another derivation of it
            return items[0][0], made[0][0]
        return table.lin(items, type_), ("sum", tuple(sorted(made)))

    def _term_of(self, a: int, placement: Placement, type_: TensorType, rank: int) -> tuple[int, Placement]:
        """The term of which a is this rank's part, and where it lay; a itself where terms are not cut."""
        table = self.table
        t = table.keys[a][1] if table.keys[a][0] == "view" else a
        key = table.keys[t]
        term, start, size = key[1:] if key[0] == "slice" else (t, 0, table.types[t].numel)
        if table.keys[term][0] == "terms":
            cut = self._cut_of_terms(table.keys[term][1], placement, type_, rank)
            if cut is not None and cut[1] == (start, start + size):
                return term, cut[0]
        return a, placement

    def _reduces_to(self, first: Placement, placement: Placement) -> bool:
        placement = self.mesh.of_any_turn(placement)
        had = [e for e in first if e.op]
        return without_terms(first) == without_terms(placement) and all(
            any(e.op == o.op and (e.group == o.group or self.mesh.inside(e.group, o.group)) for o in had) for e in placement if e.op
        )

    def _divides(self, d: int, placement: Placement) -> bool:
        """Do the ranks with each index in the groups of `placement` hold, together, every term once?"""
        key = d, placement
        found = self._divided.get(key)
        if found is None:
            found, seen = True, 0
            groups = [e.group for e in self.mesh.of_any_turn(placement) if e.op]
            for indices in product(*(range(self.mesh.size[g]) for g in groups)):
                mask = self._mask(d, tuple(zip(groups, indices, strict=True)))
                found = found and not mask & seen
                seen |= mask
            found = self._divided[key] = found and seen == self._mask(d, ())
        return found
