"""What a launched rank that made only its own programs reads of the others' from the programs for all ranks."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol

from ...ir.program import Program, ProgramPair
from ...ir.var import Var
from .fetches import ValueOwners
from .split_and_join import FeedSplitter


class PairForAllRanks(Protocol):
    """The programs for all ranks, as a transpiler gives them (see transpiler/common_programs.py)."""

    pair: ProgramPair

    @property
    def digest(self) -> str: ...

    @property
    def stand_for_ranks(self) -> bool: ...

    @property
    def may_send(self) -> bool: ...

    def rank_pair(self, rank: int) -> ProgramPair: ...

    def computes(self, rank: int, name: str) -> bool: ...


class CommonOwners(ValueOwners):
    """Finds the ranks that have a value by the programs for all ranks."""

    def __init__(self, common: PairForAllRanks, mains: Sequence[Program], descs: Mapping[str, Var], splitter: FeedSplitter):
        super().__init__(mains, descs, splitter)
        self._common = common

    def _computes(self, rank: int, name: str) -> bool:
        return self._common.computes(rank, name)


class CommonDeclarations(Mapping[str, Var]):
    """The declarations of all ranks. The programs of other ranks are made only to look up a name that the program for all ranks does not
    declare."""

    def __init__(self, common: PairForAllRanks, world_size: int):
        self._common, self._world_size = common, world_size
        self._first = common.pair.main.global_block().descs

    def __getitem__(self, name: str) -> Var:
        found = self._first.get(name)
        return self._all[name] if found is None else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @cached_property
    def _all(self) -> Mapping[str, Var]:
        return ChainMap(*(self._common.rank_pair(r).main.global_block().descs for r in range(self._world_size)))
