"""Check the `programs` argument of ParallelExecutor, and make it one ProgramPair for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ir.errors import ExecutionError
from ...ir.program import ProgramPair
from .agreement import first_difference, operators


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
