"""Start a rank that is connected by TCP: ranks of one host share memory, and ranks of different hosts exchange messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .. import local_rendezvous
from ..base import CommError
from ..flight_recorder import FlightRecord
from ..hosts.multi_host import HostsWorld
from ..launch_environment import Launched
from ..processes import ProcessWorld
from .failure_messages import FailureMessages
from .rendezvous import Joined, join
from .world import TcpWorld


class TcpRank(NamedTuple):
    """A connected rank: its world, and what is known about the others."""

    world: HostsWorld | TcpWorld
    failures: FailureMessages
    joined: Joined
    gone: list[int]  # ranks whose processes have ended, in the order in which this rank heard of it

    def trails(self) -> list[FlightRecord | None]:
        """The flight records of the ranks of this host; None for others."""
        here, n = self.joined.hosts[self.world.rank], self.world.world_size
        found: list[FlightRecord | None] = [None] * n
        if isinstance(self.world, HostsWorld):
            for rank in here:
                found[rank] = FlightRecord.of(self.world.shared, rank)
        return found

    def reports(self, rank: int) -> bool:
        """Is this the rank that reports the end of another one? It is the first one left on the same host, else the first one left."""
        left = [r for r in range(self.world.world_size) if r not in self.gone]
        beside = [r for r in self.joined.hosts[rank] if r in left]
        return self.world.rank == (beside or left)[0]


def connect(there: Launched, timeout: float) -> TcpRank:
    """Connect this rank to all others. Raises ExecutionError."""
    joined = join(there, timeout)
    failures, gone = joined.failures, list[int]()
    between = TcpWorld(there.rank, joined.links, there.world_size, timeout, failures.spread)
    ranks = joined.hosts[there.rank]
    world: HostsWorld | TcpWorld = between
    if joined.shares:
        _, memory = local_rendezvous.meet(there, ranks, timeout)
        world = HostsWorld(ProcessWorld(memory, there.rank, timeout), between, _homes(joined.hosts))

    def heard(failure: CommError, rank: int | None) -> None:
        gone.extend([] if rank is None else [rank])
        between.heard(failure)
        if isinstance(world, HostsWorld):
            world.here.abort(failure)

    failures.listen(heard)
    return TcpRank(world, failures, joined, gone)


def _homes(hosts: Sequence[tuple[int, ...]]) -> list[int]:
    """The number of each rank's host."""
    firsts = sorted({ranks[0] for ranks in hosts})
    return [firsts.index(ranks[0]) for ranks in hosts]
