"""TcpWorld: sends and receives by TCP connections between all ranks, with deadlines and notice of failed ranks."""

from __future__ import annotations

import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from ..base import CommError, CommTimeout
from ..hosts.handshake import Posted
from ..hosts.polled_world import EAGER, FAREWELL, PolledWorld
from .link import OwnTcpLink, Request, TcpLink

_LONGEST_PAUSE = 0.02  # seconds: another thread may have received what this one waits for
_PUSHES = 50  # milliseconds between two attempts to send posted messages while the rank computes, at most


class TcpWorld(PolledWorld):
    """The world of ranks that send each other messages on sockets, in the process of one rank.

    `spread` sends all other ranks the reason of a failure; `failed` is called for a failure of another rank.
    """

    tags = (1 << 31) - 1

    def __init__(self, rank: int, links: Mapping[int, TcpLink], world_size: int, timeout: float, spread: Callable[[str], None]):
        super().__init__(rank, world_size, timeout)
        self.links = {**links, rank: OwnTcpLink(rank)}
        self._spread_to_all = spread
        self._ready = select.epoll()
        self._writing = set[int]()  # the ranks to which more is to be sent than the system takes at once
        self._by_file = {link.fileno(): link for link in links.values()}
        for file in self._by_file:
            self._ready.register(file, select.EPOLLIN)
        self._posted, self._ended = threading.Event(), False
        self._pusher = threading.Thread(target=_push, args=(weakref.ref(self), self._posted), name="fluidx-tcp", daemon=True)
        self._pusher.start()
        weakref.finalize(self, self._posted.set).atexit = False  # a world that was not closed: its thread ends

    def heard(self, failure: BaseException) -> None:
        """Another rank has failed."""
        with self._guard:
            self.failure = self.failure or failure
        for pace in self.paces:
            with pace.moved:
                pace.moved.notify_all()

    def _spread(self, text: str) -> None:
        self._spread_to_all(text)

    def close(self) -> None:
        """Wait until sent messages have left, say on each connection that no more follow, and close it."""
        end = time.monotonic() + min(self.timeout, FAREWELL)
        self._ended = True
        self._posted.set()
        while self.failure is None and self._leaving() and time.monotonic() < end:
            self._look(_LONGEST_PAUSE)
        with self._guard:
            for link in self._by_file.values():
                link.read()  # unread messages would make the system drop what was sent
                with suppress(OSError):
                    link.sock.shutdown(socket.SHUT_WR)
        self._pusher.join(4 * _PUSHES / 1000)  # it looks at the connections
        with self._guard:
            for link in self.links.values():
                link.close()
            self._ready.close()

    def _leaving(self) -> bool:
        return any(link.leaving and not link.closed for link in self.links.values())

    # -- messages ---------------------------------------------------------------------------------------------------------

    def send(self, data: np.ndarray, to: int, tag: int) -> Posted:
        """Start to send a contiguous array: a request, none for an empty array."""
        return self._started(data, to, tag, is_send=True)

    def receive(self, place: np.ndarray, source: int, tag: int) -> Posted:
        """Start to receive into a contiguous array."""
        return self._started(place, source, tag, is_send=False)

    def line(self, out: np.ndarray, place: np.ndarray, peer: int, tag: int) -> Posted:
        link = self.links[peer]
        return [(peer, Request(link, place, tag, is_send=False)), (peer, Request(link, out, tag, is_send=True))]

    def start(self, posted: Posted) -> None:
        with self._guard:
            for _, request in posted:
                request.start()

    def hang_up(self, posted: Posted) -> None:
        """Nothing to free."""

    def post(self, data: np.ndarray, to: int, tag: int) -> Posted:
        """Start to send. A small message is copied, so that the caller need not wait for it."""
        small = data.nbytes <= EAGER
        posted = self._started(data.copy() if small else data, to, tag, is_send=True, asked=not small)
        if self._leaving():
            self._posted.set()
        return [] if small else posted

    def _started(self, data: np.ndarray, peer: int, tag: int, is_send: bool, asked: bool = False) -> Posted:
        if not data.size:
            return []
        request = Request(self.links[peer], data, tag, is_send, asked)
        with self._guard:
            request.start()
        return [(peer, request)]

    def finish(self, posted: Posted, what: str) -> None:
        """Wait until all requests are complete."""
        requests = [request for _, request in posted]
        try:
            if not self._happened(requests):
                self._wait(requests, posted, what)
        except _Left as e:
            gone = e.args[0]
            raise CommTimeout(f"rank {self.rank} waited in {what}; rank {gone} did not arrive: its process has ended", gone) from None
        for rank, request in posted:
            if request.error:
                raise CommError(f"rank {self.rank} in {what}: from rank {rank}, {request.error}", rank)

    # -- progress ---------------------------------------------------------------------------------------------------------

    def _happened(self, requests: Sequence[Request]) -> bool:
        with self._guard:
            for request in requests:
                if not request.done and not request.link.closed:
                    request.link.read()
                    request.link.flush()
        for request in requests:
            if not request.done and request.link.closed and time.monotonic() > request.link.closed_at + FAREWELL:
                raise _Left(request.link.rank)  # no reason has come
        return all(request.done for request in requests)

    def _pause(self, waited: float) -> None:
        self._look(_LONGEST_PAUSE)

    def _look(self, seconds: float) -> None:
        """Wait for messages, and receive and send on all connections."""
        with self._guard:
            for rank, link in self.links.items():
                if rank != self.rank and not link.closed and bool(link.leaving) != (rank in self._writing):
                    self._ready.modify(link, select.EPOLLIN | (select.EPOLLOUT if link.leaving else 0))
                    (self._writing.add if link.leaving else self._writing.discard)(rank)
        if self._ready.closed:  # another thread has closed the world
            time.sleep(seconds)
            return
        come = self._ready.poll(seconds)
        with self._guard:
            for file, _ in come:
                link = self._by_file[file]
                link.read()
                link.flush()
                if link.closed and not self._ready.closed:
                    self._ready.unregister(file)

    def _open_ranks(self, posted: Posted) -> list[int]:
        return sorted({rank for rank, request in posted if not request.done})

    def push(self) -> list[TcpLink] | None:
        """Send posted messages: the connections on which more is to be sent; None if the world has ended."""
        with self._guard:
            for link in self.links.values():
                link.flush()
            left = [link for link in self._by_file.values() if link.leaving and not link.closed]
            if not left:
                self._posted.clear()
            return None if self._ended else left


class _Left(Exception):
    """The process of a rank has ended while this one waits for it."""


def _push(world: weakref.ref[TcpWorld], posted: threading.Event) -> None:
    """A thread that sends posted messages while the rank computes."""
    while True:
        posted.wait()
        there = world()
        if there is None or (left := there.push()) is None:
            return
        del there
        writable = select.poll()
        for link in left:
            writable.register(link, select.POLLOUT)
        writable.poll(_PUSHES)
