"""The binomial tree algorithm: in each round, half of the remaining ranks send."""

from __future__ import annotations

from .schedule import Algorithm, Rounds, Transfer


class Tree(Algorithm):
    """Block k has a tree with root k: in the round of distance d, each rank at an odd multiple of d after the root sends to the rank d
    before it."""

    name = "tree"
    gathers = True

    def reduce(self, n: int) -> Rounds:
        out = []
        d = 1
        while d < n:
            out.append(tuple(
                Transfer((k + v) % n, (k + v - d) % n, k, k + 1, True) for k in range(n) for v in range(d, n, 2 * d)
            ))  # fmt: skip
            d *= 2
        return tuple(out)
