"""How a redistribute becomes communication operators: the steps from one placement to another, one group at a time."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from ...ir.errors import TranspileError
from ...ir.parts import entry_of
from ...ir.types import At, Entry, Own, Partial, Pieces, Placement, Shard, show_placement
from ..cluster import SERVERS


class RedistributionStep(NamedTuple):
    """One operator, and where the value lies behind it."""

    type: str
    attrs: dict[str, Any]
    after: Placement


def collective(old: Entry | None, new: Entry | None, group: str) -> list[tuple[str, dict[str, Any], Entry | None]]:
    """(operator, attributes, entry behind it) for one group: one collective, or two where none does it alone."""
    g: dict[str, Any] = {"group": group}
    if isinstance(old, Partial):
        if new is None:
            return [("all_reduce", {**g, "op": old.op}, None)]
        if isinstance(new, At):
            return [("reduce", {**g, "op": old.op, "root": new.root}, new)]
        if isinstance(new, (Shard, Pieces)):
            return [("reduce_scatter", {**g, "op": old.op, **_cut(new)}, new)]
    if old is None:
        if isinstance(new, (Shard, Pieces)):
            return [("part", {**g, **_cut(new)}, new)]
        if isinstance(new, Partial) and new.op == "sum":
            return [("own_term", {**g, "root": 0}, new)]
        if isinstance(new, (At, Own)):
            return [("assign", {}, new)]  # every rank has it, so the root has
    if isinstance(old, At):
        if isinstance(new, At):
            return [("transfer", {**g, "root": old.root, "to": new.root}, new)]
        if isinstance(new, Partial) and new.op == "sum":
            return [("own_term", {**g, "root": old.root}, new)]
        return _then(("broadcast", {**g, "root": old.root}, None), new, group)
    if isinstance(old, Shard) and isinstance(new, Shard) and old.axis != new.axis:
        attrs = {**g, "axis": old.axis, "unit": old.unit, "to_axis": new.axis, "to_unit": new.unit}
        return [("all_to_all", attrs, new)]
    if isinstance(old, (Shard, Pieces)):
        return _then(("all_gather", {**g, **_cut(old)}, None), new, group)
    raise TranspileError(f"there is no way from {old} to {new} over {group}")


def in_turns(old: Entry | None, new: Entry | None, group: str) -> list[tuple[str, dict[str, Any], Entry | None]]:
    """Over an axis of time a rank has all parts and terms, one after the other: an all_reduce adds up what the turns make.

    What is cut is made whole as a sum of parts among zeros: it happens where a value is needed whole that is large, so hardly ever.
    """
    g: dict[str, Any] = {"group": group}
    if isinstance(old, Shard) and old != new:
        owed = Partial("sum", group)
        return [("pad_part", {**g, **_cut(old)}, owed), *in_turns(owed, new, group)]
    if isinstance(old, Partial) and new is not None and old != new:
        return [*in_turns(old, None, group), *in_turns(None, new, group)]
    return collective(old, new, group)


def _then(first: tuple[str, dict[str, Any], Entry | None], new: Entry | None, group: str) -> list[tuple[str, dict[str, Any], Entry | None]]:
    return [first] if new is None else [first, *collective(None, new, group)]


def _cut(e: Shard | Pieces) -> dict[str, Any]:
    return {"bounds": e.bounds} if isinstance(e, Pieces) else {"axis": e.axis, "unit": e.unit}


def _served(old: Placement, new: Placement, axes: Mapping[str, int], turns: Container[str]) -> RedistributionStep | None:
    """From terms of the trainers to servers, or from servers to copies for all trainers; None for other ways."""
    (trainers,) = [g for g in axes if g != SERVERS and g not in turns]
    attrs: dict[str, Any] = {"group": SERVERS, "trainers": trainers}
    match old, new:
        case (Partial("sum"),), (At() | Pieces() as e,) if old[0].group == trainers and e.group == SERVERS:
            return RedistributionStep("push", attrs | _ends(e), new)
        case (), (At() | Pieces() as e,) if e.group == SERVERS:  # made of what trainers pulled, it may be theirs alone
            return RedistributionStep("push", attrs | _ends(e) | {"same": True}, new)
        case (At() | Pieces() as e,), () if e.group == SERVERS:
            return RedistributionStep("pull", attrs | _ends(e), new)
    return None


def _ends(e: At | Pieces) -> dict[str, Any]:
    return {"bounds": e.bounds} if isinstance(e, Pieces) else {"root": e.root}


def steps(old: Placement, new: Placement, axes: Mapping[str, int], turns: Container[str] = ()) -> list[RedistributionStep]:
    """The operators from `old` to `new`: what is cut inside is joined first, what is cut outside is cut first. `turns` are axes of time.

    Of two cuts of one axis the inner one cuts what the outer one leaves: it is undone before the outer one changes and made again behind.

    >>> [s.type for s in steps((Partial("sum", "dp"),), (), {"dp": 2})]
    ['all_reduce']
    >>> [s.type for s in steps((Shard(0, "tp"), Shard(0, "dp")), (Shard(0, "dp"),), {"tp": 2, "dp": 2})]
    ['all_gather', 'all_gather', 'part']
    """
    if SERVERS in axes and (served := _served(old, new, axes, turns)) is not None:
        return [served]
    if SERVERS in axes and (done := tuple([e for e in old if e.group not in turns])) != old and entry_of(new, SERVERS):
        return [*steps(old, done, axes, turns), *steps(done, new, axes, turns)]  # terms of turns are added up where they were made
    have = {e.group: e for e in old}
    want = {e.group: e for e in new}
    order = list(axes)
    out: list[RedistributionStep] = []

    def emit(group: str, target: Entry | None) -> None:
        for type_, attrs, entry in (in_turns if group in turns else collective)(have.get(group), target, group):
            if entry is None:
                have.pop(group, None)
            else:
                have[group] = entry
            out.append(RedistributionStep(type_, attrs, tuple(have[g] for g in order if g in have)))

    def waits(group: str, axis: int) -> bool:
        """Is a cut of this axis outside of the group's still to change?"""
        outside = [o for o in order[: order.index(group)] if have.get(o) != want.get(o)]
        return any(isinstance(e, Shard) and e.axis == axis for o in outside for e in (have.get(o), want.get(o)))

    def rank(group: str) -> int:
        """Flat ranges stand beside nothing else: they are joined first, and terms are reduced into them last."""
        return isinstance(have.get(group), Partial) and isinstance(want.get(group), Pieces) or -isinstance(have.get(group), Pieces)

    inward = order[::-1]
    for g in sorted(inward, key=rank):
        mine, target = have.get(g), want.get(g)
        if isinstance(target, Shard) and waits(g, target.axis) or isinstance(target, Pieces) and not isinstance(mine, Partial):
            target = None
        if mine is not None and mine != target:
            emit(g, target)
    for g in order:
        if have.get(g) != want.get(g):
            emit(g, want.get(g))
    if tuple(have[g] for g in order if g in have) != new:
        raise TranspileError(f"there is no way from {show_placement(old)} to {show_placement(new)}")
    return out
