"""Fetch owners: maps each fetch to ranks, to the names that they fetch, and to the placement of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...ir.entries import is_local
from ...ir.errors import FeedError
from ...ir.parts import holds, local_shape
from ...ir.program import Program
from ...ir.time_axes import in_turn, over_turns, turn_groups
from ...ir.types import Entry, Placement, TensorType, show_placement
from ...ir.var import Var
from .split_and_join import FeedSplitter, Term


class FetchOwners(NamedTuple):
    """The owners of a fetch list: the names that each rank fetches, and the placement of each fetch."""

    ranks: list[list[str]]
    places: list[Placement]


class GlobalFetch(NamedTuple):
    """One fetch: its positions among the values that each rank fetches, and how it is joined from them."""

    name: str
    at: list[list[int]]  # by rank: positions; several if it is placed over a time axis, none if the rank has no part
    placement: Placement  # of a rank's value, joined over the time axis
    shape: tuple[int, ...]
    terms: list[Term] | None
    turns: Entry | None  # the entry for the time axis, if there is one

    def part(self, rank: int, fetched: Sequence[Any]) -> Any:
        """A rank's local value, from its fetched values: the parts of all time steps joined, or their terms reduced."""
        found = [fetched[k] for k in self.at[rank]]
        if self.turns is None or not found:
            return found[0] if found else None
        return self.turns.join(found)


class ValueOwners:
    """Finds the ranks that have a value after a run of their programs."""

    def __init__(self, mains: Sequence[Program], descs: Mapping[str, Var], splitter: FeedSplitter):
        self.mains, self.descs, self.splitter = mains, descs, splitter
        self._defined: dict[int, frozenset[str]] = {}
        self._turns = dict(turn_groups(mains[0].turns))

    def owners(self, names: Sequence[str], merged: bool) -> FetchOwners:
        """The owners of a fetch list. For a global value, one rank for each part. Raises FeedError if a value cannot be fetched."""
        places = [self.descs[n].placement for n in names]
        ranks: list[list[str]] = [[] for _ in self.mains]
        for n, place in zip(names, places, strict=True):
            if not merged:
                for r, asked in enumerate(ranks):
                    if holds(place, self.splitter.coords[r]):
                        asked += [m for m in self._in_turns(n) if self._defines(r, m)]
                continue
            if any(e.group in self._turns for e in place):
                raise FeedError(
                    f"fetch_list names {n!r}, which is {show_placement(place)}: the part of a value at one index of a time axis; fetch the "
                    "value, or the local value of each rank with return_merged=False"
                )
            if is_local(place):
                raise FeedError(
                    f"fetch_list names {n!r}, which is local: every rank has its own, and there is no global value; "
                    "return_merged=False gives each rank's"
                )
            place = self._of_a_rank(place)
            for r in self.splitter.holders(place):
                there = [m for m in self._in_turns(n) if self._defines(r, m)]
                if not there:
                    if 0 in local_shape(self.descs[n].type.shape, place, self.splitter.coords[r]):
                        continue  # its part is empty
                    raise FeedError(
                        f"fetch_list names {n!r}, which no operator of rank {r} defines; return_merged=False gives what the ranks have"
                    )
                ranks[r] += there
        return FetchOwners(ranks, places)

    def global_fetches(self, names: Sequence[str], owners: FetchOwners, types: Sequence[Sequence[TensorType]]) -> list[GlobalFetch]:
        """How each fetch is joined from the values that the ranks fetch. `types`: the types of these values, by rank."""
        found = []
        for n, place in zip(names, owners.places, strict=True):
            at = [[asked.index(m) for m in self._in_turns(n) if m in asked] for asked in owners.ranks]
            shape = next((t[k[0]].shape for t, k in zip(types, at, strict=True) if k), ())
            if any(e.is_own for e in place):  # replica-local: the number of rows differs by rank
                shape = self.descs[n].type.shape
            of_rank = self._of_a_rank(place)
            terms = None if is_local(place) else self.splitter.terms(of_rank, shape, [r for r, k in enumerate(at) if k])
            turns = next((e for e in place if e.group in self.mains[0].turns), None)
            found.append(GlobalFetch(n, at, of_rank, shape, terms, turns))
        return found

    def _in_turns(self, name: str) -> list[str]:
        """The names of a value on a rank: one for each index of the time axis if it is placed over one."""
        turns = self.mains[0].turns
        axis = over_turns(self.descs[name].placement, turns)
        return [in_turn(name, axis, k) for k in range(turns[axis])] if axis else [name]

    def _of_a_rank(self, place: Placement) -> Placement:
        """The placement of a rank's value, without the entry for a time axis."""
        turns = self.mains[0].turns
        return tuple([e for e in place if e.group not in turns]) if turns else place

    def _defines(self, rank: int, name: str) -> bool:
        """Has the rank a value of this name after a run?"""
        block = self.mains[rank].global_block()
        d = block.descs.get(name)
        if d is not None and (d.persistable or d.is_data):
            return True
        return self._computes(rank, name)

    def _computes(self, rank: int, name: str) -> bool:
        block = self.mains[rank].global_block()
        if rank not in self._defined:
            self._defined[rank] = frozenset(n for op in block.oplist for n in op.output_arg_names)
        return name in self._defined[rank]
