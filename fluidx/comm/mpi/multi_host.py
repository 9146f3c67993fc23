"""Ranks of several hosts. Those of one host meet in memory that they share, as processes do; between hosts goes what other hosts have to
know, and that once.

A collective of ranks on several hosts has three steps. The ranks of each host meet and see each other's arrays. The first of each host
tells those of the others what is brought; what is little goes along, and is all that is sent. What is large the ranks carry between the
hosts, each a share of it (`carry.py`). Then the ranks of each host meet again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ... import native
from ...native.world import Brought, mails
from ..base import CommAborted, Ranks
from ..contribution import Contribution
from ..processes import ProcessCommunicator, ProcessWorld, SharedCalls
from ..threads.native_calls import among, layouts
from .host_leader import HostGroup, Lead, Seen
from .host_pipeline import Way, carry, items_of
from .message_collectives import MessageCommunicator
from .world import MpiWorld

_LITTLE = 24 * 1024  # bytes of what a host's ranks bring, up to which it is told at once
_MOST_LEADS = 128
_GRACE = 1.0  # seconds that the ranks of another host have to say which of them is missing


class HostsWorld:
    """The world that this process is one rank of: `here` are the ranks of this host, which have their numbers among all, and `between`
    sends messages to all. `homes` says of each rank which host it is on."""

    memory = None  # that all ranks share

    def __init__(self, here: ProcessWorld, between: MpiWorld, homes: Sequence[int]):
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
        """The group by host; None where its members do not follow one another by host, or none has another one on its host."""
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
        """Tell the ranks of this host, and those of others unless they know."""
        heard = self.between.failure if isinstance(reason, CommAborted) else None
        self.here.abort(heard or reason)
        if not isinstance(reason, CommAborted):
            self.between.abort(reason)

    def close(self) -> None:
        self.between.close()


class HostsCommunicator(ProcessCommunicator):
    """One rank's communicator in a HostsWorld; implements comm.base.Communicator.

    Groups of one host's ranks meet as processes. Messages are sent in groups that are not met by host, and by who exchanges messages or
    parts of its own with everyone.
    """

    def __init__(self, world: HostsWorld, rank: int):
        super().__init__(world.here, world.shared, rank)
        self.world: Any = world
        self.calls = _NearCalls(world, rank)
        self._far = MessageCommunicator(world.between, rank)
        self._leads: dict[tuple, Lead] = {}

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> None:
        with self._shared.noted(self.rank, mails(sends, recvs)):
            self._far.exchange(sends, recvs)

    def _meet(self, ranks: Ranks, slot: Contribution) -> None:
        group = self.world.group(ranks)
        try:
            if group is None or (group.hosts[1:] and slot.what == "all_to_all"):
                with self._shared.noted(self.rank, among(slot.call, ranks), kept=slot.kept):
                    self._far.bring(ranks, slot)
            elif group.hosts[1:]:
                self._meet_hosts(group, slot)
            else:
                super()._meet(ranks, slot)
        except BaseException as e:
            self.world.abort(e)  # those who wait for this rank do so in two worlds
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
            self._lead(group, slot, seen, little).trade(self._block)
        if not little:
            go()  # what all hosts bring fits together
            self._carry(group, slot, seen)
        go()
        self._give_back(given, slot)

    def _carry(self, group: HostGroup, slot: Contribution, seen: Seen) -> None:
        share, shares = group.own.index(self.rank), min(map(len, group.hosts))
        if share < shares:
            peers = [host[share] for host in group.hosts]
            way = Way(self._far.world, self._far.tag(group.ranks) + 1, peers, group.here, str(slot), self._far.room)
            carry(items_of(slot, group.homes, group.here, seen), slot.op, way, share, shares)

    def _near(self, group: HostGroup, slot: Contribution, grace: float) -> native.NativeCall:
        """A meeting of this host's members: in the first they see what they bring to the whole group's, in those with a `grace` they wait
        for the ones that wait for other hosts."""
        told = among(slot.call, group.ranks)
        gives, takes = ([slot.x], [slot.out]) if slot.gives is None else (slot.gives, slot.takes)
        kept = slot.kept and grace > 0
        brought = Brought(slot.what, slot.op, slot.root, told, told, told, kept, slot.size, gives, takes, False, grace)
        return self._shared.meet(group.own, self.rank, brought, False)

    def _lead(self, group: HostGroup, slot: Contribution, seen: Seen, little: bool) -> Lead:
        key = group.ranks, *map(id, seen)  # which the lead keeps
        lead = self._leads.get(key)
        if lead is None:
            if len(self._leads) >= _MOST_LEADS:
                self._leads.clear()
            lead = self._leads[key] = Lead(self._far, group, slot, seen, little)
        return lead


class _NearCalls(SharedCalls):
    """C calls for groups of one host's ranks."""

    def __init__(self, world: HostsWorld, rank: int):
        super().__init__(world.here, world.shared, rank)
        self._hosts = world

    def _meet(self, ranks: Ranks, slot: Contribution) -> list[native.NativeCall] | None:
        group = self._hosts.group(ranks)
        return None if group is None or group.hosts[1:] else super()._meet(ranks, slot)

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> None:
        """There are none: they are messages."""


def _moved(slot: Contribution) -> int:
    """Bytes of what a rank gives or gets, all parts together: as many on each."""
    if slot.gives is None:
        return slot.x.nbytes
    return sum(a.nbytes for a in (slot.takes if slot.what == "all_gather" else slot.gives))
