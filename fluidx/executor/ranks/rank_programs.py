"""The `programs` argument of ParallelExecutor, checked, and what follows from the programs of all ranks."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from ...ir.change_stamps import Stamp
from ...ir.errors import ExecutionError, ProgramError
from ...ir.opdef import Effect, opdef
from ...ir.operator import op_types
from ...ir.program import Program, ProgramPair
from ...ir.var import Var
from ..plan.records import Plan
from .agreement import first_difference, operators
from .common_owners import CommonDeclarations, CommonOwners, PairForAllRanks
from .fetches import ValueOwners
from .shared_plans import SharedPlans
from .split_and_join import FeedSplitter


class RankPrograms:
    """The programs of all ranks, the declarations of their variables, the ranks that have values, and how feeds are split.

    `own` are the ranks that this process plans. If `common`, the programs for all ranks, is given, it stands for the programs of the other
    ranks, which are made only if a message or a profiler needs them.
    """

    def __init__(self, pairs: Sequence[ProgramPair], own: Sequence[int], common: PairForAllRanks | None = None):
        self.mains, self.startups, self.common = [p.main for p in pairs], [p.startup for p in pairs], common
        self.world_size, self.own = len(pairs), own
        mains, startups = [self.mains[r] for r in own], [self.startups[r] for r in own]
        self._stamp = Stamp([*mains, *startups])
        self._plans = SharedPlans(self._stamp, mains, startups)
        self.splitter = FeedSplitter(self.mains)
        # a rank of another pipeline stage may not declare a variable, so these are the declarations of all ranks
        self.descs: Mapping[str, Var]
        self.owners: ValueOwners
        if common is None:
            self.descs = ChainMap(*(m.global_block().descs for m in self.mains))
            self.owners = ValueOwners(self.mains, self.descs, self.splitter)
        else:
            self.descs = CommonDeclarations(common, self.world_size)
            self.owners = CommonOwners(common, self.mains, self.descs, self.splitter)

    def pair(self, rank: int) -> ProgramPair:
        return ProgramPair(self.mains[rank], self.startups[rank])

    def main_of(self, rank: int) -> Program:
        """The main program of a rank, made if it was not needed before."""
        return self.mains[rank] if self.common is None else self.common.rank_pair(rank).main

    @property
    def may_send(self) -> bool:
        """May any rank send messages?"""
        return any(map(_sends, (*self.mains, *self.startups))) if self.common is None else self.common.may_send

    def plan(self, rank: int, program: Program, *args: Any, **how: Any) -> Plan:
        """The plan of a program of one of the `own` ranks. Arguments are those of `plan`."""
        self.check_unchanged(rank, program)
        return self._plans.plan(program, *args, **how)

    def check_unchanged(self, rank: int, program: Program) -> None:
        if change := self._stamp.changed(program):
            raise ProgramError(
                f"rank {rank}: {change}\n  the program was changed after this executor was made; "
                "transpile the changed source, or make a new executor"
            )


def _sends(program: Program) -> bool:
    return any(opdef(type_).effect is Effect.P2P for block in program.blocks for type_ in op_types(block.oplist))


def rank_programs(programs: Any) -> list[ProgramPair]:
    """The programs of every rank, in order."""
    if hasattr(programs, "get_trainer_program"):
        return [ProgramPair(programs.get_trainer_program(r), programs.get_startup_program(r)) for r in range(programs.world_size)]
    if not isinstance(programs, Sequence) or not programs or not all(isinstance(p, ProgramPair) for p in programs):
        raise ExecutionError(
            "ParallelExecutor takes the DistributeTranspiler that transpiled the program, ParallelExecutor(t, places=fx.cpu_places(4)), "
            f"or one ProgramPair for each rank; got {type(programs).__name__}"
        )
    groups = programs[0].main.groups
    for r, pair in enumerate(programs):
        for p in (pair.main, pair.startup):
            if p.rank not in (None, r):
                raise ExecutionError(
                    f"{p.label()} is the program of rank {p.rank}, but its position is {r}; give the programs in rank order"
                )
            if p.groups != groups:
                raise ExecutionError(f"rank {r}: {p.label()} declares groups {p.groups}, {programs[0].main.label()} of rank 0 {groups}")
    if programs[0].main.world_size != len(programs):
        n = programs[0].main.world_size
        raise ExecutionError(f"{programs[0].main.label()} is one of {n} rank{'s' if n > 1 else ''}, programs of {len(programs)} were given")
    _check_origins(programs)
    return list(programs)


def _check_origins(pairs: Sequence[ProgramPair]) -> None:
    """Raise ExecutionError if programs come from different transpiles, by their `origin` (which program texts have)."""
    if len({p.main.origin for p in pairs if p.main.origin}) > 1:
        text = first_difference([[f"strategy {p.main.strategy}"] for p in pairs]) + first_difference([operators(p) for p in pairs])
        raise ExecutionError(
            f"the ranks' programs are not from one transpile; the first difference is{text}\n"
            "  give every rank the result of the same program and the same strategy"
        )
