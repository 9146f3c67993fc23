"""The base class Algorithm: rounds of transfers between the ranks of a group, on blocks of a flattened value.

A value has as many blocks as the group has ranks, of any sizes, and block k belongs to rank k. In a round all sends come first: a rank
sends the values from before the round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ...ir.errors import ProgramError
from ...ir.parts import bounds
from ...ops.comm.collective_base import owned_by


class Transfer(NamedTuple):
    """Blocks [start, stop) go from rank `source` to `target`, which adds them to its own blocks (`add`), or replaces its own blocks by
    them."""

    source: int
    target: int
    start: int
    stop: int
    add: bool


class PatternRound(Sequence[Transfer]):
    """A round that a smaller one gives by a rule: its transfers are made when they are asked for."""

    def __getitem__(self, k: Any) -> Any:
        return tuple(self)[k]

    def of_rank(self, rank: int) -> list[tuple[int, Transfer]]:
        """The transfers that a rank sends or receives, with their indices in the round."""
        raise NotImplementedError

    def times_sent(self) -> Counter[tuple[int, int]]:
        """How many transfers each range of blocks has."""
        raise NotImplementedError


class Shifted(PatternRound):
    """A round of n transfers for each of its first ones; the k-th is the first one with k added to its ranks and its block, modulo n. With
    many ranks, a schedule of such rounds stays small, and the transfers of one rank are found directly.

    >>> [(t.source, t.target, t.start) for t in Shifted(3, Transfer(1, 2, 0, 1, True))]
    [(1, 2, 0), (2, 0, 1), (0, 1, 2)]
    >>> [(t.source, t.target, t.start) for t in Shifted(2, Transfer(0, 1, 0, 1, True), Transfer(1, 0, 0, 1, True))]
    [(0, 1, 0), (1, 0, 1), (1, 0, 0), (0, 1, 1)]
    """

    def __init__(self, n: int, *firsts: Transfer):
        for first in firsts:
            if first.start + 1 != first.stop:
                raise ProgramError(f"a shifted transfer has one block, got blocks {first.start} to {first.stop} (exclusive)")
        self.firsts, self.n = firsts, n

    def __len__(self) -> int:
        return self.n * len(self.firsts)

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return tuple(self)[k]
        if not -len(self) <= k < len(self):
            raise IndexError(f"transfer {k} of a round of {len(self)}")
        which, by = divmod(k % len(self), self.n)
        return self._shifted(self.firsts[which], by)

    def _shifted(self, first: Transfer, by: int) -> Transfer:
        n, block = self.n, (first.start + by) % self.n
        return Transfer((first.source + by) % n, (first.target + by) % n, block, block + 1, first.add)

    def of_rank(self, rank: int) -> list[tuple[int, Transfer]]:
        found = []
        for k, first in enumerate(self.firsts):
            places = sorted({(rank - first.source) % self.n, (rank - first.target) % self.n})
            found += [(k * self.n + by, self._shifted(first, by)) for by in places]
        return found

    def times_sent(self) -> Counter[tuple[int, int]]:
        return Counter({(b, b + 1): len(self.firsts) for b in range(self.n)} if self.firsts else {})

    def back(self) -> Shifted:
        """The round that sends each block back."""
        return Shifted(self.n, *(Transfer(t.target, t.source, t.start, t.stop, False) for t in self.firsts))


Round = Sequence[Transfer]
Rounds = tuple[Round, ...]


def times_sent(r: Round) -> Counter[tuple[int, int]]:
    """How many transfers of a round each range of blocks has."""
    return r.times_sent() if isinstance(r, PatternRound) else Counter((t.start, t.stop) for t in r)


class Algorithm:
    """One way to carry out collectives. A subclass must define `reduce`; the other methods have defaults that follow from it."""

    name = ""
    gathers = False  # does an all_reduce collect the sum on rank 0? Else every rank is responsible for a block

    def reduce(self, n: int) -> Rounds:
        """From terms on all ranks to each block's sum on its rank: for reduce_scatter, and for reduce, where one rank owns all blocks."""
        raise Refused(f"{self.name} does not define reduce(n): the rounds that bring sums to the ranks of their blocks")

    def spread(self, n: int) -> Rounds:
        """From each block on its rank to all blocks on all ranks: for all_gather, and for broadcast, where one rank owns all blocks."""
        return backwards(self.reduce(n))

    def all_reduce(self, n: int) -> Rounds:
        """From terms on all ranks to sums on all ranks."""
        return self.reduce(n) + self.spread(n)

    def exchange(self, n: int) -> Rounds:
        """all_to_all: of n*n blocks, block k*n + j goes from rank k to rank j. By default, each rank sends in round h to the rank with
        number h higher."""
        return tuple(tuple(handed(k, (k + h) % n, n) for k in range(n)) for h in range(1, n))

    def adaptive(self, n: int) -> Rounds:
        """Rounds that leave the adaptive sum of every rank's value on all ranks; lowering/adasum.py says what a transfer means here."""
        raise Refused(f"{self.name} makes no adaptive sum; halving_doubling does")

    def cut(self, n: int, size: int) -> Sequence[int]:
        """The bounds of the blocks of an all_reduce of `size` elements."""
        return owned_by(0, n, size) if self.gathers else bounds(size, n)


def handed(k: int, to: int, n: int) -> Transfer:
    """The transfer of rank k's block for rank `to`, of n ranks."""
    return Transfer(k, to, k * n + to, k * n + to + 1, False)


class Refused(ProgramError):
    """Raised if an algorithm cannot carry out a collective."""


def backwards(rounds: Sequence[Round]) -> Rounds:
    """The rounds in reverse: the sum of a block goes from its owner back to all ranks."""
    return tuple(
        r.back() if isinstance(r, Shifted) else tuple(Transfer(t.target, t.source, t.start, t.stop, False) for t in r)
        for r in reversed(rounds)
    )


def runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Neighbouring block numbers as ranges.

    >>> runs([4, 0, 1, 5])
    [(0, 2), (4, 6)]
    """
    out: list[tuple[int, int]] = []
    for k in sorted(blocks):
        if out and out[-1][1] == k:
            out[-1] = out[-1][0], k + 1
        else:
            out.append((k, k + 1))
    return out
