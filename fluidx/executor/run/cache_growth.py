"""The growth of caches: if an operator appends new rows to a feed and its result is fetched, the next run is expected to feed that
result."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...ir.types import ANY, TensorType
from ..plan.selection import Outline

Sizes = tuple[tuple[int, ...], ...]


class _GrowingFeed(NamedTuple):
    """A feed, by its number, that gets so many rows along an axis in each run."""

    feed: int
    axis: int
    rows: int


def growth_of_caches(outline: Outline) -> Callable[[Sizes], Sizes | None]:
    """A function of the shapes of the feeds, in their order, that tells by how much they will grow: a cache by its new rows, and so an open
    axis that is as long as the cache, before or after the run. None if no cache of the same length gets rows.

    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main):
    ...     past, new = fx.data("past", [1, "past", 8], "float32"), fx.data("new", [1, 1, 8], "float32")
    ...     mask, present = fx.data("mask", [1, "all"], "float32"), fx.layers.concat([past, new], axis=1)
    ...     y = fx.layers.reduce_sum(mask)
    >>> types = {v.name: v.desc.type for v in (past, new, mask)}
    >>> growth_of_caches(Outline.of(main, types, [present.name, y.name]))(((1, 40, 8), (1, 1, 8), (1, 41)))
    ((0, 1, 0), (0, 0, 0), (0, 1))
    """
    caches, opened = _caches(outline), _open_axes(outline)

    def grows(sizes: Sizes) -> Sizes | None:
        if len({(sizes[c.feed][c.axis], c.rows) for c in caches}) != 1:
            return None
        before, rows = sizes[caches[0].feed][caches[0].axis], caches[0].rows
        own = {(c.feed, c.axis) for c in caches}
        step = [
            tuple([rows if (k, axis) in own or (k, axis) in opened and d in (before, before + rows) else 0 for axis, d in enumerate(shape)])
            for k, shape in enumerate(sizes)
        ]
        return tuple(step)

    return grows


def _caches(outline: Outline) -> list[_GrowingFeed]:
    descs, numbers, found = outline.program.global_block().descs, {n: k for k, n in enumerate(outline.given)}, []
    for op in outline.ops:
        if op.type != "concat" or op.output_arg_names[0] not in outline.fetch:
            continue
        types = [descs[n].type for n in op.input_arg_names]
        if not all(isinstance(t, TensorType) for t in types):
            continue
        axis = op.attrs["axis"] % len(types[0].shape)
        rows = [t.shape[axis] for t in types if t.shape[axis] != ANY]
        grown = [n for n, t in zip(op.input_arg_names, types, strict=True) if t.shape[axis] == ANY]
        if len(grown) == 1 and grown[0] in numbers and sum(rows) > 0:
            found.append(_GrowingFeed(numbers[grown[0]], axis, sum(rows)))
    return found


def _open_axes(outline: Outline) -> set[tuple[int, int]]:
    """The open axes of the feeds, as their number and that of the axis."""
    descs = outline.program.global_block().descs
    shapes = [t.shape if isinstance(t := descs[n].type, TensorType) else () for n in outline.given]
    return {(k, axis) for k, shape in enumerate(shapes) for axis, d in enumerate(shape) if d == ANY}
