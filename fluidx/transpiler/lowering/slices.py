"""Slices of a large value: their ranges, the position of each element, and the order of their stages.

A slice has a slot for each rank of a host, and a slot a shard for each host. Slots and shards are placements: `shard(0) over node`, and
within that `shard(0) over rail`. So slot j and shard k of a slice belong to rank j of host k.
"""

from __future__ import annotations

from typing import NamedTuple

from ...ir.parts import bounds


class SliceStep(NamedTuple):
    """Stage `stage` of slice `slice`."""

    slice: int
    stage: int


def slices(size: int, most: int) -> list[tuple[int, int]]:
    """Ranges of at most `most` elements; their sizes differ by at most one. Uneven parts are allowed everywhere, so nothing is padded.

    >>> slices(10, 4)
    [(0, 3), (3, 6), (6, 10)]
    """
    marks = bounds(size, _count(size, most))
    return list(zip(marks, marks[1:], strict=False))


class SlicePosition(NamedTuple):
    """Element `offset` of shard `shard` in slot `slot` of slice `slice`."""

    slice: int
    slot: int
    shard: int
    offset: int


def position_of(element: int, size: int, most: int, devices: int, hosts: int) -> SlicePosition:
    """The position of an element of a flat value of `size` elements, in slices of at most `most` elements, on `hosts` hosts with `devices`
    devices each.

    >>> position_of(7, 10, 4, devices=2, hosts=2), element_at(SlicePosition(2, 0, 1, 0), 10, 4, devices=2, hosts=2)
    (SlicePosition(slice=2, slot=0, shard=1, offset=0), 7)
    """
    numbers: list[int] = []
    for n in (_count(size, most), devices, hosts):
        k = -(-(element + 1) * n // size) - 1  # the part that begins at k * size // n and has the element
        start = k * size // n
        element, size = element - start, (k + 1) * size // n - start
        numbers.append(k)
    return SlicePosition(numbers[0], numbers[1], numbers[2], element)


def element_at(position: SlicePosition, size: int, most: int, devices: int, hosts: int) -> int:
    """The element at a position: the inverse of position_of."""
    start = 0
    for k, n in zip(position, (_count(size, most), devices, hosts), strict=False):
        first = k * size // n
        start, size = start + first, (k + 1) * size // n - first
    return start + position.offset


def _count(size: int, most: int) -> int:
    return max(1, -(-size // most))


def steps(count: int, stages: int, in_flight: int) -> list[list[SliceStep]]:
    """The steps of `count` slices as lists of independent steps; at most `in_flight` slices have begun and not ended. A slice begins as
    soon as possible, and then advances one stage at a time. In one list, the slice nearest to its end comes last, so the sends of a slice
    come before the additions of the slice before it.

    >>> [["".join(map(str, s)) for s in now] for now in steps(3, stages=2, in_flight=2)]
    [['00'], ['10', '01'], ['20', '11'], ['21']]
    """
    together = -(-in_flight // stages)
    begin: list[int] = []
    for k in range(count):
        after = begin[k - together] + 1 if k >= together else 0
        begin.append(max(after, begin[k - in_flight] + stages if k >= in_flight else 0))
    out: list[list[SliceStep]] = [[] for _ in range(begin[-1] + stages if begin else 0)]
    for k, t in enumerate(begin):
        for stage in range(stages):
            out[t + stage].append(SliceStep(k, stage))
    return [sorted(now, key=lambda s: (s.stage, s.slice)) for now in out]
