"""Communicators of ranks that are processes of one host: the collective calls of rank threads, in shared memory.

Arrays in shared memory are read and written in place by all ranks. Other arrays are copied there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import config, native
from ..native.shared import Memory, SharedWorld, take
from .base import CommAborted, Ranks
from .contribution import Contribution
from .threads.native_calls import Calls, NativeCommunicator, in_one_piece


class ProcessWorld:
    """The world of ranks that share memory, in the process of one rank."""

    threaded = True

    def __init__(self, memory: Memory, rank: int, timeout: float):
        self.memory, self.rank, self.world_size = memory, rank, memory.ranks
        self.timeout, self.stall = timeout, config.stall()
        self.shared: SharedWorld = memory.join(rank, self.stall)

    def communicator(self, rank: int) -> ProcessCommunicator:
        if rank != self.rank:
            raise ValueError(f"this process is rank {self.rank}, not {rank}")
        return ProcessCommunicator(self, self.shared, rank)

    def begin(self) -> None:
        """Begin a run in which this rank has two threads: set their progress to 0."""
        self.shared.begin(self.rank)

    def check(self) -> None:
        """Raise CommAborted when a rank has failed."""
        if why := self.shared.failed():
            raise CommAborted(why)

    def abort(self, reason: BaseException) -> None:
        self.shared.abort(str(reason))

    def close(self) -> None:
        """Nothing to release: memory is unmapped when no array uses it."""


class ProcessCommunicator(NativeCommunicator):
    """One rank's communicator in a ProcessWorld; implements comm.base.Communicator."""

    def __init__(self, world: Any, shared: SharedWorld, rank: int):
        super().__init__(world, shared, rank)
        self.calls = SharedCalls(world, shared, rank)
        self._memory, self._all = world.memory, shared

    def reach(self, beside: bool, at: int) -> None:
        native.compile(self.calls.reach(beside, at))()

    def follow(self, beside: bool, at: int) -> None:
        native.compile(self.calls.follow(beside, at))()

    def _reachable(self, slot: Contribution, strided: bool = True) -> Contribution:
        if _can_reach(self._memory, slot, strided):
            return slot
        made: dict[int, np.ndarray] = {}  # an array that is both input and output is copied once

        def there(a: Any) -> Any:
            if not isinstance(a, np.ndarray):
                return [there(one) for one in a]
            if self._memory.holds(a) and ((strided and slot.gives is not None) or in_one_piece(a)):
                return a
            if id(a) not in made:
                made[id(a)] = _copied(a)
            return made[id(a)]

        parts = {} if slot.gives is None else {"gives": there(slot.gives), "takes": there(slot.takes)}
        return Contribution(slot.what, there(slot.x), there(slot.out), slot.op, slot.root, **parts)

    def _sent(self, x: np.ndarray) -> np.ndarray:
        return x if in_one_piece(x) and self._memory.holds(x) else _copied(x)

    def _show(self, ranks: Ranks, slot: Contribution) -> None:
        """Nothing to do: other ranks read the words of the call in shared memory."""

    def _shown(self, ranks: Ranks, slot: Contribution) -> list[Contribution]:
        found = []
        for gives, takes in self._all.brought(ranks):
            parts = {} if slot.gives is None else {"gives": gives, "takes": takes}
            found.append(Contribution(slot.what, gives[0] if slot.gives is None else gives, takes[0], slot.op, slot.root, **parts))
        return found


class SharedCalls(Calls):
    """C calls for arrays in shared memory; None for other arrays."""

    def __init__(self, world: Any, shared: SharedWorld, rank: int):
        super().__init__(world, shared, rank)
        self._memory = world.memory

    def _can_reach(self, slot: Contribution) -> bool:
        return _can_reach(self._memory, slot)

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> list[native.NativeCall] | None:
        return super().exchange(sends, recvs) if all(self._memory.holds(x) for x, _ in sends) else None


def _can_reach(memory: Memory, slot: Contribution, strided: bool = True) -> bool:
    """Are all arrays in shared memory, and contiguous (parts may be strided if `strided`)?"""
    arrays = [slot.x, slot.out] if slot.gives is None else [*slot.gives, *slot.takes]
    return all(map(memory.holds, arrays)) and ((strided and slot.gives is not None) or in_one_piece(*arrays))


def _copied(a: np.ndarray) -> np.ndarray:
    there = take(a.nbytes).view(a.dtype).reshape(a.shape)
    there[...] = a
    return there
