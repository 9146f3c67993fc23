"""Placement rules that operators of several kinds share: of those that move elements, join like inputs, or work along one axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ir.placement import Placed, PlaceError, by_group
from ...ir.types import At, Partial, Placement, Shard, show_placement


def moved(new_axis: Callable[..., int | None], linear: bool = True) -> Callable[..., Placement]:
    """The placement rule of an op that moves elements of its first input about; other inputs must be replicated.

    `new_axis(x, axis, **attrs)` says which axis of the output a shard along `axis` lies on, None where the op mixes that axis.
    A `linear` op passes partial values on.
    """

    def rule(group: str, x: Placed, *rest: Any, **attrs: Any) -> Any:
        for other in rest:
            for y in other if isinstance(other, list) else [other]:
                if y is not None and y.on(group) is not None:
                    raise PlaceError(f"%{y.name} is {show_placement(y.placement)}; beside %{x.name} it must be replicate over {group}")
        entry = x.on(group)
        if entry is None or isinstance(entry, At) and not rest:
            return entry
        if isinstance(entry, Partial) and linear:
            return entry
        if isinstance(entry, Shard):
            axis = new_axis(x, entry.axis, **attrs)
            if axis is not None:
                return Shard(axis, group)
            raise PlaceError(f"%{x.name} is {entry}; the operator works along that axis and needs it whole: all_gather it first")
        raise PlaceError(f"%{x.name} is {entry}; the operator needs the finished value")

    return by_group(rule)


def copies(place: Callable[..., Placement], count: Callable[..., int]) -> Callable[..., list[Placement]]:
    """The rule of an op with one "X*" output slot whose `count(x, **attrs)` outputs all lie alike."""
    return lambda x, *rest, **attrs: [place(x, *rest, **attrs)] * count(x.type, **attrs)


def all_alike(keeps: Callable[..., int | None]) -> Callable[..., Placement]:
    """The rule of an op over a list of like inputs (concat, stack): all lie alike, and `keeps(x, axis, **attrs)` maps the shard."""

    def rule(group: str, xs: list[Placed], **attrs: Any) -> Any:
        entries = {x.on(group) for x in xs}
        if len(entries) != 1:
            listed = ", ".join(f"%{x.name} is {show_placement(x.placement)}" for x in xs)
            raise PlaceError(f"inputs lie in places that do not combine over {group}: {listed}")
        entry = entries.pop()
        if not isinstance(entry, Shard):
            return entry
        axis = keeps(xs[0], entry.axis, **attrs)
        if axis is None:
            raise PlaceError(f"%{xs[0].name} is {entry}; joining along that axis needs it whole: all_gather it first")
        return Shard(axis, group)

    return by_group(rule)


def place_along_axis(*args: Any, axis: int = -1, **attrs: Any) -> Any:
    """All inputs split alike, on any axis but `axis`, which is worked on whole."""

    @by_group
    def rule(group, *items):
        entries = {a.on(group) for a in items if a is not None}
        entry = entries.pop() if len(entries) == 1 else None
        if isinstance(entry, Shard) and entry.axis != axis % items[0].type.ndim:
            return entry
        listed = ", ".join(f"%{a.name} is {a.on(group) or 'replicate'}" for a in items if a is not None)
        raise PlaceError(f"the op works along axis {axis % items[0].type.ndim}, which must be whole over {group}: {listed}")

    return rule(*args)
