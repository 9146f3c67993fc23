"""The cores that the threads of CPU ranks keep to, where FLUIDX_AFFINITY asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .. import config
from ..ir.errors import ExecutionError

Cores = frozenset[int]


def cores_of(ranks: int) -> list[Cores | None]:
    """For each rank the cores that its threads keep to, or None: all of them. Raises ExecutionError for what cannot be had here."""
    asked = config.affinity()
    if not asked:
        return [None] * ranks
    if not hasattr(os, "sched_setaffinity"):
        raise ExecutionError("FLUIDX_AFFINITY is set, and this system does not let threads choose their cores; unset it")
    here = sorted(os.sched_getaffinity(0))
    found = _shares(here, ranks) if isinstance(asked, str) else asked
    if len(found) != ranks:
        raise ExecutionError(f"FLUIDX_AFFINITY names cores for {len(found)} rank{'s' * (len(found) > 1)}, there are {ranks}")
    for rank, cores in enumerate(found):
        if missing := sorted(cores - set(here)):
            raise ExecutionError(f"FLUIDX_AFFINITY gives rank {rank} core {missing[0]}; this process has {', '.join(map(str, here))}")
    return list(found)


def _shares(here: Sequence[int], ranks: int) -> list[Cores]:
    """Neighbouring cores for each rank; ranks share them where there are not enough."""
    n = len(here)
    return [frozenset(here[n * r // ranks : max(n * (r + 1) // ranks, n * r // ranks + 1)]) for r in range(ranks)]


def keep_to(cores: Cores | None) -> None:
    """Let the calling thread run on these cores only."""
    if cores is not None:
        os.sched_setaffinity(0, cores)


@contextmanager
def kept_to(cores: Cores | None) -> Iterator[None]:
    """A time during which it does."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
