"""The world of ranks of which each launched process holds several, in memory that the processes share."""

from __future__ import annotations

import threading
import weakref

from .. import config
from ..ir.errors import ExecutionError
from ..native.shared import MOST_RANKS, make_world_in, take, world_at
from .base import STOPPED, CommAborted, LaunchedWorld, World
from .launched_rank import LaunchedRank
from .processes import ProcessCommunicator

_BYTES = 64 << 20  # for the world, its meetings and mailboxes; memory is taken where it is touched
_LOOK = 0.05  # seconds between looks at whether a process has failed


def world_of(member: LaunchedRank, each: int) -> World:
    """The world of ranks of which every process holds `each`. All processes must call it.

    Raises ExecutionError if the processes share no memory.
    """
    if each == 1:
        return member.world
    if member.memory is None:
        raise ExecutionError(
            f"each process holds {each} ranks, which needs processes of one host that share memory; over MPI or TCP start one process for "
            "each rank"
        )
    ranks = member.world_size * each
    if ranks > MOST_RANKS:
        raise ExecutionError(f"{member.world_size} processes hold {each} ranks each: at most {MOST_RANKS} ranks share memory")
    made = take(_BYTES) if member.rank == 0 else None
    at = 0 if made is None else make_world_in(made, ranks, member.world.timeout)
    return MultiRankWorld(member.world, each, member.gather(at)[0], made)


class MultiRankWorld:
    """The world of ranks in shared memory, in a process that holds `each` of them. It fails with the world of the processes, and makes it
    fail."""

    threaded = True

    def __init__(self, processes: LaunchedWorld, each: int, at: int, memory: object):
        self.processes, self.memory, self._keeps = processes, processes.memory, memory
        self.own = range(processes.rank * each, (processes.rank + 1) * each)
        self.world_size, self.timeout, self.stall = processes.world_size * each, processes.timeout, config.stall()
        self.shared = world_at(at, self.own, self.stall)
        self._closed = threading.Event()
        threading.Thread(target=_watch, args=(weakref.ref(self), self._closed), name="fluidx-ranks", daemon=True).start()

    def communicator(self, rank: int) -> ProcessCommunicator:
        if rank not in self.own:
            raise ValueError(f"this process has the ranks {self.own.start} to {self.own.stop - 1}, not {rank}")
        return ProcessCommunicator(self, self.shared, rank)

    def begin(self) -> None:
        for rank in self.own:
            self.shared.begin(rank)

    def check(self) -> None:
        if why := self.shared.failed():
            raise CommAborted(why)
        self.processes.check()

    def abort(self, reason: BaseException) -> None:
        self.shared.abort(str(reason))
        self.processes.abort(reason)

    def close(self) -> None:
        self._closed.set()


def _watch(world: weakref.ref[MultiRankWorld], closed: threading.Event) -> None:
    """Stop the ranks when a process has failed: they wait in another world than the processes do."""
    while not closed.wait(_LOOK):
        if (there := world()) is None:
            return
        try:
            there.processes.check()
        except CommAborted as e:
            there.shared.abort(str(e).removeprefix(STOPPED))
            return
        del there
