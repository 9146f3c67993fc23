"""Specialize: make the program of one rank from the program for all ranks. The segments of lowering/segments.py write its operators."""

from __future__ import annotations

from functools import cached_property

from ..ir.operator import Operator
from ..ir.parts import coords_of
from ..ir.program import Program
from ..verify.rank_program import RankRecipe
from .cluster import SERVERS
from .lowering.segments import OnEveryRank, ProgramSegments
from .lowering.server_exchange import ServerExchange
from .lowering.server_programs import ServerPrograms
from .lowering.transfers import Transfers
from .lowering.write_algorithm import MessageRounds


class Specializer:
    """Makes rank programs from a program for all ranks. Operators that do not depend on the rank are shared objects. An operator with
    results at a root runs only there. Collectives with an algorithm become send, recv and sum, round by round; a transfer becomes a send on
    one rank and a recv on another.
    """

    def __init__(self, program: Program):
        self.program, self.servers = program, ServerPrograms(program)
        self.segments = ProgramSegments(program, self.servers.kept).of_blocks

    @property
    def is_common(self) -> bool:
        """Do the rank programs follow from the program for all ranks? They do if they have its operators, those at roots only there,
        messages for transfers, and collectives by rounds that are proved for all ranks."""
        groups = self.program.groups
        if SERVERS in groups or any(sum(map(len, sets)) != self.program.world_size for sets in groups.values()):
            return False
        first, *inner = self.segments
        if not all(isinstance(s, OnEveryRank) for segments in inner for s in segments):
            return False
        return all(s.is_common() for s in first)

    @property
    def has_transfers(self) -> bool:
        """Does block 0 have transfers, as programs of pipeline stages do?"""
        return any(isinstance(s, Transfers) for s in self.segments[0])

    @property
    def writes_nothing(self) -> bool:
        """Has every rank the operators of the program for all ranks, and no others?"""
        return all(isinstance(s, OnEveryRank) for segments in self.segments for s in segments)

    @property
    def differs_in_rounds_only(self) -> bool:
        """Has every rank the operators of the program for all ranks, but for the messages of collectives that are carried out by rounds?"""
        return all(isinstance(s, (OnEveryRank, MessageRounds)) for segments in self.segments for s in segments)

    @property
    def exchanges(self) -> tuple[int, int]:
        """The number of collectives of block 0 that the ranks carry out by messages, and the number of these messages."""
        found = [s.count() for s in self.segments[0] if isinstance(s, (MessageRounds, Transfers))]
        return sum(c for c, _ in found), sum(m for _, m in found)

    def recipe(self, op: Operator, rank: int) -> RankRecipe | None:
        """The rank's part of the rounds of a collective of block 0; None for an operator that is not carried out by rounds."""
        found = self._rounds.get(id(op))
        return None if found is None else found[0].recipe(found[1], rank)

    @cached_property
    def _rounds(self) -> dict[int, tuple[MessageRounds, int]]:
        """The segment and the index in it of each operator that is carried out by rounds, by the operator's id."""
        return {id(op): (s, k) for s in self.segments[0] if isinstance(s, MessageRounds) for k, op in enumerate(s.ops)}

    def rank_program(self, rank: int) -> Program:
        """The program of one rank. Ranks with equal operators share these, and the records of variables."""
        return self._rank_program(rank)

    def check_server(self, rank: int) -> None:
        """Raise TranspileError if a server cannot run the program. The answer is the same for any number of trainers, so two are used."""
        self._rank_program(rank, few=True)

    def _rank_program(self, rank: int, few: bool = False) -> Program:
        new = self.program.copy()
        new.rank = rank
        coords = coords_of(self.program.groups, rank, self.program.turns)
        for block, segments in zip(new.blocks, self.segments, strict=True):
            if all(isinstance(s, OnEveryRank) for s in segments):
                continue
            block.oplist = []
            for segment in segments:
                if few and isinstance(segment, ServerExchange):
                    segment.write_with_two_trainers(rank, block)
                else:
                    segment.write(rank, coords, block)
        self.servers.leave_out(new, coords)
        new.frozen = True
        return new
