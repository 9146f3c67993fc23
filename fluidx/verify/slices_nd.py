"""Boxes: the elements of an array between marks on each of its axes, where these are no range of its flat form.

A box knows the flat array that it is taken from, where it begins there, and how far the elements of each axis are apart: so it is the same
one whatever shape the array had, and in how many steps it was cut out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from .refusal import Refusal

if TYPE_CHECKING:
    from .normal_form import ExpressionTable

Spans = Sequence[tuple[int, int]]


class Box(NamedTuple):
    """Elements start + i0 * strides[0] + i1 * strides[1] + ... of an array laid out flat; the stride of an axis of one element is 0."""

    array: int
    start: int
    strides: tuple[int, ...]


class Boxes:
    """The boxes over a table of expressions."""

    def __init__(self, table: ExpressionTable):
        self.table = table

    def cut(self, e: int, spans: Spans) -> int:
        """The elements of a value between the marks of each axis."""
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
        box = self._box(e)
        return self._made(box._replace(start=box.start + _offset(spans, box.strides)), shape)

    def join(self, parts: Sequence[int], axis: int, shape: Sequence[int]) -> int | None:
        """Parts that continue each other along an axis; None where they do not."""
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
        """The box of that shape which begins at an element of a value, with elements so far apart."""
        table, t = self.table, self.table.types[e].with_shape(shape)
        if table.keys[e][0] == "lin":
            return table.lin([(self.taken(a, start, strides, shape), w) for a, w in table.keys[e][1]], t)
        if table.keys[e][0] == "one":
            return table.one(t.dtype, shape)
        flat = table.flat(e)
        if table.keys[flat][0] in ("view", "slice"):
            inner = table.keys[flat]
            return self._made(Box(inner[1], start + (inner[2] if inner[0] == "slice" else 0), tuple(strides)), shape)
        return self._made(Box(flat, start, tuple(strides)), shape)

    def whole(self, e: int, spans: Spans, shape: Sequence[int]) -> int:
        """The array of that shape of which a value is the elements between these marks."""
        table = self.table
        if table.keys[e][0] == "one":
            return table.one(table.types[e].dtype, shape)
        box, strides = self._box(e), row_major(shape)
        first = box.start - _offset(spans, strides)
        if 0 <= first <= table.types[box.array].numel - prod(shape):
            found = table.shaped(table.cut(box.array, first, first + prod(shape)), shape)
            if self.cut(found, spans) == e:
                return found
        raise Refusal(f"it is {table.show(e)}, which is not this rank's part of one value")

    def _by_array(self, item: tuple[int, float]) -> int:
        return -1 if self.table.keys[item[0]][0] == "one" else self._box(item[0]).array

    def _continued(self, parts: Sequence[int], axis: int, shape: Sequence[int]) -> int | None:
        if all(self.table.keys[p][0] == "one" for p in parts):
            return self.table.one(self.table.types[parts[0]].dtype, shape)
        boxes, widths = [self._box(p) for p in parts], [self.table.types[p].shape[axis] for p in parts]
        first = boxes[0]
        apart = max(b.strides[axis] for b in boxes) or (boxes[1].start - first.start if boxes[1:] else 0)
        at = first.start
        for box, width in zip(boxes, widths, strict=True):
            if box.array != first.array or box.start != at or (width > 1 and box.strides[axis] != apart) or not _alike(box, first, axis):
                return None
            at += width * apart
        return self._made(first._replace(strides=(*first.strides[:axis], apart, *first.strides[axis + 1 :])), shape)

    def _box(self, e: int) -> Box:
        """A value that is no sum, as elements of an array."""
        keys, key, shape = self.table.keys, self.table.keys[e], self.table.types[e].shape
        if key[0] == "box":
            return Box(*key[1:4])
        if key[0] == "view":
            e, key = key[1], keys[key[1]]
        if key[0] == "slice":
            return Box(key[1], key[2], row_major(shape))
        return Box(e, 0, row_major(shape))

    def _made(self, box: Box, shape: Sequence[int]) -> int:
        shape = tuple(shape)
        box = box._replace(strides=tuple(0 if n == 1 else s for n, s in zip(shape, box.strides, strict=True)))
        if box.strides == row_major(shape):
            return self.table.shaped(self.table.cut(box.array, box.start, box.start + prod(shape)), shape)
        return self.table.intern(("box", *box, shape), self.table.types[box.array].with_shape(shape), (box.array,))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of an array in one piece."""
    return tuple(0 if n == 1 else prod(shape[k + 1 :]) for k, n in enumerate(shape))


def _offset(spans: Spans, strides: Sequence[int]) -> int:
    return sum(a * s for (a, _), s in zip(spans, strides, strict=True))


def _alike(a: Box, b: Box, axis: int) -> bool:
    """Are two boxes of one array alike, but for an axis?"""
    return all(s == t for k, (s, t) in enumerate(zip(a.strides, b.strides, strict=True)) if k != axis)
