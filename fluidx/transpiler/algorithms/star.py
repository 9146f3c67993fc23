"""The star algorithms: all ranks send to the owner, and the owner sends to all. Two rounds for any number of ranks."""

from __future__ import annotations

from .schedule import Algorithm, Round, Rounds, Shifted, Transfer


class Star(Algorithm):
    """An all_reduce collects the sum on rank 0, which receives n-1 values and sends n-1."""

    name = "star"
    gathers = True

    def reduce(self, n: int) -> Rounds:
        return (_to_owners(n),) if n > 1 else ()

    def exchange(self, n: int) -> Rounds:
        return (tuple(t for r in super().exchange(n) for t in r),) if n > 1 else ()


class Direct(Star):
    """One star for each block, all at the same time: each rank adds up its block of an all_reduce, as the servers of Herring and Fairring
    do."""

    name = "direct"
    gathers = False


def _to_owners(n: int) -> Round:
    # every rank begins with its right neighbour, so that not all send to one rank first
    return Shifted(n, *(Transfer(0, d, d, d + 1, True) for d in range(1, n)))
