"""MpiWorld: sends and receives by MPI messages, with deadlines and notice of failed ranks."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..base import CommError
from ..hosts.handshake import Posted
from ..hosts.polled_world import AWAKE, EAGER, FAREWELL, PolledWorld

_REASON = 2048  # bytes of a text that says why a rank failed
_PIECE = 1 << 30  # bytes of a message: a count of MPI has 31 bits
_LOOKS = 20  # polls of a request before the first check for a failed rank
_LONGEST_PAUSE = 2e-4  # seconds: MPI moves messages only while it is called


class MpiWorld(PolledWorld):
    """The world of ranks that send each other messages, in the process of one rank.

    It polls MPI and never blocks in it, so that each wait has a deadline and notices a failed rank.
    """

    def __init__(self, everyone: Any, timeout: float):
        from mpi4py import MPI

        self.mpi = MPI
        self.comm, self._news = everyone.Dup(), everyone.Dup()
        super().__init__(self.comm.rank, self.comm.size, timeout)
        self.tags = self.comm.Get_attr(MPI.TAG_UB)
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

    def check(self) -> None:
        """Raise CommAborted when a rank has failed."""
        with self._guard:
            if self.failure is None and self._heard is not None:
                status = self._status
                if self._heard.Test(status):
                    self._heard = None
                    self.failure = CommError(self._text[: status.Get_count()].decode(errors="replace"), rank=status.Get_source())
        super().check()

    def _spread(self, text: str) -> None:
        said = text.encode()[:_REASON]
        self._leave([self._news.Isend([said, self.mpi.BYTE], r) for r in range(self.world_size) if r != self.rank])

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
            time.sleep(AWAKE)

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
        if data.nbytes > EAGER:
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

    def _happened(self, requests: Sequence[Any]) -> bool:
        try:
            return self.mpi.Request.Testall(requests)
        except self.mpi.Exception as e:
            raise CommError(f"rank {self.rank}: MPI failed: {e}") from e

    def _pause(self, waited: float) -> None:
        time.sleep(min(waited / 8, _LONGEST_PAUSE))

    def _open_ranks(self, posted: Posted) -> list[int]:
        return sorted({rank for rank, request in posted if not request.Test()})


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
