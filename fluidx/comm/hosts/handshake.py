"""The handshake of a collective call by messages: before data, ranks send each other a text of the call and the types of their arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..base import Ranks
from ..contribution import Contribution
from ..threads.python_locks import Pace

HEAD = 512  # bytes of the text of a call
LITTLE = 32 * 1024  # bytes up to which an array is sent in the same message, behind the text

Posted = list[tuple[int, Any]]  # messages in flight: the other rank, and the request


class MessageWorld(Protocol):
    """The message layer below a MessageCommunicator. Messages between two ranks with one tag arrive in order."""

    world_size: int
    tags: int  # the highest tag
    paces: list[Pace]

    def send(self, data: np.ndarray, to: int, tag: int) -> Posted:
        """Start to send a contiguous array, which must not change until then. An empty array sends nothing."""

    def post(self, data: np.ndarray, to: int, tag: int) -> Posted:
        """Start to send an array. A small array is copied, so it may change at once."""

    def receive(self, place: np.ndarray, source: int, tag: int) -> Posted: ...

    def line(self, out: np.ndarray, place: np.ndarray, peer: int, tag: int) -> Posted:
        """Persistable requests: messages of bytes that are sent and received at each `start`, until `finish`. A shorter one may arrive."""

    def start(self, posted: Posted) -> None: ...

    def hang_up(self, posted: Posted) -> None:
        """Free the requests of a line."""

    def finish(self, posted: Posted, what: str) -> None:
        """Wait until all requests are complete. Raises CommTimeout, which names the missing ranks, or CommAborted."""

    def check(self) -> None: ...

    def abort(self, reason: BaseException) -> None: ...


class Handshake:
    """The handshake of repeated equal calls of a group. For each other member: the message to send (text, then space for small arrays), the
    buffer for its message, and the expected beginning of that."""

    def __init__(self, world: MessageWorld, me: int, ranks: Ranks, tag: int, slot: Contribution, along: Sequence[int]):
        self.text, self.call, self.world, self.posted = str(slot), slot.call, world, list[tuple[int, Any]]()
        self.others = [(k, r) for k, r in enumerate(ranks) if r != me]
        self.said, self.heard, self.wanted = dict[int, np.ndarray](), dict[int, np.ndarray](), dict[int, bytes]()
        for k, r in self.others:
            given, taken = ("", "") if slot.gives is None else (type_of(slot.gives[k]), type_of(slot.takes[k]))
            self.said[k], self.heard[k] = np.zeros(HEAD + along[k], np.uint8), np.zeros(HEAD + LITTLE, np.uint8)
            head = encoded(self.call, given, self.text)
            self.said[k][: head.size] = head
            self.wanted[k] = encoded(self.call, taken, "").tobytes()
            self.posted += world.line(self.said[k], self.heard[k], r, tag)

    def close(self) -> None:
        self.world.hang_up(self.posted)


def encoded(*texts: str) -> np.ndarray:
    """Texts as a message. It is cut at HEAD bytes."""
    return np.frombuffer("\0".join(texts).encode()[:HEAD], np.uint8)


def decoded(head: np.ndarray) -> list[str]:
    """The three texts of a message; missing ones are ""."""
    return (head.tobytes().decode(errors="replace").split("\0") + ["", ""])[:3]


def type_of(a: np.ndarray) -> str:
    return f"{a.dtype}{list(a.shape)}"
