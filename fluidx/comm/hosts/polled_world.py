"""PolledWorld: what message layers have in common: waits with a deadline, which name the missing ranks and notice a failed rank."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ... import config
from ...native.world import log
from ..base import STOPPED, CommAborted, CommTimeout
from ..threads.python_locks import Pace, some
from .handshake import MessageWorld, Posted
from .message_collectives import MessageCommunicator

EAGER = 64 * 1024  # bytes up to which a posted message is copied; a larger one waits until the peer reads
FAREWELL = 1.0  # seconds for messages to leave when this rank ends
AWAKE = 5e-5  # seconds in which a rank polls without a pause


class PolledWorld(MessageWorld, ABC):
    """The world of ranks that send each other messages, in the process of one rank. It makes progress while it is called."""

    memory = None  # there is no memory that all ranks share
    shared = None
    threaded = True

    def __init__(self, rank: int, world_size: int, timeout: float):
        self.rank, self.world_size = rank, world_size
        self.timeout, self.stall = timeout, config.stall()
        self.grace = 0.0  # seconds beyond the timeout, so that another part can name the missing ranks first
        self.failure: BaseException | None = None
        self.paces = [Pace(self) for _ in range(world_size)]
        self._guard = threading.Lock()

    def communicator(self, rank: int) -> MessageCommunicator:
        if rank != self.rank:
            raise ValueError(f"this process is rank {self.rank}, not {rank}")
        return MessageCommunicator(self, rank)

    def begin(self) -> None:
        """Begin a run in which this rank has two threads: set their progress to 0."""
        self.paces[self.rank].at[:] = 0, 0

    def check(self) -> None:
        """Raise CommAborted when a rank has failed."""
        if self.failure is not None:
            raise CommAborted(f"{STOPPED}{self.failure}")

    def abort(self, reason: BaseException) -> None:
        """Send the reason to all ranks, unless a failure is known already. Messages in flight are lost; this world cannot be used any
        more."""
        with self._guard:
            first = self.failure is None
            self.failure = self.failure or reason
        if first:
            self._spread(str(reason))
        for pace in self.paces:
            with pace.moved:
                pace.moved.notify_all()

    def await_reason(self) -> None:
        """Wait a moment for the reason of a failure that another rank tells; this rank may have to pass it on before it ends."""
        end = time.monotonic() + FAREWELL
        with suppress(CommAborted):
            while time.monotonic() < end:
                self.check()
                time.sleep(AWAKE)

    @abstractmethod
    def close(self) -> None:
        """Wait until sent messages have left."""

    @abstractmethod
    def _spread(self, text: str) -> None:
        """Send all other ranks the reason of a failure."""

    @abstractmethod
    def _happened(self, requests: Sequence[Any]) -> bool:
        """Make progress; are all requests complete?"""

    @abstractmethod
    def _pause(self, waited: float) -> None:
        """Wait a moment for messages; `waited` is for how many seconds this rank has waited by now."""

    @abstractmethod
    def _open_ranks(self, posted: Posted) -> list[int]:
        """The ranks of requests that are not complete."""

    def _wait(self, requests: Sequence[Any], posted: Posted, what: str) -> None:
        """Wait until all requests are complete."""
        begun, told = time.monotonic(), False
        while not self._happened(requests):
            self.check()
            waited = time.monotonic() - begun
            if waited > self.timeout + self.grace:
                missing = self._missing(posted)
                raise CommTimeout(f"rank {self.rank} waited {self.timeout:g} s in {what}; {some(missing)} did not arrive", missing[0])
            if waited > self.stall and not told:
                told = True
                who = some(missing := self._missing(posted)) + (" have" if missing[1:] else " has")
                log.warning(f"rank {self.rank} has waited {self.stall:g} s in {what}: {who} not arrived; it goes on waiting")
            if waited < AWAKE:
                _yield_core()
            else:
                self._pause(waited)

    def _missing(self, posted: Posted) -> list[int]:
        return self._open_ranks(posted) or [posted[0][0]]


def _yield_core() -> None:
    """Yield this core to another thread. Windows has no such call."""
    os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
