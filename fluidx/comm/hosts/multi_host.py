"""HostsWorld: ranks on several hosts. Ranks of one host use shared memory; between hosts, each value is sent once.

A collective of ranks on several hosts has three steps. First, the ranks of each host wait for each other and see each other's arrays.
Second, the first rank of each host exchanges the types with the others; small arrays are sent in the same message. Large arrays are sent by
all ranks, each a share of them (`host_pipeline.py`). Third, the ranks of each host wait for each other again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ... import native
from ...native.world import MeetWords, mails
from ..base import STOPPED, Ranks, was_stopped
from ..contribution import Contribution
from ..processes import ProcessCommunicator, ProcessWorld, SharedCalls
from ..threads.native_calls import among, layouts
from .host_leader import HostGroup, HostLeader, Seen
from .host_pipeline import PipelineRoute, carry, items_of
from .message_collectives import MessageCommunicator
from .polled_world import PolledWorld

_LITTLE = 24 * 1024  # bytes of a host's arrays up to which they are sent with the types
_MOST_LEADS = 128
_APART = "all_to_all", "scatter", "gather"  # collectives in which each part has one receiver: the ranks send them to each other
_GRACE = 1.0  # seconds for the ranks of another host to name their missing rank


class HostsWorld:
    """The world of ranks on several hosts. `here` is the world of this host's ranks (with global rank numbers), `between` sends messages to
    all ranks, and `homes` is the host of each rank."""

    memory = None  # there is no memory that all ranks share

    def __init__(self, here: ProcessWorld, between: PolledWorld, homes: Sequence[int]):
        self.here, self.between, self.homes = here, between, tuple(homes)
        self.rank, self.world_size = between.rank, between.world_size
        self.timeout, self.stall, self.shared = between.timeout, between.stall, here.shared
        self.threaded = between.threaded
        self._groups: dict[Ranks, HostGroup | None] = {}
        between.grace = _GRACE

    def communicator(self, rank: int) -> HostsCommunicator:
        if rank != self.rank:
            raise ValueError(f"this process is rank {self.rank}, not {rank}")
        return HostsCommunicator(self, rank)

    def group(self, ranks: Ranks) -> HostGroup | None:
        """The group by host; None if its members are not ordered by host, or if no host has two of them."""
        if ranks not in self._groups:
            hosts = tuple(tuple(members) for _, members in groupby(ranks, lambda r: self.homes[r]))
            apart = len({self.homes[host[0]] for host in hosts}) < len(hosts) or len(hosts) == len(ranks) > 1
            here = next(h for h, host in enumerate(hosts) if self.rank in host)
            self._groups[ranks] = None if apart else HostGroup(ranks, hosts, here)
        return self._groups[ranks]

    def begin(self) -> None:
        self.here.begin()

    def check(self) -> None:
        """Raise CommAborted when a rank has failed."""
        self.here.check()
        self.between.check()

    def abort(self, reason: BaseException) -> None:
        """Abort the ranks of this host, and those of other hosts unless another rank tells them. The first reason counts."""
        known = self.shared.failed()
        stopped = was_stopped(reason) or bool(known) and (known in str(reason) or known.removeprefix(STOPPED) not in str(reason))
        if stopped:
            self.between.await_reason()
        self.here.abort(self.between.failure or reason)
        if not stopped:
            self.between.abort(reason)

    def close(self) -> None:
        self.between.close()


class HostsCommunicator(ProcessCommunicator):
    """One rank's communicator in a HostsWorld; implements comm.base.Communicator.

    Groups on one host use shared memory. Messages are used for groups that are not ordered by host, for send and recv, and for
    all_to_all, scatter and gather.
    """

    def __init__(self, world: HostsWorld, rank: int):
        super().__init__(world.here, world.shared, rank)
        self.world: Any = world
        self.calls = _NearCalls(world, rank)
        self._far = MessageCommunicator(world.between, rank)
        self._leaders: dict[tuple, HostLeader] = {}

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> None:
        with self._shared.noted(self.rank, mails(sends, recvs)):
            self._far.exchange(sends, recvs)

    def _collective(self, ranks: Ranks, slot: Contribution) -> None:
        group = self.world.group(ranks)
        try:
            if group is None or (group.hosts[1:] and slot.what in _APART):
                with self._shared.noted(self.rank, among(slot.call, ranks), kept=slot.kept):
                    self._far._collective(ranks, slot)
            elif group.hosts[1:]:
                self._meet_hosts(group, slot)
            else:
                super()._collective(ranks, slot)
        except BaseException as e:
            self.world.abort(e)  # other ranks may wait for this one in two worlds
            raise

    def _meet_hosts(self, group: HostGroup, given: Contribution) -> None:
        slot = self._reachable(given, strided=False)
        key = group.ranks, type(slot), *layouts(slot)
        come = self._compiled(("come", *key), lambda: self._near(group, slot, 0.0))
        go = self._compiled(("go", *key), lambda: self._near(group, slot, 2 * _GRACE))
        come()
        little, leads = _moved(slot) * max(map(len, group.hosts)) <= _LITTLE, self.rank == group.own[0]
        seen = self._all.brought(group.own) if leads or not little else []
        if leads:
            self._run_leader(group, slot, seen, little).trade(self._block)
        if not little:
            go()  # the leaders have checked that all arrays fit together
            self._carry(group, slot, seen)
        go()
        self._give_back(given, slot)

    def _carry(self, group: HostGroup, slot: Contribution, seen: Seen) -> None:
        share, shares = group.own.index(self.rank), min(map(len, group.hosts))
        if share < shares:
            peers = [host[share] for host in group.hosts]
            way = PipelineRoute(self._far.world, self._far.tag(group.ranks) + 1, peers, group.here, str(slot), self._far.room)
            carry(items_of(slot, group.homes, group.here, seen), slot.op, way, share, shares)

    def _near(self, group: HostGroup, slot: Contribution, grace: float) -> native.NativeCall:
        """A barrier of this host's members. In the first one they see each other's arrays; those with a `grace` also wait for the ranks
        that wait for other hosts."""
        told = among(slot.call, group.ranks)
        gives, takes = ([slot.x], [slot.out]) if slot.gives is None else (slot.gives, slot.takes)
        kept = slot.kept and grace > 0
        brought = MeetWords(slot.what, slot.op, slot.root, told, told, told, kept, slot.size, gives, takes, False, grace)
        return self._shared.meet(group.own, self.rank, brought, False)

    def _run_leader(self, group: HostGroup, slot: Contribution, seen: Seen, little: bool) -> HostLeader:
        key = group.ranks, *map(id, seen)  # the leader keeps `seen` alive
        lead = self._leaders.get(key)
        if lead is None:
            if len(self._leaders) >= _MOST_LEADS:
                self._leaders.clear()
            lead = self._leaders[key] = HostLeader(self._far, group, slot, seen, little)
        return lead


class _NearCalls(SharedCalls):
    """C calls for groups of one host's ranks."""

    def __init__(self, world: HostsWorld, rank: int):
        super().__init__(world.here, world.shared, rank)
        self._hosts = world

    def _collective(self, ranks: Ranks, slot: Contribution) -> list[native.NativeCall] | None:
        group = self._hosts.group(ranks)
        return None if group is None or group.hosts[1:] else super()._collective(ranks, slot)

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> None:
        """None: they are messages."""


def _moved(slot: Contribution) -> int:
    """The bytes that a rank sends or receives, in all parts. It is equal on all ranks."""
    if slot.gives is None:
        return slot.x.nbytes
    return sum(a.nbytes for a in (slot.takes if slot.what == "all_gather" else slot.gives))
