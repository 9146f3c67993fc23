"""MpiWorld: sends and receives by MPI messages, with deadlines and notice of failed ranks."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import config
from ...native.world import log
from ..base import CommAborted, CommError, CommTimeout
from ..threads.python_locks import Pace, some
from .handshake import Posted
from .message_collectives import MessageCommunicator

_EAGER = 64 * 1024  # bytes up to which a send copies and returns; above, it waits until the peer reads
_REASON = 2048  # bytes of a text that says why a rank failed
_PIECE = 1 << 30  # bytes of a message: a count of MPI has 31 bits
_AWAKE = 5e-5  # seconds in which a rank polls without a pause
_LOOKS = 20  # polls of a request before the first check for a failed rank
_LONGEST_PAUSE = 2e-4  # seconds: MPI moves messages only while it is called
FAREWELL = 1.0  # seconds for messages to leave when this rank ends


class MpiWorld:
    """The world of ranks that send each other messages, in the process of one rank.

    It polls MPI and never blocks in it, so that each wait has a deadline and notices a failed rank.
    """

    memory = None
    shared = None

    def __init__(self, everyone: Any, timeout: float):
        from mpi4py import MPI

        self.mpi = MPI
        self.comm, self._news = everyone.Dup(), everyone.Dup()
        self.rank, self.world_size = self.comm.rank, self.comm.size
        self.timeout, self.stall = timeout, config.stall()
        self.grace = 0.0  # seconds beyond the timeout, so that another part can name the missing ranks first
        self.failure: BaseException | None = None
        self.tags = self.comm.Get_attr(MPI.TAG_UB)
        self.paces = [Pace(self) for _ in range(self.world_size)]
        self._guard = threading.Lock()
        self._text = bytearray(_REASON)
        self._heard = self._news.Irecv([self._text, MPI.BYTE])
        self._status = MPI.Status()
        self._outbox: list[Any] = []
        self._open: dict[int, Any] = {}  # unfinished requests: MPI may still use their memory, also after a failure
        self._posted, self._closed = threading.Event(), False
        self._pusher = threading.Thread(target=_push, args=(weakref.ref(self), self._posted), name="fluidx-mpi", daemon=True)
        self.threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE  # other threads of this process may check whether a rank has failed
        if self.threaded:
            self._pusher.start()

    def communicator(self, rank: int) -> MessageCommunicator:
        if rank != self.rank:
            raise ValueError(f"this process is rank {self.rank}, not {rank}")
        return MessageCommunicator(self, rank)

    def begin(self) -> None:
        """Begin a run in which this rank has two threads: set their progress to 0."""
        self.paces[self.rank].at[:] = 0, 0

    def check(self) -> None:
        """Raise CommAborted when a rank has failed."""
        with self._guard:
            if self.failure is None and self._heard is not None:
                status = self._status
                if self._heard.Test(status):
                    self._heard = None
                    self.failure = CommError(self._text[: status.Get_count()].decode(errors="replace"), rank=status.Get_source())
        if self.failure is not None:
            raise CommAborted(f"stopped because another rank failed: {self.failure}")

    def abort(self, reason: BaseException) -> None:
        """Send the reason to all ranks, unless a failure is known already. Messages in flight are lost; this world cannot be used any
        more."""
        with self._guard:
            first = self.failure is None
            self.failure = self.failure or reason
        if first:
            text = str(reason).encode()[:_REASON]
            self._leave([self._news.Isend([text, self.mpi.BYTE], r) for r in range(self.world_size) if r != self.rank])
        for pace in self.paces:
            with pace.moved:
                pace.moved.notify_all()

    def close(self) -> None:
        """Wait until sent messages have left. Communicators are not freed: that call would wait for the other ranks."""
        self._closed = True
        self._posted.set()
        if self._pusher.is_alive():
            self._pusher.join(FAREWELL)
        with self._guard:
            left, self._outbox = self._outbox, []
            if self._heard is not None:
                self._heard.Cancel()
                left.append(self._heard)
                self._heard = None
        self._leave(left)

    def _leave(self, requests: list[Any]) -> None:
        end = time.monotonic() + min(self.timeout, FAREWELL)
        self._opened(self.rank, requests)
        while not self.mpi.Request.Testall(requests) and time.monotonic() < end:
            time.sleep(_AWAKE)

    # -- messages ---------------------------------------------------------------------------------------------------------

    def send(self, data: np.ndarray, to: int, tag: int) -> Posted:
        """Start to send a contiguous array: a request for each message, none for an empty array."""
        return self._opened(to, [self.comm.Isend([piece, self.mpi.BYTE], to, tag) for piece in _pieces(data)])

    def receive(self, place: np.ndarray, source: int, tag: int) -> Posted:
        """Start to receive into a contiguous array."""
        return self._opened(source, [self.comm.Irecv([piece, self.mpi.BYTE], source, tag) for piece in _pieces(place)])

    def line(self, out: np.ndarray, place: np.ndarray, peer: int, tag: int) -> Posted:
        made = self.comm.Recv_init([place, self.mpi.BYTE], peer, tag), self.comm.Send_init([out, self.mpi.BYTE], peer, tag)
        return [(peer, request) for request in made]

    def start(self, posted: Posted) -> None:
        requests = [request for _, request in posted]
        self._opened(self.rank, requests)
        self.mpi.Prequest.Startall(requests)

    def hang_up(self, posted: Posted) -> None:
        for _, request in posted:
            request.Free()

    def post(self, data: np.ndarray, to: int, tag: int) -> Posted:
        """Start to send. A small message is copied, so that the caller need not wait for it."""
        if data.nbytes > _EAGER:
            return self._opened(to, [self.comm.Issend([piece, self.mpi.BYTE], to, tag) for piece in _pieces(data)])
        copied = data.copy()
        with self._guard:
            self._outbox += [self.comm.Isend([piece, self.mpi.BYTE], to, tag) for piece in _pieces(copied)]
        self._posted.set()
        return []

    def _opened(self, rank: int, requests: list[Any]) -> Posted:
        for request in requests:
            self._open[id(request)] = request
        return [(rank, request) for request in requests]

    def push(self) -> bool:
        """Make progress with posted messages; True if the world is closed."""
        with self._guard:
            self._outbox = [r for r in self._outbox if not r.Test()]
            if not self._outbox:
                self._posted.clear()
            return self._closed

    def finish(self, posted: Posted, what: str) -> None:
        """Wait until all requests are complete."""
        requests = [request for _, request in posted]
        for _ in range(_LOOKS):
            if self._happened(requests):
                break
        else:
            self._wait(requests, posted, what)
        for request in requests:
            del self._open[id(request)]

    def _wait(self, requests: list[Any], posted: Posted, what: str) -> None:
        begun, told = time.monotonic(), False
        while not self._happened(requests):
            self.check()
            waited = time.monotonic() - begun
            if waited > self.timeout + self.grace:
                missing = _missing(posted)
                raise CommTimeout(f"rank {self.rank} waited {self.timeout:g} s in {what}; {some(missing)} did not arrive", missing[0])
            if waited > self.stall and not told:
                told = True
                who = some(missing := _missing(posted)) + (" have" if missing[1:] else " has")
                log.warning(f"rank {self.rank} has waited {self.stall:g} s in {what}: {who} not arrived; it goes on waiting")
            if waited < _AWAKE:
                _yield_core()
            else:
                time.sleep(min(waited / 8, _LONGEST_PAUSE))

    def _happened(self, requests: list[Any]) -> bool:
        try:
            return self.mpi.Request.Testall(requests)
        except self.mpi.Exception as e:
            raise CommError(f"rank {self.rank}: MPI failed: {e}") from e


def _yield_core() -> None:
    """Yield this core to another thread. Windows has no such call."""
    os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)


def _missing(posted: Posted) -> list[int]:
    return sorted({rank for rank, request in posted if not request.Test()}) or [posted[0][0]]


def _push(world: weakref.ref[MpiWorld], posted: threading.Event) -> None:
    """A thread that lets MPI move posted messages while the rank computes: many MPI libraries do so only while they are called."""
    while True:
        posted.wait()
        there = world()
        if there is None or there.push():
            return
        del there
        time.sleep(_LONGEST_PAUSE)


def _pieces(data: np.ndarray) -> Iterator[np.ndarray]:
    """A contiguous array as pieces of bytes, one for each message."""
    flat = data.reshape(-1).view(np.uint8)
    for at in range(0, flat.size, _PIECE):
        yield flat[at : at + _PIECE]
