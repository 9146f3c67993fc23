"""The groups of ranks and the time axes of a program: indices of ranks, canonical placements, and checks of placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ..ir.parts import Coords, bounds, check_placement, flat_range, intervals, local_shape
from ..ir.time_axes import seats, turn_group, turn_groups
from ..ir.types import ANY, Entry, Partial, Placement, Shard, TensorType, show_placement
from .refusal import Refusal

Sets = Sequence[Sequence[int]]


class RankGroups:
    """The groups of all ranks, and the time axes with their turns (iterations). Raises Refusal for invalid groups."""

    def __init__(self, groups: Mapping[str, Sets], world: int, turns: Mapping[str, int] | None = None):
        self.groups, self.world = dict(groups), world
        self.where: dict[str, dict[int, tuple[int, Sequence[int]]]] = {}  # group -> rank -> (index, members)
        self.size: dict[str, int] = {}  # of groups whose sets all have this size
        for name, sets in self.groups.items():
            where: dict[int, tuple[int, Sequence[int]]] = {}
            for members in sets:
                if not members:
                    raise Refusal(f"group {name} has a set without ranks")
                for k, r in enumerate(members):
                    if r in where:
                        raise Refusal(f"group {name} names rank {r} twice")
                    if not 0 <= r < world:
                        raise Refusal(f"group {name} names rank {r}; there are {world} ranks")
                    where[r] = k, members
            self.where[name] = where
            if sets and len({len(s) for s in sets}) == 1:
                self.size[name] = len(sets[0])
        self.axes = dict(turns or {})  # time axes, with their number of turns
        self.turns = dict(turn_groups(self.axes))
        self._declare_turns()
        self._at: dict[int, Coords] = {}
        self._ranks_at: dict[str, dict[int, list[int]]] = {}
        self._canon: dict[tuple[Placement, TensorType], Placement] = {}
        self._units: dict[tuple, int] = {}
        self._inside: dict[tuple[str, str], bool] = {}
        self._along: dict[tuple, bool] = {}
        self._coords: dict[tuple, tuple] = {}

    def _declare_turns(self) -> None:
        """Declare each turn as a group whose sets have one rank, with the turn's index and the size of its axis."""
        alone = tuple((r,) for r in range(self.world)) if self.axes else ()
        for axis, n in self.axes.items():
            if axis in self.groups:
                raise Refusal(f"{axis} is a group of ranks and an axis of time")
            self.groups[axis], self.size[axis], self.where[axis] = alone, n, dict.fromkeys(range(self.world), (0, (0,)))
        for name, turn in self.turns.items():
            if name in self.groups:
                raise Refusal(f"{name} is both a group of ranks and an iteration")
            self.groups[name], self.size[name] = alone, self.axes[turn.axis]
            self.where[name] = dict.fromkeys(range(self.world), (turn.first, (0,)))

    def members(self, group: str, rank: int) -> Sequence[int]:
        """The ranks in the set of a group that has `rank`, in order."""
        if group in self.turns:
            raise Refusal(f"{group} is an iteration, not a group of ranks")
        if group not in self.where:
            listed = ", ".join(self.where) or "none"
            raise Refusal(f"group {group!r} is not declared; declared: {listed}")
        if rank not in self.where[group]:
            raise Refusal(f"rank {rank} is in no set of group {group}")
        return self.where[group][rank][1]

    def ranks_at(self, group: str, index: int) -> Sequence[int]:
        """The ranks that have an index in a group."""
        if group not in self._ranks_at:
            found = self._ranks_at[group] = {}
            for r, (k, _) in self.where[group].items():
                found.setdefault(k, []).append(r)
        return self._ranks_at[group].get(index, ())

    def index(self, group: str, rank: int) -> int:
        return self.where[group][rank][0]

    def coords(self, placement: Placement, rank: int) -> tuple[tuple[str, int], ...]:
        """The rank's index in each group of a placement, without roots. The rank's part of a value depends on these only."""
        key = placement, rank
        found = self._coords.get(key)
        if found is None:
            found = self._coords[key] = tuple([self._coord(e.group, rank) for e in placement if e.root is None])
        return found

    def _coord(self, group: str, rank: int) -> tuple[str, Any]:
        turn = self.turns.get(group)
        if turn is None:
            return group, self.where[group][rank][0]
        return turn.axis, turn.first if turn.first == turn.last else tuple(range(turn.first, turn.last + 1))

    def of_any_turn(self, placement: Placement) -> Placement:
        """A placement with turns replaced by their time axes."""
        if not self.turns or not placement:
            return placement
        return tuple([e.over(self.turns[e.group].axis) if e.group in self.turns else e for e in placement])

    def holds(self, placement: Placement, rank: int) -> bool:
        for e in placement:
            at = self.where[e.group].get(rank)
            if at is None or not e.holds(at[0]):
                return False
        return True

    def sets_at(self, group: str, roots: Placement) -> Sets:
        """The sets of a group whose first rank is at these roots."""
        return [s for s in self.groups[group] if self.holds(roots, s[0])] if roots else self.groups[group]

    def is_subgroup(self, inner: str, outer: str) -> bool:
        """True if every set of `inner` is a proper subset of a set of `outer`."""
        key = inner, outer
        found = self._inside.get(key)
        if found is None:
            of_ranks = not any(g in self.turns or g in self.axes for g in key)
            sets = [set(s) for s in self.groups[outer]] if of_ranks else []
            found = self._inside[key] = of_ranks and inner != outer and all(any(set(s) < o for o in sets) for s in self.groups[inner])
        return found

    def same_index(self, members: Sequence[int], groups: Sequence[str]) -> bool:
        """True if the members have the same index in each of these groups."""
        key = tuple(members), tuple(groups)
        found = self._along.get(key)
        if found is None:
            found = all(len({self.where[g][m][0] if m in self.where.get(g, ()) else -1 for m in members}) == 1 for g in groups) and all(
                m in self.where.get(g, ()) for g in groups for m in members
            )
            self._along[key] = found
        return found

    def of_turns_together(self, placements: Sequence[Placement], op: str) -> Placement | None:
        """The placement of the reduction by `op` of terms that several turns made; None if `placements` are not those of such terms."""
        if len(placements) < 2 or not all(placements):
            return None
        found: list[int] = []
        of = [[e for e in q if e.group in self.turns] for q in placements]
        rest = {tuple([e for e in q if e.group not in self.turns]) for q in placements}
        turns = [self.turns[mine[0].group] for mine in of if len(mine) == 1 and mine[0] == Partial(op, mine[0].group)]
        if len(rest) > 1 or len(turns) < len(placements) or len({t.axis for t in turns}) > 1:
            return None
        for t in turns:
            found += range(t.first, t.last + 1)
        if sorted(found) != list(range(len(found))):  # each turn once, from the first one on
            return None
        axis, n = turns[0].axis, len(found)
        added = next(iter(rest))
        return added if n == self.axes[axis] else (*added, Partial(op, turn_group(axis, 0, n - 1)))

    # -- placements --------------------------------------------------------------------------------------------------

    def canonical(self, placement: Placement, t: TensorType) -> Placement:
        """The canonical form of a placement: equal for placements that give every rank the same part. Raises Refusal if it is invalid."""
        if not placement:
            return placement
        key = placement, t
        found = self._canon.get(key)
        if found is None:
            found = self._canon[key] = self._make_canonical(placement, t)
        return found

    def _make_canonical(self, placement: Placement, t: TensorType) -> Placement:
        if any(e.is_local for e in placement):
            if len(placement) > 1:
                raise Refusal("local cannot be combined with other entries")
            return placement
        for e in placement:
            if e.group not in self.groups:
                raise Refusal(f"{e} names no declared group")
            if e.group not in self.size:
                raise Refusal(f"{e}: the sets of group {e.group} have different sizes, or it has no set")
        self._check_turns(placement)
        wrong = check_placement(t, placement, self.groups, self.world)
        if wrong:
            raise Refusal(wrong)
        if len({e.op for e in placement if e.op}) > 1:
            raise Refusal(f"{show_placement(placement)}: several reductions have no defined order")
        taken: dict[int, int] = {}
        out: list[tuple[tuple, Entry]] = []
        for e in placement:
            if self.size[e.group] == 1 and e.bounds is None:
                continue
            axis = e.axis
            if axis is not None:
                before = taken.get(axis, 0)
                taken[axis] = before + 1
                alone = sum(o.axis == axis for o in placement) == 1
                out.append(((0, axis, before), self._with_one_unit(e, axis, t.shape[axis]) if alone else e))
            else:
                out.append(((1, 0, 0, e.group), e))
        return tuple(e for _, e in sorted(out, key=lambda x: x[0]))

    def _check_turns(self, placement: Placement) -> None:
        axes = [axis for e in placement if (axis := e.group if e.group in self.axes else getattr(self.turns.get(e.group), "axis", ""))]
        for e in placement:
            turn = self.turns.get(e.group)
            if (turn or e.group in self.axes) and e.axis is None and not e.op:
                raise Refusal(f"{e}: over iterations a value must be shard or partial")
            if turn and turn.first < turn.last and not e.op:
                raise Refusal(f"{e}: several iterations together can be partial, not shard")
        if len(set(axes)) < len(axes):
            raise Refusal(f"{show_placement(placement)}: a value belongs to one iteration of an axis")

    def _with_one_unit(self, e: Entry, axis: int, size: int) -> Entry:
        n = self.size[e.group]
        if size == ANY:
            return e
        marks = tuple(bounds(size, n, e.unit))
        return Shard(axis, e.group, self._units.setdefault((size, n, marks), e.unit))

    def _place(self, rank: int) -> Coords:
        found = self._at.get(rank)
        if found is None:
            found = {g: (at[rank][0], len(at[rank][1])) for g, at in self.where.items() if rank in at and g not in self.turns}
            self._at[rank] = found = {**seats(self.axes), **found}
        return found

    def intervals(self, placement: Placement, shape: Sequence[int], rank: int) -> list[tuple[int, int]]:
        """The range of every axis in a rank's part; (0, -1) for an open axis."""
        return intervals(shape, placement, self._place(rank))

    def local_shape(self, placement: Placement, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        return local_shape(shape, placement, self._place(rank))

    def flat_range(self, placement: Placement, shape: Sequence[int], rank: int) -> tuple[int, int] | None:
        """The range of the flattened value that is a rank's part; None if it is not one range, or not known."""
        if partial(placement) or any(e.is_own for e in placement):
            return None
        found = flat_range(placement, self._place(rank))
        if found is not None:
            return found
        if ANY in shape or any(e.axis for e in placement):
            return None
        inner = prod(shape[1:])
        start, stop = self.intervals(placement, shape, rank)[0] if shape else (0, 1)
        return start * inner, stop * inner


def without_roots(placement: Placement) -> Placement:
    return tuple([e for e in placement if e.root is None]) if placement else placement


def partial(placement: Placement) -> bool:
    return any(e.op for e in placement)


def without_terms(placement: Placement) -> Placement:
    return tuple([e for e in placement if not e.op])
