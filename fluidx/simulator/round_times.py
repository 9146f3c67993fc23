"""The seconds of a collective that ranks carry out by rounds of messages, in closed form: round after round, on the links of a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

from ..ir.parts import bounds
from ..ops.comm.collective_base import owned_by
from ..transpiler.algorithms import algorithm, schedule
from ..transpiler.algorithms.schedule import Algorithm, Transfer
from .network import MessagePath, Network

_UNITS = 1 << 20
_MOST_TRANSFERS = 500_000  # of a collective: with more, an algorithm has no time here


class Share(NamedTuple):
    """The seconds of a collective: `fixed`, and `by_byte` for each byte of the whole value; `adds`: of these bytes, the share that the
    busiest rank adds, and `rounds` in which it does."""

    fixed: float
    by_byte: float
    adds: float
    rounds: int


class RoundTimes:
    """The times of algorithms on a network. In a round, all ranks of all sets of a group send; the round takes as long as its slowest
    message, and as the bytes on its busiest link. `add` gives the seconds in which a rank adds a number of bytes.

    >>> from fluidx.simulator.network import PortFigures, hosts_with_ports
    >>> ports = PortFigures(1e-6, 1e9)
    >>> times = RoundTimes(hosts_with_ports([0] * 4, ports, ports), lambda nbytes: 0.0)
    >>> round(times.seconds("ring", "all_reduce", [(0, 1, 2, 3)], 4e6) * 1e6)  # 6 rounds of a message of 1 MB
    6006
    """

    def __init__(self, network: Network, add: Callable[[float], float]):
        self.network, self.add = network, add
        self._paths: dict[tuple[int, int], MessagePath] = {}
        self._known: dict[tuple, Share] = {}
        self._numbers: dict[tuple[tuple[int, ...], ...], int] = {}  # of sets
        self._sets: dict[int, tuple[Sequence[Sequence[int]], int]] = {}  # the same by identity; they are kept, so that it stays theirs

    def seconds(self, name: str, method: str, sets: Sequence[Sequence[int]], nbytes: float, hosts: int = 1, rooted: bool = False) -> float:
        """The time of a collective with the algorithm `name` that all sets of a group carry out at once. `nbytes` are those of the whole
        value; `hosts`: on how many hosts a set is, for an algorithm of two levels; `rooted`: one rank owns the whole value, or all parts
        of an exchange. Infinite for an algorithm of too many messages."""
        of, number = algorithm(name, hosts), self._number(sets)
        key = of, method, number, rooted
        if key not in self._known:
            self._known[key] = self._share(schedule(name, method, len(sets[0]), hosts), of, method, sets, rooted)
        found = self._known[key]
        adds = found.rounds * self.add(found.adds * nbytes / found.rounds) if found.rounds else 0.0
        return found.fixed + found.by_byte * nbytes + adds

    def _number(self, sets: Sequence[Sequence[int]]) -> int:
        """A number that equal sets have in common."""
        if id(sets) not in self._sets:
            self._sets[id(sets)] = sets, self._numbers.setdefault(tuple(map(tuple, sets)), len(self._numbers))
        return self._sets[id(sets)][1]

    def _share(self, rounds: Sequence[Sequence[Transfer]], of: Algorithm, method: str, sets: Any, rooted: bool) -> Share:
        n = len(sets[0])
        if sum(map(len, rounds)) * len(sets) > _MOST_TRANSFERS:
            return Share(inf, 0.0, 0.0, 0)
        of_root = rooted and method in ("reduce", "spread")
        marks = [*(of.cut(n, _UNITS) if method == "all_reduce" else owned_by(0, n, _UNITS) if of_root else
                   bounds(_UNITS, n * n if method == "exchange" else n))]  # fmt: skip
        if rooted and method == "exchange":  # only the root's blocks have elements
            marks = [*bounds(_UNITS, n), *[_UNITS] * (n * n - n)]
        fixed = by_byte = adds = 0.0
        adding = 0
        for r in rounds:
            latency, busiest, most = self._round([(t, size) for t in r if (size := marks[t.stop] - marks[t.start])], sets)
            fixed, by_byte, adds, adding = fixed + latency, by_byte + busiest / _UNITS, adds + most / _UNITS, adding + (most > 0)
        return Share(fixed, by_byte, adds, adding)

    def _round(self, transfers: Sequence[tuple[Transfer, int]], sets: Sequence[Sequence[int]]) -> tuple[float, float, int]:
        """The longest latency of a round, the seconds of its busiest link, and the most that a rank adds, for these sizes."""
        latency, load, added = 0.0, dict[str, int](), dict[int, int]()
        for t, size in transfers:
            if t.add:
                added[t.target] = added.get(t.target, 0) + size
            for members in sets:
                path = self._path(members[t.source], members[t.target])
                latency = max(latency, path.latency)
                for link in path.links:
                    load[link] = load.get(link, 0) + size
        capacity = self.network.capacity
        return latency, max((size / capacity[link] for link, size in load.items()), default=0.0), max(added.values(), default=0)

    def _path(self, source: int, target: int) -> MessagePath:
        if (source, target) not in self._paths:
            self._paths[source, target] = self.network.path(source, target)
        return self._paths[source, target]
