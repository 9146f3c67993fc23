"""Multi-dimensional slices as expressions: a range on each axis of an array, for slices that are not one range of the flat array.

A slice is stored as its flat array, the index of its first element there, and the strides of its axes. So it does not depend on the shape
of the array or on the number of steps in which it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from .refusal import Refusal

if TYPE_CHECKING:
    from .normal_form import ExpressionTable

Spans = Sequence[tuple[int, int]]


class SliceND(NamedTuple):
    """Elements start + i0 * strides[0] + i1 * strides[1] + ... of a flat array. The stride of an axis with one element is 0."""

    array: int
    start: int
    strides: tuple[int, ...]


class SlicesND:
    """The strided slices in a table of expressions."""

    def __init__(self, table: ExpressionTable):
        self.table = table

    def cut(self, e: int, spans: Spans) -> int:
        """The slice of a value with a (start, stop) for each axis."""
        table = self.table
        t, shape = table.types[e], tuple(b - a for a, b in spans)
        if shape == t.shape:
            return e
        if 0 in shape:
            return table.lin((), t.with_shape(shape))
        key = table.keys[e]
        if key[0] == "lin":
            return table.lin([(self.cut(a, spans), w) for a, w in key[1]], t.with_shape(shape))
        if key[0] == "one":
            return table.one(t.dtype, shape)
        sliced = self._strided(e)
        return self._made(sliced._replace(start=sliced.start + _offset(spans, sliced.strides)), shape)

    def join(self, parts: Sequence[int], axis: int, shape: Sequence[int]) -> int | None:
        """Concatenate parts along an axis, if each continues the one before in the same array; else None."""
        table = self.table
        parts = [p for p in parts if 0 not in table.types[p].shape]
        weighted = [sorted(table.items(p), key=self._by_array) for p in parts]
        if not parts or any(len(items) != len(weighted[0]) for items in weighted):
            return None
        joined = []
        for column in zip(*weighted, strict=True):
            made = self._continued([a for a, _ in column], axis, shape)
            if made is None or len({w for _, w in column}) > 1:
                return None
            joined.append((made, column[0][1]))
        return table.lin(joined, table.types[parts[0]].with_shape(shape))

    def taken(self, e: int, start: int, strides: Sequence[int], shape: Sequence[int]) -> int:
        """The strided slice of a value: first element, strides, shape."""
        table, t = self.table, self.table.types[e].with_shape(shape)
        if table.keys[e][0] == "lin":
            return table.lin([(self.taken(a, start, strides, shape), w) for a, w in table.keys[e][1]], t)
        if table.keys[e][0] == "one":
            return table.one(t.dtype, shape)
        flat = table.flat(e)
        if table.keys[flat][0] in ("view", "slice"):
            inner = table.keys[flat]
            return self._made(SliceND(inner[1], start + (inner[2] if inner[0] == "slice" else 0), tuple(strides)), shape)
        return self._made(SliceND(flat, start, tuple(strides)), shape)

    def array_of(self, e: int, spans: Spans, shape: Sequence[int]) -> int:
        """The array of shape `shape` whose slice at `spans` is the value."""
        table = self.table
        if table.keys[e][0] == "one":
            return table.one(table.types[e].dtype, shape)
        sliced, strides = self._strided(e), row_major(shape)
        first = sliced.start - _offset(spans, strides)
        if 0 <= first <= table.types[sliced.array].numel - prod(shape):
            found = table.shaped(table.cut(sliced.array, first, first + prod(shape)), shape)
            if self.cut(found, spans) == e:
                return found
        raise Refusal(f"it is {table.show(e)}, which is not this rank's part of one value")

    def _by_array(self, item: tuple[int, float]) -> int:
        return -1 if self.table.keys[item[0]][0] == "one" else self._strided(item[0]).array

    def _continued(self, parts: Sequence[int], axis: int, shape: Sequence[int]) -> int | None:
        if all(self.table.keys[p][0] == "one" for p in parts):
            return self.table.one(self.table.types[parts[0]].dtype, shape)
        slices, widths = [self._strided(p) for p in parts], [self.table.types[p].shape[axis] for p in parts]
        first = slices[0]
        stride = max(b.strides[axis] for b in slices) or (slices[1].start - first.start if slices[1:] else 0)
        at = first.start
        for sliced, width in zip(slices, widths, strict=True):
            if sliced.array != first.array or sliced.start != at or not _same_strides(sliced, first, axis):
                return None
            if width > 1 and sliced.strides[axis] != stride:
                return None
            at += width * stride
        return self._made(first._replace(strides=(*first.strides[:axis], stride, *first.strides[axis + 1 :])), shape)

    def _strided(self, e: int) -> SliceND:
        """A value that is not a sum, as a strided slice."""
        keys, key, shape = self.table.keys, self.table.keys[e], self.table.types[e].shape
        if key[0] == "strided":
            return SliceND(*key[1:4])
        if key[0] == "view":
            e, key = key[1], keys[key[1]]
        if key[0] == "slice":
            return SliceND(key[1], key[2], row_major(shape))
        return SliceND(e, 0, row_major(shape))

    def _made(self, sliced: SliceND, shape: Sequence[int]) -> int:
        shape = tuple(shape)
        sliced = sliced._replace(strides=tuple(0 if n == 1 else s for n, s in zip(shape, sliced.strides, strict=True)))
        if sliced.strides == row_major(shape):
            return self.table.shaped(self.table.cut(sliced.array, sliced.start, sliced.start + prod(shape)), shape)
        return self.table.intern(("strided", *sliced, shape), self.table.types[sliced.array].with_shape(shape), (sliced.array,))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous array."""
    return tuple(0 if n == 1 else prod(shape[k + 1 :]) for k, n in enumerate(shape))


def _offset(spans: Spans, strides: Sequence[int]) -> int:
    return sum(a * s for (a, _), s in zip(spans, strides, strict=True))


def _same_strides(a: SliceND, b: SliceND, axis: int) -> bool:
    """True if two slices have equal strides on all axes but one."""
    return all(s == t for k, (s, t) in enumerate(zip(a.strides, b.strides, strict=True)) if k != axis)
