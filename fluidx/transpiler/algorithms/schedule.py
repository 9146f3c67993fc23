"""What an algorithm is: rounds of transfers between the ranks of a group, on blocks of a value laid out flat.

A value has as many blocks as the group has ranks, of any sizes, and block k belongs to rank k. In a round all sends come first: what is
sent is what was there before the round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ...ir.errors import ProgramError
from ...ir.parts import bounds
from ...ops.comm.collective import owned_by


class Transfer(NamedTuple):
    """Blocks [start, stop) go from rank `source` to `target`, which adds them to what it has there (`add`), or keeps them instead."""

    source: int
    target: int
    start: int
    stop: int
    add: bool


class Shifted(Sequence[Transfer]):
    """The round of n transfers of which the k-th is the first with k added to its ranks and its block, modulo n.

    Among many ranks a schedule of such rounds is small, and the transfers of a rank are found without a look at those of the others.

    >>> [(t.source, t.target, t.start) for t in Shifted(Transfer(1, 2, 0, 1, True), 3)]
    [(1, 2, 0), (2, 0, 1), (0, 1, 2)]
    """

    def __init__(self, first: Transfer, n: int):
        if first.start + 1 != first.stop:
            raise ProgramError(f"a transfer that is shifted has one block, got blocks {first.start} to {first.stop} (exclusive)")
        self.first, self.n = first, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return tuple(self)[k]
        if not -self.n <= k < self.n:
            raise IndexError(f"transfer {k} of a round of {self.n}")
        (source, target, start, _, add), n = self.first, self.n
        block = (start + k) % n
        return Transfer((source + k) % n, (target + k) % n, block, block + 1, add)

    def of_rank(self, rank: int) -> list[tuple[int, Transfer]]:
        """The transfers that a rank sends or receives, with their places in the round."""
        places = sorted({(rank - self.first.source) % self.n, (rank - self.first.target) % self.n})
        return [(k, self[k]) for k in places]


Round = Sequence[Transfer]
Rounds = tuple[Round, ...]


class Algorithm:
    """One way to carry collectives out. A subclass says how sums come together; the rest follows unless it says otherwise."""

    name = ""
    gathers = False  # does an all_reduce meet on rank 0? Else every rank is responsible for a block

    def reduce(self, n: int) -> Rounds:
        """From terms on all ranks to each block's sum on its rank: reduce_scatter, and reduce where one rank has all."""
        raise Refused(f"{self.name} does not say how sums come to the ranks of their blocks")

    def spread(self, n: int) -> Rounds:
        """From each block on its rank to all blocks on all ranks: all_gather, and broadcast where one rank has all."""
        return backwards(self.reduce(n))

    def all_reduce(self, n: int) -> Rounds:
        """From terms on all ranks to sums on all ranks."""
        return self.reduce(n) + self.spread(n)

    def exchange(self, n: int) -> Rounds:
        """From what each rank has for each other to there; of n*n blocks, k*n + j is what rank k has for rank j. By default one after the
        other, in the h-th round to the rank that is h further on."""
        return tuple(tuple(handed(k, (k + h) % n, n) for k in range(n)) for h in range(1, n))

    def adaptive(self, n: int) -> Rounds:
        """Rounds that leave the adaptive sum of every rank's value on all ranks; lowering/adasum.py says what a transfer then means."""
        raise Refused(f"{self.name} makes no adaptive sum; halving_doubling does")

    def cut(self, n: int, size: int) -> Sequence[int]:
        """Where an all_reduce of `size` elements cuts them into blocks."""
        return owned_by(0, n, size) if self.gathers else bounds(size, n)


def handed(k: int, to: int, n: int) -> Transfer:
    """What rank k of n has for another one."""
    return Transfer(k, to, k * n + to, k * n + to + 1, False)


class Refused(ProgramError):
    """An algorithm cannot carry a collective out."""


def backwards(rounds: Sequence[Round]) -> Rounds:
    """The same ways back: what added up on an owner goes from there to all."""
    return tuple(tuple(Transfer(t.target, t.source, t.start, t.stop, False) for t in r) for r in reversed(rounds))


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
