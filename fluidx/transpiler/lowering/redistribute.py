"""Lower a redistribute: the communication operators that lead from one placement to another, one group at a time."""

from __future__ import annotations

from collections.abc import Container, Mapping
from types import NoneType
from typing import Any, NamedTuple

from ...ir.entries import axis_of
from ...ir.errors import TranspileError
from ...ir.parts import entry_of
from ...ir.types import At, Entry, Own, Partial, Pieces, Placement, Shard, show_placement
from ..cluster import SERVERS


class RedistributionStep(NamedTuple):
    """One operator, and the placement of the value after it."""

    type: str
    attrs: dict[str, Any]
    after: Placement


# The operator that changes the entry of one group into another, by the classes of the two; NoneType is replicated. Other changes go through
# the replicated value.
_OPERATORS = {
    (Partial, NoneType): "all_reduce",
    (Partial, At): "reduce",
    (Partial, Shard): "reduce_scatter",
    (Partial, Pieces): "reduce_scatter",
    (NoneType, Shard): "part",
    (NoneType, Pieces): "part",
    (NoneType, Partial): "own_term",
    (NoneType, At): "assign",  # every rank has it, so the root has
    (NoneType, Own): "assign",
    (At, NoneType): "broadcast",
    (At, At): "transfer",
    (At, Shard): "scatter_parts",
    (At, Pieces): "scatter_parts",
    (At, Partial): "own_term",
    (Shard, NoneType): "all_gather",
    (Shard, At): "gather_parts",
    (Shard, Shard): "all_to_all",
    (Pieces, NoneType): "all_gather",
    (Pieces, At): "gather_parts",
}


def collective(old: Entry | None, new: Entry | None, group: str) -> list[tuple[str, dict[str, Any], Entry | None]]:
    """(operator, attributes, entry after it) for one group: one collective, or two if no single one can do it."""
    type_ = _OPERATORS.get((type(old), type(new)))
    had = old.attrs() if old is not None else {}
    wanted = new.attrs() if new is not None else {}
    if type_ == "own_term":  # a term that is the value on one rank and zero on the others
        type_ = type_ if wanted["op"] == "sum" else None
        had, wanted = had or {"root": 0}, {}
    elif type_ == "assign":
        return [(type_, {}, new)]
    elif type_ == "transfer":
        wanted = {"to": wanted["root"]}
    elif type_ == "all_to_all":
        type_ = type_ if had["axis"] != wanted["axis"] else None  # other blocks of the same axis: gather, then cut
        wanted = {f"to_{name}": value for name, value in wanted.items()}
    if type_ is not None:
        return [(type_, {"group": group, **had, **wanted}, new)]
    if old is None or new is None or (type(old), NoneType) not in _OPERATORS or old.op:
        raise TranspileError(f"there is no way from {old} to {new} over {group}")
    return [*collective(old, None, group), *collective(None, new, group)]


def in_turns(old: Entry | None, new: Entry | None, group: str) -> list[tuple[str, dict[str, Any], Entry | None]]:
    """The same for a time axis. A rank has all parts and terms, one after the other; an all_reduce adds up the values of the turns. A value
    that is cut is gathered as a sum of parts padded with zeros. This is rare: it is only needed if an operator reads a large value that is
    not cut.
    """
    if old is not None and old.axis is not None and old != new:
        owed = Partial("sum", group)
        return [("pad_part", {"group": group, **old.attrs()}, owed), *in_turns(owed, new, group)]
    if old is not None and old.op and new is not None and old != new:
        return [*in_turns(old, None, group), *in_turns(None, new, group)]
    return collective(old, new, group)


def _served(old: Placement, new: Placement, axes: Mapping[str, int], turns: Container[str]) -> RedistributionStep | None:
    """The step from partial sums on trainers to servers, or from servers to copies on all trainers; None for other changes."""
    (trainers,) = [g for g in axes if g != SERVERS and g not in turns]
    attrs: dict[str, Any] = {"group": SERVERS, "trainers": trainers}
    match old, new:
        case (Partial("sum"),), (At() | Pieces() as e,) if old[0].group == trainers and e.group == SERVERS:
            return RedistributionStep("push", attrs | e.attrs(), new)
        case (), (At() | Pieces() as e,) if e.group == SERVERS:  # computed from pulled values, so only trainers may have it
            return RedistributionStep("push", attrs | e.attrs() | {"same": True}, new)
        case (At() | Pieces() as e,), () if e.group == SERVERS:
            return RedistributionStep("pull", attrs | e.attrs(), new)
    return None


def _one_group(old: Placement, new: Placement, axes: Mapping[str, int], turns: Container[str]) -> str:
    """The group over which two placements with at most one entry differ; "" if there are several, or if it is a time axis."""
    if not old and not new or old and new and old[0].group != new[0].group:
        return ""
    group = (old or new)[0].group
    return group if group in axes and group not in turns and SERVERS not in axes and old != new else ""


def steps(old: Placement, new: Placement, axes: Mapping[str, int], turns: Container[str] = ()) -> list[RedistributionStep]:
    """The operators from `old` to `new`: inner cuts are gathered first, outer cuts are made first. `turns` are time axes. If two groups cut
    one axis, the inner group cuts the parts of the outer one: the inner cut is undone before the outer one changes, and made again
    afterwards.

    >>> [s.type for s in steps((Partial("sum", "dp"),), (), {"dp": 2})]
    ['all_reduce']
    >>> [s.type for s in steps((Shard(0, "tp"), Shard(0, "dp")), (Shard(0, "dp"),), {"tp": 2, "dp": 2})]
    ['all_gather', 'all_gather', 'part']
    """
    if SERVERS in axes and (served := _served(old, new, axes, turns)) is not None:
        return [served]
    if SERVERS in axes and (done := tuple([e for e in old if e.group not in turns])) != old and entry_of(new, SERVERS):
        return [*steps(old, done, axes, turns), *steps(done, new, axes, turns)]  # terms of turns are added up in their own placement
    out: list[RedistributionStep] = []
    if len(old) < 2 and len(new) < 2 and (group := _one_group(old, new, axes, turns)):
        after = old
        for type_, attrs, entry in collective(next(iter(old), None), next(iter(new), None), group):
            after = () if entry is None else (entry,)
            out.append(RedistributionStep(type_, attrs, after))
        if after == new:
            return out
        out.clear()
    have = {e.group: e for e in old}
    want = {e.group: e for e in new}
    order = list(axes)

    def emit(group: str, target: Entry | None) -> None:
        for type_, attrs, entry in (in_turns if group in turns else collective)(have.get(group), target, group):
            if entry is None:
                have.pop(group, None)
            else:
                have[group] = entry
            out.append(RedistributionStep(type_, attrs, tuple(have[g] for g in order if g in have)))

    def waits(group: str, axis: int) -> bool:
        """Must an outer cut of this axis still change?"""
        outside = [o for o in order[: order.index(group)] if have.get(o) != want.get(o)]
        return any(axis_of(e) == axis for o in outside for e in (have.get(o), want.get(o)))

    def rank(group: str) -> int:
        """The order of groups. A value with flat ranges has no other entry: they are gathered first, and sums are scattered into them
        last."""
        mine, target = have.get(group), want.get(group)
        if mine is None:
            return 0
        return int(bool(mine.op) and _is_flat(target)) - _is_flat(mine)

    inward = order[::-1]
    for g in sorted(inward, key=rank):
        mine, target = have.get(g), want.get(g)
        if target is not None and target.axis is not None and waits(g, target.axis) or _is_flat(target) and not (mine and mine.op):
            target = None
        if mine is not None and mine != target:
            emit(g, target)
    for g in order:
        if have.get(g) != want.get(g):
            emit(g, want.get(g))
    if tuple(have[g] for g in order if g in have) != new:
        raise TranspileError(f"there is no way from {show_placement(old)} to {show_placement(new)}")
    return out


def _is_flat(e: Entry | None) -> bool:
    return e is not None and e.bounds is not None
