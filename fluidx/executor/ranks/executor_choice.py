"""The executor class for given places: ranks are threads of this process, processes that it starts, or processes of a launcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...comm.launched_rank import LaunchedRank, by_mpi, member
from .. import launched_alone
from ..places import MpiPlace, Place, ProcessPlace, RankGpu
from . import parallel_executor
from .parallel_executor import ParallelExecutor


def new_executor(places: Any) -> ParallelExecutor:
    """An executor for ranks on these places, not yet initialised. ParallelExecutor's `__init__` refuses places that are not a list."""
    listed: Any = places if places is None or hasattr(places, "__iter__") else [places]
    if (rank := _launched(listed)) is not None:
        from .launched_executor import LaunchedExecutor

        return LaunchedExecutor.of(rank)
    if any(isinstance(p, ProcessPlace) for p in listed or ()):
        from .process_executor import ProcessExecutor

        return object.__new__(ProcessExecutor)
    return object.__new__(ParallelExecutor)


def _launched(places: Sequence[Place] | None) -> LaunchedRank | None:
    """This process as a launched rank, if the places are for ranks that a launcher started; else None."""
    if places is None or any(isinstance(p, RankGpu) for p in places):
        return member()
    if any(isinstance(p, MpiPlace) for p in places):
        return by_mpi()
    launched_alone.check_places(places)
    return None


parallel_executor.new_executor = new_executor
