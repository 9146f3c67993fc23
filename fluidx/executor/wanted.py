"""Which ranks fetch what of a fetch list, and where what they fetch lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..ir.errors import FeedError
from ..ir.parts import holds, local_shape
from ..ir.program import Program, Var
from ..ir.types import Own, Placement, TensorType
from .deal import Dealer, Term, is_local


class Wanted(NamedTuple):
    """A fetch list, worked out: what each rank fetches, and where what is fetched lies."""

    ranks: list[list[str]]
    places: list[Placement]


class Gathered(NamedTuple):
    """One fetch: its place among what each rank fetches, and how it is made of that."""

    name: str
    at: list[int | None]  # by rank
    placement: Placement
    shape: tuple[int, ...]
    terms: list[Term] | None


class Holders:
    """Which ranks have which values after a run of their programs."""

    def __init__(self, mains: Sequence[Program], descs: Mapping[str, Var], dealer: Dealer):
        self.mains, self.descs, self.dealer = mains, descs, dealer
        self._defined: dict[int, frozenset[str]] = {}

    def wanted(self, names: Sequence[str], merged: bool) -> Wanted:
        """For a global value one rank for each of its parts is asked. Raises FeedError for what cannot be had."""
        places = [self.descs[n].placement for n in names]
        ranks: list[list[str]] = [[] for _ in self.mains]
        for n, place in zip(names, places, strict=True):
            if not merged:
                for r, asked in enumerate(ranks):
                    if holds(place, self.dealer.coords[r]) and self._defines(r, n):
                        asked.append(n)
                continue
            if is_local(place):
                raise FeedError(
                    f"fetch_list names {n!r}, which is local: every rank has its own, and there is no global value; "
                    "return_merged=False gives each rank's"
                )
            for r in self.dealer.holders(place):
                if not self._defines(r, n):
                    if 0 in local_shape(self.descs[n].type.shape, place, self.dealer.coords[r]):
                        continue  # there is nothing to compute
                    raise FeedError(
                        f"fetch_list names {n!r}, which no operator of rank {r} defines; return_merged=False gives what the ranks have"
                    )
                ranks[r].append(n)
        return Wanted(ranks, places)

    def gathered(self, names: Sequence[str], wanted: Wanted, types: Sequence[Sequence[TensorType]]) -> list[Gathered]:
        """How every fetch is made of what the ranks fetch, which has these types."""
        found = []
        for n, place in zip(names, wanted.places, strict=True):
            at = [asked.index(n) if n in asked else None for asked in wanted.ranks]
            shape = next((t[k].shape for t, k in zip(types, at, strict=True) if k is not None), ())
            if any(isinstance(e, Own) for e in place):  # each rank has its own number of rows
                shape = self.descs[n].type.shape
            terms = None if is_local(place) else self.dealer.terms(place, shape, [r for r, k in enumerate(at) if k is not None])
            found.append(Gathered(n, at, place, shape, terms))
        return found

    def _defines(self, rank: int, name: str) -> bool:
        """Does the rank have a value of that name after a run?"""
        block = self.mains[rank].global_block()
        d = block.descs.get(name)
        if d is not None and (d.persistable or d.is_data):
            return True
        if rank not in self._defined:
            self._defined[rank] = frozenset(n for op in block.oplist for n in op.output_arg_names)
        return name in self._defined[rank]
