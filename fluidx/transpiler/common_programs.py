"""CommonPrograms: what a launched rank knows of the other ranks from the programs for all ranks, without making their programs.

Ranks whose programs for all ranks have the same text have the same rank programs, because Specialize is deterministic. So each rank
compares the digest of the programs for all ranks with the others, and makes only its own programs where that is possible.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property

from ..ir.operator import Operator
from ..ir.parts import coords_of, holds
from ..ir.program import Program, ProgramPair
from ..verify.rank_program import RunsAt, check_rank_program
from ..verify.refusal import Refusal
from .specialize import Specializer

Pair = tuple[Program, Program]  # main and startup


class Fingerprint:
    """A hash of a pair of programs, computed when it is first needed: printing the programs takes as long as transpiling them."""

    def __init__(self, pair: ProgramPair):
        self.pair = pair

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(str(self.pair).encode()).hexdigest()

    def __str__(self) -> str:
        return self.digest[:16]


class CommonPrograms:
    """The programs for all ranks, from which the rank programs follow. `rank_pair` makes the programs of a rank."""

    def __init__(self, specials: tuple[Specializer, Specializer], fingerprint: Fingerprint, rank_pair: Callable[[int], Pair]):
        self._specials, self._fingerprint, self._rank_pair = specials, fingerprint, rank_pair
        self.pair = fingerprint.pair

    @property
    def digest(self) -> str:
        """A digest of the text of the programs for all ranks."""
        return self._fingerprint.digest

    @property
    def stand_for_ranks(self) -> bool:
        """Can they stand for the programs of other ranks? Not for those of servers and of pipeline stages."""
        return all(special.is_common and not special.has_transfers for special in self._specials)

    def cover(self, made: Mapping[int, Pair]) -> bool:
        """Are these rank programs those that follow from the programs for all ranks?"""
        if any(str(p.origin) != str(self._fingerprint) for pair in made.values() for p in pair):
            return False
        if not self.stand_for_ranks:
            return True
        try:
            for rank, pair in made.items():
                for special, mine in zip(self._specials, pair, strict=True):
                    check_rank_program(special.program, mine, rank, special.recipe)
        except Refusal:
            return False
        return True

    def rank_pair(self, rank: int) -> ProgramPair:
        """The programs of a rank, made when they are first needed."""
        return ProgramPair(*self._rank_pair(rank))

    @property
    def may_send(self) -> bool:
        """May ranks send messages? False if every rank has the operators of the programs for all ranks."""
        return not all(special.writes_nothing for special in self._specials)

    def computes(self, rank: int, name: str) -> bool:
        """Has the main program of a rank an operator that defines a variable which the rank holds?"""
        main = self.pair.main
        if name not in main.global_block().descs:  # a variable of one rank's own
            return any(name in op.output_arg_names for op in self.rank_pair(rank).main.global_block().oplist)
        coords = coords_of(main.groups, rank, main.turns)
        return any(holds(self._runs_at.of(op), coords) for op in self._definers.get(name, ()))

    @cached_property
    def _runs_at(self) -> RunsAt:
        return RunsAt(self.pair.main.groups, self.pair.main.global_block().descs)

    @cached_property
    def _definers(self) -> Mapping[str, list[Operator]]:
        found: dict[str, list[Operator]] = {}
        for op in self.pair.main.global_block().oplist:
            for name in op.output_arg_names:
                found.setdefault(name, []).append(op)
        return found
