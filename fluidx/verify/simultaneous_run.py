"""All rank programs at once. What all ranks do alike is done once, for all of them; where they differ, each rank goes by itself until the
next operator that they have in common. Sends are taken to wait for their receives."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from ..ir.change_stamps import Twins
from ..ir.entries import is_local
from ..ir.errors import VerifyError
from ..ir.opdef import OPS, Effect
from ..ir.operator import Operator
from ..ir.parts import entry_of
from ..ir.program import Block, Program
from ..ir.sub_blocks import bodies
from ..ir.text import ALWAYS_SHOWN
from ..ir.types import Entry, Placement, show_placement
from .branches import Branches
from .collectives import Meetings
from .declarations import Declarations
from .mesh import RankGroups
from .operator_check import OperatorClass, OperatorClasses
from .operator_meaning import NameScope, Operators
from .rank_classes import Programs, collectives, touched
from .rank_program import RunsAt
from .rank_values import AllRanks, Holdings, PerRank, RootRanks, rank_of
from .refusal import NotHere, NotYet, Refusal, fail
from .send_recv import Messages, handed_on
from .started import Started
from .sub_blocks import Control
from .values import EMPTY, UNDEFINED, ProgramValues


class SimultaneousRun:
    """One program of every rank, run on what the ranks' variables mean. `twins` are those that say the same. `by_roots`: it is one program
    for all ranks, and an operator whose results are at roots runs there alone."""

    def __init__(
        self,
        values: ProgramValues,
        mesh: RankGroups,
        programs: Sequence[Program],
        twins: Twins,
        started: Started | None,
        single: bool = False,
        loose: set[tuple] | None = None,
        outside: SimultaneousRun | None = None,
        kept: Collection[str] | None = None,
        by_roots: bool = False,
    ):
        self.runs_at = RunsAt(programs[0].groups, programs[0].global_block().descs) if by_roots else None
        self.mesh, self.table, self.programs, self.n, self.twins = mesh, values.table, programs, len(programs), twins
        self.declared = Declarations(mesh, values.table, programs, twins, single)
        self.said = Programs(programs, twins, values.table, kept)
        self._at: dict[Placement, int] = {}  # how many ranks are at some roots
        self._whole_sets: set[tuple[Placement, str]] = set()  # roots at which all ranks of a set of a group are, or none
        self.held: Holdings = Holdings(values, self.declared, started, 0 if outside is None else outside.held.depth + 1)
        self.kinds: OperatorClasses = OperatorClasses(mesh, values.table, loose, single) if outside is None else outside.kinds
        self.operators: Operators = Operators(values, self.kinds) if outside is None else outside.operators
        self.control = Control(self.operators, self._inner, single)
        self.branches, self.within = Branches(self), outside is not None
        self.meetings = Meetings(self)
        self.messages = Messages(self)
        self.operators_at_roots = 0  # that ranks at other roots do not run, counted for each such rank
        self.running: frozenset[int] = frozenset()  # ranks that run a block which communicates, and hold the same values
        self._kinds: dict[int, tuple[OperatorClass, Sequence[str | None], Sequence[str | None]]] = {}

    def inside(self, programs: Sequence[Program], twins: Twins, kept: Collection[str]) -> SimultaneousRun:
        """A world of what each rank runs in one branch of an operator of this one."""
        return SimultaneousRun(self.operators.values, self.mesh, programs, twins, self.held.started, outside=self, kept=kept)

    def dissolve(self) -> None:
        """Forget everything, at the end: its parts know each other, and the collector would look through all values to find that out."""
        if not self.within:  # branches share what their world knows
            vars(self.operators.values).clear()
        for part in (self.control, self.branches, self.meetings, self.messages, self):
            vars(part).clear()

    def run(self) -> None:
        ops = [op for op, _ in self.said.ops]
        for c in self.said.classes:
            found = handed_on(ops, c.codes, self.said.is_message)
            if found is not None:
                k, n = found
                raise fail(
                    c.program, k, f"%{n} is received in the batch that this operator belongs to: the sends of a batch are posted first"
                )
        everyone = AllRanks(self.held)
        k = 0
        while True:
            k = self._apart(k)
            if k >= self.said.length:
                return
            self._together(k, everyone)
            k += 1

    def _together(self, k: int, scope: AllRanks) -> None:
        first = self.said.classes[0]
        code = first.codes[first.common[k]]
        op, program = self.said.ops[code]
        try:
            if k in self.said.unlike:
                self.branches.of_all(op, scope)
                return
            if self.runs_at is not None:
                scope = self._at_roots(op, self.runs_at.of(op), scope)
            if self._shareable(op, program):
                definition = OPS.get(op.type)
                if definition is not None and definition.effect is Effect.COLLECTIVE:
                    if self.meetings.of_all(op, scope):
                        return
                else:
                    try:
                        self.operator(op, scope, program, program.global_block(), code)
                        return
                    except NotHere:
                        pass  # some rank may have it, or no rank may need the result
            self._everyone(k, code, op, program, scope)
        except Refusal as e:
            raise fail(first.program, first.common[k], str(e)) from None
        except VerifyError:
            raise
        except Exception as e:
            raise fail(first.program, first.common[k], f"op {op.type} cannot be looked through: {type(e).__name__}: {e}") from None

    def _at_roots(self, op: Operator, roots: Placement, scope: AllRanks) -> AllRanks:
        """The ranks that run an operator of the program for all ranks. Raises Refusal where its results are said to be on others too, or
        a collective would have some ranks of a set alone."""
        communicates = op.type in OPS and OPS[op.type].move is not None
        group = op.attrs.get("group", "") if communicates else ""
        for n in op.output_arg_names:
            found = [e for e in self.declared.signatures[n][1] if e.root is not None]
            if found != [*roots] and not (communicates and self._only_at(roots, found)):
                raise Refusal(f"op {op.type} runs at {show_placement(roots)}, and its result %{n} is {show_placement(tuple(found))}")
        if not roots:
            return scope
        if group and (roots, group) not in self._whole_sets:
            for members in self.mesh.groups.get(group, ()):
                if len({self.mesh.holds(roots, r) for r in members}) > 1:
                    raise Refusal(f"op {op.type} runs at {show_placement(roots)}, where some ranks of {list(members)} are and some are not")
            self._whole_sets.add((roots, group))
        scope = RootRanks(self.held, roots)
        self.operators_at_roots += self.n - self._ranks_at(roots)
        return scope

    def _ranks_at(self, roots: Placement) -> int:
        found = self._at.get(roots)
        if found is None:
            (first, *more) = roots
            if more or first.group not in self.mesh.groups or first.group in self.mesh.turns:
                found = sum(self.mesh.holds(roots, r) for r in range(self.n))
            else:
                found = sum(first.root < len(members) for members in self.mesh.groups[first.group])  # type: ignore[operator]
            self._at[roots] = found
        return found

    def _only_at(self, roots: Placement, found: Sequence[Entry]) -> bool:
        """Is what is at the roots `found` on no other ranks than those at `roots`?"""
        if all(e in found for e in roots):
            return True
        there = tuple(found)
        return bool(found) and all(self.mesh.holds(roots, r) for r in range(self.n) if self.mesh.holds(there, r))

    def _everyone(self, k: int, code: int, op: Operator, program: Program, scope: AllRanks) -> None:
        """An operator that all ranks have, or all at some roots, on each rank's own values."""
        definition = OPS.get(op.type)
        ranks: Sequence[int] = range(self.n)
        if isinstance(scope, RootRanks):
            ranks = [r for r in ranks if self.mesh.holds(scope.roots, r)]
        if definition is not None and definition.effect is Effect.COLLECTIVE:
            done: set[int] = set()
            for r in ranks:
                if r not in done:
                    members = self.meetings.members(op, r)
                    done.update(members)
                    self.meetings.of_members(members, [op] * len(members))
            return
        for r in ranks:
            try:
                self._by_itself(r, self.said.of[r].common[k], op, program, code)
            except Refusal as e:
                raise Refusal(f"rank {r}: {e}") from None

    def _shareable(self, op: Operator, program: Program) -> bool:
        own, differs = self.held.own, self.declared.differs
        if not own and not differs and not self.declared.has_local:
            return True
        for n in op.input_arg_names:
            if n in own or n in differs:
                return False
        if op.type not in OPS or not OPS[op.type].bodies:
            return self._lie_together(op)
        for body in bodies(op):
            named = op.attrs.get(body.results_attr, ())
            if any(n in own or n in differs for n in named if isinstance(n, str)):
                return False
        if not self._lie_together(op):
            return False
        for b in op.sub_blocks():
            names = touched(program, b)
            if not own.keys().isdisjoint(names) or not differs.keys().isdisjoint(names):
                return False
        return True

    def _lie_together(self, op: Operator) -> bool:
        differs, signatures = self.declared.differs, self.declared.signatures
        return not any(n in differs or ((s := signatures.get(n)) is not None and is_local(s[1])) for n in op.output_arg_names)

    def _inner(self, op: Operator, scope: Any, program: Program, block: Block) -> None:
        try:
            definition = OPS.get(op.type)
            if definition is not None and definition.effect is Effect.P2P:
                raise Refusal(f"op {op.type} is in a sub-block; messages are only checked outside of sub-blocks")
            if definition is not None and definition.effect is Effect.COLLECTIVE:
                rank = rank_of(scope)
                if not self.meetings.of_all(op, scope) if rank is None else not self.meetings.of_alike(op, scope, rank, self.running):
                    raise Refusal(f"op {op.type} is in a sub-block that not all ranks run with the same values")
                return
            self.operator(op, scope, program, block, None)
        except Refusal as e:
            raise fail(program, _index(block, op), str(e), block=block.idx) from None

    def operator(self, op: Operator, scope: NameScope, program: Program, block: Block, code: int | None) -> None:
        """An operator that does not communicate."""
        rank = rank_of(scope)
        known = self._kinds.get(code) if code is not None else None
        if known is None:
            known = self.operators.kind(op, scope)
            if known[0].definition.abstract:
                raise Refusal(f"op {op.type} is a placeholder for communication; lower the program first")
            if known[0].definition.effect is Effect.P2P:
                raise Refusal(f"op {op.type} communicates, in the program for one device")
            differs = self.declared.differs
            if code is not None and not (differs and any(n in differs for n in (*known[1], *known[2]))):
                self._kinds[code] = known
        kind, ins, outs = known
        if kind.runs:
            self.said.check_blocks(program)
            self.control.operator(op, scope, program)
            return
        if kind.local:
            if rank is None:
                raise Refusal(f"op {op.type} works on what one rank holds for itself")
            given = [None if n is None else self.held.read(n, rank) for n in ins]
            made: Sequence[int | None] = self.operators.alone(kind, op, given, rank, outs)
        else:
            if rank is not None and isinstance(scope, PerRank):
                given = self._given(kind, ins, scope, rank)
                if EMPTY in given:
                    if self.operators.emptied(kind, given, rank):
                        for n in outs:
                            if n is not None:
                                scope.write(n, EMPTY)
                        return
                    given = [self.held.current(n, rank) if v == EMPTY and n is not None else v for n, v in zip(ins, given, strict=True)]
            elif kind.definition.move is not None and ins[0] is not None:
                given = [self.moving(kind, ins[0], scope, rank)]
            else:
                read = scope.read
                given = [None if n is None else read(n) for n in ins]
            try:
                made = self.operators.together(kind, op, tuple(given))
            except Refusal as e:
                if not kind.no_row or rank is None:
                    if kind.no_row and isinstance(scope, AllRanks):
                        for r in range(self.n):
                            self.operator(op, PerRank(self.held, r), program, block, code)
                        return
                    raise
                try:
                    made = self.operators.alone(kind, op, given, rank, outs)
                except Refusal:
                    raise e from None
        for n, v in zip(outs, made, strict=True):
            if n is not None and v is not None:
                scope.write(n, v)

    def _given(self, kind: OperatorClass, ins: Sequence[str | None], scope: PerRank, rank: int) -> list[int | None]:
        if kind.definition.move is not None and ins[0] is not None:
            return [self.moving(kind, ins[0], scope, rank)]
        return [None if n is None else self.held.read(n, rank) for n in ins]

    def moving(self, kind: OperatorClass, name: str, scope: Any, rank: int | None) -> int:
        """The operand of an op that moves it: where it says `at` over the op's own group, only the root reads it."""
        signature = scope.signature(name)
        entry = entry_of(signature[1], kind.attrs.get("group", ""))
        if entry is None or entry.root is None or not isinstance(scope, (AllRanks, PerRank)):
            return self.held.read(name, scope.rank) if isinstance(scope, PerRank) else scope.read(name)
        others = tuple(e for e in signature[1] if e is not entry and e.root is not None)
        if isinstance(scope, RootRanks):
            others = tuple(e for e in others if e not in scope.roots)
        if others and any(not self.mesh.holds(others, r) for r in (range(self.n) if rank is None else (rank,))):
            raise Refusal(f"%{name} is {show_placement(signature[1])}, and not every rank that reads it holds it")
        try:
            return self.held.read(name, rank or 0, anywhere=True)
        except NotHere:
            raise
        except Refusal as e:
            if rank is None or self.mesh.index(entry.group, rank) == entry.root:
                raise
            raise NotYet(str(e)) from None

    # -- each rank by itself ----------------------------------------------------------------------------------------

    def _apart(self, k: int) -> int:
        """Run what stands before common operator k; give the number of the next one that all ranks have come to."""
        if k not in self.said.apart:
            return k
        begin = [0 if k == 0 else c.common[k - 1] + 1 for c in self.said.classes]
        active = {id(c) for c, b in zip(self.said.classes, begin, strict=True) if b < c.common[k]}
        if not active:
            return k
        start = {id(c): b for c, b in zip(self.said.classes, begin, strict=True)}
        self.at = [start[id(c)] for c in self.said.of]
        self.stop = [c.common[k] for c in self.said.of]
        self.messages.items = [None] * self.n
        todo = deque(r for r in range(self.n) if id(self.said.of[r]) in active)
        self.later: dict[int, NotYet] = {}  # ranks that speak of what another one has still to make
        seen = -1
        while True:
            queued = set(todo)
            while todo:
                r = todo.popleft()
                queued.discard(r)
                for other in self._advance(r):
                    if other not in queued:
                        queued.add(other)
                        todo.append(other)
            stuck = [r for r in range(self.n) if self.at[r] < self.stop[r]]
            if not stuck:
                return k
            if self.later and sum(self.at) > seen:
                seen = sum(self.at)
                todo.extend(self.later)
                self.later.clear()
                continue
            if k >= self.said.length and self.later:
                r, e = next(iter(self.later.items()))
                raise fail(self.programs[r], self.at[r], str(e), rank=r)
            if k >= self.said.length:
                raise self._deadlock(stuck)
            # some rank waits for one that has come to the common operator: nobody waits for others there
            k += 1
            self.stop = [c.common[k] for c in self.said.of]
            todo.extend(range(self.n))

    def _by_itself(self, r: int, k: int, op: Operator, program: Program, code: int) -> None:
        """Operator k of rank r, which does not communicate."""
        try:
            self.operator(op, PerRank(self.held, r), program, program.global_block(), code)
        except NotHere:
            if k not in self.said.of[r].dead(self.said.ops):
                raise
            for n in op.output_arg_names:
                self.held.write(n, r, UNDEFINED)

    def _op(self, r: int) -> Operator:
        c = self.said.of[r]
        return self.said.ops[c.codes[self.at[r]]][0]

    def _advance(self, r: int) -> list[int]:
        """Run rank r up to a communication that cannot complete yet; give the ranks that may go on because of it."""
        woken: list[int] = []
        alike = self.said.of[r]
        while self.at[r] < self.stop[r]:
            k = self.at[r]
            code = alike.codes[k]
            op, program = self.said.ops[code]
            definition = OPS.get(op.type)
            effect = definition.effect if definition is not None else Effect.PURE
            try:
                if effect is Effect.P2P:
                    if not self.messages.exchange(r, woken):
                        break
                elif effect is Effect.COLLECTIVE:
                    if not self._meet(r, op, woken):
                        break
                elif members := self._met_inside(op, program, r):
                    if not self._meet_inside(code, members, woken, r):
                        break
                else:
                    self._by_itself(r, k, op, program, code)
                    self.at[r] = k + 1
            except NotYet as e:
                self.later[r] = e
                break
            except Refusal as e:
                raise fail(self.programs[r], min(self.at[r], k), str(e), rank=r) from None
            except VerifyError:
                raise
            except Exception as e:
                raise fail(self.programs[r], k, f"op {op.type} cannot be looked through: {type(e).__name__}: {e}", rank=r) from None
        return woken

    def _meet(self, r: int, op: Operator, woken: list[int]) -> bool:
        members = self.meetings.members(op, r)
        theirs = []
        for m in members:
            if self.at[m] >= len(self.said.of[m].codes):
                raise Refusal(f"op {op.type} waits for rank {m}, which has ended")
            if self.at[m] >= self.stop[m]:
                return False
            other = self._op(m)
            if OPS[other.type].effect is not Effect.COLLECTIVE if other.type in OPS else True:
                return False
            if tuple(self.meetings.members(other, m)) != tuple(members):
                return False
            theirs.append(other)
        for m, other in zip(members, theirs, strict=True):
            if (other.type, self.kinds.attrs_id(other.attrs)) != (op.type, self.kinds.attrs_id(op.attrs)):
                raise Refusal(f"rank {r} is in {_said(op)}, rank {m} in the same collective call in {_said(other)}")
        self.meetings.of_members(members, theirs)
        for m in members:
            self.at[m] += 1
            if m != r:
                woken.append(m)
        return True

    def _met_inside(self, op: Operator, program: Program, r: int) -> Sequence[int]:
        """The ranks that a rank meets in the blocks of an operator, which run them together; () where it meets none."""
        if op.type not in OPS or not OPS[op.type].bodies:
            return ()
        groups = collectives(program, op)
        members = {r} if groups else set()
        while more := {m for one in groups for k in members for m in self.meetings.members(one, k)} - members:
            members |= more
        return sorted(members)

    def _meet_inside(self, code: int, members: Sequence[int], woken: list[int], r: int) -> bool:
        """An operator whose blocks communicate, on the ranks that do it together: with the same values, each says what it does alike."""
        op, program = self.said.ops[code]
        for m in members:
            if self.at[m] >= len(self.said.of[m].codes):
                raise Refusal(f"op {op.type} waits for rank {m}, which has ended")
            if self.at[m] >= self.stop[m] or self.said.of[m].codes[self.at[m]] != code:
                return False
        for n in {*op.input_arg_names, *(n for b in op.sub_blocks() for n in touched(program, b))}:
            if n in self.declared.vars and len({self.held.value(n, m) for m in members} - {EMPTY}) > 1:
                raise Refusal(
                    f"op {op.type}: its blocks communicate, and ranks {members[0]} to {members[-1]} hold different values of %{n}"
                )
        self.running = frozenset(members)
        for m in members:
            self._by_itself(m, self.at[m], op, program, code)
        self.running = frozenset()
        for m in members:
            self.at[m] += 1
            if m != r:
                woken.append(m)
        return True

    # -- for messages ------------------------------------------------------------------------------------------------

    def _deadlock(self, stuck: Sequence[int]) -> VerifyError:
        lines = []
        for r in stuck[:8]:
            op = self._op(r)
            items = self.messages.items[r]
            if items:
                op = next(x.op for x in items if not x.done)
                waits = f"rank {op.attrs['peer']}"
            else:
                members = self._met_inside(op, self.programs[r], r) or self.meetings.members(op, r)
                absent = [m for m in members if m != r and not self._is_at(m, members)]
                waits = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent[:8]))}"
            lines.append(f"  rank {r} waits for {waits} in {op.to_string()}")
        head = f"the ranks wait for each other for ever: {len(stuck)} of {self.n} ranks are stuck"
        return fail(self.programs[stuck[0]], self.at[stuck[0]], head + "\n" + "\n".join(lines), rank=stuck[0])

    def _is_at(self, m: int, members: Sequence[int]) -> bool:
        if self.at[m] >= len(self.said.of[m].codes):
            return False
        other = self._op(m)
        definition = OPS.get(other.type)
        if inside := self._met_inside(other, self.programs[m], m):
            return tuple(inside) == tuple(members)
        if definition is None or definition.effect is not Effect.COLLECTIVE:
            return False
        try:
            return tuple(self.meetings.members(other, m)) == tuple(members)
        except Refusal:
            return False


def _index(block: Block, op: Operator) -> int:
    return next((k for k, o in enumerate(block.oplist) if o is op), -1)


def _said(op: Operator) -> str:
    usual = OPS[op.type].defaults
    shown = ", ".join(f"{k}={v}" for k, v in sorted(op.attrs.items()) if k in ALWAYS_SHOWN or v != usual.get(k))
    return f"{op.type}({shown})"
