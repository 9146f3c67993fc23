"""ThreadCommunicator: collectives of ranks that are threads. They work directly on the ranks' arrays, without copies.

In a collective call, each rank publishes its contribution, waits for the others, does its share of the work for everyone, and waits again.
The last rank to arrive compares all contributions and, if they are small, does all of the work. Reductions add in rank order, so every rank
and every run gets the same bits.

With C kernels all collective calls of a world are in C (`native_calls.py`); else they use Python's locks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import CommError, CommTimeout, Ranks
from ..contribution import BLOCK, Contribution, work
from .python_locks import open_gate, patiently

if TYPE_CHECKING:
    from .world import ThreadWorld

_EAGER = 64 * 1024  # bytes up to which a send copies and returns; above, it waits until the peer has read
_SMALL = 4 * 1024  # elements up to which the last rank to arrive does all the work: ranks wait once instead of twice


class ThreadCommunicator:
    """One rank's communicator in a ThreadWorld; implements comm.base.Communicator."""

    asynchronous = False
    calls: Any = None

    def __init__(self, world: ThreadWorld, rank: int):
        self.world = world
        self.rank = rank
        self.world_size = world.world_size
        self._scratch: np.ndarray | None = None

    def abort(self, reason: BaseException) -> None:
        self.world.abort(reason)

    # -- the threads of this rank ---------------------------------------------------------------------------------------

    def reach(self, beside: bool, at: int) -> Any:
        self.world.paces[self.rank].reach(beside, at)

    def follow(self, beside: bool, at: int) -> Any:
        self.world.paces[self.rank].follow(beside, at)

    # -- collectives --------------------------------------------------------------------------------------------------

    def init_group(self, ranks: Ranks) -> Any:
        return self._meet(ranks, Contribution("nccl_init"))

    def barrier(self, ranks: Ranks) -> Any:
        return self._meet(ranks, Contribution("barrier"))

    def broadcast(self, x: np.ndarray, out: np.ndarray, root: int, ranks: Ranks) -> Any:
        return self._meet(ranks, Contribution("broadcast", x, out, root=root))

    def all_reduce(self, x: np.ndarray, out: np.ndarray, op: str, ranks: Ranks) -> Any:
        return self._meet(ranks, Contribution("all_reduce", x, out, op))

    def reduce(self, x: np.ndarray, out: np.ndarray, op: str, root: int, ranks: Ranks) -> Any:
        return self._meet(ranks, Contribution("reduce", x, out, op, root))

    def all_gather(self, x: np.ndarray, parts: Sequence[np.ndarray], ranks: Ranks) -> Any:
        return self._meet(ranks, Contribution("all_gather", x, gives=[x] * len(ranks), takes=parts))

    def reduce_scatter(self, parts: Sequence[np.ndarray], out: np.ndarray, op: str, ranks: Ranks) -> Any:
        return self._meet(ranks, Contribution("reduce_scatter", parts, out, op, gives=parts, takes=[out] * len(ranks)))

    def all_to_all(self, sends: Sequence[np.ndarray], recvs: Sequence[np.ndarray], ranks: Ranks) -> Any:
        return self._meet(ranks, Contribution("all_to_all", sends, gives=sends, takes=recvs))

    def _meet(self, ranks: Ranks, slot: Contribution) -> Any:
        """A collective call: wait for the other members, and do this rank's share of the work for all of them."""
        m, n = self.world.meeting(ranks), len(ranks)
        m.slots[self.rank] = slot

        def begin() -> None:
            m.agree()
            # sizes may differ by rank, so only the last rank to arrive knows the largest one
            m.done = max(m.slots[r].size for r in ranks) <= _SMALL
            if m.done:
                work([m.slots[r] for r in ranks], 0, n, self._block)

        m.wait(self.rank, slot.what, begin)
        if m.done:
            return
        mine = ranks.index(self.rank)
        work([m.slots[r] for r in ranks], mine, mine + 1, self._block)
        m.wait(self.rank, slot.what)

    def _block(self, dtype: np.dtype) -> np.ndarray:
        if self._scratch is None or self._scratch.dtype != dtype:
            self._scratch = np.empty(BLOCK, dtype)
        return self._scratch

    # -- point to point -------------------------------------------------------------------------------------------------

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> Any:
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
                open_gate(taken)
            raise error
        np.copyto(out, x)
        if taken is not None:
            open_gate(taken)

    def _wait(self, lock: Any, peer: int, what: str) -> None:
        # an abort from here on opens the lock; one that came before is seen here
        self.world.check()
        late = f"rank {self.rank} has waited {self.world.stall:g} s in {what}, which has not arrived; it goes on waiting"
        if not patiently(lock, self.world, lambda: late):
            raise CommTimeout(f"rank {self.rank} waited {self.world.timeout:g} s in {what}; rank {peer} did not arrive", rank=peer)
        self.world.check()
