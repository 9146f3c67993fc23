"""Offsets of flat ranges: where each rank's range of a value laid out flat begins and ends."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress, count
from operator import le, lt


class Offsets(tuple[int, ...]):
    """n + 1 rising numbers from 0: rank k of n has elements self[k] to self[k + 1].

    A tuple that also knows the ranks that have elements. With many ranks a parameter has elements on few of them: sums, comparisons and
    the checks of a placement look at these only. The hash is computed once.

    >>> Offsets((0, 0, 3, 4)).filled
    (1, 2)
    """

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
        marks, total, filled = [0], 0, tuple(sorted([k for k, size in sizes.items() if size]))
        for k in filled:
            marks += [total] * (k + 1 - len(marks))
            total += sizes[k]
            marks.append(total)
        return cls._known((*marks, *[total] * (ranks + 1 - len(marks))), filled)

    @classmethod
    def joined(cls, parts: Iterable[Sequence[int]]) -> Offsets:
        """The offsets of the concatenation, on each rank, of its parts of several values.

        >>> Offsets.joined([Offsets((0, 2, 3)), Offsets((0, 0, 3))])
        (0, 2, 6)
        """
        sizes: dict[int, int] = {}
        ranks = 0
        for part in map(cls.of, parts):
            ranks = len(part) - 1
            for k in part.filled:
                sizes[k] = sizes.get(k, 0) + part[k + 1] - part[k]
        return cls.of_sizes(sizes, ranks)

    @classmethod
    def within(cls, marks: Sequence[int], sizes: Iterable[int]) -> Iterator[Offsets]:
        """Splits the offsets of a concatenation of values with these sizes into the offsets of each value.

        >>> [*Offsets.within([0, 2, 5, 6], [3, 3])]
        [(0, 2, 3, 3), (0, 0, 2, 3)]
        """
        start = 0
        for size in sizes:
            lo, hi = bisect_right(marks, start), bisect_left(marks, start + size)
            inner = [m - start for m in marks[lo:hi]]
            window = [0, *inner, size]
            filled = [lo - 1 + k for k in compress(count(), map(lt, window, window[1:]))]
            yield cls._known((0,) * lo + tuple(inner) + (size,) * (len(marks) - max(lo, hi)), tuple(filled))
            start += size

    @classmethod
    def _known(cls, marks: tuple[int, ...], filled: tuple[int, ...]) -> Offsets:
        made = cls(marks)
        made.__dict__.update(filled=filled, rising=True)
        return made

    @cached_property
    def filled(self) -> tuple[int, ...]:
        """The ranks that have elements."""
        return tuple(compress(count(), map(lt, self, self[1:])))

    @cached_property
    def rising(self) -> bool:
        """Are the offsets valid: do they begin at 0 and never decrease?"""
        return self[:1] == (0,) and all(map(le, self, self[1:]))

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:
        return Offsets, (tuple(self),)
