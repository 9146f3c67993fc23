"""The event simulation: the schedules of all ranks on two streams each, with meetings, and messages over shared links.

Each rank has a compute stream and a communication stream, each in order. The host issues the items of both, one after the other and ahead
of the device; no computing item ends before it is issued. An item beside compute starts when the compute stream has come to
it and all earlier items of the communication stream have ended. A meeting begins when its last member has come. A message up to the eager
limit of its path lets its sender go on at once; a larger one starts when both ends have come, and both wait until it has arrived. What an
exchange sends, and what it receives, divide their links by bytes before they start, as a grouped call of NCCL assigns its channels: no
message of it becomes faster because another one is late.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from ..ir.errors import ExecutionError
from .fair_share import Flow, fair_rates
from .folding import FoldedRanks
from .network import Network
from .schedule import Compute, Exchange, Meeting, RankSchedule, Wait


class EvenProgress(NamedTuple):
    """A time in which compute made even progress: from `start` to `stop`, from `done` to `then` seconds of its own work."""

    start: float
    stop: float
    done: float
    then: float


class ItemTimes(NamedTuple):
    """The times of an item: when its stream came to it, when it began (a meeting: when the last member came), and when it ended. `late` is
    the item that decided when it began, as (schedule, item), if it is another rank's."""

    came: float
    began: float
    ended: float
    late: tuple[int, int] | None = None


class SimulatedRun(NamedTuple):
    """A simulated run: the spans of all items by schedule, and the pieces of compute items."""

    spans: list[list[ItemTimes]]
    pieces: list[dict[int, list[EvenProgress]]]
    link_bytes: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return max((s.ended for some in self.spans for s in some), default=0.0)


def simulate_events(folded: FoldedRanks, network: Network, slowdown: float = 1.0) -> SimulatedRun:
    """Run the schedules. `slowdown` is the factor on the time of compute while communication of its rank is under way.

    Raises ExecutionError if ranks wait for each other for ever.

    >>> from fluidx.simulator.folding import unfolded
    >>> from fluidx.simulator.network import shared_link
    >>> def rank(work):
    ...     return [Compute((0,), (work,)), Meeting((1,), "dp", (0, 1), 0.5), Compute((2,), (1.0,))]
    >>> simulate_events(unfolded([rank(1.0), rank(3.0)]), shared_link(0.0, 1.0)).seconds
    4.5
    """
    return _Simulation(folded, network, slowdown).run()


class _RankState:
    """The state of a rank."""

    __slots__ = ("pc", "queue", "busy", "blocked", "active", "compute", "version", "host")

    def __init__(self) -> None:
        self.pc = 0  # the item that the compute stream is at
        self.queue: deque[int] = deque()  # items of the communication stream that did not start yet
        self.busy: int | None = None
        self.blocked = False  # the compute stream waits for an item
        self.active = 0  # transfers and meetings under way on the communication stream
        self.compute: list[float] | None = None  # of the compute item that runs: last time, work done, rate
        self.version = 0
        self.host = 0.0  # when the host has issued all items up to `pc`


class _Transfer:
    __slots__ = ("nbytes", "sender", "receiver", "path", "sent_at", "asked_at", "left", "rate", "started", "slows")

    def __init__(self, nbytes: int, path: Any):
        self.nbytes, self.path = nbytes, path
        self.sender: tuple[int, int] | None = None
        self.receiver: tuple[int, int] | None = None
        self.sent_at = self.asked_at = -1.0
        self.left, self.rate, self.started = float(nbytes), 0.0, False
        self.slows: list[int] = []  # the schedules whose communication is under way with it


class _Simulation:
    def __init__(self, folded: FoldedRanks, network: Network, slowdown: float):
        self.folded, self.network, self.slowdown = folded, network, slowdown
        self.schedules: Sequence[RankSchedule] = folded.schedules
        self.state = [_RankState() for _ in self.schedules]
        self.came = [[0.0] * len(s.items) for s in self.schedules]
        self.spans: list[list[ItemTimes | None]] = [[None] * len(s.items) for s in self.schedules]
        self.pieces: list[dict[int, list[EvenProgress]]] = [{} for _ in self.schedules]
        self.meetings: dict[tuple, list[tuple[int, int]]] = {}
        self.open_ports: dict[tuple[int, int], int] = {}
        self.transfers: dict[tuple, _Transfer] = {}
        self.flows: dict[tuple, Flow] = {}
        self.link_bytes: dict[str, float] = {}
        self.carries: dict[tuple[int, int, bool], dict[str, int]] = {}  # by exchange and direction
        self.flow_time, self.flow_version = 0.0, 0
        self.heap: list[tuple[float, int, Callable[[float], None]]] = []
        self.count = 0

    # -- events -----------------------------------------------------------------------------------------------------------------

    def at(self, time: float, act: Callable[[float], None]) -> None:
        self.count += 1
        heapq.heappush(self.heap, (time, self.count, act))

    def run(self) -> SimulatedRun:
        for k in range(len(self.schedules)):
            self.at(0.0, lambda now, k=k: self.advance(k, now))  # type: ignore[misc]
        while self.heap:
            now, _, act = heapq.heappop(self.heap)
            act(now)
        self.check_ended()
        return SimulatedRun(self.spans, self.pieces, self.link_bytes)  # type: ignore[arg-type]

    def check_ended(self) -> None:
        stuck = [k for k, spans in enumerate(self.spans) if None in spans]
        if stuck:
            k = stuck[0]
            item = self.spans[k].index(None)
            rank = self.schedules[k].rank
            raise ExecutionError(
                f"the ranks wait for each other: rank {rank} never ends item {item} of its schedule "
                f"({type(self.schedules[k].items[item]).__name__.lower()}), and {len(stuck)} of {len(self.schedules)} schedules are stuck; "
                "fluidx verify shows why such programs cannot run"
            )

    # -- the compute stream ----------------------------------------------------------------------------------------------------

    def advance(self, k: int, now: float) -> None:
        """Let the compute stream go on until it computes or waits."""
        state, items = self.state[k], self.schedules[k].items
        while state.pc < len(items):
            i, item = state.pc, items[state.pc]
            self.came[k][i] = now
            state.host += item.dispatch
            if isinstance(item, Wait):
                if (span := self.spans[k][item.item]) is None:
                    state.blocked = True
                    return
                self.spans[k][i] = ItemTimes(now, max(now, span.ended), now)
            elif item.beside:
                state.queue.append(i)
                self.next_beside(k, now)
            elif isinstance(item, Compute):
                self.start_compute(k, i, now)
                return
            else:
                state.blocked = True
                self.begin(k, i, now)
                return
            state.pc += 1

    def start_compute(self, k: int, i: int, now: float) -> None:
        state = self.state[k]
        state.compute = [now, 0.0, self.rate(k)]
        self.pieces[k][i] = []
        self.schedule_end(k, i)

    def rate(self, k: int) -> float:
        return 1.0 / (self.schedules[k].slow * (self.slowdown if self.state[k].active else 1.0))

    def schedule_end(self, k: int, i: int) -> None:
        state, item = self.state[k], self.schedules[k].items[i]
        assert isinstance(item, Compute) and state.compute is not None
        state.version += 1
        last, done, rate = state.compute
        end = max(last + max(0.0, item.total - done) / rate, state.host)
        self.at(end, lambda now, v=state.version: self.end_compute(k, i, v, now))  # type: ignore[misc]

    def progress(self, k: int, now: float) -> None:
        """Book the progress of the running compute item up to now."""
        state = self.state[k]
        if state.compute is None:
            return
        last, done, rate = state.compute
        item = self.schedules[k].items[state.pc]
        then = min(done + (now - last) * rate, item.total) if isinstance(item, Compute) and item.dispatch else done + (now - last) * rate
        if now > last:
            self.pieces[k][state.pc].append(EvenProgress(last, now, done, then))
        state.compute = [now, then, self.rate(k)]

    def end_compute(self, k: int, i: int, version: int, now: float) -> None:
        state = self.state[k]
        if version != state.version:
            return
        self.progress(k, now)
        state.compute = None
        self.spans[k][i] = ItemTimes(self.came[k][i], self.came[k][i], now)
        state.pc += 1
        self.advance(k, now)

    def toggle(self, k: int, change: int, now: float) -> None:
        """Communication of a rank begins or ends: its compute becomes slower or faster."""
        state = self.state[k]
        before = state.active
        self.progress(k, now)
        state.active += change
        if state.compute is not None and (before == 0) != (state.active == 0):
            state.compute[2] = self.rate(k)
            self.schedule_end(k, state.pc)

    # -- the communication stream ----------------------------------------------------------------------------------------------

    def next_beside(self, k: int, now: float) -> None:
        state = self.state[k]
        if state.busy is None and state.queue:
            state.busy = state.queue.popleft()
            self.begin(k, state.busy, now)

    def begin(self, k: int, i: int, now: float) -> None:
        """An item that communicates, or runs on the communication stream, is next on its stream."""
        item = self.schedules[k].items[i]
        self.came[k][i] = now
        if isinstance(item, Meeting):
            self.meet(k, i, item, now)
        elif isinstance(item, Exchange):
            self.exchange(k, i, item, now)
        else:
            assert isinstance(item, Compute)
            seconds = item.total * self.schedules[k].slow
            self.pieces[k][i] = [EvenProgress(now, now + seconds, 0.0, item.total)]
            self.at(now + seconds, lambda then: self.end(k, i, now, None, then))

    def end(self, k: int, i: int, began: float, late: tuple[int, int] | None, now: float) -> None:
        self.spans[k][i] = ItemTimes(self.came[k][i], began, now, late)
        self.at(now, lambda then: self.go_on(k, i, then))  # as an event, so that a row of short items is no recursion

    def go_on(self, k: int, i: int, now: float) -> None:
        """What waited for an item goes on."""
        state, items = self.state[k], self.schedules[k].items
        if items[i].beside:
            state.busy = None
            self.next_beside(k, now)
            waiting = items[state.pc] if state.blocked else None
            if not isinstance(waiting, Wait) or waiting.item != i:
                return
            self.spans[k][state.pc] = ItemTimes(self.came[k][state.pc], now, now)
        state.blocked = False
        state.pc += 1
        self.advance(k, now)

    # -- meetings ---------------------------------------------------------------------------------------------------------------

    def meet(self, k: int, i: int, item: Meeting, now: float) -> None:
        key, classes = self.folded.meeting(k, i)
        here = self.meetings.setdefault(key, [])
        here.append((k, i))
        if len(here) < classes:
            return
        del self.meetings[key]
        seconds = max(self.schedules[a].items[b].seconds for a, b in here)  # type: ignore[attr-defined]
        for a, _ in here:
            self.toggle(a, 1, now)
        self.at(now + seconds, lambda then: self.end_meeting(here, (k, i), now, then))

    def end_meeting(self, here: list[tuple[int, int]], last: tuple[int, int], began: float, now: float) -> None:
        for k, i in here:
            self.toggle(k, -1, now)
            self.end(k, i, began, None if (k, i) == last else last, now)

    # -- messages ---------------------------------------------------------------------------------------------------------------

    def exchange(self, k: int, i: int, item: Exchange, now: float) -> None:
        self.open_ports[k, i] = len(item.sends) + len(item.receives)
        for port, (peer, nbytes) in enumerate(item.sends):
            key = self.folded.sent(k, i, port)
            t = self.transfer(key, nbytes, self.schedules[k].rank, peer)
            t.sender, t.sent_at = (k, i), now
            if nbytes <= t.path.eager:
                self.close_port(k, i, None, now, now)
            self.start(key, t, now)
        for port, (peer, nbytes) in enumerate(item.receives):
            key = self.folded.received(k, i, port)
            t = self.transfer(key, nbytes, peer, self.schedules[k].rank)
            t.receiver, t.asked_at = (k, i), now
            if t.left < 0:  # an eager message that has arrived
                self.close_port(k, i, None, now, now)
            elif t.started:  # an eager message that is on its way
                t.slows.append(k)
                self.toggle(k, 1, now)
            else:
                self.start(key, t, now)
        if not item.sends and not item.receives:
            self.end(k, i, now, None, now)

    def transfer(self, key: tuple, nbytes: int, source: int, target: int) -> _Transfer:
        if key not in self.transfers:
            self.transfers[key] = _Transfer(nbytes, self.network.path(source, target))
        return self.transfers[key]

    def start(self, key: tuple, t: _Transfer, now: float) -> None:
        eager = t.nbytes <= t.path.eager
        if t.started or t.sender is None or (not eager and t.receiver is None):
            return
        t.started = True
        # the sender of an eager message goes on; its receiver may not have come yet
        t.slows = [end[0] for end in (None if eager else t.sender, t.receiver) if end is not None]
        for k in t.slows:
            self.toggle(k, 1, now)
        self.at(now + t.path.delay(t.nbytes), lambda then: self.flow(key, t, then))

    def flow(self, key: tuple, t: _Transfer, now: float) -> None:
        uses = self.folded.uses(key) if self.folded.folds else dict.fromkeys(t.path.links, 1)
        for link, n in uses.items():
            self.link_bytes[link] = self.link_bytes.get(link, 0.0) + n * t.nbytes
        if not t.nbytes:
            self.arrived(key, t, now)
            return
        self.book(now)
        self.flows[key] = Flow(uses, self.most(key, t))
        self.reshare_once(now)

    def most(self, key: tuple, t: _Transfer) -> float:
        """The rate that a message cannot exceed: its part of what each link carries for the exchanges at its two ends."""
        found = inf
        for sent, (k, i, port) in ((True, key), (False, self.folded.receiver(key))):
            item, rank = self.schedules[k].items[i], self.schedules[k].rank
            assert isinstance(item, Exchange)
            ports = item.sends if sent else item.receives
            if len(ports) > 1:  # the links of the schedule's own rank: those of the message are of another one of its class
                carried, peer = self.carried(k, i, item, sent), ports[port][0]
                links = (self.network.path(rank, peer) if sent else self.network.path(peer, rank)).links
                found = min([found, *(self.network.capacity[link] * t.nbytes / carried[link] for link in links)])
        return found

    def carried(self, k: int, i: int, item: Exchange, sent: bool) -> dict[str, int]:
        """The bytes that an exchange sends or receives, by link."""
        if (k, i, sent) not in self.carries:
            found = self.carries[k, i, sent] = dict[str, int]()
            rank, path = self.schedules[k].rank, self.network.path
            for peer, nbytes in item.sends if sent else item.receives:
                for link in (path(rank, peer) if sent else path(peer, rank)).links:
                    found[link] = found.get(link, 0) + nbytes
        return self.carries[k, i, sent]

    def book(self, now: float) -> None:
        if now == self.flow_time:
            return
        for key in self.flows:
            t = self.transfers[key]
            t.left -= t.rate * (now - self.flow_time)
        self.flow_time = now

    def reshare_once(self, now: float) -> None:
        """Reshare when all that is known to begin and end now has done so: the events of ranks that do the same come at the same time."""
        self.flow_version += 1
        self.at(now, lambda then, v=self.flow_version: self.reshare(v, then))  # type: ignore[misc]

    def reshare(self, version: int, now: float) -> None:
        """Give every flow its fair rate, and wait for the first that ends."""
        if version != self.flow_version or not self.flows:
            return
        first = None
        for key, rate in fair_rates(self.flows, self.network.capacity).items():
            t = self.transfers[key]
            t.rate = rate
            ends = now + max(0.0, t.left) / rate
            first = ends if first is None or ends < first else first
        assert first is not None
        self.at(first, lambda then, v=self.flow_version: self.flows_end(v, then))  # type: ignore[misc]

    def flows_end(self, version: int, now: float) -> None:
        if version != self.flow_version:
            return
        self.book(now)
        # what is left when the clock cannot tell its end from now has arrived
        ended = [key for key in self.flows if now + self.transfers[key].left / self.transfers[key].rate <= now * (1 + 1e-15)]
        for key in ended:
            del self.flows[key]
        self.reshare_once(now)
        for key in ended:
            self.arrived(key, self.transfers[key], now)

    def arrived(self, key: tuple, t: _Transfer, now: float) -> None:
        t.left = -1.0
        eager = t.nbytes <= t.path.eager
        for k in t.slows:
            self.toggle(k, -1, now)
        sender, receiver = t.sender, t.receiver
        assert sender is not None
        if not eager:
            assert receiver is not None
            self.close_port(*sender, receiver if t.asked_at > t.sent_at else None, max(t.sent_at, t.asked_at), now)
        if receiver is not None:
            self.close_port(*receiver, sender if t.sent_at > t.asked_at else None, max(t.sent_at, t.asked_at), now)

    def close_port(self, k: int, i: int, late: tuple[int, int] | None, began: float, now: float) -> None:
        self.open_ports[k, i] -= 1
        if not self.open_ports[k, i]:
            self.end(k, i, began, late, now)
