"""Algorithms with pairs of ranks at distances that double or halve. Of n ranks, the largest power of two is the core; each other rank is
folded onto a rank of the core.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005).
"""

from __future__ import annotations

from .schedule import Algorithm, Refused, Round, Rounds, Transfer, backwards, handed, runs


class HalvingDoubling(Algorithm):
    """A reduce_scatter halves the blocks still to be added up in each round; an all_gather does the rounds in reverse. If one rank owns all
    blocks, it is a binomial tree.
    """

    name = "halving_doubling"

    def reduce(self, n: int) -> Rounds:
        core, folded = _core(n)
        p, out = len(core), []
        mine = [[k, *folded.get(k, ())] for k in core]  # the blocks that a rank of the core is responsible for
        d = p // 2
        while d:
            pairs = []
            for i, k in enumerate(core):
                theirs = i ^ d
                first = theirs - theirs % d
                blocks = [b for j in range(first, first + d) for b in mine[j]]
                pairs += [Transfer(k, core[theirs], a, b, True) for a, b in runs(blocks)]
            out.append(tuple(pairs))
            d //= 2
        last: Round = tuple(Transfer(k, b, b, b + 1, False) for k, more in folded.items() for b in more)
        return (*_fold(folded, n), *out, last) if last else tuple(out)

    def spread(self, n: int) -> Rounds:
        core, folded = _core(n)
        rounds = backwards(self.reduce(n))
        if not folded:
            return rounds
        # a folded rank receives all blocks but its own
        last = tuple(
            Transfer(k, b, a, z, False) for k, more in folded.items() for b in more for a, z in runs(set(range(n)) - {b})
        )  # fmt: skip
        return (*rounds[:-1], last)

    def exchange(self, n: int) -> Rounds:
        """Pairs that differ in the same bits, where n is a power of two."""
        if n & (n - 1):
            return super().exchange(n)
        return tuple(tuple(handed(k, k ^ h, n) for k in range(n)) for h in range(1, n))

    def adaptive(self, n: int) -> Rounds:
        """Two neighbours each take one half of both values and combine them; then ranks at twice the distance do the same with the results,
        and so on. Block n has the dot products of the two values: in each step they are added up among all ranks that have parts of these
        values.
        """
        self._check_pairs(n)
        mine, meetings, out = [(0, n)] * n, [], []
        d = 1
        while d < n:
            halves = [((a, (a + b) // 2), ((a + b) // 2, b)) for a, b in mine]
            mine = [halves[k][k & d > 0] for k in range(n)]
            meetings.append(tuple(Transfer(k, k ^ d, *mine[k ^ d], True) for k in range(n)))
            out.append(meetings[-1])
            e = 1
            while e <= d:
                out.append(tuple(Transfer(k, k ^ e, n, n + 1, True) for k in range(n)))
                e *= 2
            d *= 2
        return (*out, *backwards(meetings))

    def _check_pairs(self, n: int) -> None:
        if n & (n - 1):
            raise Refused(f"{self.name} makes adaptive sums in pairs, so it needs a power of two of ranks, not {n}; leave algorithm empty")


class RecursiveDoubling(HalvingDoubling):
    """An all_reduce and an adaptive sum exchange full values, at twice the distance in each round; the rest is as in halving_doubling."""

    name = "recursive_doubling"
    gathers = True

    def all_reduce(self, n: int) -> Rounds:
        core, folded = _core(n)
        out, d = [], 1
        while d < len(core):
            out.append(tuple(Transfer(k, core[i ^ d], 0, n, True) for i, k in enumerate(core)))
            d *= 2
        fold = _fold(folded, n)
        return (*fold, *out, *backwards(fold))

    def adaptive(self, n: int) -> Rounds:
        self._check_pairs(n)
        return self.all_reduce(n)


def _core(n: int) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    """The ranks of the core, and for each rank with a neighbour folded onto it, this neighbour.

    >>> _core(6)
    ([0, 2, 4, 5], {0: (1,), 2: (3,)})
    """
    p = 1 << (n.bit_length() - 1)
    pairs = n - p
    return [*range(0, 2 * pairs, 2), *range(2 * pairs, n)], {k: (k + 1,) for k in range(0, 2 * pairs, 2)}


def _fold(folded: dict[int, tuple[int, ...]], n: int) -> Rounds:
    return (tuple(Transfer(b, k, 0, n, True) for k, more in folded.items() for b in more),) if folded else ()
