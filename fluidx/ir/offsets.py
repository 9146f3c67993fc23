"""Offsets of flat ranges: where each rank's range of a value laid out flat begins and ends."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, compress, count
from operator import le, lt, sub
from typing import Any


class Offsets(Sequence[int]):
    """n + 1 rising numbers from 0: rank k of n has elements self[k] to self[k + 1].

    Kept are the ranks that have elements, and where they begin: among many ranks a parameter is on few. Numbers that are no offsets,
    because they fall or begin elsewhere, are kept as they are. Equal to the tuple of the numbers, but not found by it in a dict.

    >>> Offsets((0, 0, 3, 4)), Offsets((0, 0, 3, 4)).filled
    ((0, 0, 3, 4), (1, 2))
    """

    __slots__ = ("_hash", "_starts", "_wrong", "filled", "ranks")

    filled: tuple[int, ...]  # the ranks that have elements

    def __init__(self, values: Iterable[int] = ()):
        numbers = tuple(values)
        filled = tuple(compress(count(), map(lt, numbers, numbers[1:])))
        if numbers[:1] == (0,) and all(map(le, numbers, numbers[1:])):
            self._set(len(numbers) - 1, filled, (*[numbers[k] for k in filled], numbers[-1]))
        else:
            self._set(len(numbers) - 1, filled, (), numbers)

    def _set(self, ranks: int, filled: tuple[int, ...], starts: tuple[int, ...], wrong: tuple[int, ...] | None = None) -> None:
        self.ranks, self.filled, self._starts, self._wrong = ranks, filled, starts, wrong
        self._hash = hash((ranks, filled, starts, wrong))

    @property
    def rising(self) -> bool:
        """Are these offsets at all: do they begin at 0 and never fall?"""
        return self._wrong is None

    def __len__(self) -> int:
        return self.ranks + 1

    def __getitem__(self, k: Any) -> Any:
        if self._wrong is not None:
            return self._wrong[k]
        if isinstance(k, slice):
            return tuple(self)[k]
        if k < 0:
            k += self.ranks + 1
        if not 0 <= k <= self.ranks:
            raise IndexError(f"offset {k} of {self.ranks + 1}")
        return self._starts[bisect_left(self.filled, k)]

    def __iter__(self) -> Iterator[int]:
        if self._wrong is not None:
            return iter(self._wrong)
        out: list[int] = []
        for k, start in zip((*self.filled, self.ranks), self._starts, strict=True):
            out += [start] * (k + 1 - len(out))
        return iter(out)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, Offsets):
            mine = self._hash, self.ranks, self.filled, self._starts, self._wrong
            return mine == (other._hash, other.ranks, other.filled, other._starts, other._wrong)
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple:
        return Offsets, (tuple(self),)

    @classmethod
    def of(cls, values: Iterable[int]) -> Offsets:
        """The numbers as Offsets; the same object if they are Offsets."""
        return values if isinstance(values, Offsets) else cls(values)

    @classmethod
    def of_sizes(cls, sizes: Mapping[int, int], ranks: int) -> Offsets:
        """The offsets of `ranks` ranges from {rank: number of elements}; other ranks have none.

        >>> Offsets.of_sizes({2: 1, 1: 3}, 4)
        (0, 0, 3, 4, 4)
        """
        filled = tuple(sorted([k for k, size in sizes.items() if size]))
        return cls._known(ranks, filled, tuple(accumulate([sizes[k] for k in filled], initial=0)))

    @classmethod
    def joined(cls, parts: Iterable[Sequence[int]]) -> Offsets:
        """The offsets of the concatenation, on each rank, of its parts of several values.

        >>> Offsets.joined([Offsets((0, 2, 3)), Offsets((0, 0, 3))])
        (0, 2, 6)
        """
        sizes: dict[int, int] = {}
        ranks = 0
        for part in map(cls.of, parts):
            ranks = part.ranks
            for k, size in part.sizes():
                sizes[k] = sizes.get(k, 0) + size
        return cls.of_sizes(sizes, ranks)

    def sizes(self) -> Iterable[tuple[int, int]]:
        """The ranks that have elements, and how many each has."""
        if self._wrong is not None:
            return [(k, self._wrong[k + 1] - self._wrong[k]) for k in self.filled]
        return zip(self.filled, map(sub, self._starts[1:], self._starts), strict=True)

    @classmethod
    def within(cls, marks: Sequence[int], sizes: Iterable[int]) -> Iterator[Offsets]:
        """Splits the offsets of a concatenation of values with these sizes into the offsets of each value.

        >>> [*Offsets.within([0, 2, 5, 6], [3, 3])]
        [(0, 2, 3, 3), (0, 0, 2, 3)]
        """
        start, marks = 0, tuple(marks)
        for size in sizes:
            lo, hi = bisect_right(marks, start), bisect_left(marks, start + size)
            window = [0, *[m - start for m in marks[lo:hi]], size]
            filled = tuple([lo - 1 + k for k in compress(count(), map(lt, window, window[1:]))])
            starts = (*[window[k + 1 - lo] for k in filled], size)
            yield cls._known(len(marks) - 1, filled, starts)
            start += size

    @classmethod
    def _known(cls, ranks: int, filled: tuple[int, ...], starts: tuple[int, ...]) -> Offsets:
        made = cls.__new__(cls)
        made._set(ranks, filled, starts)
        return made
