"""Round the ring: every rank sends to its right neighbour and receives from its left one."""

from __future__ import annotations

from .schedule import Algorithm, Rounds, Shifted, Transfer


class Ring(Algorithm):
    """Block k starts at rank k+1 and ends, after n-1 hops with a term added at each, on rank k; its value takes n-1 hops on.

    Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009); steps 1 to 5 of the ring scheme in Paddle's NCCL design
    document.
    """

    name = "ring"

    def reduce(self, n: int) -> Rounds:
        return tuple(Shifted(Transfer(h, (h + 1) % n, 0, 1, True), n) for h in range(1, n))

    def spread(self, n: int) -> Rounds:
        return tuple(Shifted(Transfer(h, h + 1, 0, 1, False), n) for h in range(n - 1))
