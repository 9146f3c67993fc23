"""The one protocol that every way of communicating implements; operators and executors know nothing else about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

REDUCE_OPS = ("sum", "avg", "max", "min", "prod")
UFUNCS = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}

Ranks = tuple[int, ...]


class CommError(RuntimeError):
    """Communication failed. `rank` is the rank at fault and `status` the library's number for it, when they are known."""

    status: int | None = None

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class CommAborted(CommError):
    """Another rank failed first; this rank only stopped waiting for it."""


class CommTimeout(CommError):
    """A peer did not arrive before the deadline."""


def was_stopped(error: BaseException) -> bool:
    """Is an error the consequence of another rank's?"""
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, CommAborted)


class Communicator(Protocol):
    """What one rank can do. `ranks` lists a group's members in order; `out` may be the input itself. Single arrays are contiguous.

    Lists hold one array per rank of the group, in order: views, strided or not, of any sizes, also empty. What rank i gives for rank j
    has the shape that rank j expects from rank i. Every call returns within the deadline or raises CommError; every member of `ranks`
    makes the same calls in the same order.

    A group is its members and their order, and needs no more to be made than that they call; ranks may be in many, which meet by turns.
    Reductions add in rank order, small floats in float32: every rank has the same bits, and so has every run. Ranks that bring what does
    not fit together are told so (CommError), and a passed deadline (CommTimeout) names those who are missing; where ranks of several hosts
    meet by host, those of the host that it passes on first. tests/comm/conformance holds every body to this.
    """

    rank: int
    world_size: int
    asynchronous: bool  # True: it is an AsynchronousCommunicator
    # The same methods, which do nothing and give the C calls that would: a list of `native.Call`, or None where there are none for these
    # arrays. None where there never are. They may stand in a block with other calls.
    calls: Any

    def init_group(self, ranks: Ranks) -> None: ...

    def barrier(self, ranks: Ranks) -> None: ...

    def broadcast(self, x: Any, out: Any, root: int, ranks: Ranks) -> None:
        """Every rank's `out` becomes the `x` of the rank with index `root` in `ranks`."""

    def all_reduce(self, x: Any, out: Any, op: str, ranks: Ranks) -> None: ...

    def reduce(self, x: Any, out: Any, op: str, root: int, ranks: Ranks) -> None:
        """`out` is written on the root only."""

    def all_gather(self, x: Any, parts: Sequence[Any], ranks: Ranks) -> None:
        """`parts[k]` becomes the `x` of the rank with index k. `x` may be my own part itself."""

    def reduce_scatter(self, parts: Sequence[Any], out: Any, op: str, ranks: Ranks) -> None:
        """`out` becomes the reduction of what the ranks have in `parts[my index]`. It may be my own part itself."""

    def all_to_all(self, sends: Sequence[Any], recvs: Sequence[Any], ranks: Ranks) -> None:
        """`recvs[k]` becomes what the rank with index k has in `sends[my index]`. No send shares memory with a receive."""

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> None:
        """Send arrays to peers (global ranks) and receive into arrays, all at once, as one NCCL group would."""

    # Where communication is not asynchronous, a thread beside the one that computes may make these calls, in their order. The two say how
    # far they have come in a run, which began with 0 (`World.begin`), and wait for each other.

    def reach(self, beside: bool, at: int) -> None:
        """The calling thread, the one that computes or the one `beside` it, has come so far."""

    def follow(self, beside: bool, at: int) -> None:
        """Wait until the other one has."""

    def abort(self, reason: BaseException) -> None:
        """Make every waiting rank stop with CommAborted."""


class AsynchronousCommunicator(Communicator, Protocol):
    """One whose calls only start the work, on a stream of its own."""

    def mark(self) -> Any:
        """A token for what was started before."""

    def order_after(self, token: Any) -> None:
        """Let compute wait for what was started before the token was given."""

    def wait(self) -> None:
        """Wait until all that was started is done, or the deadline has passed."""
