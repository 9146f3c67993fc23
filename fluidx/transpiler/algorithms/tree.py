"""Binomial trees: half of the ranks that are left send in each round."""

from __future__ import annotations

from .schedule import Algorithm, Rounds, Transfer


class Tree(Algorithm):
    """Rank k's tree: in the round of distance d, the ranks that lie an odd number of d behind it send to those d before them."""

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
