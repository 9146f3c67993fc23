"""Collectives between a root and the parts of all ranks: the root sends each rank its part, or gets a part from each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from ...ir.errors import ProgramError
from ...ir.offsets import Offsets
from ...ir.op_facets import Comm, Native, Rewrite
from ...ir.opdef import Effect, OpDef, Required, Sample
from ...ir.types import At, Entry, TensorType
from ..shared.samples import counting
from .collective import HOW, check_cut, cut_entry, cut_views, expect, flat_marks, native_calls
from .volume import share


class _RootedParts(OpDef):
    """Base of both: `root` is an index into the group."""

    inputs = ("X",)
    attrs = {"group": Required(str), "root": Required(int), "axis": 0, "unit": 1, "bounds": Offsets(), **HOW}
    effect = Effect.COLLECTIVE
    # of the n * n blocks of an exchange, those from the root or to it have elements
    comm = Comm(sent=lambda n, *_: share("exchange", n), algorithm_method="exchange")

    @classmethod
    def infer(cls, x: TensorType, *, group: str, root: int, axis: int, unit: int, bounds: Offsets, **how: Any) -> TensorType:
        check_cut(cls.name, x, axis, unit, bounds)
        if root < 0:
            raise ProgramError(f"op {cls.name}: root must be an index into group {group}, from 0 on, got {root}")
        return x


class ScatterParts(_RootedParts):
    """This rank's part of a value that the root has: the root sends every other rank its part.

    `root` is an index into the group. The parts are shards along `axis`, between blocks of `unit` neighbours, or the flat ranges between
    `bounds`. The gradient is the dual collective, gather_parts.
    """

    name = "scatter_parts"

    @staticmethod
    def _move(entry: Entry | None, *, group: str, root: int, axis: int, unit: int, bounds: Offsets, **how: Any) -> Entry | None:
        expect("scatter_parts", entry, At(root, group))
        return cut_entry(group, axis, unit, bounds)

    comm = Comm(
        move=_move,
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
        return b.gather_parts(g, **_cut_of(op))

    @staticmethod
    def _bind(ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        ranks = ctx.group(attrs["group"])
        return partial(ctx.comm.ring(attrs["ring"]).scatter, _parts(ins[0], attrs, ranks), outs[0], attrs["root"], ranks)

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, ctx: Any, dry: bool = False) -> Any:
        ranks = ctx.group(attrs["group"])
        return native_calls(ctx, "scatter", _parts(ins[0], attrs, ranks), outs[0], attrs["root"], ranks)

    native = Native(calls=_calls, bind=_bind)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", root=0, axis=1, grad=(), why="needs ranks; tested in tests/comm/test_operators.py")


class GatherParts(_RootedParts):
    """The whole of a value that is sharded among the ranks of a group, on the root only; elsewhere the result is undefined.

    `root` is an index into the group. The shards are along `axis`, between blocks of `unit` neighbours, or the flat ranges between
    `bounds`. The gradient is the dual collective, scatter_parts.
    """

    name = "gather_parts"

    @staticmethod
    def _move(entry: Entry | None, *, group: str, root: int, axis: int, unit: int, bounds: Offsets, **how: Any) -> Entry | None:
        expect("gather_parts", entry, cut_entry(group, axis, unit, bounds))
        return At(root, group)

    comm = Comm(
        move=_move,
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
        return b.scatter_parts(g, **_cut_of(op))

    @staticmethod
    def _bind(ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        ranks = ctx.group(attrs["group"])
        return partial(ctx.comm.ring(attrs["ring"]).gather, ins[0], _parts(outs[0], attrs, ranks), attrs["root"], ranks)

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, ctx: Any, dry: bool = False) -> Any:
        ranks = ctx.group(attrs["group"])
        return native_calls(ctx, "gather", ins[0], _parts(outs[0], attrs, ranks), attrs["root"], ranks)

    native = Native(calls=_calls, bind=_bind)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", root=0, axis=1, grad=(), why="needs ranks; tested in tests/comm/test_operators.py")


def _blocks(t: TensorType, n: int, attrs: Mapping[str, Any], block: Any) -> Offsets | None:
    """The bounds of the n * n blocks of an exchange, of which `block(k)` is the part of rank k and the others are empty; None if parts are
    no flat ranges or some have no elements."""
    marks = flat_marks(t, n, attrs["axis"], attrs["unit"], attrs["bounds"])
    if marks is None or attrs["root"] >= n or any(a == b for a, b in pairwise(marks)):
        return None
    return Offsets.of_sizes({block(k): b - a for k, (a, b) in enumerate(pairwise(marks))}, n * n)


def _parts(whole: Any, attrs: Mapping[str, Any], ranks: tuple[int, ...]) -> list[Any]:
    return cut_views(whole, len(ranks), attrs["axis"], attrs["unit"], attrs["bounds"])


def _cut_of(op: Any) -> dict[str, Any]:
    return {k: op.attrs[k] for k in ("group", "root", "axis", "unit", "bounds")}
