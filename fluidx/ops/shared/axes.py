"""Axis and shape arithmetic that the data-movement ops share: normal forms, broadcasting of open axes, and where a shard goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ...ir.errors import ExecutionError, ProgramError
from ...ir.placement import Placed, PlaceError, by_group
from ...ir.types import ANY, At, Partial, Placement, Shard, TensorType, show_placement

INT_MAX = 2**31 - 1  # fluid's "to the end" in slice attributes


def norm_axis(op: str, axis: int, ndim: int, extra: int = 0) -> int:
    """`axis` counted from the front. Raises ProgramError when it lies outside `ndim + extra` axes.

    >>> norm_axis("concat", -1, 3)
    2
    """
    n = ndim + extra
    if not -n <= axis < n:
        raise ProgramError(f"op {op}: axis {axis} is out of range; expected {-n} to {n - 1} for {n} axes")
    return axis % n


def norm_axes(op: str, axes: Sequence[int], ndim: int) -> tuple[int, ...]:
    """`norm_axis` over several axes, in the given order. Raises ProgramError when one is named twice."""
    out = tuple(norm_axis(op, a, ndim) for a in axes)
    if len(set(out)) != len(out):
        raise ProgramError(f"op {op}: axes {list(axes)} name one axis twice")
    return out


def merge_size(op: str, what: str, a: int, b: int) -> int:
    """The size that two equal axes have, one of which may be open. Raises ProgramError when they differ."""
    if a == ANY or b == ANY:
        return max(a, b)
    if a != b:
        raise ProgramError(f"op {op}: {what} must be equal, found {a} and {b}")
    return a


def add_sizes(sizes: Sequence[int]) -> int:
    """The sum of sizes, open when one of them is."""
    return ANY if ANY in sizes else sum(sizes)


def mul_sizes(sizes: Sequence[int]) -> int:
    """The product of sizes, open when one of them is."""
    return ANY if ANY in sizes else prod(sizes)


def need_ndim(op: str, slot: str, x: TensorType, low: int, high: int | None = None) -> None:
    """Raise ProgramError unless `x` has `low` to `high` axes (exactly `low` when `high` is left out)."""
    high = low if high is None else high
    if not low <= x.ndim <= high:
        want = f"{low}" if high == low else f"{low} to {high}" if high < 99 else f"at least {low}"
        raise ProgramError(f"op {op}: expected {slot} with ndim {want}, found ndim {x.ndim}: {x}")


def need_ids(op: str, slot: str, x: TensorType) -> None:
    """Raise ProgramError unless `x` holds int32 or int64."""
    if x.dtype not in ("int32", "int64"):
        raise ProgramError(f"op {op}: {slot} must be int32 or int64, found {x.dtype}")


def need_dtype(op: str, slot: str, x: TensorType, like: TensorType, like_slot: str) -> None:
    """Raise ProgramError unless two inputs have one dtype."""
    if x.dtype != like.dtype:
        raise ProgramError(f"op {op}: {slot} must have the dtype of {like_slot}, {like.dtype}, found {x.dtype}")


def need_size(op: str, name: str, value: int, least: int) -> None:
    """Raise ProgramError unless an attribute is at least `least`."""
    if value < least:
        raise ProgramError(f"op {op}: attribute {name} must be {least} or more, found {value}")


def check_range(xp: Any, op: str, ids: Any, size: int, what: str) -> None:
    """Raise ExecutionError naming the first id outside [0, size). `ids` is a contiguous int32 or int64 array."""
    if ids.size == 0:
        return
    # read as unsigned, a negative id is a huge one: a single reduction finds both kinds
    unsigned = ids.view(xp.uint64 if ids.itemsize == 8 else xp.uint32)
    if int(unsigned.max()) < size:
        return
    bad = int(ids.reshape(-1)[unsigned.reshape(-1) >= size][0])
    raise ExecutionError(f"op {op}: id {bad} is out of range; {what} has {size} rows, ids go from 0 to {size - 1}")


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
