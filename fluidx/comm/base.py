"""The Communicator protocol, which threads, processes, MPI and NCCL implement. Operators and executors use only this protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..native.shared import Memory
from ..native.world import NativeWorld

UFUNCS = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
REDUCE_OPS = tuple(UFUNCS)

STOPPED = "stopped because another rank failed: "  # begins the text of a CommAborted; world.c has it too

Ranks = tuple[int, ...]


class CommError(RuntimeError):
    """Communication failed. `rank` is the rank that caused it and `status` the library's error number, if they are known."""

    status: int | None = None

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class CommAborted(CommError):
    """Another rank failed first; this rank only stopped."""


class CommTimeout(CommError):
    """A peer did not arrive before the deadline."""


def was_stopped(error: BaseException) -> bool:
    """Is an error the consequence of another rank's error?"""
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, CommAborted)


class Communicator(Protocol):
    """The communication calls of one rank. `ranks` lists a group's members in order; `out` may be the input itself. Single arrays are
    contiguous.

    Lists hold one array for each rank of the group, in order: views, strided or not, of any sizes, also empty. The array that rank i sends
    to rank j has the shape that rank j expects from rank i. Every call returns within the deadline or raises CommError. Every member of
    `ranks` makes the same calls in the same order.

    A group is the tuple of its members, in order; it needs no set-up. A rank may be in many groups and use them alternately. Reductions add
    in rank order, 16-bit floats in float32: every rank and every run has the same bits. Calls that do not fit together raise CommError. A
    passed deadline raises CommTimeout, which names the missing ranks; for a group on several hosts, those of the host on which it passes
    first. tests/comm/conformance checks every implementation.
    """

    rank: int
    world_size: int
    asynchronous: bool  # True: it is an AsynchronousCommunicator
    # An object with the same methods, which only return the C calls: a list of `native.Call`, or None if there are none for these arrays.
    # The calls can be joined with others to a block. `calls` is None for a communicator without C calls.
    calls: Any

    def ring(self, number: int) -> Any:
        """The Communicator of the same rank whose calls go by ring `number`: over NCCL a communicator and a stream of its own; elsewhere
        this one, since calls there have no stream."""

    def init_group(self, ranks: Ranks) -> None: ...

    def barrier(self, ranks: Ranks) -> None: ...

    def broadcast(self, x: Any, out: Any, root: int, ranks: Ranks) -> None:
        """Copy the `x` of the rank with index `root` in `ranks` to every rank's `out`."""

    def all_reduce(self, x: Any, out: Any, op: str, ranks: Ranks) -> None: ...

    def reduce(self, x: Any, out: Any, op: str, root: int, ranks: Ranks) -> None:
        """`out` is written on the root only."""

    def all_gather(self, x: Any, parts: Sequence[Any], ranks: Ranks) -> None:
        """Copy the `x` of the rank with index k to `parts[k]`. `x` may be this rank's own part itself."""

    def reduce_scatter(self, parts: Sequence[Any], out: Any, op: str, ranks: Ranks) -> None:
        """Reduce the `parts[my index]` of all ranks into `out`, which may be this rank's own part itself."""

    def all_to_all(self, sends: Sequence[Any], recvs: Sequence[Any], ranks: Ranks) -> None:
        """Copy the `sends[my index]` of the rank with index k to `recvs[k]`. No send shares memory with a receive."""

    def scatter(self, parts: Sequence[Any], out: Any, root: int, ranks: Ranks) -> None:
        """Copy the `parts[k]` of the rank with index `root` to the `out` of the rank with index k. Only the root's `parts` are read."""

    def gather(self, x: Any, parts: Sequence[Any], root: int, ranks: Ranks) -> None:
        """Copy the `x` of the rank with index k to the root's `parts[k]`. Only the root's `parts` are written; `x` may be its own part
        itself."""

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> None:
        """Send arrays to peers (global ranks) and receive into arrays, all at once, as one NCCL group would."""

    # If communication is not asynchronous, a second thread may make these calls, in order, while the first one computes. Both threads
    # count their progress in a run, which begins with 0 (`World.begin`), and wait for each other.

    def reach(self, beside: bool, at: int) -> None:
        """Set the progress of the calling thread: the one that computes, or the second one (`beside`)."""

    def follow(self, beside: bool, at: int) -> None:
        """Wait until the other thread has reached `at`."""

    def abort(self, reason: BaseException) -> None:
        """Make every waiting rank stop with CommAborted."""


class AsynchronousCommunicator(Communicator, Protocol):
    """A communicator whose calls only start the work, on a separate stream."""

    def mark(self) -> Any:
        """A token for the work that was started before."""

    def order_after(self, token: Any) -> None:
        """Make compute wait for the work that was started before the token was made."""

    def wait(self) -> None:
        """Wait until all started work is done, or the deadline has passed."""


class World(Protocol):
    """The state that ranks share, as one process sees it; their communicators wait and fail together. tests/comm/conformance checks every
    implementation."""

    world_size: int
    timeout: float  # seconds that a rank waits for others

    @property
    def shared(self) -> NativeWorld | None:
        """Collective calls in C and the flight recorder; None if there are none."""

    @property
    def threaded(self) -> bool:
        """May any thread of this process call `check`?"""

    def communicator(self, rank: int) -> Any:
        """The Communicator of a rank of this process. Raises ValueError for a rank of another one."""

    def begin(self) -> None:
        """Begin a run in which ranks of this process have two threads: set their progress to 0."""

    def check(self) -> None:
        """Raise CommAborted when a rank has failed."""

    def abort(self, reason: BaseException) -> None:
        """Make every rank stop with CommAborted. The first reason counts."""

    def close(self) -> None:
        """Release what the library behind it holds. No call follows."""


class LaunchedWorld(World, Protocol):
    """The world of ranks that are processes of a launched script, in the process of one of them."""

    rank: int

    @property
    def memory(self) -> Memory | None:
        """The memory that all ranks share; None if some are on other hosts."""


class LocalWorld(World, Protocol):
    """The world of ranks that are threads of one process."""

    def reset(self) -> None:
        """Forget a failure and drop pending calls and messages. Only while no rank is running."""
