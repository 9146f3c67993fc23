"""The ring algorithm: every rank sends to its right neighbour and receives from its left one."""

from __future__ import annotations

from .schedule import Algorithm, Rounds, Shifted, Transfer


class Ring(Algorithm):
    """The sum of block k starts at rank k+1 and ends after n-1 rounds, with a term added in each, on rank k; the result takes n-1 more
    rounds.

    Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009); steps 1 to 5 of the ring scheme in Paddle's NCCL design
    document.
    """

    name = "ring"

    def reduce(self, n: int) -> Rounds:
        return tuple(Shifted(n, Transfer(h, (h + 1) % n, 0, 1, True)) for h in range(1, n))

    def spread(self, n: int) -> Rounds:
        return tuple(Shifted(n, Transfer(h, h + 1, 0, 1, False)) for h in range(n - 1))
