"""CPU affinity of ranks: the cores on which the threads of each CPU rank run, if FLUIDX_AFFINITY is set."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ... import config
from ...ir.errors import ExecutionError

Cores = frozenset[int]


def cores_of(ranks: int) -> list[Cores | None]:
    """The cores for the threads of each rank; None: all cores. Raises ExecutionError if FLUIDX_AFFINITY does not fit this machine."""
    asked = config.affinity() if ranks else ""
    if not asked:
        return [None] * ranks
    if not hasattr(os, "sched_setaffinity"):
        raise ExecutionError("FLUIDX_AFFINITY is set, and this system does not let threads choose their cores; unset it")
    here = sorted(os.sched_getaffinity(0))
    found = _shares(here, ranks) if isinstance(asked, str) else asked
    for rank, cores in enumerate(found):
        if missing := sorted(cores - set(here)):
            which = f"core{'s' * (len(missing) > 1)} {_listed(missing)}"
            raise ExecutionError(f"FLUIDX_AFFINITY gives rank {rank} {which}; this process has {_listed(here)}")
    if len(found) != ranks:
        raise ExecutionError(f"FLUIDX_AFFINITY names cores for {len(found)} rank{'s' * (len(found) > 1)}, there are {ranks}")
    return list(found)


def _listed(cores: Sequence[int]) -> str:
    """
    >>> _listed([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _shares(here: Sequence[int], ranks: int) -> list[Cores]:
    """Neighbouring cores for each rank. Ranks share cores if there are too few."""
    n = len(here)
    return [frozenset(here[n * r // ranks : max(n * (r + 1) // ranks, n * r // ranks + 1)]) for r in range(ranks)]


def keep_to(cores: Cores | None) -> None:
    """Restrict the calling thread to these cores."""
    if cores is not None:
        os.sched_setaffinity(0, cores)


@contextmanager
def kept_to(cores: Cores | None) -> Iterator[None]:
    """A context in which the calling thread runs on these cores only."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
