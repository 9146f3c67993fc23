"""What ranks that send messages tell each other before they trade: who brings what to which call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..base import Ranks
from ..contribution import Contribution
from ..threads.python_locks import Pace

HEAD = 512  # bytes of a text that says what comes
LITTLE = 32 * 1024  # bytes of an array that travels behind the text which tells of it

Posted = list[tuple[int, Any]]  # messages on their way: the other rank, and what the world knows them by


class MessageWorld(Protocol):
    """What sends the messages. Those between two ranks that have one tag arrive in order."""

    world_size: int
    tags: int  # the highest
    paces: list[Pace]

    def send(self, data: np.ndarray, to: int, tag: int) -> Posted:
        """Begin to send a contiguous array, which stays as it is until that has happened. Nothing is sent of an empty one."""

    def post(self, data: np.ndarray, to: int, tag: int) -> Posted:
        """Begin to send an array, a small one for good: it may change at once."""

    def receive(self, place: np.ndarray, source: int, tag: int) -> Posted: ...

    def line(self, out: np.ndarray, place: np.ndarray, peer: int, tag: int) -> Posted:
        """Messages of bytes to be sent and received again and again, between `start` and `finish`. A shorter one may arrive."""

    def start(self, posted: Posted) -> None: ...

    def hang_up(self, posted: Posted) -> None:
        """A line is of no more use."""

    def finish(self, posted: Posted, what: str) -> None:
        """Wait until all that has happened. Raises CommTimeout, which names the other ranks, or CommAborted."""

    def check(self) -> None: ...

    def abort(self, reason: BaseException) -> None: ...


class Talk:
    """What the members of a group tell each other in calls that are alike: for each other one the text, with room behind it for what
    little goes along, the same of what is heard, and how what is heard has to begin."""

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
    """Texts as a message, of which the last ones are cut where it would be too long."""
    return np.frombuffer("\0".join(texts).encode()[:HEAD], np.uint8)


def decoded(head: np.ndarray) -> list[str]:
    """The texts of a message, and empty ones behind them."""
    return (head.tobytes().decode(errors="replace").split("\0") + ["", ""])[:3]


def type_of(a: np.ndarray) -> str:
    return f"{a.dtype}{list(a.shape)}"
