"""TcpLink: messages on the socket to one other rank. Messages with one tag arrive in order; those that nobody waits for yet are kept."""

from __future__ import annotations

import socket
import struct
import time
from collections import defaultdict, deque

import numpy as np

_HEAD = struct.Struct("<IIQ")  # kind, tag, bytes
_PLAIN, _ASKED, _TAKEN = 0, 1, 2  # a message; one that the receiver confirms; the confirmation
_MOST_VIEWS = 64  # of one call of the system
_EMPTY = memoryview(b"")


class Request:
    """A message to send, or a place for one. It can be started again when it is complete."""

    __slots__ = ("data", "tag", "link", "is_send", "asked", "done", "error")

    def __init__(self, link: TcpLink, data: np.ndarray, tag: int, is_send: bool, asked: bool = False):
        self.link, self.tag, self.is_send, self.asked = link, tag, is_send, asked
        self.data = data.reshape(-1).view(np.uint8).data if data.size else _EMPTY
        self.done, self.error = False, ""

    def start(self) -> None:
        self.done = False
        (self.link.send if self.is_send else self.link.receive)(self)


class _Early:
    """A message that has come before its place."""

    __slots__ = ("data", "asked", "whole", "request")

    def __init__(self, size: int, asked: bool):
        self.data, self.asked, self.whole = np.empty(size, np.uint8).data, asked, False
        self.request: Request | None = None


class TcpLink:
    """A connection to one other rank. All methods but `fileno` are called with the lock of the world."""

    def __init__(self, rank: int, sock: socket.socket):
        self.rank, self.sock = rank, sock
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.closed, self.closed_at = False, 0.0
        self.leaving = deque[tuple[memoryview, Request | None]]()  # what is still to be sent; the request ends with its last bytes
        self.unconfirmed: dict[int, deque[Request]] = defaultdict(deque)  # by tag
        self.places: dict[int, deque[Request]] = defaultdict(deque)
        self.early: dict[int, deque[_Early]] = defaultdict(deque)
        self._head, self._got = bytearray(_HEAD.size), 0
        self._rest: memoryview | None = None  # the rest of the message that is arriving
        self._into: Request | _Early | None = None
        self._asked = False

    def fileno(self) -> int:
        return self.sock.fileno()

    def _close(self) -> None:
        self.closed, self.closed_at = True, time.monotonic()

    def close(self) -> None:
        if not self.closed:
            self._close()
        self.sock.close()

    # -- sending ------------------------------------------------------------------------------------------------------------

    def send(self, request: Request) -> None:
        self._say(_ASKED if request.asked else _PLAIN, request.tag, request.data, request)
        self.flush()

    def _say(self, kind: int, tag: int, data: memoryview = _EMPTY, request: Request | None = None) -> None:
        self.leaving.append((memoryview(_HEAD.pack(kind, tag, data.nbytes)), None if data.nbytes else request))
        if data.nbytes:
            self.leaving.append((data, request))
        if kind == _ASKED and request is not None:
            self.unconfirmed[tag].append(request)

    def flush(self) -> None:
        """Send what the system takes without waiting."""
        while self.leaving and not self.closed:
            try:
                sent = self.sock.sendmsg([view for view, _ in list(self.leaving)[:_MOST_VIEWS]])
            except BlockingIOError:
                return
            except OSError:
                self._close()
                return
            while self.leaving and sent >= self.leaving[0][0].nbytes:
                view, request = self.leaving.popleft()
                sent -= view.nbytes
                if request is not None and not request.asked:
                    request.done = True
            if sent:
                view, request = self.leaving[0]
                self.leaving[0] = view[sent:], request

    # -- receiving ----------------------------------------------------------------------------------------------------------

    def receive(self, request: Request) -> None:
        tag = request.tag
        if not self.early[tag]:
            self.places[tag].append(request)
            return
        found = self.early[tag].popleft()
        if found.whole:
            self._place(found, request)
        else:
            found.request = request
        if found.asked:
            self._confirm(tag)

    def _confirm(self, tag: int) -> None:
        self._say(_TAKEN, tag)
        self.flush()

    def read(self) -> None:
        """Receive what has arrived."""
        while not self.closed:
            try:
                if self._rest is None:
                    got = self.sock.recv_into(memoryview(self._head)[self._got :])
                else:
                    got = self.sock.recv_into(self._rest)
            except BlockingIOError:
                return
            except OSError:
                got = 0
            if not got:
                self._close()
            elif self._rest is not None:
                self._rest = self._rest[got:]
                if not self._rest.nbytes:
                    self._complete()
            else:
                self._got += got
                if self._got == _HEAD.size:
                    self._got = 0
                    self._begin(*_HEAD.unpack(self._head))

    def _begin(self, kind: int, tag: int, size: int) -> None:
        """The head of a message is here: find the place for what follows."""
        if kind == _TAKEN:
            self.unconfirmed[tag].popleft().done = True
            return
        places = self.places[tag]
        if places and size <= places[0].data.nbytes:
            self._into = into = places.popleft()
            self._rest = into.data[:size]
            if kind == _ASKED:
                self._confirm(tag)
        else:
            early = _Early(size, kind == _ASKED)
            self._into, self._rest = early, early.data
            if places:
                early.request = places.popleft()
            else:
                self.early[tag].append(early)

    def _complete(self) -> None:
        into, self._into, self._rest = self._into, None, None
        if isinstance(into, Request):
            into.done = True
        elif into is not None:
            into.whole = True
            if into.request is not None:
                self._place(into, into.request)

    @staticmethod
    def _place(early: _Early, request: Request) -> None:
        size = early.data.nbytes
        if size > request.data.nbytes:
            request.error = f"a message of {size} bytes arrived where {request.data.nbytes} were expected"
        else:
            request.data[:size] = early.data
        request.done = True


class OwnTcpLink(TcpLink):
    """Messages of a rank to itself."""

    def __init__(self, rank: int):
        super().__init__(rank, socket.socket())  # never connected

    def send(self, request: Request) -> None:
        found = _Early(request.data.nbytes, request.asked)
        found.data[:], found.whole = request.data, True
        if places := self.places[request.tag]:
            self._place(found, places.popleft())
            request.done = True
            return
        self.early[request.tag].append(found)
        request.done = not request.asked
        if request.asked:
            self.unconfirmed[request.tag].append(request)

    def _confirm(self, tag: int) -> None:
        self.unconfirmed[tag].popleft().done = True

    def flush(self) -> None:
        """Nothing leaves."""

    def read(self) -> None:
        """Nothing arrives."""
