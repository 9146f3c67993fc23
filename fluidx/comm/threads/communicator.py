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

from ...native.world import array_text
from ..base import CommTimeout, Ranks
from ..collective_methods import CollectiveMethods
from ..contribution import Contribution, work
from ..disagreement import disagreement, other_message
from .python_locks import open_gate, patiently

if TYPE_CHECKING:
    from .world import ThreadWorld

_EAGER = 64 * 1024  # bytes up to which a send copies and returns; above, it waits until the peer has read
_SMALL = 4 * 1024  # elements up to which the last rank to arrive does all the work: ranks wait once instead of twice


class ThreadCommunicator(CollectiveMethods):
    """One rank's communicator in a ThreadWorld; implements comm.base.Communicator."""

    world: ThreadWorld

    # -- collectives --------------------------------------------------------------------------------------------------

    def _collective(self, ranks: Ranks, slot: Contribution) -> Any:
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
            error = disagreement(other_message(self.rank, array_text(out), peer, array_text(x)), peer)
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
