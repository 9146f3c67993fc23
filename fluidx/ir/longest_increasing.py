"""`longest_increasing`: the longest increasing subsequence, which numbers to keep so that they increase, and as many as possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import lt


def longest_increasing(numbers: Sequence[int]) -> list[int]:
    """The indices of a longest increasing subsequence.

    Source: Fredman, "On computing the length of longest increasing subsequences" (1975).

    >>> longest_increasing([3, 1, 2, 9, 4])
    [1, 2, 4]
    """
    if all(map(lt, numbers, numbers[1:])):
        return list(range(len(numbers)))
    least: list[int] = []  # for each length of a rising subsequence: the least number with which one ends
    ends: list[int] = []  # and its index
    before: list[int] = []  # for each number: the index of the one before it in a longest subsequence that it ends
    for k, number in enumerate(numbers):
        length = bisect_left(least, number)
        before.append(ends[length - 1] if length else -1)
        least[length : length + 1] = [number]
        ends[length : length + 1] = [k]
    found = []
    k = ends[-1] if ends else -1
    while k >= 0:
        found.append(k)
        k = before[k]
    return found[::-1]
