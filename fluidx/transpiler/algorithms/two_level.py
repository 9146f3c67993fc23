"""Two-level reduce_scatter and all_gather over all ranks: first inside the hosts, then between them, so that few bytes cross the
network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .schedule import Algorithm, PatternRound, Round, Rounds, Transfer, times_sent


class TwoLevel(Algorithm):
    """Rank l of host h is rank h*g + l, of g on each host.

    Sums are made first inside the hosts, where rank l adds up block l of every host, and then on the rails, among the ranks with the same
    l; results take the same way back. So each rank sends 1/g of the blocks over the network.
    """

    def __init__(self, inside: Algorithm, between: Algorithm, hosts: int):
        self.inside, self.between, self.hosts = inside, between, hosts
        self.name = f"{inside.name}/{between.name}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TwoLevel) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.inside, self.between, self.hosts))

    def reduce(self, n: int) -> Rounds:
        g = n // self.hosts
        return self._inside(self.inside.reduce(g), g) + self._between(self.between.reduce(self.hosts), g)

    def spread(self, n: int) -> Rounds:
        g = n // self.hosts
        return self._between(self.between.spread(self.hosts), g) + self._inside(self.inside.spread(g), g)

    def _inside(self, rounds: Rounds, g: int) -> Rounds:
        return tuple(InsideHosts(r, self.hosts, g) for r in rounds)

    def _between(self, rounds: Rounds, g: int) -> Rounds:
        return tuple(BetweenHosts(r, self.hosts, g) for r in rounds)


class Level(PatternRound):
    """A round inside hosts, or between them, on ranks of `hosts` hosts with g devices each."""

    def __init__(self, first: Round, hosts: int, g: int):
        self.first, self.hosts, self.g = first, hosts, g


class InsideHosts(Level):
    """The round that each host makes from one among its g devices: block l of `first` is block l of each host.

    >>> [(t.source, t.target, t.start) for t in InsideHosts([Transfer(1, 0, 0, 1, True)], 2, 2)]
    [(1, 0, 0), (1, 0, 2), (3, 2, 0), (3, 2, 2)]
    """

    def __len__(self) -> int:
        return self.hosts * len(self.first) * self.hosts

    def __iter__(self) -> Iterator[Transfer]:
        return (self._on(h, t, b) for h in range(self.hosts) for t in self.first for b in range(self.hosts))

    def _on(self, h: int, t: Transfer, b: int) -> Transfer:
        g = self.g
        return Transfer(h * g + t.source, h * g + t.target, b * g + t.start, b * g + t.stop, t.add)

    def of_rank(self, rank: int) -> list[tuple[int, Transfer]]:
        h, me = divmod(rank, self.g)
        mine = [(k, t) for k, t in enumerate(self.first, h * len(self.first)) if me in (t.source, t.target)]
        return [(k * self.hosts + b, self._on(h, t, b)) for k, t in mine for b in range(self.hosts)]

    def times_sent(self) -> Counter[tuple[int, int]]:
        g = self.g
        each = times_sent(self.first)
        return Counter({(b * g + x, b * g + y): self.hosts * k for (x, y), k in each.items() for b in range(self.hosts)})


class BetweenHosts(Level):
    """The round that the devices of one number make from one among the hosts: block h of `first` is block h*g + l for devices l.

    >>> [(t.source, t.target, t.start) for t in BetweenHosts([Transfer(1, 0, 0, 1, True)], 2, 2)]
    [(2, 0, 0), (3, 1, 1)]
    """

    def __len__(self) -> int:
        return self.g * sum(t.stop - t.start for t in self.first)

    def __iter__(self) -> Iterator[Transfer]:
        return (self._on(k, t, b) for k in range(self.g) for t in self.first for b in range(t.start, t.stop))

    def _on(self, k: int, t: Transfer, b: int) -> Transfer:
        g = self.g
        return Transfer(t.source * g + k, t.target * g + k, b * g + k, b * g + k + 1, t.add)

    def of_rank(self, rank: int) -> list[tuple[int, Transfer]]:
        me, k = divmod(rank, self.g)
        each = [(t, b) for t in self.first for b in range(t.start, t.stop)]
        return [(place, self._on(k, t, b)) for place, (t, b) in enumerate(each, k * len(each)) if me in (t.source, t.target)]

    def times_sent(self) -> Counter[tuple[int, int]]:
        each: Counter[int] = Counter()
        for (start, stop), times in times_sent(self.first).items():
            each.update(dict.fromkeys(range(start, stop), times))
        return Counter({(b * self.g + k, b * self.g + k + 1): times for b, times in each.items() for k in range(self.g)})
