"""NativeWorld: collective calls and messages in C, for ranks that share memory. The calls can be part of any block."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from . import NativeCall, _module, address

log = logging.getLogger("fluidx.comm")

SPIN_US = 100  # the longest time that a rank waits without sleeping

Ranks = tuple[int, ...]
Sending = tuple[np.ndarray, int]  # an array and the peer
Block = Callable[[], None]
Launch = Callable[[tuple[np.ndarray, ...]], tuple[Exception | None, ...] | None]

_WORK = {
    "broadcast": 1, "all_reduce": 2, "reduce": 2, "all_gather": 3, "all_to_all": 3, "scatter": 3, "gather": 3, "reduce_scatter": 4,
}  # the numbers in combine.h  # fmt: skip
_HOW = {"": 0, "sum": 0, "avg": 1, "max": 2, "min": 3, "prod": 4}


@cache
def dtype_text(dtype: np.dtype) -> str:
    """`str(dtype)`, cached: NumPy computes it at each use, and every collective call that is bound has it in its text."""
    return str(dtype)


class MeetWords(NamedTuple):
    """One rank's contribution to a collective call in C. `text` describes it, and `call` is the part of the text that is equal on all
    ranks.

    `told` is the text for the flight recorder, and `kept`: does the recorder keep it as the last completed call? `gives` and `takes` are
    single contiguous arrays, or (`parts`) one for each rank. Without `parts`, several arrays are only published to the other ranks and not
    compared. Members may arrive `grace` seconds after the timeout.
    """

    what: str
    op: str
    root: int
    text: str
    call: str
    told: str
    kept: bool
    size: int
    gives: Sequence[np.ndarray]
    takes: Sequence[np.ndarray]
    parts: bool
    grace: float = 0.0


class NativeWorld:
    """The state that the ranks of one world share in C. Calls that it makes keep it alive."""

    def __init__(self, capsule: Any):
        self.capsule, self._module = capsule, _module()
        self._place = self._module.place(capsule)
        self._guard = threading.Lock()
        self._meetings: dict[Ranks, int] = {}
        self._mailboxes: dict[tuple[int, int], int] = {}
        self._texts: dict[str, np.ndarray] = {}  # never freed: others read a rank's last text after it has ended

    def meet(self, ranks: Ranks, rank: int, brought: MeetWords, working: bool = True) -> NativeCall:
        """The collective call: it waits for the other members and, if `working`, does this rank's share of the work."""
        b = brought
        texts, told = [self._text(b.text)], address(self._text(b.told))
        places: dict[int, int] = {}
        records: list[int] = []
        first = 14 + len(b.gives) + len(b.takes)  # the layout of the words is in meet.h
        for a in (*b.gives, *b.takes):
            if id(a) not in places:
                places[id(a)] = first + len(records)
                texts.append(self._text(array_text(a)))
                records += [address(a), address(texts[-1]), a.ndim, *a.shape, *a.strides]
        item, sign = b.gives[0].itemsize if b.gives else 1, 1 if b.parts else -1
        words = [
            self.meeting(ranks), ranks.index(rank), _WORK.get(b.what, 0) if working else 0, _HOW[b.op], b.root, item, b.size,
            address(texts[0]), told, told if b.kept else 0, int(1e9 * b.grace), len(b.call), sign * len(b.gives), sign * len(b.takes),
            *(places[id(a)] for a in (*b.gives, *b.takes)), *records,
        ]  # fmt: skip
        return self._call(words, texts)._replace(keeps=(self.capsule, texts, b.gives, b.takes))

    def _call(self, words: Sequence[int], texts: list[np.ndarray]) -> NativeCall:
        return NativeCall("meet", tuple(words))

    def _text(self, text: str) -> np.ndarray:
        """A text for C, which ends with a zero byte."""
        found = self._texts.get(text)
        if found is None:
            found = self._texts.setdefault(text, self._lasting(np.frombuffer(text.encode() + b"\0", np.uint8)))
        return found

    def _lasting(self, data: np.ndarray) -> np.ndarray:
        """Copy bytes to where all ranks can read them."""
        return data

    def exchange(self, rank: int, sends: Sequence[Sending], recvs: Sequence[Sending]) -> NativeCall:
        """The call that sends and receives contiguous arrays, all at the same time."""
        told = self._text(mails(sends, recvs))
        words, keeps = [self._place, rank, len(sends), len(recvs), address(told)], [self.capsule, told]
        for k, (a, peer) in enumerate((*sends, *recvs)):
            text = self._text(array_text(a))
            words += [self._mailbox(*((rank, peer) if k < len(sends) else (peer, rank))), peer, address(a), a.nbytes, address(text)]
            keeps += [a, text]
        return NativeCall("exchange", tuple(words), tuple(keeps))

    def reach(self, rank: int, beside: bool, at: int) -> NativeCall:
        """The call by which a thread of a rank, the compute thread or the second one (`beside`), sets its progress."""
        return NativeCall("reach", (self._place, rank, int(beside), at), (self.capsule,))

    def follow(self, rank: int, beside: bool, at: int) -> NativeCall:
        """The call by which a thread waits for the progress of the other thread."""
        return NativeCall("await", (self._place, rank, int(beside), at), (self.capsule,))

    def begin(self, rank: int = -1) -> None:
        """Begin a run in which the rank, or every rank (-1), has two threads: set their progress to 0."""
        self._module.begin(self.capsule, rank)

    def launcher(self, blocks: Sequence[Block], buffers: Sequence[Sequence[np.ndarray]], beside: Sequence[Block | None]) -> Launch:
        """A function that runs a block on every rank at once: rank 0's on the calling thread, the others', and the blocks of second threads
        (`beside`), on the threads that `serve`.

        First each rank copies its feeds into its buffers; the function takes all feeds in one tuple, in the order of the buffers. It
        returns None, or the error or None of each block, those of second threads last. Python's signal handlers run meanwhile; an
        exception of a handler stops all ranks at their next collective call and is raised when they have stopped.
        """
        return self._module.launcher(self.capsule, tuple(blocks), tuple(map(tuple, buffers)), tuple(beside))

    def serve(self, rank: int, beside: bool = False) -> None:
        """Run the blocks that are launched on a rank, or for its second thread, on the calling thread, until `knock`."""
        self._module.serve(self.capsule, rank, beside)

    def knock(self, rank: int, beside: bool = False) -> None:
        """Make `serve` return; the next call of it, if none runs now."""
        self._module.knock(self.capsule, rank, beside)

    def expect(self) -> None:
        """Wake the threads that serve, because a launch comes soon."""
        self._module.expect(self.capsule)

    def abort(self, why: str) -> None:
        """Make every waiting rank stop."""
        self._module.abort(self.capsule, why.replace("\0", " ").encode("utf-8", "replace").decode())

    def failed(self) -> str:
        """The error text for ranks that start a collective call after one has failed; "" before a failure."""
        return self._module.failed(self.capsule)

    def latest(self, rank: int, done: bool = False) -> str:
        """The latest collective call, or messages, that a rank started, or completed (`done`); "" if there is none."""
        return self._module.latest(self.capsule, rank, done)

    @contextmanager
    def noted(self, rank: int, text: str, kept: bool = True) -> Iterator[None]:
        """A context that records a collective call of a rank which does not run in this world; `kept`: record it as completed too."""
        at = self.at(text)
        self._module.note(self.capsule, rank, at, False)
        yield
        self._module.note(self.capsule, rank, at if kept else 0, True)

    def inside(self, rank: int) -> bool:
        """Is a rank inside a collective call?"""
        return self._module.inside(self.capsule, rank)

    def trail(self, rank: int) -> memoryview:
        """The two words of a rank's progress record: the address of its operator's text (`at`), or 0, and the number of its run."""
        raw: Any = (ctypes.c_char * 16).from_address(self._module.trail(self.capsule, rank))
        return np.frombuffer(raw, np.int64).data

    def at(self, text: str) -> int:
        """The address of a text that other ranks can read."""
        return address(self._text(text))

    def whereabouts(self, rank: int) -> tuple[str, int]:
        """A rank's progress record: the text of its operator, or "", and the number of its run."""
        at, step = self.trail(rank)
        return ctypes.string_at(at).decode(errors="replace") if at else "", step

    def reset(self) -> None:
        self._module.reset(self.capsule)

    def meeting(self, ranks: Ranks) -> int:
        """The address of a group's barrier."""
        with self._guard:
            if ranks not in self._meetings:
                self._meetings[ranks] = self._module.meeting(self.capsule, ranks)
            return self._meetings[ranks]

    def _mailbox(self, source: int, to: int) -> int:
        with self._guard:
            if (source, to) not in self._mailboxes:
                self._mailboxes[source, to] = self._module.mailbox(self.capsule, source, to)
            return self._mailboxes[source, to]


def make_world(ranks: int, timeout: float, stall: float) -> NativeWorld | None:
    """A world for `ranks` threads; it logs a warning when a rank has waited `stall` seconds. None if the extension has no worlds: MSVC has
    no C11 atomics."""
    capsule = _module().world(ranks, timeout, SPIN_US * 1000)
    if capsule is None:
        return None
    _module().watch(capsule, -1, stall, log.warning)
    return NativeWorld(capsule)


def array_text(a: np.ndarray) -> str:
    """The dtype and the shape of an array, as errors show them."""
    return f"{dtype_text(a.dtype)}{list(a.shape)}"


def mails(sends: Sequence[Sending], recvs: Sequence[Sending]) -> str:
    """A text for messages."""
    there = [f"send of {array_text(a)} to rank {peer}" for a, peer in sends]
    return ", ".join(there + [f"recv of {array_text(a)} from rank {peer}" for a, peer in recvs])
