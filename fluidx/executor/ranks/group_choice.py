"""The RankGroup for places: ranks are threads of this process, processes that it starts, or processes of a launcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...comm.launched_rank import LaunchedRank, by_mpi, member
from .. import launched_alone
from ..places import CPUPlace, CUDAPlace, MpiPlace, Place, ProcessPlace, RankGpu
from .rank_group import RankGroup
from .thread_group import ThreadGroup


def group_for(places: Any, programs: Any) -> RankGroup:
    """A group, not yet open, for ranks of these programs on these places. ParallelExecutor refuses places that are not a list."""
    listed: Any = places if places is None or hasattr(places, "__iter__") else [places]
    each = _ranks_of_each(listed, programs)
    if (rank := member() if each > 1 else _launched(listed)) is not None:
        from .launched_group import LaunchedGroup

        launched_alone.note_joined()
        return LaunchedGroup(rank, listed, each)
    if any(isinstance(p, ProcessPlace) for p in listed or ()):
        from .process_group import ProcessGroup

        return ProcessGroup()
    return ThreadGroup()


def _ranks_of_each(places: Sequence[Place] | None, programs: Any) -> int:
    """The number of ranks that each launched process holds: several, if the places of this process are its share of those of all ranks."""
    if places is None or len(places) < 2 or (there := launched_alone.launched_as()) is None:
        return 1
    ranks = programs.world_size if hasattr(programs, "get_trainer_program") else len(programs) if isinstance(programs, Sequence) else 0
    alike = all(type(p) is CPUPlace for p in places) or all(type(p) is CUDAPlace for p in places)
    return len(places) if alike and ranks == len(places) * there.world_size else 1


def _launched(places: Sequence[Place] | None) -> LaunchedRank | None:
    """This process as a launched rank, if the places are for ranks that a launcher started; else None."""
    if places is None or any(isinstance(p, RankGpu) for p in places):
        return member()
    if any(isinstance(p, MpiPlace) for p in places):
        return by_mpi()
    launched_alone.check_places(places)
    return None
