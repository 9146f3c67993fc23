"""Import of operators whose sizes the program computes, if nothing can run the program for their values."""

from __future__ import annotations

import numpy as np

from ..import_tables import dynamic
from ..node import Node


@dynamic("Range", 0, 1, 2)
def computed_range(n: Node) -> object:
    return n.b.range_between(*n.xs())


@dynamic("Reshape", 1)
def computed_reshape(n: Node) -> object:
    return n.b.reshape_by(n.x(), n.x(1), zeros=bool(n.attr("allowzero", 0)))


@dynamic("Expand", 1)
def computed_expand(n: Node) -> object:
    return n.b.expand_by(n.x(), n.x(1))


@dynamic("Tile", 1)
def computed_tile(n: Node) -> object:
    return n.b.tile_by(n.x(), n.x(1))


@dynamic("ConstantOfShape", 0)
def computed_constant_of_shape(n: Node) -> object:
    value = n.attr("value", np.zeros(1, np.float32))
    return n.b.fill_by(n.x(), value=n.filler(value), dtype=value.dtype.name)


@dynamic("Slice", 1, 2)
def computed_slice(n: Node) -> object:
    starts, ends = n.x(1), n.x(2)
    axes = n.ints(3)
    axes = list(range(starts.shape[0])) if axes is None else [a % n.rank() for a in axes]
    return n.b.slice_by(n.x(), starts, ends, axes=tuple(axes), steps=tuple(n.ints(4) or ()))


@dynamic("TopK", 1)
def computed_top_k(n: Node) -> object:
    return n.b.top_k_by(n.x(), n.x(1), axis=n.attr("axis", -1), largest=bool(n.attr("largest", 1)))
