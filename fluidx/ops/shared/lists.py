"""Sequences as Python lists: access by position, and the sizes of the parts of a split axis. The elements may be anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ir.errors import ExecutionError


def element(values: Sequence[Any], at: int) -> Any:
    """The element at a position; a negative position counts from the end. Raises ExecutionError for a position outside of the list."""
    return values[_inside(at, len(values), 0)]


def inserted(values: Sequence[Any], value: Any, at: int | None) -> list[Any]:
    """The elements with `value` inserted before position `at`; at the end if `at` is None.

    >>> inserted([1, 2], 3, -1), inserted([1, 2], 3, None)
    ([1, 3, 2], [1, 2, 3])
    """
    at = len(values) if at is None else _inside(at, len(values), 1)
    return [*values[:at], value, *values[at:]]


def erased(values: Sequence[Any], at: int | None) -> list[Any]:
    """The elements without the one at position `at`; without the last one if `at` is None."""
    at = _inside(-1 if at is None else at, len(values), 0)
    return [*values[:at], *values[at + 1 :]]


def _inside(at: int, count: int, behind: int) -> int:
    if not -count <= at < count + behind:
        raise ExecutionError(f"position {at} is outside of the sequence, which has {count} elements")
    return at + count if at < 0 else at


def part_sizes(size: int, split: int | Sequence[int]) -> list[int]:
    """The sizes of the parts of an axis: `split` lists them, or is the size of every part but the last, which has the rest.

    >>> part_sizes(7, 3), part_sizes(7, [3, 4])
    ([3, 3, 1], [3, 4])
    """
    if not isinstance(split, int):
        if sum(split) != size or min(split, default=0) < 0:
            raise ExecutionError(f"the parts {list(split)} do not add up to the {size} elements along the axis")
        return list(split)
    if split <= 0:
        raise ExecutionError(f"the size of a part must be positive, found {split}")
    return [min(split, size - k) for k in range(0, size, split)]
