"""Ranks as threads of one process: collectives that work directly on the ranks' arrays, without copies.

A collective is: publish my arrays, meet, do my share of the work for everyone, meet again. Reductions add in rank order, so
every rank gets the same bits and so does every run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from .base import UFUNCS, CommAborted, CommTimeout, Ranks

_BLOCK = 32 * 1024  # elements reduced at a time: the block stays in the second-level cache
_EAGER = 64 * 1024  # bytes up to which a send copies and returns; above, it waits until the peer has read


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
        self.slots: dict[int, Any] = {}
        self.scratch: dict[int, np.ndarray] = {}

    def wait(self, rank: int, what: str) -> None:
        if len(self.ranks) == 1:
            return
        with self.guard:
            self.arrived.add(rank)
            last = len(self.arrived) == len(self.ranks)
            if last:
                self.arrived.clear()
        if last:
            for r, gate in self.gates.items():
                if r != rank:
                    gate.release()
        elif not self.gates[rank].acquire(timeout=self.world.timeout):
            missing = sorted(set(self.ranks) - self.arrived)
            raise CommTimeout(
                f"rank {rank} waited {self.world.timeout:g} s in {what}; rank{'s' * (len(missing) > 1)} "
                f"{', '.join(map(str, missing)) or '?'} did not arrive",
                rank=missing[0] if missing else None,
            )
        self.world.check()

    def block(self, rank: int, dtype: np.dtype) -> np.ndarray:
        b = self.scratch.get(rank)
        if b is None or b.dtype != dtype:
            b = self.scratch[rank] = np.empty(_BLOCK, dtype)
        return b


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
                if gate.locked():
                    try:
                        gate.release()
                    except RuntimeError:  # a member released it in between
                        pass
        for box in mail:
            box.ready.release(self.world_size)
            for _, taken in list(box.posts):
                if taken is not None and taken.locked():
                    try:
                        taken.release()
                    except RuntimeError:
                        pass


class ThreadCommunicator:
    """One rank's communicator in a ThreadWorld; implements comm.base.Communicator."""

    def __init__(self, world: ThreadWorld, rank: int):
        self.world = world
        self.rank = rank
        self.world_size = world.world_size

    def init_group(self, ranks: Ranks) -> None:
        self.world.meeting(ranks)
        self.barrier(ranks)

    def barrier(self, ranks: Ranks) -> None:
        self.world.meeting(ranks).wait(self.rank, "barrier")

    def abort(self, reason: BaseException) -> None:
        self.world.abort(reason)

    # -- collectives --------------------------------------------------------------------------------------------------

    def _publish(self, ranks: Ranks, what: str, x: np.ndarray, out: np.ndarray | None) -> _Meeting:
        m = self.world.meeting(ranks)
        m.slots[self.rank] = (what, x, out)
        m.wait(self.rank, what)
        for r in ranks:
            other, theirs, _ = m.slots[r]
            if other != what or theirs.shape != x.shape or theirs.dtype != x.dtype:
                error = CommTimeout(
                    f"ranks disagree: rank {self.rank} is in {what} of {x.dtype}{list(x.shape)}, "
                    f"rank {r} in {other} of {theirs.dtype}{list(theirs.shape)}",
                    rank=r,
                )
                self.world.abort(error)
                raise error
        return m

    def broadcast(self, x: np.ndarray, out: np.ndarray, root: int, ranks: Ranks) -> None:
        m = self._publish(ranks, "broadcast", x, out)
        source = m.slots[ranks[root]][1]
        if out is not source:
            np.copyto(out, source)
        m.wait(self.rank, "broadcast")

    def all_reduce(self, x: np.ndarray, out: np.ndarray, op: str, ranks: Ranks) -> None:
        m = self._publish(ranks, "all_reduce", x, out)
        ins = [m.slots[r][1].reshape(-1) for r in ranks]
        outs = [m.slots[r][2].reshape(-1) for r in ranks]
        n, mine = len(ranks), ranks.index(self.rank)
        lo, hi = x.size * mine // n, x.size * (mine + 1) // n
        self._reduce_share(m, ins, outs, lo, hi, op)
        m.wait(self.rank, "all_reduce")

    def reduce(self, x: np.ndarray, out: np.ndarray, op: str, root: int, ranks: Ranks) -> None:
        # every rank reduces its share straight into the root's array, so the root is no bottleneck
        m = self._publish(ranks, "reduce", x, out)
        ins = [m.slots[r][1].reshape(-1) for r in ranks]
        n, mine = len(ranks), ranks.index(self.rank)
        lo, hi = x.size * mine // n, x.size * (mine + 1) // n
        self._reduce_share(m, ins, [m.slots[ranks[root]][2].reshape(-1)], lo, hi, op)
        m.wait(self.rank, "reduce")

    def _reduce_share(self, m: _Meeting, ins: list, outs: list, lo: int, hi: int, op: str) -> None:
        ufunc, n = UFUNCS[op], len(ins)
        dtype = ins[0].dtype
        wide = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
        scratch = m.block(self.rank, wide)
        for a in range(lo, hi, _BLOCK):
            b = min(a + _BLOCK, hi)
            total = scratch[: b - a]
            if n == 1:
                np.copyto(total, ins[0][a:b])
            else:
                ufunc(ins[0][a:b], ins[1][a:b], out=total, casting="unsafe")
            for k in range(2, n):
                ufunc(total, ins[k][a:b], out=total, casting="unsafe")
            if op == "avg":
                np.divide(total, n, out=total, casting="unsafe")
            for o in outs:
                o[a:b] = total

    def all_gather(self, x: np.ndarray, out: np.ndarray, ranks: Ranks) -> None:
        m = self._publish(ranks, "all_gather", x, out)
        parts = out.reshape(len(ranks), -1)
        for k, r in enumerate(ranks):
            np.copyto(parts[k], m.slots[r][1].reshape(-1))
        m.wait(self.rank, "all_gather")

    def reduce_scatter(self, x: np.ndarray, out: np.ndarray, op: str, ranks: Ranks) -> None:
        m = self._publish(ranks, "reduce_scatter", x, out)
        mine, size = ranks.index(self.rank), x.size // len(ranks)
        ins = [m.slots[r][1].reshape(-1)[mine * size : (mine + 1) * size] for r in ranks]
        self._reduce_share(m, ins, [out.reshape(-1)], 0, size, op)
        m.wait(self.rank, "reduce_scatter")

    def all_to_all(self, x: np.ndarray, out: np.ndarray, ranks: Ranks) -> None:
        m = self._publish(ranks, "all_to_all", x, out)
        mine, parts = ranks.index(self.rank), out.reshape(len(ranks), -1)
        for k, r in enumerate(ranks):
            np.copyto(parts[k], m.slots[r][1].reshape(len(ranks), -1)[mine])
        m.wait(self.rank, "all_to_all")

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
            raise CommTimeout(
                f"rank {self.rank} expects {out.dtype}{list(out.shape)} from rank {peer}, which sent {x.dtype}{list(x.shape)}", rank=peer
            )
        np.copyto(out, x)
        if taken is not None:
            taken.release()

    def _wait(self, lock: Any, peer: int, what: str) -> None:
        start = time.monotonic()
        if not lock.acquire(timeout=self.world.timeout):
            raise CommTimeout(
                f"rank {self.rank} waited {time.monotonic() - start:.0f} s in {what}; rank {peer} did not arrive", rank=peer
            )
        self.world.check()
