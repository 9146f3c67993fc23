"""Meetings and mailboxes of ranks that are threads, on Python's locks: for where there are no C kernels."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .base import CommError, CommTimeout, Ranks
from .slots import Slot

if TYPE_CHECKING:
    from .threads import ThreadWorld


class Meeting:
    """A reusable barrier for the members of a group. Each member sleeps on its own lock, which is cheaper than a condition."""

    def __init__(self, ranks: Ranks, world: ThreadWorld):
        self.ranks = ranks
        self.world = world
        self.guard = threading.Lock()
        self.arrived: set[int] = set()
        self.gates = {r: threading.Lock() for r in ranks}
        for gate in self.gates.values():
            gate.acquire()
        self.slots: dict[int, Slot] = {}
        self.done = False  # by the last to arrive; it stays as it is until all have seen it, for nobody is last before

    def wait(self, rank: int, what: str, action: Callable[[], None] | None = None) -> None:
        """Return when every member has arrived and the last of them has done its `action`."""
        with self.guard:
            self.arrived.add(rank)
            last = len(self.arrived) == len(self.ranks)
            if last:
                self.arrived.clear()
        # from here on an abort opens this rank's gate; one that came before is seen here
        self.world.check()
        if last:
            if action is not None:
                action()
            for r, gate in self.gates.items():
                if r != rank:
                    open_gate(gate)
        elif not self.gates[rank].acquire(timeout=self.world.timeout):
            with self.guard:
                missing = sorted(set(self.ranks) - self.arrived)
            raise CommTimeout(
                f"rank {rank} waited {self.world.timeout:g} s in {what}; rank{'s' * (len(missing) > 1)} "
                f"{', '.join(map(str, missing)) or '?'} did not arrive",
                rank=missing[0] if missing else None,
            )
        self.world.check()

    def agree(self) -> None:
        """Raise CommError, and stop everyone, unless all members are in the same call with arrays that fit together."""
        first = self.ranks[0]
        mine = self.slots[first]
        for r in self.ranks[1:]:
            if self.slots[r].call != mine.call:
                self.refuse(f"rank {first} is in {mine}, rank {r} in {self.slots[r]}", r)
        if mine.gives is None:
            return
        for r in self.ranks:
            slot = self.slots[r]
            if not len(slot.gives) == len(slot.takes) == len(self.ranks):
                n = len(self.ranks)
                self.refuse(f"rank {r} brings {len(slot.gives)} parts to {slot.what} and takes {len(slot.takes)}, among {n} ranks", r)
        for k, r in enumerate(self.ranks):
            takes = self.slots[r].takes
            for j, source in enumerate(self.ranks):
                given = self.slots[source].gives[k]
                if given.shape != takes[j].shape:
                    want, have = (f"{a.dtype}{list(a.shape)}" for a in (takes[j], given))
                    self.refuse(f"rank {r} expects {want} from rank {source} in {mine.what}, which gives {have}", source)

    def refuse(self, why: str, rank: int) -> None:
        error = CommError(f"ranks disagree: {why}", rank=rank)
        self.world.abort(error)
        raise error


class Mailbox:
    """What one rank has posted for another and not yet been read."""

    def __init__(self) -> None:
        self.posts: deque[tuple[Any, threading.Lock | None]] = deque()
        self.ready = threading.Semaphore(0)


def open_gate(lock: threading.Lock) -> None:
    try:
        lock.release()
    except RuntimeError:  # an abort opened it already
        pass
