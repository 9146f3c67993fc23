"""The values of ranks in the proof: global expressions with placements (atoms), and local expressions of one rank.

An *atom* describes the values of all ranks at once. It is an expression with a placement: each rank has its part of the expression. With a
`partial` placement each rank has a term of it; the atom then has a *derivation*, the way in which the terms were computed, because only
terms of one derivation add up to the expression. `local_expression` gives one rank's value of an atom as an expression over parts and terms
of that rank; `GlobalAtoms` is the inverse.
"""

from __future__ import annotations

from typing import NamedTuple

from ..ir.types import ANY, Placement, TensorType
from .mesh import RankGroups, partial, without_roots, without_terms
from .normal_form import ExpressionTable
from .refusal import Refusal

UNDEFINED = -1  # no value; it may not be read
EMPTY = -2  # a part without elements, which may be the part of any value


class Atom(NamedTuple):
    """An expression with a placement: each rank has its part of it, or a term of it."""

    e: int
    placement: Placement
    derivation: int | None  # None: parts, not terms


class ProgramValues:
    """The atoms of one run of all ranks, over a table of expressions."""

    def __init__(self, table: ExpressionTable, mesh: RankGroups):
        self.table, self.mesh = table, mesh
        self.ids: dict[tuple, int] = {}
        self.atoms: list[Atom] = []
        self.derivations: dict[object, int] = {}
        self.spread: list[tuple[int, Placement]] = []  # derivation -> (expression, placement of the terms when they were made)
        table.complete, table.adaptive.ranks = self._complete, mesh.size
        self._local: dict[tuple, int] = {}
        self._masks: dict[tuple, int] = {}

    def atom(self, e: int, placement: Placement, derivation: int | None = None) -> int:
        key = e, placement, derivation
        found = self.ids.get(key)
        if found is None:
            found = self.ids[key] = len(self.atoms)
            self.atoms.append(Atom._make(key))
        return found

    def term(self, e: int, placement: Placement, key: object) -> int:
        """The atom of terms whose derivation is `key`. It is the same in all iterations of a time axis."""
        spread = self.mesh.of_any_turn(placement)
        key = key, e, spread
        d = self.derivations.get(key)
        if d is None:
            d = self.derivations[key] = len(self.spread)
            self.spread.append((e, without_roots(spread)))
        return self.atom(e, placement, d)

    def of_any_turn(self, a: int) -> int:
        """The atom with turns replaced by their time axes: equal for the same value of different iterations."""
        if a < 0 or not self.mesh.turns:
            return a
        e, placement, d = self.atoms[a]
        return self.atom(e, self.mesh.of_any_turn(placement), d)

    def moved(self, a: int, placement: Placement, how: object) -> int:
        """The same value in another placement. Terms over a group that is not in the new placement were added up.

        If the new placement has terms that the old one has not, `how` is part of the key of their derivation.
        """
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

    # -- from atoms to local expressions -----------------------------------------------------------------------------

    def local_expression(self, a: int, rank: int) -> int:
        """The local value of an atom on a rank, as an expression that does not depend on the placement."""
        e, placement, d = self.atoms[a]
        if not self.mesh.holds(placement, rank):
            raise Refusal("it is at its root only")
        coords = self.mesh.coords(placement, rank)
        if not coords:
            return e
        key = a, coords
        found = self._local.get(key)
        if found is None:
            found = self._local[key] = self._make_local(a, coords, rank)
        return found

    def _make_local(self, a: int, coords: tuple, rank: int) -> int:
        e, placement, d = self.atoms[a]
        placement = without_roots(placement)
        t, table = self.table.types[e], self.table
        if d is not None and self._adds(d) and (cut := self.cut_of_terms(d, placement, t, rank)) is not None:
            before, (start, stop) = cut
            x = table.cut(self.local_expression(self.atom(e, before, d), rank), start, stop)
            return table.shaped(x, self.mesh.local_shape(placement, t.shape, rank))
        if d is not None and self._adds(d):
            others = self._others(self.mesh.of_any_turn(placement), coords)
            return table.terms(d, others, self.rank_mask(d, coords), self.local_type(placement, t, rank))
        span = self.mesh.flat_range(placement, t.shape, rank)
        local = self.local_type(placement, t, rank)
        if span is not None:
            return table.shaped(table.cut(e, *span), local.shape)
        if d is None and ANY not in t.shape and all(x.axis is not None for x in placement):
            return table.strided.cut(e, self.mesh.intervals(placement, t.shape, rank))
        return table.intern(("part", (e, placement, d), coords), local, ranked=True)

    def cut_of_terms(self, d: int, placement: Placement, t: TensorType, rank: int) -> tuple[Placement, tuple[int, int]] | None:
        """(placement of the terms before they were sharded, the rank's flat range); None if they were not sharded after they were made."""
        terms, cuts = tuple([e for e in placement if e.op]), without_terms(placement)
        if not cuts or without_terms(self.spread[d][1]):
            return None
        span = self.mesh.flat_range(cuts, t.shape, rank)
        return None if span is None else (terms, span)

    def local_type(self, placement: Placement, t: TensorType, rank: int) -> TensorType:
        return TensorType(t.dtype, self.mesh.local_shape(placement, t.shape, rank))

    def _adds(self, d: int) -> bool:
        return all(e.op in ("", "sum") for e in self.spread[d][1])

    @staticmethod
    def _others(placement: Placement, coords: tuple) -> tuple:
        terms = {e.group for e in placement if e.op}
        return tuple(c for c in coords if c[0] not in terms)

    def rank_mask(self, d: int, coords: tuple) -> int:
        """The ranks with these coordinates, as a bit mask over the indices in the groups of a derivation's terms."""
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
            inside = [(g, k) for g, k in coords if any(self.mesh.is_subgroup(g, whole) for whole in groups)]
            if inside:  # subgroups, such as hosts: some ranks of a larger group
                found &= self._mask_of_ranks(groups, inside)
            self._masks[key] = found
        return found

    def _mask_of_ranks(self, groups: list[str], coords: list[tuple[str, int]]) -> int:
        """The same mask by a look at each rank, for coordinates in subgroups of the groups of the terms."""
        where, found = self.mesh.where, 0
        few = min((self.mesh.ranks_at(g, k) for g, k in coords), key=len)
        for r in few:
            if all(r in where[g] and where[g][r][0] == k for g, k in coords):
                indices = [0]
                for g in groups:  # a rank runs all turns
                    n = self.mesh.size[g]
                    indices = [i * n + k for i in indices for k in (range(n) if g in self.mesh.axes else (where[g][r][0],))]
                for i in indices:
                    found |= 1 << i
        return found

    def _complete(self, d: int, others: tuple, ranks: int) -> int | None:
        e, placement = self.spread[d]
        if ranks != self.rank_mask(d, ()):
            return None
        rest = without_terms(placement)
        if not others:
            return e
        # any rank with these coordinates has the part
        at = dict(others)
        rank = next((r for r in range(self.mesh.world) if all(self.mesh.where[g].get(r, (-1,))[0] == k for g, k in at.items())), None)
        return None if rank is None else self.local_expression(self.atom(e, rest), rank)
