"""Families of placement rules: how the places of an op's inputs decide the place of its output.

A rule takes one `Placed` per input slot (a list for a "X*" slot, None for an absent one) and the attributes, and returns a
placement, or a tuple of them for several outputs. It raises `PlaceError` for a combination that would give a wrong value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .errors import ProgramError
from .types import At, Partial, Placement, Shard, TensorType, show_placement


class PlaceError(ProgramError):
    """Inputs lie in places that the operator cannot combine."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One input of an operator as a placement rule sees it."""

    name: str
    type: TensorType
    placement: Placement

    def on(self, group: str) -> Shard | Partial | At | None:
        """Its entry for one group; None is replicate."""
        return next((p for p in self.placement if p.group == group), None)


def flat(args: Iterable[Any]) -> list[Placed]:
    out: list[Placed] = []
    for a in args:
        out += a if isinstance(a, list) else [] if a is None else [a]
    return out


def groups_of(args: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(p.group for a in flat(args) for p in a.placement))


def by_group(rule: Callable[..., Any]) -> Callable[..., Placement]:
    """Lift a rule over one group's entries to whole placements: each group is independent of the others."""

    def place(*args: Any, **attrs: Any) -> Placement:
        out = []
        for group in groups_of(args):
            entry = rule(group, *args, **attrs)
            if entry is not None:
                out.append(entry)
        return tuple(out)

    return place


def _clash(args: list[Placed], group: str) -> PlaceError:
    listed = ", ".join(f"%{a.name} is {show_placement(a.placement)}" for a in args)
    return PlaceError(f"inputs lie in places that do not combine over {group}: {listed}")



def _elementwise(group: str, *args: Any, **attrs: Any) -> Any:
    items = flat(args)
    entries = [(a, a.on(group)) for a in items]
    if any(isinstance(e, (Partial, At)) for _, e in entries):
        if len(items) == 1 and isinstance(entries[0][1], At):
            return entries[0][1]
        ats = {e for _, e in entries if isinstance(e, At)}
        if len(ats) == 1 and all(e is None or isinstance(e, At) for _, e in entries):
            return ats.pop()
        raise _clash(items, group)
    ndim = max(a.type.ndim for a in items)
    first_axis = attrs.get("axis", -1)
    found = set()
    for k, (a, e) in enumerate(entries):
        if e is None:
            continue
        # fluid's `axis`: the second operand's axis 0 meets axis `axis` of the first
        offset = first_axis if k == 1 and isinstance(first_axis, int) and first_axis >= 0 else ndim - a.type.ndim
        assert isinstance(e, Shard)
        found.add(e.axis + offset)
    if len(found) != 1:
        raise _clash(items, group)
    axis = found.pop()
    for k, (a, e) in enumerate(entries):  # a replicated operand must not have rows of its own along the sharded axis
        offset = first_axis if k == 1 and isinstance(first_axis, int) and first_axis >= 0 else ndim - a.type.ndim
        own = axis - offset
        if e is None and 0 <= own < a.type.ndim and a.type.shape[own] != 1:
            raise _clash(items, group)
    return Shard(axis, group)


def _linear(group: str, *args: Any, **attrs: Any) -> Any:
    """Sums of alike terms: partial values may be added to partial values of the same kind."""
    entries = {a.on(group) for a in flat(args)}
    if len(entries) == 1:
        return entries.pop()
    return _affine(group, *args, **attrs)


def _affine(group: str, *args: Any, **attrs: Any) -> Any:
    """A mean over the ranks may take a replicated value too: the mean of l + c is the mean of l, plus c."""
    entries = {a.on(group) for a in flat(args)}
    mean = Partial("avg", group)
    return mean if mean in entries and entries <= {mean, None} else _elementwise(group, *args, **attrs)


def _rowwise(group: str, *args: Any, **attrs: Any) -> Any:
    """Each row of the first input is worked on alone; everything else (weights) is replicated."""
    items = flat(args)
    if items[0].on(group) == Shard(0, group):
        rest = {a.on(group) for a in items[1:]}
        if rest <= {None}:
            return Shard(0, group)
    raise _clash(items, group)


def _rows(group: str, *args: Any, **attrs: Any) -> Any:
    """Row i of the output needs row i of every input only."""
    items = flat(args)
    if all(a.on(group) == Shard(0, group) for a in items):
        return Shard(0, group)
    raise _clash(items, group)


def _replicated(group: str, *args: Any, **attrs: Any) -> Any:
    items = flat(args)
    ats = {a.on(group) for a in items} - {None}
    if len(ats) == 1 and isinstance(next(iter(ats)), At):
        return ats.pop()
    if ats:
        raise _clash(items, group)
    return None


place_elementwise = by_group(_elementwise)  # add, relu, where: right-aligned broadcasting or fluid's `axis`
place_linear = by_group(_linear)  # sum, scale without bias, cast: also takes partial values
place_affine = by_group(_affine)  # scale with a bias
place_rowwise = by_group(_rowwise)  # conv2d, layer_norm: rows of X alone, weights replicated
place_rows = by_group(_rows)  # cross_entropy: row i of all inputs
place_replicated = by_group(_replicated)  # anything whose inputs must be whole


def reduce_place(op: str) -> Callable[..., Placement]:
    """A reduction: a reduced sharded axis becomes partial(op); axes before it that vanish shift the shard."""

    def rule(group: str, x: Placed, *, dim: Any = None, keep_dim: bool = False, **attrs: Any) -> Any:
        entry = x.on(group)
        nd = x.type.ndim
        axes = sorted({d % nd for d in dim}) if dim and nd else list(range(nd))
        if isinstance(entry, Partial):
            if entry.op in ("sum", "avg") and op in ("sum", "avg"):
                return entry
            raise _clash([x], group)
        if isinstance(entry, Shard):
            if entry.axis in axes:
                if op not in ("sum", "avg", "max", "min"):
                    raise PlaceError(f"%{x.name} is {entry}; reducing that axis by {op} needs the whole value")
                return Partial(op, group)
            return entry if keep_dim else Shard(entry.axis - sum(a < entry.axis for a in axes), group)
        return entry

    return by_group(rule)


def matmul_place(group: str, x: Placed, y: Placed, *, transpose_x: bool = False, transpose_y: bool = False, **attrs: Any) -> Any:
    """(rows sharded, whole) -> rows; (whole, columns sharded) -> columns; both on the summed axis -> partial(sum)."""
    ex, ey = x.on(group), y.on(group)
    nx, ny = x.type.ndim, y.type.ndim
    if isinstance(ex, (Partial, At)) or isinstance(ey, (Partial, At)):
        if isinstance(ex, Partial) and ex.op in ("sum", "avg") and ey is None:
            return ex
        if isinstance(ey, Partial) and ey.op in ("sum", "avg") and ex is None:
            return ey
        raise _clash([x, y], group)
    k_x = nx - 2 if transpose_x else nx - 1
    k_y = ny - 1 if transpose_y else ny - 2
    out = max(nx, ny)
    if ex and ey:
        if ex.axis == k_x and ey.axis == k_y:
            return Partial("sum", group)
        if ex.axis < nx - 2 and ex.axis - nx == ey.axis - ny:
            return Shard(ex.axis + out - nx, group)
        raise _clash([x, y], group)
    if ex and ex.axis != k_x and not (ex.axis < nx - 2 and ny > 2):
        return Shard(out - 2 if ex.axis >= nx - 2 else ex.axis + out - nx, group)
    if ey and ey.axis != k_y and not (ey.axis < ny - 2 and nx > 2):
        return Shard(out - 1 if ey.axis >= ny - 2 else ey.axis + out - ny, group)
    raise _clash([x, y], group)


place_matmul = by_group(matmul_place)


def default_place(*args: Any, **attrs: Any) -> Placement:
    """The rule of an op that declares none: every input whole."""
    return place_replicated(*args, **attrs)
