"""Collectives between a root and the parts of all ranks: the root sends each rank its part, or gets a part from each."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ...ir.offsets import Offsets
from ...ir.op_facets import Comm, Rewrite
from ...ir.opdef import Required
from ...ir.types import TensorType
from .collective_base import HOW, Attrs, CommunicatorCall, at_root, attrs_of, cut, flat_marks, moved, parts_of
from .volume import share

CUT = ("group", "root", "axis", "unit", "bounds")


class _RootedParts(CommunicatorCall):
    """Base of both: `root` is an index into the group."""

    inputs = ("X",)
    attrs = {"group": Required(str), "root": Required(int), "axis": 0, "unit": 1, "bounds": Offsets(), **HOW}
    sampled = {"root": 0, "axis": 1}
    # of the n * n blocks of an exchange, those from the root or to it have elements
    comm = Comm(sent=lambda n, *_: share("exchange", n), algorithm_method="exchange")


class ScatterParts(_RootedParts):
    """This rank's part of a value that the root has: the root sends every other rank its part.

    `root` is an index into the group. The parts are shards along `axis`, between blocks of `unit` neighbours, or the flat ranges between
    `bounds`. The gradient is the dual collective, gather_parts.
    """

    name = "scatter_parts"
    method = "scatter"
    comm = Comm(
        move=moved(at_root, gives=cut),
        blocks=lambda t, n, attrs: _blocks(t, n, attrs, lambda k: attrs["root"] * n + k),
        fluid_names=("c_scatter", "c_scatter"),
        fluid_counts=("nranks",),
        activity="SCATTER",
    )

    @staticmethod
    def _meaning(a: Any, xs: Any, out: TensorType, index: int, *, root: int, axis: int, unit: int, bounds: Offsets, **_: Any) -> Any:
        marks = None if xs[root] is None else flat_marks(a.type(xs[root]), len(xs), axis, unit, bounds)
        return None if marks is None else a.shaped(a.cut(xs[root], marks[index], marks[index + 1]), out.shape)

    rewrite = Rewrite(meaning=_meaning)

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.gather_parts(g, **attrs_of(op, *CUT))

    @staticmethod
    def _arguments(x: Any, out: Any, attrs: Attrs, ranks: tuple[int, ...]) -> tuple:
        return parts_of(x, attrs, ranks), out, attrs["root"], ranks


class GatherParts(_RootedParts):
    """The whole of a value that is sharded among the ranks of a group, on the root only; elsewhere the result is undefined.

    `root` is an index into the group. The shards are along `axis`, between blocks of `unit` neighbours, or the flat ranges between
    `bounds`. The gradient is the dual collective, scatter_parts.
    """

    name = "gather_parts"
    method = "gather"
    comm = Comm(
        move=moved(cut, gives=at_root),
        blocks=lambda t, n, attrs: _blocks(t, n, attrs, lambda k: k * n + attrs["root"]),
        activity="GATHER",
    )

    @staticmethod
    def _meaning(a: Any, xs: Any, out: TensorType, index: int, *, root: int, axis: int, unit: int, bounds: Offsets, **_: Any) -> Any:
        marks = flat_marks(out, len(xs), axis, unit, bounds)
        return a.nothing if index != root else None if marks is None else a.gathered(xs, marks, out.shape)

    rewrite = Rewrite(meaning=_meaning)

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.scatter_parts(g, **attrs_of(op, *CUT))

    @staticmethod
    def _arguments(x: Any, out: Any, attrs: Attrs, ranks: tuple[int, ...]) -> tuple:
        return x, parts_of(out, attrs, ranks), attrs["root"], ranks


def _blocks(t: TensorType, n: int, attrs: Attrs, block: Callable[[int], int]) -> Offsets | None:
    """The bounds of the n * n blocks of an exchange, of which `block(k)` is the part of rank k and the others are empty; None if parts are
    no flat ranges or some have no elements."""
    marks = flat_marks(t, n, attrs["axis"], attrs["unit"], attrs["bounds"])
    if marks is None or attrs["root"] >= n or any(a == b for a, b in pairwise(marks)):
        return None
    return Offsets.of_sizes({block(k): b - a for k, (a, b) in enumerate(pairwise(marks))}, n * n)
