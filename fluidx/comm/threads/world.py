"""The world of ranks that are threads of one process: the collective calls, mailboxes and clocks that the threads share."""

from __future__ import annotations

import threading

from ... import config, native
from ...native.world import NativeWorld, make_world
from ..base import STOPPED, CommAborted, Ranks
from ..contribution import Contribution
from .communicator import ThreadCommunicator
from .native_calls import NativeCommunicator
from .python_locks import GroupBarrier, Mailbox, Pace, open_gate


class ThreadWorld:
    """The state that the rank threads of one executor share. `communicator(rank)` is one rank's view of it."""

    threaded = True

    def __init__(self, world_size: int, timeout: float = 60.0):
        self.world_size = world_size
        self.timeout, self.stall = timeout, config.stall()
        self._guard = threading.Lock()
        self.shared: NativeWorld | None = make_world(world_size, timeout, self.stall) if not native.why_not() else None
        self.paces = [Pace(self) for _ in range(world_size)]
        self.reset()

    def begin(self) -> None:
        """Begin a run in which ranks have two threads: set their progress to 0."""
        if self.shared is not None:
            self.shared.begin()
        for pace in self.paces:
            pace.at[:] = 0, 0

    def reset(self) -> None:
        """Drop pending collective calls and messages. Only while no rank is running."""
        self.failure: BaseException | None = None
        self._meetings: dict[Ranks, GroupBarrier] = {}
        self._mail: dict[tuple[int, int], Mailbox] = {}
        self._boards: dict[Ranks, dict[int, Contribution]] = {}
        if self.shared is not None:
            self.shared.reset()

    def communicator(self, rank: int) -> ThreadCommunicator:
        if self.shared is None:
            return ThreadCommunicator(self, rank)
        return NativeCommunicator(self, self.shared, rank)

    def meeting(self, ranks: Ranks) -> GroupBarrier:
        m = self._meetings.get(ranks)
        if m is None:
            with self._guard:
                m = self._meetings.setdefault(ranks, GroupBarrier(ranks, self))
        return m

    def board(self, ranks: Ranks) -> dict[int, Contribution]:
        """The contributions of a group's members by rank, for calls that wait in C and work in NumPy."""
        return self._boards.setdefault(ranks, {})

    def mailbox(self, source: int, to: int) -> Mailbox:
        m = self._mail.get((source, to))
        if m is None:
            with self._guard:
                m = self._mail.setdefault((source, to), Mailbox())
        return m

    def close(self) -> None:
        """Nothing to release."""

    def check(self) -> None:
        if self.failure is not None:
            raise CommAborted(f"{STOPPED}{self.failure}")

    def abort(self, reason: BaseException) -> None:
        with self._guard:
            if self.failure is None:
                self.failure = reason
            meetings, mail = list(self._meetings.values()), list(self._mail.values())
        if self.shared is not None:
            self.shared.abort(str(reason))
        for m in meetings:
            for gate in m.gates.values():
                open_gate(gate)
        for box in mail:
            box.ready.release(self.world_size)
            for _, taken in list(box.posts):
                if taken is not None:
                    open_gate(taken)
        for pace in self.paces:
            with pace.moved:
                pace.moved.notify_all()
