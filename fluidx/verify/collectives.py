"""Collectives: what the members of a group get from each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..ir.operator import Operator
from ..ir.parts import entry_of
from ..ir.types import Placement
from .operator_check import OperatorClass
from .rank_values import AllRanks, PerRank, RootRanks
from .refusal import NotHere, Refusal
from .values import UNDEFINED

if TYPE_CHECKING:
    from .simultaneous_run import SimultaneousRun


class Meetings:
    """The collectives of a world of ranks."""

    def __init__(self, world: SimultaneousRun):
        self.world, self.held, self.operators = world, world.held, world.operators
        self.mesh, self.table, self.n = world.mesh, world.table, world.n
        self.count = 0
        self._everybody_in: set[str] = set()
        self._sets_along: dict[tuple[str, tuple[str, ...]], bool] = {}

    def members(self, op: Operator, r: int) -> Sequence[int]:
        group = op.attrs.get("group")
        if not isinstance(group, str):
            raise Refusal(f"op {op.type}: group must be a name, found {group!r}")
        return self.mesh.members(group, r)

    def of_all(self, op: Operator, scope: Any) -> bool:
        """A collective that all ranks run on values that all hold alike; False where they must be looked at one by one."""
        kind, ins, outs = self.operators.kind(op, scope)
        self.check(kind, op)
        group = op.attrs["group"]
        if group not in self._everybody_in:
            for r in range(self.n):
                self.members(op, r)
            self._everybody_in.add(group)
        if not ins and not outs:
            self.count += len(self.mesh.groups[group])
            return True
        if kind.local or len(ins) != 1 or ins[0] is None or outs[0] is None:
            return False
        try:
            value = self.world.moving(kind, ins[0], scope, None)
            if not self._all_along(kind):
                return False
            if isinstance(scope, RootRanks):
                kind, value = self._at_roots(kind, op, value, scope.roots)
            made = self.operators.moved(kind, op, (value,))
        except Refusal:
            if isinstance(scope, AllRanks):
                return False
            raise
        sets = self.mesh.groups[group]
        self.count += sum(self.mesh.holds(scope.roots, s[0]) for s in sets) if isinstance(scope, RootRanks) else len(sets)
        scope.write(outs[0], made)
        return True

    def _at_roots(self, kind: OperatorClass, op: Operator, value: int, roots: Placement) -> tuple[OperatorClass, int]:
        """The operator and its operand among the ranks at some roots: what all ranks have is at these roots too."""
        given, made = kind.ins[0], kind.outs[0]
        assert given is not None and made is not None
        t, place = given
        missing = [e for e in roots if e not in place]
        if not missing:
            return kind, value
        order = {e.group: k for k, e in enumerate(made[1])}
        there = tuple(sorted([*place, *missing], key=lambda e: order.get(e.group, len(order))))
        kind = self.operators.kinds.of(op, (self.table.signature(t, there),), (made,), kind.counts)
        if kind.wrong:
            raise Refusal(kind.wrong)
        return kind, self.operators.values.moved(value, self.mesh.canonical(there, t), ("at roots", there))

    def of_alike(self, op: Operator, scope: Any, rank: int, running: Collection[int]) -> bool:
        """A collective in a block, on one of the ranks that run it with the same values: what it gets; False where others belong to it."""
        members = self.members(op, rank)
        if not running or not set(members) <= set(running):
            return False
        kind, ins, outs = self.operators.kind(op, scope)
        self.check(kind, op)
        self.count += rank == members[0]
        if not ins and not outs:
            return True
        if kind.local or len(ins) != 1 or ins[0] is None or outs[0] is None or not self._along(kind, members):
            return False
        scope.write(outs[0], self.operators.moved(kind, op, (self.world.moving(kind, ins[0], scope, rank),)))
        return True

    def _all_along(self, kind: OperatorClass) -> bool:
        """Do the members of each set differ in nothing but their index in the group?"""
        key = kind.attrs["group"], self._others(kind)
        found = self._sets_along.get(key)
        if found is None:
            found = self._sets_along[key] = all(self._along(kind, members) for members in self.mesh.groups[key[0]])
        return found

    def _along(self, kind: OperatorClass, members: Sequence[int]) -> bool:
        """Do the members differ in nothing but their index in the group?"""
        others = self._others(kind)
        return not others or self.mesh.along(members, others)

    @staticmethod
    def _others(kind: OperatorClass) -> tuple[str, ...]:
        """The groups that an operator's operand and result lie over, but for its own."""
        group = kind.attrs["group"]
        return tuple(sorted({e.group for s in (*kind.ins, *kind.outs) if s is not None for e in s[1] if e.group and e.group != group}))

    def check(self, kind: OperatorClass, op: Operator) -> None:
        if kind.definition.abstract:
            raise Refusal(f"op {op.type} is a placeholder for communication; lower the program first")
        if self.world.declared.single:
            raise Refusal(f"op {op.type} communicates, in the program for one device")

    def of_members(self, members: Sequence[int], ops: Sequence[Operator]) -> None:
        """One collective, by what it moves where all members hold the same value, and else by what it computes."""
        self.count += 1
        known = [self.operators.kind(o, PerRank(self.held, m)) for m, o in zip(members, ops, strict=True)]
        kind = known[0][0]
        self.check(kind, ops[0])
        if not known[0][1] and not known[0][2]:
            return
        if len(kind.ins) != 1 or len(kind.outs) != 1:
            raise Refusal(f"op {ops[0].type} has not one input and one output")
        names: list[tuple[str, str]] = []
        for _, ins, outs in known:
            read, written = ins[0], outs[0]
            if read is None or written is None:
                raise Refusal(f"op {ops[0].type} is written without its input or output")
            names.append((read, written))
        if len({k.ins[0][0] for k, _, _ in known if k.ins[0] is not None and not k.local}) > 1:
            listed = ", ".join(dict.fromkeys(str(k.ins[0][0]) for k, _, _ in known if k.ins[0] is not None))
            raise Refusal(f"op {ops[0].type}: its members bring values of different types: {listed}")
        why = ""
        if all(k is kind for k, _, _ in known) and not kind.local:
            made = self._moved_at(kind, ops[0], members, names)
            if isinstance(made, int):
                for (_, out), m in zip(names, members, strict=True):
                    self.held.write(out, m, made)
                return
            why = made
        if not 0 <= kind.attrs.get("root", 0) < len(members):
            raise Refusal(f"op {ops[0].type}: root {kind.attrs['root']} is no rank of its group, which has {len(members)}")
        self._computed(known, members, ops, names, why)

    def _moved_at(self, kind: OperatorClass, op: Operator, members: Sequence[int], names: Sequence[tuple]) -> int | str:
        """The atom that a collective hands to its members, or why it is not a move."""
        s = kind.ins[0]
        assert s is not None
        if not self._along(kind, members):
            return "its members differ in more than their index"
        placement = self.mesh.canonical(s[1], s[0])
        entry = entry_of(placement, op.attrs["group"])
        found = set()
        for (n, _), m in zip(names, members, strict=True):
            if entry is not None and not entry.holds(self.mesh.index(entry.group, m)):
                continue
            try:
                value = self.held.read(n, m)
            except Refusal as e:
                if isinstance(e, NotHere) and self._is_only_received(kind, m):
                    continue
                return str(e)
            if value >= 0:
                found.add(value)
        if len(found) != 1:
            said = "; ".join(self.operators.describe(v) for v in list(found)[:2])
            return f"its members hold different values: {said}"
        try:
            return self.operators.moved(kind, op, (found.pop(),))
        except Refusal as e:
            return str(e)

    def _is_only_received(self, kind: OperatorClass, rank: int) -> bool:
        """Is it a broadcast from another rank, which may have a value that lies elsewhere over a larger group?"""
        return kind.definition.algorithm_method == "spread" and self.mesh.index(kind.attrs["group"], rank) != kind.attrs.get("root", rank)

    def _computed(self, known: Sequence[tuple], members: Sequence[int], ops: Sequence[Operator], names: Sequence[tuple], why: str) -> None:
        """A collective on what each member holds for itself."""
        definition = known[0][0].definition
        xs: list[int | None] = []
        reason = why
        for (kind, _, _), m, (n, _) in zip(known, members, names, strict=True):
            try:
                xs.append(self.operators.plain(kind.ins[0], self.held.read(n, m), m))
            except Refusal as e:
                entry = entry_of(kind.ins[0][1], kind.attrs["group"])
                reads = entry is None or entry.holds(self.mesh.index(entry.group, m))
                if reads and not (isinstance(e, NotHere) and self._is_only_received(kind, m)):
                    raise Refusal(f"op {definition.name} on rank {m}: {e}") from None
                reason = reason or str(e)
                xs.append(None)
        shapes = {self.operators.local_type(k.ins[0], m) for (k, _, _), m in zip(known, members, strict=True)}
        if "bounds" not in known[0][0].attrs and len(shapes) > 1:
            raise Refusal(f"op {definition.name}: its members bring {', '.join(sorted(map(str, shapes)))}, which are not of one shape")
        if definition.meaning is None:
            raise Refusal(f"op {definition.name}: {reason or 'the proof does not know what it computes'}")
        for index, ((kind, _, _), m, (_, out)) in enumerate(zip(known, members, names, strict=True)):
            local = self.operators.local_type(kind.outs[0], m)
            try:
                made = definition.meaning(self.table, xs, local, index, **ops[index].attrs)
                if made is None:
                    raise Refusal("the proof does not know what it computes")
                value = UNDEFINED if made == self.table.nothing else self.operators.stored(made, kind.outs[0], m)
            except Refusal as e:
                said = f"{reason}; " if reason and reason != str(e) else ""
                raise Refusal(f"op {definition.name}, %{out} on rank {m}: {said}{e}") from None
            self.held.write(out, m, value)
