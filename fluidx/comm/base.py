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


class Communicator(Protocol):
    """What one rank can do. Arrays are contiguous; `out` may be the input itself. `ranks` lists a group's members in order.

    Every call returns within the deadline or raises CommError; every member of `ranks` makes the same calls in the same order.
    """

    rank: int
    world_size: int
    # True: calls only start the work, on a stream of its own. `mark()` gives a token, `order_after(token)` makes compute wait for what
    # was started before it.
    asynchronous: bool

    def init_group(self, ranks: Ranks) -> None: ...

    def barrier(self, ranks: Ranks) -> None: ...

    def broadcast(self, x: Any, out: Any, root: int, ranks: Ranks) -> None:
        """Every rank's `out` becomes the `x` of the rank with index `root` in `ranks`."""

    def all_reduce(self, x: Any, out: Any, op: str, ranks: Ranks) -> None: ...

    def reduce(self, x: Any, out: Any, op: str, root: int, ranks: Ranks) -> None:
        """`out` is written on the root only."""

    def all_gather(self, x: Any, out: Any, ranks: Ranks) -> None:
        """`out` is every rank's `x`, joined along axis 0 in rank order."""

    def reduce_scatter(self, x: Any, out: Any, op: str, ranks: Ranks) -> None:
        """Slice number (my index) along axis 0 of the reduction of every `x`."""

    def all_to_all(self, x: Any, out: Any, ranks: Ranks) -> None:
        """Slice j of my `x` goes to rank j; slice i of my `out` came from rank i."""

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> None:
        """Send arrays to peers (global ranks) and receive into arrays, all at once, as one NCCL group would."""

    def abort(self, reason: BaseException) -> None:
        """Make every waiting rank stop with CommAborted."""
