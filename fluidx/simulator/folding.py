"""Classes of ranks that do the same at the same times, of which one is simulated.

Two ranks are in one class if they have equal schedules, and if the k-th thing that each communicates goes to ranks of the same classes in
the same way. The classes are refined until this holds, as the states of an automaton are when it is made minimal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..ir.errors import ExecutionError
from .network import Network
from .schedule import Exchange, Item, Meeting, RankSchedule

Port = tuple[int, int, int]  # a schedule or rank, the number of an item, and of a message in it
Messages = tuple[tuple[int, int], ...]  # (the other rank, bytes)


@dataclass(eq=False)
class RankItems:
    """The items of a rank. Ranks with equal schedules share `items`, which name the communication of one of them; `sets` has the rank's own
    set of each group, and `messages` its own sends and receives by item."""

    items: Sequence[Item]
    sets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    messages: Mapping[int, tuple[Messages, Messages]] = field(default_factory=dict)

    def own(self) -> list[Item]:
        """The items with the rank's own sets and messages."""
        found: list[Item] = []
        for k, item in enumerate(self.items):
            if isinstance(item, Meeting):
                item = replace(item, members=self.sets.get(item.group, item.members))
            elif isinstance(item, Exchange) and k in self.messages:
                item = replace(item, sends=self.messages[k][0], receives=self.messages[k][1])
            found.append(item)
        return found


class FoldedRanks:
    """The schedules of classes of ranks, and how their communication fits together."""

    def __init__(self, ranks: Sequence[RankItems], colors: Sequence[int], slow: Sequence[float], matches: Mapping[Port, Port],
                 network: Network | None):  # fmt: skip
        members: dict[int, list[int]] = defaultdict(list)
        for rank, color in enumerate(colors):
            members[color].append(rank)
        classes = sorted(members.values())
        self.class_of = [0] * len(ranks)
        for k, some in enumerate(classes):
            for rank in some:
                self.class_of[rank] = k
        self.schedules = [RankSchedule(ranks[some[0]].own(), tuple(some), slow[some[0]]) for some in classes]
        self.folds = len(classes) < len(ranks)
        self._ranks, self._matches, self._network = ranks, matches, network
        self._uses: dict[Port, dict[str, int]] = {}
        self._sets: dict[tuple[int, ...], tuple] = {}
        self._meetings = [_numbered(s.items) for s in self.schedules]

    def meeting(self, k: int, i: int) -> tuple[tuple, int]:
        """The key of a meeting, equal for all schedules that take part in it, and the number of these schedules."""
        group, number, members = self._meetings[k][i]
        if members not in self._sets:
            self._sets[members] = tuple(sorted(Counter(self.class_of[m] for m in members).items()))
        classes = self._sets[members]
        return (group, number, classes), len(classes)

    def sent(self, k: int, i: int, port: int) -> Port:
        """The key of a message, for its sender."""
        return k, i, port

    def received(self, k: int, i: int, port: int) -> Port:
        """The key of a message, for its receiver."""
        rank, item, sent = self._matches[self.schedules[k].rank, i, port]
        return self.class_of[rank], item, sent

    def receiver(self, key: Port) -> Port:
        """The schedule and the item that receive a message, and its number among those that the item receives."""
        k, i, port = key
        rank, item, received = self._matches[self.schedules[k].rank, i, -1 - port]
        return self.class_of[rank], item, received

    def uses(self, key: Port) -> Mapping[str, int]:
        """How many messages like this one, of all ranks of the class, pass each link."""
        if key not in self._uses:
            k, i, port = key
            assert self._network is not None
            count: Counter[str] = Counter()
            for rank in self.schedules[k].ranks:
                peer = self._ranks[rank].messages[i][0][port][0]
                count.update(self._network.path(rank, peer).links)
            self._uses[key] = dict(count)
        return self._uses[key]


def _numbered(items: Sequence[Item]) -> dict[int, tuple[str, int, tuple[int, ...]]]:
    """{number of an item: (group, number of the meeting among those of the set, members)}."""
    seen: Counter[tuple] = Counter()
    found = {}
    for i, item in enumerate(items):
        if isinstance(item, Meeting):
            found[i] = item.group, seen[item.group, item.members], item.members
            seen[item.group, item.members] += 1
    return found


def fold(ranks: Sequence[RankItems], slow: Mapping[int, float], host_of: Sequence[int], network: Network) -> FoldedRanks:
    """Put ranks that do the same at the same times into classes. `slow` has factors on the time of compute.

    >>> from fluidx.simulator.network import shared_link
    >>> from fluidx.simulator.schedule import Compute
    >>> items = [Compute((0,), (1.0,)), Meeting((1,), "dp", (0, 1, 2), 0.5)]
    >>> ranks = [RankItems(items, {"dp": (0, 1, 2)}) for _ in range(3)]
    >>> [s.ranks for s in fold(ranks, {1: 2.0}, [0, 0, 0], shared_link(0, 1)).schedules]
    [(0, 2), (1,)]
    """
    factors = [slow.get(r, 1.0) for r in range(len(ranks))]
    matches = matched(ranks)
    colors = _renumbered([(id(r.items), f) for r, f in zip(ranks, factors, strict=True)])
    while True:
        sets: dict[int, tuple] = {}
        seen = []
        for rank, r in enumerate(ranks):
            groups = tuple([(g, _set_signature(members, colors, host_of, sets)) for g, members in r.sets.items()])
            seen.append((colors[rank], groups, _message_signature(rank, r, colors, host_of, matches)))
        finer = _renumbered(seen)
        if len(set(finer)) == len(set(colors)):
            return FoldedRanks(ranks, colors, factors, matches, network)
        colors = finer


def unfolded(ranks: Sequence[Sequence[Item]], slow: Mapping[int, float] | None = None) -> FoldedRanks:
    """Every rank by itself."""
    made = [RankItems(items, {}, {k: (i.sends, i.receives) for k, i in enumerate(items) if isinstance(i, Exchange)}) for items in ranks]
    return FoldedRanks(made, range(len(ranks)), [(slow or {}).get(r, 1.0) for r in range(len(ranks))], matched(made), None)


def matched(ranks: Sequence[RankItems]) -> dict[Port, Port]:
    """{a port of a message: the port at its other end}. The k-th message from a rank to another is the k-th that the other receives."""
    sends: dict[tuple[int, int], list[Port]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Port]] = defaultdict(list)
    for rank, r in enumerate(ranks):
        for i, (out, into) in sorted(r.messages.items()):
            for port, (peer, _) in enumerate(out):
                sends[rank, peer].append((rank, i, port))
            for port, (peer, _) in enumerate(into):
                receives[peer, rank].append((rank, i, port))
    found: dict[Port, Port] = {}
    for pair in sends.keys() | receives.keys():
        a, b = sends[pair], receives[pair]
        if len(a) != len(b):
            raise ExecutionError(f"rank {pair[0]} sends rank {pair[1]} {len(a)} messages, which receives {len(b)}; fluidx verify says more")
        found.update({(*one[:2], one[2]): other for one, other in zip(b, a, strict=True)})
        found.update({(one[0], one[1], -1 - one[2]): other for one, other in zip(a, b, strict=True)})
    return found


def _renumbered(keys: Sequence[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _set_signature(members: tuple[int, ...], colors: Sequence[int], host_of: Sequence[int], known: dict[int, tuple]) -> tuple:
    """The classes of the members of a set, and how many of them are on each host. `known` has them by the identity of the set: to hash one
    of many ranks takes as long as to look at all of them."""
    if id(members) not in known:
        hosts = Counter(host_of[m] for m in members)
        known[id(members)] = tuple(sorted(Counter(colors[m] for m in members).items())), tuple(sorted(hosts.values()))
    return known[id(members)]


def _message_signature(rank: int, r: RankItems, colors: Sequence[int], host_of: Sequence[int], matches: Mapping[Port, Port]) -> tuple:
    """For each message of a rank: the class of the other rank, where in its schedule the message is, and whether it leaves the host."""
    found: list[tuple] = []
    for i, (out, into) in r.messages.items():
        for port, (peer, nbytes) in enumerate(out):
            found.append((nbytes, colors[peer], matches[rank, i, -1 - port][1:], host_of[peer] == host_of[rank]))
        for port, (peer, nbytes) in enumerate(into):
            found.append((nbytes, colors[peer], matches[rank, i, port][1:], host_of[peer] == host_of[rank]))
    return tuple(found)
