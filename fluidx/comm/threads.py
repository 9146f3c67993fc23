"""Ranks as threads of one process: collectives that work directly on the ranks' arrays, without copies.

A collective is: publish my arrays, meet, do my share of the work for everyone, meet again. The last to arrive compares what all
brought and, where that is small, does all of the work. Reductions add in rank order, so every rank gets the same bits and so does
every run.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from .. import native
from .base import UFUNCS, CommAborted, CommError, CommTimeout, Ranks

_BLOCK = 32 * 1024  # elements reduced at a time: the block stays in the second-level cache
_EAGER = 64 * 1024  # bytes up to which a send copies and returns; above, it waits until the peer has read
_LARGE = 64 * 1024  # elements above which one call into C pays, which is packed first
_SMALL = 4 * 1024  # elements up to which the last rank to arrive does all the work: one meeting instead of two


class _Meeting:
    """A reusable barrier for the members of a group. Each member sleeps on its own lock, which is cheaper than a condition."""

    def __init__(self, ranks: Ranks, world: ThreadWorld):
        self.ranks = ranks
        self.world = world
        self.guard = threading.Lock()
        self.arrived: set[int] = set()
        self.gates = {r: threading.Lock() for r in ranks}
        for gate in self.gates.values():
            gate.acquire()
        self.slots: dict[int, _Slot] = {}
        self.done = False  # by the last to arrive; it stays as it is until all have seen it, for nobody is last before
        self.scratch: dict[int, np.ndarray] = {}

    def wait(self, rank: int, what: str, action: Callable[[], None] | None = None) -> None:
        """Return when every member has arrived and the last of them has done its `action`."""
        with self.guard:
            self.arrived.add(rank)
            last = len(self.arrived) == len(self.ranks)
            if last:
                self.arrived.clear()
        # from here on an abort opens this rank's gate; one that came before is seen here
        self.world.check()
        if last:
            if action is not None:
                action()
            for r, gate in self.gates.items():
                if r != rank:
                    _open(gate)
        elif not self.gates[rank].acquire(timeout=self.world.timeout):
            with self.guard:
                missing = sorted(set(self.ranks) - self.arrived)
            raise CommTimeout(
                f"rank {rank} waited {self.world.timeout:g} s in {what}; rank{'s' * (len(missing) > 1)} "
                f"{', '.join(map(str, missing)) or '?'} did not arrive",
                rank=missing[0] if missing else None,
            )
        self.world.check()

    def agree(self) -> None:
        """Raise CommError, and stop everyone, unless all members are in the same call with arrays that fit together."""
        first = self.ranks[0]
        mine = self.slots[first]
        for r in self.ranks[1:]:
            other = self.slots[r]
            alike = other.what == mine.what and other.how == mine.how and other.dtype == mine.dtype
            if not alike or (mine.gives is None and other.x.shape != mine.x.shape):
                self.refuse(f"rank {first} is in {mine}, rank {r} in {other}", r)
        if mine.gives is None:
            return
        for r in self.ranks:
            slot = self.slots[r]
            if not len(slot.gives) == len(slot.takes) == len(self.ranks):
                n = len(self.ranks)
                self.refuse(f"rank {r} brings {len(slot.gives)} parts to {slot.what} and takes {len(slot.takes)}, among {n} ranks", r)
        for k, r in enumerate(self.ranks):
            takes = self.slots[r].takes
            for j, source in enumerate(self.ranks):
                given = self.slots[source].gives[k]
                if given.shape != takes[j].shape:
                    want, have = (f"{a.dtype}{list(a.shape)}" for a in (takes[j], given))
                    self.refuse(f"rank {r} expects {want} from rank {source} in {mine.what}, which gives {have}", source)

    def refuse(self, why: str, rank: int) -> None:
        error = CommError(f"ranks disagree: {why}", rank=rank)
        self.world.abort(error)
        raise error

    def block(self, rank: int, dtype: np.dtype) -> np.ndarray:
        b = self.scratch.get(rank)
        if b is None or b.dtype != dtype:
            b = self.scratch[rank] = np.empty(_BLOCK, dtype)
        return b


class _Slot:
    """What one rank brought to a meeting: the call, how (a reduction, a root), and its arrays.

    Where every rank has a part for each of the others, `gives` are those by reader and `takes` the places for what the others give.
    """

    __slots__ = ("what", "how", "x", "out", "gives", "takes", "dtype", "size")

    def __init__(self, what: str, how: Any, x: Any, out: Any, gives: Any = None, takes: Any = None):
        self.what, self.how, self.x, self.out, self.gives, self.takes = what, how, x, out, gives, takes
        array = x if isinstance(x, np.ndarray) else x[0] if x else _NOTHING
        self.dtype = array.dtype
        self.size = x.size if array is x else sum(a.size for a in x)

    def __str__(self) -> str:
        if self.x is _NOTHING:
            return self.what
        how = "" if self.how is None else f" ({self.how})" if isinstance(self.how, str) else f" from index {self.how}"
        shape = list(self.x.shape) if isinstance(self.x, np.ndarray) else f" in {len(self.x)} parts"
        return f"{self.what}{how} of {self.dtype}{shape}"


_NOTHING = np.empty(0, np.uint8)


def _nothing(m: _Meeting, first: int, end: int) -> None:
    """The work of a barrier."""


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Indices that take an array of this shape apart into blocks of at most _BLOCK elements."""
    size = prod(shape)
    if size <= _BLOCK:
        yield ()
        return
    row = size // shape[0]
    if row > _BLOCK:
        for i in range(shape[0]):
            for rest in _blocks(shape[1:]):
                yield (i, *rest)
        return
    step = _BLOCK // row
    for a in range(0, shape[0], step):
        yield (slice(a, a + step),)


def _flat(*arrays: np.ndarray) -> list[np.ndarray]:
    """The arrays, as one axis if all of them are contiguous."""
    return [a.reshape(-1) for a in arrays] if all(a.flags.c_contiguous for a in arrays) else list(arrays)


def _open(lock: threading.Lock) -> None:
    try:
        lock.release()
    except RuntimeError:  # an abort opened it already
        pass


class _Mailbox:
    """What one rank has posted for another and not yet been read."""

    def __init__(self) -> None:
        self.posts: deque[tuple[Any, threading.Lock | None]] = deque()
        self.ready = threading.Semaphore(0)


class ThreadWorld:
    """What the rank threads of one executor share. `communicator(rank)` is one rank's view of it."""

    def __init__(self, world_size: int, timeout: float = 60.0):
        self.world_size = world_size
        self.timeout = timeout
        self._guard = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget meetings and messages; only when no rank is running."""
        self.failure: BaseException | None = None
        self._meetings: dict[Ranks, _Meeting] = {}
        self._mail: dict[tuple[int, int], _Mailbox] = {}

    def communicator(self, rank: int) -> ThreadCommunicator:
        return ThreadCommunicator(self, rank)

    def meeting(self, ranks: Ranks) -> _Meeting:
        m = self._meetings.get(ranks)
        if m is None:
            with self._guard:
                m = self._meetings.setdefault(ranks, _Meeting(ranks, self))
        return m

    def mailbox(self, source: int, to: int) -> _Mailbox:
        m = self._mail.get((source, to))
        if m is None:
            with self._guard:
                m = self._mail.setdefault((source, to), _Mailbox())
        return m

    def check(self) -> None:
        if self.failure is not None:
            raise CommAborted(f"stopped because another rank failed: {self.failure}")

    def abort(self, reason: BaseException) -> None:
        with self._guard:
            if self.failure is None:
                self.failure = reason
            meetings, mail = list(self._meetings.values()), list(self._mail.values())
        for m in meetings:
            for gate in m.gates.values():
                _open(gate)
        for box in mail:
            box.ready.release(self.world_size)
            for _, taken in list(box.posts):
                if taken is not None:
                    _open(taken)


class ThreadCommunicator:
    """One rank's communicator in a ThreadWorld; implements comm.base.Communicator."""

    asynchronous = False

    def __init__(self, world: ThreadWorld, rank: int):
        self.world = world
        self.rank = rank
        self.world_size = world.world_size

    def init_group(self, ranks: Ranks) -> None:
        self._meet(ranks, "nccl_init", None, _NOTHING, _NOTHING, _nothing)

    def barrier(self, ranks: Ranks) -> None:
        self._meet(ranks, "barrier", None, _NOTHING, _NOTHING, _nothing)

    def abort(self, reason: BaseException) -> None:
        self.world.abort(reason)

    # -- collectives --------------------------------------------------------------------------------------------------

    def _meet(
        self,
        ranks: Ranks,
        what: str,
        how: Any,
        x: Any,
        out: Any,
        work: Callable[[_Meeting, int, int], None],
        gives: Sequence[np.ndarray] | None = None,
        takes: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Meet the others and do `work(meeting, first, end)`, this rank's share of what is done for all members."""
        m, n = self.world.meeting(ranks), len(ranks)
        m.slots[self.rank] = _Slot(what, how, x, out, gives, takes)

        def begin() -> None:
            m.agree()
            # ranks may bring different sizes, so only the last to arrive can tell
            m.done = max(m.slots[r].size for r in ranks) <= _SMALL
            if m.done:
                work(m, 0, n)

        m.wait(self.rank, what, begin)
        if m.done:
            return
        mine = ranks.index(self.rank)
        work(m, mine, mine + 1)
        m.wait(self.rank, what)

    def broadcast(self, x: np.ndarray, out: np.ndarray, root: int, ranks: Ranks) -> None:
        def work(m: _Meeting, first: int, end: int) -> None:
            source = m.slots[ranks[root]].x
            for r in ranks[first:end]:
                if m.slots[r].out is not source:
                    np.copyto(m.slots[r].out, source)

        self._meet(ranks, "broadcast", root, x, out, work)

    def all_reduce(self, x: np.ndarray, out: np.ndarray, op: str, ranks: Ranks) -> None:
        def work(m: _Meeting, first: int, end: int) -> None:
            share = slice(x.size * first // len(ranks), x.size * end // len(ranks))
            ins = [m.slots[r].x.reshape(-1)[share] for r in ranks]
            self._reduce(m, ins, [m.slots[r].out.reshape(-1)[share] for r in ranks], op)

        self._meet(ranks, "all_reduce", op, x, out, work)

    def reduce(self, x: np.ndarray, out: np.ndarray, op: str, root: int, ranks: Ranks) -> None:
        # every rank reduces its share straight into the root's array, so the root is no bottleneck
        def work(m: _Meeting, first: int, end: int) -> None:
            share = slice(x.size * first // len(ranks), x.size * end // len(ranks))
            ins = [m.slots[r].x.reshape(-1)[share] for r in ranks]
            self._reduce(m, ins, [m.slots[ranks[root]].out.reshape(-1)[share]], op)

        self._meet(ranks, "reduce", f"{op}, root {root}", x, out, work)

    def _reduce(self, m: _Meeting, ins: list, outs: list, op: str) -> None:
        """The reduction of `ins`, in rank order, into each of `outs`; 16-bit floats are added in float32."""
        if ins[0].size > _LARGE and not native.why_not() and (call := native.combine(ins, outs, op)) is not None:
            native.compile([call])()
            return
        ufunc, n = UFUNCS[op], len(ins)
        dtype = ins[0].dtype
        wide = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
        kwargs: dict[str, Any] = {"casting": "unsafe"} if wide == dtype else {"casting": "unsafe", "dtype": wide}
        scratch = m.block(self.rank, wide)
        arrays = _flat(*ins, *outs)
        ins, outs = arrays[:n], arrays[n:]
        for at in _blocks(ins[0].shape):
            terms = [x[at] for x in ins]
            total = scratch[: terms[0].size].reshape(terms[0].shape)
            if n == 1:
                np.copyto(total, terms[0])
            else:
                ufunc(terms[0], terms[1], out=total, **kwargs)
            for k in range(2, n):
                ufunc(total, terms[k], out=total, **kwargs)
            if op == "avg":
                np.divide(total, n, out=total, casting="unsafe")
            for o in outs:
                o[at] = total

    def all_gather(self, x: np.ndarray, parts: Sequence[np.ndarray], ranks: Ranks) -> None:
        def work(m: _Meeting, first: int, end: int) -> None:
            for r in ranks[first:end]:
                for part, source in zip(m.slots[r].takes, ranks, strict=True):
                    np.copyto(part, m.slots[source].x)

        self._meet(ranks, "all_gather", None, x, None, work, [x] * len(ranks), parts)

    def reduce_scatter(self, parts: Sequence[np.ndarray], out: np.ndarray, op: str, ranks: Ranks) -> None:
        def work(m: _Meeting, first: int, end: int) -> None:
            for k in range(first, end):
                self._reduce(m, [m.slots[r].gives[k] for r in ranks], [m.slots[ranks[k]].out], op)

        self._meet(ranks, "reduce_scatter", op, parts, out, work, parts, [out] * len(ranks))

    def all_to_all(self, sends: Sequence[np.ndarray], recvs: Sequence[np.ndarray], ranks: Ranks) -> None:
        def work(m: _Meeting, first: int, end: int) -> None:
            for k in range(first, end):
                for part, source in zip(m.slots[ranks[k]].takes, ranks, strict=True):
                    np.copyto(part, m.slots[source].gives[k])

        self._meet(ranks, "all_to_all", None, sends, None, work, sends, recvs)

    # -- point to point -------------------------------------------------------------------------------------------------

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> None:
        world, pending = self.world, []
        for x, peer in sends:
            box = world.mailbox(self.rank, peer)
            if x.nbytes <= _EAGER:
                box.posts.append((x.copy(), None))
            else:
                taken = threading.Lock()
                taken.acquire()
                pending.append((peer, taken))
                box.posts.append((x, taken))
            box.ready.release()
        for out, peer in recvs:
            self._receive(out, peer)
        for peer, taken in pending:
            self._wait(taken, peer, f"send to rank {peer}")

    def _receive(self, out: np.ndarray, peer: int) -> None:
        box = self.world.mailbox(peer, self.rank)
        self._wait(box.ready, peer, f"recv from rank {peer}")
        x, taken = box.posts.popleft()
        if x.shape != out.shape or x.dtype != out.dtype:
            error = CommError(
                f"ranks disagree: rank {self.rank} expects {out.dtype}{list(out.shape)} from rank {peer}, "
                f"which sent {x.dtype}{list(x.shape)}",
                rank=peer,
            )
            self.world.abort(error)
            if taken is not None:
                _open(taken)
            raise error
        np.copyto(out, x)
        if taken is not None:
            _open(taken)

    def _wait(self, lock: Any, peer: int, what: str) -> None:
        # an abort from here on opens the lock; one that came before is seen here
        self.world.check()
        if not lock.acquire(timeout=self.world.timeout):
            raise CommTimeout(f"rank {self.rank} waited {self.world.timeout:g} s in {what}; rank {peer} did not arrive", rank=peer)
        self.world.check()
