"""The meaning of placements: the part of a value that each rank holds, and how the parts make up the value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from .entries import REDUCE, Entry, Placement, Shard, block_start, is_local
from .errors import ProgramError
from .time_axes import seats
from .types import ANY, TensorType

if TYPE_CHECKING:
    from .pattern import Pattern

Coords = Mapping[str, tuple[int, int]]  # group -> (this rank's index in it, its size)
Groups = Mapping[str, Sequence[Sequence[int]]]


def bounds(size: int, n: int, unit: int = 1) -> list[int]:
    """The bounds of the shards of an axis for n ranks, between blocks of `unit`; the last block may be short.

    >>> bounds(10, 4), bounds(12, 2, 4)
    ([0, 2, 5, 7, 10], [0, 4, 12])
    """
    return [block_start(size, n, unit, k) for k in range(n + 1)]


def coords_of(groups: Groups, rank: int, turns: Mapping[str, int] | None = None) -> dict[str, tuple[int, int]]:
    """{group: (index, size)} of a rank, without the groups that it does not belong to. `turns` are time axes, whose steps count too.

    >>> coords_of({"dp": [[0, 1], [2, 3]]}, 3)
    {'dp': (1, 2)}
    """
    out = seats(turns) if turns else {}
    for name, sets in groups.items():
        for members in sets:
            if rank in members:
                out[name] = (list(members).index(rank), len(members))
    return out


def intervals(shape: Sequence[int], placement: Placement, coords: Coords) -> list[tuple[int, int]]:
    """The range of every axis that a rank with these coordinates holds, for a placement without flat ranges; (0, -1) for an open axis."""
    box = [(0, d) for d in shape]
    for e in placement:
        axis = e.axis
        if axis is not None:
            if not -1 < axis < len(box):
                raise ProgramError(f"{e} names an axis that a value of shape {list(shape)} does not have")
            start, stop = box[axis]
            if stop != ANY:
                a, b = e.range_of(*coords[e.group], stop - start)
                box[axis] = (start + a, start + b)
    return box


def flat_range(placement: Placement, coords: Coords) -> tuple[int, int] | None:
    """The flat range that a rank holds, or None for a placement without flat ranges."""
    for e in placement:
        if e.bounds is not None:
            return e.range_of(*coords[e.group], e.bounds[-1])
    return None


def holds(placement: Placement, coords: Coords) -> bool:
    """Does a rank with these coordinates hold any element of the value? A rank in no set of a group holds nothing of a value placed over
    it.

    >>> from fluidx.ir import At
    >>> holds((At(1, "dp"),), {"dp": (1, 2)}), holds((At(1, "dp"),), {"dp": (0, 2)}), holds((Shard(0, "dp"),), {"ps": (2, 3)})
    (True, False, False)
    """
    return all(e.is_local or (e.group in coords and e.holds(coords[e.group][0])) for e in placement)


def local_shape(shape: Sequence[int], placement: Placement, coords: Coords) -> tuple[int, ...]:
    """The shape of a rank's part. A sharded open axis stays open.

    >>> local_shape((10, 3), (Shard(0, "dp"),), {"dp": (1, 4)})
    (3, 3)
    """
    if not placement:
        return tuple(shape)
    flat = flat_range(placement, coords)
    if flat is not None:
        return (flat[1] - flat[0],)
    return tuple(ANY if stop == ANY else stop - start for start, stop in intervals(shape, placement, coords))


def local_type(t: TensorType, placement: Placement, coords: Coords) -> TensorType:
    for e in placement:
        if e.is_cut:
            return TensorType(t.dtype, local_shape(t.shape, placement, coords))
    return t


def cut(value: Any, placement: Placement, coords: Coords) -> Any:
    """The part of a whole array that a rank holds, as a view if possible. A partial sum is the whole value at index 0 and 0 elsewhere."""
    flat = flat_range(placement, coords)
    if flat is not None:
        return value.reshape(-1)[flat[0] : flat[1]]
    part = value[tuple(slice(a, b) for a, b in intervals(value.shape, placement, coords))]
    if any(e.op == "sum" and coords[e.group][0] for e in placement):
        part = part * part.dtype.type(0)
    return part


def feed_placement(placement: Placement) -> Placement:
    """The placement by which a feed is split: replica-local values are shards of its rows."""
    return tuple([Shard(0, e.group) if e.is_own else e for e in placement])


def _replicas(parts: Sequence[Any], placement: Placement, groups: Groups, shape: Sequence[int]) -> list[Any]:
    """The replica-local values, each joined from the ranks that hold a part of it."""
    own = [e.group for e in placement if e.is_own]
    rest = tuple([e for e in placement if not e.is_own])
    sets: dict[tuple[int, ...], list[Any]] = {}
    for rank, part in enumerate(parts):
        if part is not None:
            coords = coords_of(groups, rank)
            sets.setdefault(tuple([coords[g][0] for g in own]), [None] * len(parts))[rank] = part
    out = []
    for some in sets.values():
        first = next(p for p in some if p is not None)
        rows = first.shape[:1] if _has_rows(shape) else tuple(shape[:1])
        out.append(join(some, rest, groups, (*rows, *shape[1:])) if rest else first)
    return out


def _has_rows(shape: Sequence[int]) -> bool:
    return tuple(shape[:1]) == (ANY,)


class NoMean(ProgramError):
    """Ranks have different replica-local values of a dtype without a mean."""


def _one_of(wholes: Sequence[Any], shape: Sequence[int]) -> Any:
    """One value from replica-local values: their rows, joined, if axis 0 is open, otherwise their mean."""
    if _has_rows(shape):
        return np.concatenate(wholes)
    first = wholes[0]
    if all(np.array_equal(first, w) for w in wholes[1:]):
        return first
    if first.dtype.kind != "f":
        raise NoMean(
            f"each rank has its own, {', '.join(str(w.ravel()[:3].tolist()) for w in wholes[:4])}, and of {first.dtype} there is no mean; "
            "run(fetch_list=[...], return_merged=False) gives each rank's"
        )
    return np.mean(wholes, axis=0, dtype=np.float64).astype(first.dtype)


def join(parts: Sequence[Any], placement: Placement, groups: Groups, shape: Sequence[int]) -> Any:
    """The whole array, from the parts of all ranks (None for a rank that holds nothing). Partial values are reduced in rank order.
    Replica-local values give their mean, or all rows if axis 0 is open.

    >>> join([np.ones(2), np.zeros(2)], (Shard(0, "dp"),), {"dp": [[0, 1]]}, (4,)).tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    if is_local(placement):
        raise ProgramError("a local value means something on its rank only; fetch it with return_merged=False")
    if any(e.is_own for e in placement):
        return _one_of(_replicas(parts, placement, groups, shape), shape)
    mentioned = [e.group for e in placement]
    partial = [e for e in placement if e.op]
    rest = tuple([e for e in placement if not e.op])
    out: Any = None
    seen: set[tuple[int, ...]] = set()
    begun: dict[tuple, bool] = {}
    for rank, part in enumerate(parts):
        coords = coords_of(groups, rank)
        if part is None or not holds(placement, coords):
            continue
        here = tuple(coords[g][0] for g in mentioned)
        if here in seen:
            continue
        seen.add(here)
        if len(placement) == 0 or (len(placement) == 1 and placement[0].root is not None):
            return part
        if out is None:
            out = np.empty(tuple(shape), part.dtype)
        target = cut(out, rest, coords)
        where = tuple([coords[e.group][0] for e in rest])
        if partial and begun.get(where):
            REDUCE[partial[0].op](target, part, out=target, casting="unsafe")
        else:
            target[...] = part
            begun[where] = True
    if out is None:
        raise ProgramError("no rank holds the value")
    return out


def check_placement(t: TensorType, placement: Placement, groups: Groups, world: int) -> str:
    """The error in a placement for a value of this type; "" if there is none."""
    taken: set[str] = set()
    for e in placement:
        if e.is_local:
            if len(placement) > 1:
                return "local stands alone"
            continue
        if e.group not in groups:
            return f"{e} names no declared group"
        n = len(next(iter(groups[e.group]), ()))
        if e.group in taken:
            return f"{e.group} is named twice"
        taken.add(e.group)
        if e.bounds is not None and len(placement) > 1:
            return f"{e} stands beside other entries"
        wrong = e.check(t, n)
        if wrong:
            return wrong
    for e, f in combinations(placement, 2):
        set_of = {rank: k for k, members in enumerate(groups[e.group]) for rank in members}
        for members in groups[f.group]:
            met = [set_of[rank] for rank in members if rank in set_of]
            if len(set(met)) < len(met):
                return f"{e} and {f} both part ranks of {list(members)}; the groups of a placement cross, as the axes of a mesh do"
    return ""


def entry_of(placement: Placement, group: str) -> Entry | None:
    """The entry for one group; None is replicate."""
    for e in placement:
        if e.group == group:
            return e
    return None


# -- the argument `part` of kernels -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """The part of the whole value that a kernel computes, for kernels whose pattern needs it.

    count: the product of the global sizes of the factors marked `#`. start, size: the start of this part of the located factor (`@`), and
    its global size; for runs (`n/4@`), the first run of this part, and the number of runs. box, shape: for `K`, the range of every axis of
    the first output that is computed here, and its global shape; for a flat range, those of the flat output.
    """

    count: int = 1
    start: int = 0
    size: int = 0
    box: tuple[tuple[int, int], ...] = ()
    shape: tuple[int, ...] = ()


def actual_sizes(p: Pattern, types: Sequence[TensorType | None]) -> dict[str, int]:
    """The sizes of a pattern's factors for operands and outputs of these types, in which every size is known."""
    sizes = {f: s for f, s in p.sizes.items() if s != ANY}
    again = []
    for axes, t in zip((*p.ins, *p.outs), types, strict=True):
        for factors, d in zip(axes or (), t.shape if t is not None else (), strict=True):
            if len(factors) == 1 and (sizes.get(factors[0], 1) == 1):
                sizes[factors[0]] = d
            elif len(factors) > 1:
                again.append((factors, d))
    for factors, d in again:
        unknown = [f for f in factors if f not in sizes]
        if len(unknown) == 1:
            sizes[unknown[0]] = d // max(1, prod(sizes[f] for f in factors if f in sizes))
    return sizes


def part_of(
    p: Pattern, ins: Sequence[TensorType | None], in_places: Sequence[Placement], outs: Sequence[TensorType | None],
    out_places: Sequence[Placement], coords: Coords,
) -> Part | None:  # fmt: skip
    """The `part` argument of the kernel on the rank with these coordinates; None if its pattern does not need it. Types are global, sizes
    known.
    """
    if not p.needs_part:
        return None
    types, places = [*ins, *outs], [*in_places, *out_places]
    sizes = actual_sizes(p, types)
    count = prod(sizes.get(f, 1) for f in p.counted)
    start = size = 0
    for f in p.located:
        size = sizes.get(f, 1)
        for k, (axes, t, place) in enumerate(zip((*p.ins, *p.outs), types, places, strict=True)):
            if t is None or k in p.shape_only or flat_range(place, coords) is not None:
                continue
            for axis, factors in enumerate(axes or ()):
                if factors == (f,):
                    start = max(start, intervals(t.shape, place, coords)[axis][0])
    box: tuple[tuple[int, int], ...] = ()
    shape: tuple[int, ...] = ()
    if p.keyed and outs[0] is not None:
        if (flat := flat_range(out_places[0], coords)) is not None:
            shape, box = (prod(outs[0].shape),), (flat,)
        else:
            shape, box = outs[0].shape, tuple(intervals(outs[0].shape, out_places[0], coords))
    return Part(count, start, size, box, shape)
