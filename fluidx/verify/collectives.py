"""Collective calls in the proof: the results of the members of a group."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..ir.operator import Operator
from ..ir.parts import entry_of
from ..ir.types import Placement
from .operator_check import OperatorClass
from .rank_values import AllRanks, PerRank, RootRanks
from .refusal import NotHere, Refusal
from .transfer_messages import TRANSFER
from .values import UNDEFINED

if TYPE_CHECKING:
    from .simultaneous_run import SimultaneousRun


class CollectiveCalls:
    """The collective calls of one run of all ranks; `count` is their number."""

    def __init__(self, world: SimultaneousRun):
        self.world, self.rank_values, self.operators = world, world.rank_values, world.operators
        self.mesh, self.table, self.n = world.mesh, world.table, world.n
        self.count = 0
        self._complete_groups: set[str] = set()
        self._same_sets: dict[tuple[str, tuple[str, ...]], bool] = {}

    def members(self, op: Operator, r: int) -> Sequence[int]:
        group = op.attrs.get("group")
        if not isinstance(group, str):
            raise Refusal(f"op {op.type}: group must be a name, found {group!r}")
        return self.mesh.members(group, r)

    def of_all(self, op: Operator, scope: Any) -> bool:
        """Run a collective on all ranks at once. False if values or declarations differ, so that each call must be run by itself."""
        op_class, ins, outs = self.operators.class_of(op, scope)
        self.check(op_class, op)
        group = op.attrs["group"]
        if group not in self._complete_groups:
            for r in range(self.n):
                self.members(op, r)
            self._complete_groups.add(group)
        if not ins and not outs:
            self.count += len(self.mesh.groups[group])
            return True
        if op_class.local or len(ins) != 1 or ins[0] is None or outs[0] is None:
            return False
        try:
            value = self.world.moved_operand(op_class, ins[0], scope, None)
            if not self._all_sets_same(op_class):
                return False
            if isinstance(scope, RootRanks):
                op_class, value = self._at_roots(op_class, op, value, scope.roots)
            made = self.operators.moved(op_class, op, (value,))
        except Refusal:
            if isinstance(scope, AllRanks):
                return False
            raise
        self.count += len(self.mesh.sets_at(group, scope.roots if isinstance(scope, RootRanks) else ()))
        scope.write(outs[0], made)
        return True

    def _at_roots(self, op_class: OperatorClass, op: Operator, value: int, roots: Placement) -> tuple[OperatorClass, int]:
        """The operator class and operand for the ranks at some roots: a replicated operand is also at these roots."""
        given, made = op_class.ins[0], op_class.outs[0]
        assert given is not None and made is not None
        t, place = given
        missing = [e for e in roots if e not in place]
        if not missing:
            return op_class, value
        order = {e.group: k for k, e in enumerate(made[1])}
        there = tuple(sorted([*place, *missing], key=lambda e: order.get(e.group, len(order))))
        op_class = self.operators.classes.of(op, (self.table.signature(t, there),), (made,), op_class.counts)
        if op_class.wrong:
            raise Refusal(op_class.wrong)
        return op_class, self.operators.values.moved(value, self.mesh.canonical(there, t), ("at roots", there))

    def of_equal_ranks(self, op: Operator, scope: Any, rank: int, running: Collection[int]) -> bool:
        """Run a collective of a sub-block on one of the ranks `running`, which have the same values. False if other ranks take part."""
        members = self.members(op, rank)
        if not running or not set(members) <= set(running):
            return False
        op_class, ins, outs = self.operators.class_of(op, scope)
        self.check(op_class, op)
        self.count += rank == members[0]
        if not ins and not outs:
            return True
        if op_class.local or len(ins) != 1 or ins[0] is None or outs[0] is None or not self._same_elsewhere(op_class, members):
            return False
        scope.write(outs[0], self.operators.moved(op_class, op, (self.world.moved_operand(op_class, ins[0], scope, rank),)))
        return True

    def _all_sets_same(self, op_class: OperatorClass) -> bool:
        """True if `_same_elsewhere` holds for every set of the group."""
        key = op_class.attrs["group"], self._others(op_class)
        found = self._same_sets.get(key)
        if found is None:
            found = self._same_sets[key] = all(self._same_elsewhere(op_class, members) for members in self.mesh.groups[key[0]])
        return found

    def _same_elsewhere(self, op_class: OperatorClass, members: Sequence[int]) -> bool:
        """True if the members have the same indices in all other groups of the operand and result."""
        others = self._others(op_class)
        return not others or self.mesh.same_index(members, others)

    @staticmethod
    def _others(op_class: OperatorClass) -> tuple[str, ...]:
        """The groups in the placements of operand and result, without the operator's own group."""
        group = op_class.attrs["group"]
        entries = (e for s in (*op_class.ins, *op_class.outs) if s is not None for e in s[1])
        return tuple(sorted({e.group for e in entries if e.group and e.group != group}))

    def check(self, op_class: OperatorClass, op: Operator) -> None:
        """Raise Refusal if an operator may not communicate here. A program for all ranks may have transfers in block 0."""
        if op_class.definition.control.abstract and (op.type != TRANSFER or self.world.runs_at is None):
            raise Refusal(f"op {op.type} is a placeholder for communication; lower the program first")
        if self.world.declared.single:
            raise Refusal(f"op {op.type} communicates, in the program for one device")

    def of_members(self, members: Sequence[int], ops: Sequence[Operator]) -> None:
        """Run one collective call: as a change of placement if all members have one atom, else as a computation on local values."""
        self.count += 1
        known = [self.operators.class_of(o, PerRank(self.rank_values, m)) for m, o in zip(members, ops, strict=True)]
        op_class = known[0][0]
        self.check(op_class, ops[0])
        if not known[0][1] and not known[0][2]:
            return
        if len(op_class.ins) != 1 or len(op_class.outs) != 1:
            raise Refusal(f"op {ops[0].type} must have one input and one output")
        names: list[tuple[str, str]] = []
        for _, ins, outs in known:
            read, written = ins[0], outs[0]
            if read is None or written is None:
                raise Refusal(f"op {ops[0].type} has no input or no output")
            names.append((read, written))
        if len({k.ins[0][0] for k, _, _ in known if k.ins[0] is not None and not k.local}) > 1:
            listed = ", ".join(dict.fromkeys(str(k.ins[0][0]) for k, _, _ in known if k.ins[0] is not None))
            raise Refusal(f"op {ops[0].type}: its members have operands of different types: {listed}")
        why = ""
        if all(k is op_class for k, _, _ in known) and not op_class.local:
            made = self._moved_at(op_class, ops[0], members, names)
            if isinstance(made, int):
                for (_, out), m in zip(names, members, strict=True):
                    self.rank_values.write(out, m, made)
                return
            why = made
        if not 0 <= op_class.attrs.get("root", 0) < len(members):
            raise Refusal(f"op {ops[0].type}: root {op_class.attrs['root']} is not an index of its group, which has {len(members)} ranks")
        self._computed(known, members, ops, names, why)

    def _moved_at(self, op_class: OperatorClass, op: Operator, members: Sequence[int], names: Sequence[tuple]) -> int | str:
        """The atom of the members' results, or why the call is not a change of placement."""
        s = op_class.ins[0]
        assert s is not None
        if not self._same_elsewhere(op_class, members):
            return "its members have different indices in other groups"
        placement = self.mesh.canonical(s[1], s[0])
        entry = entry_of(placement, op.attrs["group"])
        found = set()
        for (n, _), m in zip(names, members, strict=True):
            if entry is not None and not entry.holds(self.mesh.index(entry.group, m)):
                continue
            try:
                value = self.rank_values.read(n, m)
            except Refusal as e:
                if isinstance(e, NotHere) and self._is_only_received(op_class, m):
                    continue
                return str(e)
            if value >= 0:
                found.add(value)
        if len(found) != 1:
            values = "; ".join(self.operators.describe(v) for v in list(found)[:2])
            return f"its members have different values: {values}"
        try:
            return self.operators.moved(op_class, op, (found.pop(),))
        except Refusal as e:
            return str(e)

    def _is_only_received(self, op_class: OperatorClass, rank: int) -> bool:
        """True for a rank that only receives: the operand of a broadcast need not be defined there."""
        index = self.mesh.index(op_class.attrs["group"], rank)
        return op_class.definition.comm.algorithm_method == "spread" and index != op_class.attrs.get("root", rank)

    def _computed(self, known: Sequence[tuple], members: Sequence[int], ops: Sequence[Operator], names: Sequence[tuple], why: str) -> None:
        """Run one collective call by what it computes from the members' local values (`Rewrite.meaning`)."""
        definition = known[0][0].definition
        xs: list[int | None] = []
        reason = why
        for (op_class, _, _), m, (n, _) in zip(known, members, names, strict=True):
            try:
                xs.append(self.operators.local_expression(op_class.ins[0], self.rank_values.read(n, m), m))
            except Refusal as e:
                entry = entry_of(op_class.ins[0][1], op_class.attrs["group"])
                reads = entry is None or entry.holds(self.mesh.index(entry.group, m))
                if reads and not (isinstance(e, NotHere) and self._is_only_received(op_class, m)):
                    raise Refusal(f"op {definition.name} on rank {m}: {e}") from None
                reason = reason or str(e)
                xs.append(None)
        shapes = {self.operators.local_type(k.ins[0], m) for (k, _, _), m in zip(known, members, strict=True)}
        if "bounds" not in known[0][0].attrs and len(shapes) > 1:
            raise Refusal(f"op {definition.name}: its members have operands of different shapes: {', '.join(sorted(map(str, shapes)))}")
        if definition.rewrite.meaning is None:
            raise Refusal(f"op {definition.name}: {reason or 'the proof does not know what it computes'}")
        for index, ((op_class, _, _), m, (_, out)) in enumerate(zip(known, members, names, strict=True)):
            local = self.operators.local_type(op_class.outs[0], m)
            try:
                made = definition.rewrite.meaning(self.table, xs, local, index, **ops[index].attrs)
                if made is None:
                    raise Refusal("the proof does not know what it computes")
                value = UNDEFINED if made == self.table.nothing else self.operators.as_stored(made, op_class.outs[0], m)
            except Refusal as e:
                first = f"{reason}; " if reason and reason != str(e) else ""
                raise Refusal(f"op {definition.name}, %{out} on rank {m}: {first}{e}") from None
            self.rank_values.write(out, m, value)
