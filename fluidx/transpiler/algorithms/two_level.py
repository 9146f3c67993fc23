"""Two-level reduce_scatter and all_gather over all ranks: first inside the hosts, then between them, so that few bytes cross the
network."""

from __future__ import annotations

from .schedule import Algorithm, Rounds, Transfer


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
        """Block l of a host's schedule is block l of each host."""
        hosts = range(self.hosts)
        return tuple(
            tuple(
                Transfer(h * g + t.source, h * g + t.target, b * g + t.start, b * g + t.stop, t.add)
                for h in hosts
                for t in r
                for b in hosts
            )
            for r in rounds
        )

    def _between(self, rounds: Rounds, g: int) -> Rounds:
        """Block h of a rail's schedule is, on rail l, block h*g + l."""
        return tuple(
            tuple(
                Transfer(t.source * g + k, t.target * g + k, b * g + k, b * g + k + 1, t.add)
                for k in range(g)
                for t in r
                for b in range(t.start, t.stop)
            )
            for r in rounds
        )
