"""Barriers and mailboxes of ranks that are threads, with Python's locks. Used without C kernels."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...native.world import array_text, log
from ..base import CommTimeout, Ranks
from ..contribution import Contribution
from ..disagreement import disagreement, other_call, other_count, other_type

if TYPE_CHECKING:
    from .world import ThreadWorld


class GroupBarrier:
    """A reusable barrier for the members of a group, with their contributions. Each member sleeps on its own lock: cheaper than a
    condition."""

    def __init__(self, ranks: Ranks, world: ThreadWorld):
        self.ranks = ranks
        self.world = world
        self.guard = threading.Lock()
        self.arrived: set[int] = set()
        self.gates = {r: threading.Lock() for r in ranks}
        for gate in self.gates.values():
            gate.acquire()
        self.slots: dict[int, Contribution] = {}
        # set by the last member to arrive; it does not change before all have read it, because the next call needs them all
        self.done = False

    def wait(self, rank: int, what: str, action: Callable[[], None] | None = None) -> None:
        """Return when every member has arrived and the last one has run `action`."""
        with self.guard:
            self.arrived.add(rank)
            last = len(self.arrived) == len(self.ranks)
            if last:
                self.arrived.clear()
        # a later abort opens this rank's gate; an earlier one is found here
        self.world.check()
        if last:
            if action is not None:
                action()
            for r, gate in self.gates.items():
                if r != rank:
                    open_gate(gate)
        elif not patiently(self.gates[rank], self.world, lambda: self.tell(rank)):
            missing, _ = self.sides()
            raise CommTimeout(
                f"rank {rank} waited {self.world.timeout:g} s in {what}; {some(missing)} did not arrive",
                rank=missing[0] if missing else None,
            )
        self.world.check()

    def sides(self) -> tuple[list[int], list[int]]:
        """The ranks that have not arrived, and those that have."""
        with self.guard:
            return sorted(set(self.ranks) - self.arrived), sorted(self.arrived)

    def tell(self, rank: int) -> str:
        late, here = self.sides()
        return (
            f"rank {rank} has waited {self.world.stall:g} s in {self.slots[rank]}: {some(here)} {'are' if here[1:] else 'is'} here, "
            f"{some(late)} {'have' if late[1:] else 'has'} not arrived; it goes on waiting"
        )

    def agree(self) -> None:
        """Raise CommError and stop all ranks unless all members make the same call with arrays that fit together."""
        first = self.ranks[0]
        mine = self.slots[first]
        for r in self.ranks[1:]:
            if self.slots[r].call != mine.call:
                self.refuse(other_call(first, mine, r, self.slots[r]), r)
        if mine.gives is None:
            return
        for r in self.ranks:
            slot = self.slots[r]
            if not len(slot.gives) == len(slot.takes) == len(self.ranks):
                self.refuse(other_count(r, len(slot.gives), slot.what, len(slot.takes), len(self.ranks)), r)
        for k, r in enumerate(self.ranks):
            takes = self.slots[r].takes
            for j, source in enumerate(self.ranks):
                given = self.slots[source].gives[k]
                if given.shape != takes[j].shape:
                    self.refuse(other_type(r, array_text(takes[j]), source, mine.what, array_text(given)), source)

    def refuse(self, why: str, rank: int) -> None:
        error = disagreement(why, rank)
        self.world.abort(error)
        raise error


class Pace:
    """The progress of a rank's two threads in a run: the one that computes, and the one that communicates at the same time."""

    def __init__(self, world: Any):
        self.world = world
        self.moved = threading.Condition()
        self.at = [0, 0]

    def reach(self, beside: bool, at: int) -> None:
        with self.moved:
            self.at[beside] = at
            self.moved.notify_all()

    def follow(self, beside: bool, at: int) -> None:
        """Wait, without a deadline, until the other thread has reached `at`. It may compute for long; its own waits for ranks have
        deadlines."""
        with self.moved:
            self.moved.wait_for(lambda: self.at[not beside] >= at or self.world.failure is not None)
            there = self.at[not beside] >= at
        if not there:
            self.world.check()


class Mailbox:
    """Messages from one rank to another that were not read yet."""

    def __init__(self) -> None:
        self.posts: deque[tuple[Any, threading.Lock | None]] = deque()
        self.ready = threading.Semaphore(0)


def patiently(lock: Any, world: ThreadWorld, tell: Callable[[], str]) -> bool:
    """Acquire a lock that another rank opens, before the deadline. Logs a warning after `world.stall` seconds."""
    if world.stall >= world.timeout:
        return lock.acquire(timeout=world.timeout)
    if lock.acquire(timeout=world.stall):
        return True
    log.warning(tell())
    return lock.acquire(timeout=world.timeout - world.stall)


def some(ranks: Sequence[int]) -> str:
    """The ranks as a text: "rank 1", "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks)) or '?'}"


def open_gate(lock: threading.Lock) -> None:
    try:
        lock.release()
    except RuntimeError:  # an abort opened it already
        pass
