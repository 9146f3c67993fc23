"""The symbolic run of all rank programs. Operators that all ranks have are run once, for all ranks together.

Where programs differ, each rank runs by itself up to the next common operator. A send is assumed to wait for its receive.
"""

from __future__ import annotations

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
from ..ir.types import Entry, Placement, show_placement
from .branches import Branches
from .collectives import CollectiveCalls
from .declarations import Declarations
from .mesh import RankGroups
from .operator_check import OperatorClass, OperatorClasses
from .operator_meaning import NameScope, Operators
from .rank_classes import RankClasses, touched
from .rank_program import RunsAt
from .rank_values import AllRanks, PerRank, RootRanks, VariableValues, rank_of
from .refusal import NotHere, NotYet, Refusal, fail
from .send_recv import Messages, reused_in_batch
from .separate_runs import SeparateRuns
from .started import Started
from .sub_blocks import SubBlockCheck
from .transfer_messages import TRANSFER
from .values import EMPTY, UNDEFINED, ProgramValues


class SimultaneousRun:
    """One symbolic run of the programs of all ranks.

    `twins`: the equal programs with their ranks. `by_roots`: `programs` is one program for all ranks, whose operators with results at roots
    run at these roots only. `outside`: the run that has the branch which this run is for; `kept`: the names that are read after it.
    """

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
        self.rank_classes = RankClasses(programs, twins, values.table, kept)
        self._at: dict[Placement, int] = {}  # roots -> number of ranks there
        self._whole_sets: set[tuple[Placement, str]] = set()  # (roots, group): each set is whole at the roots, or not there
        depth = 0 if outside is None else outside.rank_values.depth + 1
        self.rank_values: VariableValues = VariableValues(values, self.declared, started, depth)
        self.classes: OperatorClasses = OperatorClasses(mesh, values.table, loose, single) if outside is None else outside.classes
        self.operators: Operators = Operators(values, self.classes) if outside is None else outside.operators
        self.control = SubBlockCheck(self.operators, self._inner, single)
        self.branches, self.within = Branches(self), outside is not None
        self.collective_calls = CollectiveCalls(self)
        self.messages = Messages(self)
        self.separate = SeparateRuns(self)
        self.operators_at_roots = 0  # operators that a rank does not run because it is not at their roots, summed over ranks
        self.running: frozenset[int] = frozenset()  # ranks that run a block with collectives together, on equal values
        # operator classes with their names in slot order, and those of the names that not all ranks declare
        self._classes_by_code: dict[int, tuple[tuple[OperatorClass, Sequence[str | None], Sequence[str | None]], list[str]]] = {}

    def branch_run(self, programs: Sequence[Program], twins: Twins, kept: Collection[str]) -> SimultaneousRun:
        """A run of one branch of an operator of this run."""
        return SimultaneousRun(self.operators.values, self.mesh, programs, twins, self.rank_values.started, outside=self, kept=kept)

    def clear(self) -> None:
        """Break the reference cycles at the end, so that the garbage collector need not search all values."""
        if not self.within:  # branches share these with their run
            vars(self.operators.values).clear()
        for part in (self.control, self.branches, self.collective_calls, self.messages, self.separate, self):
            vars(part).clear()

    def run(self) -> None:
        ops = [op for op, _ in self.rank_classes.ops]
        for c in self.rank_classes.classes:
            found = reused_in_batch(ops, c.codes, self.rank_classes.is_message)
            if found is not None:
                k, n = found
                raise fail(
                    c.program, k, f"%{n} is received in the batch that this operator belongs to: the sends of a batch are posted first"
                )
        everyone = AllRanks(self.rank_values)
        k = 0
        while True:
            k = self.separate.run_to(k)
            if k >= self.rank_classes.length:
                return
            self._run_common(k, everyone)
            k += 1

    def _run_common(self, k: int, scope: AllRanks) -> None:
        first = self.rank_classes.classes[0]
        code = first.codes[first.common[k]]
        op, program = self.rank_classes.ops[code]
        try:
            if k in self.rank_classes.different_bodies:
                self.branches.of_all(op, scope)
                return
            if self.runs_at is not None:
                scope = self._at_roots(op, self.runs_at.of(op), scope)
            if self._shareable(op, program):
                definition = OPS.get(op.type)
                if definition is not None and definition.effect is Effect.COLLECTIVE:
                    if self.collective_calls.of_all(op, scope):
                        if op.type == TRANSFER:  # other ranks than those of its messages have no operator
                            at = self.mesh.sets_at(op.attrs["group"], scope.roots if isinstance(scope, RootRanks) else ())
                            self.operators_at_roots += sum(len(s) - 2 for s in at)
                        return
                else:
                    try:
                        self.operator(op, scope, program, program.global_block(), code)
                        return
                    except NotHere:
                        pass  # the value may be defined on some ranks, or the result may not be needed
            self._run_each_rank(k, code, op, program, scope)
        except Refusal as e:
            raise fail(first.program, first.common[k], str(e)) from None
        except VerifyError:
            raise
        except Exception as e:
            raise fail(first.program, first.common[k], f"op {op.type} cannot be checked: {type(e).__name__}: {e}") from None

    def _at_roots(self, op: Operator, roots: Placement, scope: AllRanks) -> AllRanks:
        """The scope of the ranks that run an operator of the program for all ranks.

        Raises Refusal if a result is declared on other ranks too, or if only some ranks of a set would run a collective.
        """
        communicates = op.type in OPS and OPS[op.type].comm.move is not None
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
        scope = RootRanks(self.rank_values, roots)
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
        """True if all ranks at the roots `found` are also at `roots`."""
        if all(e in found for e in roots):
            return True
        there = tuple(found)
        return bool(found) and all(self.mesh.holds(roots, r) for r in range(self.n) if self.mesh.holds(there, r))

    def _run_each_rank(self, k: int, code: int, op: Operator, program: Program, scope: AllRanks) -> None:
        """Run an operator of all ranks, or of all ranks at some roots, on each rank separately."""
        definition = OPS.get(op.type)
        ranks: Sequence[int] = range(self.n)
        if isinstance(scope, RootRanks):
            ranks = [r for r in ranks if self.mesh.holds(scope.roots, r)]
        if definition is not None and definition.effect is Effect.COLLECTIVE:
            done: set[int] = set()
            for r in ranks:
                if r not in done:
                    members = self.collective_calls.members(op, r)
                    done.update(members)
                    self.collective_calls.of_members(members, [op] * len(members))
            return
        for r in ranks:
            try:
                self.run_on_rank(r, self.rank_classes.of[r].common[k], op, program, code)
            except Refusal as e:
                raise Refusal(f"rank {r}: {e}") from None

    def _shareable(self, op: Operator, program: Program) -> bool:
        own, differs = self.rank_values.own, self.declared.differs
        if not own and not differs and not self.declared.has_local:
            return True
        for n in op.input_arg_names:
            if n in own or n in differs:
                return False
        if op.type not in OPS or not OPS[op.type].control.bodies:
            return self._outputs_are_common(op)
        for body in bodies(op):
            named = op.attrs.get(body.results_attr, ())
            if any(n in own or n in differs for n in named if isinstance(n, str)):
                return False
        if not self._outputs_are_common(op):
            return False
        for b in op.sub_blocks():
            names = touched(program, b)
            if not own.keys().isdisjoint(names) or not differs.keys().isdisjoint(names):
                return False
        return True

    def _outputs_are_common(self, op: Operator) -> bool:
        differs, signatures = self.declared.differs, self.declared.signatures
        return not any(n in differs or ((s := signatures.get(n)) is not None and is_local(s[1])) for n in op.output_arg_names)

    def _inner(self, op: Operator, scope: Any, program: Program, block: Block) -> None:
        try:
            definition = OPS.get(op.type)
            if definition is not None and definition.effect is Effect.P2P:
                raise Refusal(f"op {op.type} is in a sub-block; messages are only checked outside of sub-blocks")
            if op.type == TRANSFER:
                raise Refusal("op transfer is in a sub-block; transfers are only checked outside of sub-blocks")
            if definition is not None and definition.effect is Effect.COLLECTIVE:
                rank = rank_of(scope)
                calls = self.collective_calls
                if not (calls.of_all(op, scope) if rank is None else calls.of_equal_ranks(op, scope, rank, self.running)):
                    raise Refusal(f"op {op.type} is in a sub-block, but not all of its ranks run that with the same values")
                return
            self.operator(op, scope, program, block, None)
        except Refusal as e:
            raise fail(program, _index(block, op), str(e), block=block.idx) from None

    def operator(self, op: Operator, scope: NameScope, program: Program, block: Block, code: int | None) -> None:
        """Run an operator that is no collective or message."""
        rank = rank_of(scope)
        op_class, ins, outs = self._checked_class(op, scope, code)
        if op_class.runs:
            self.rank_classes.check_blocks(program)
            self.control.operator(op, scope, program)
            return
        if op_class.local:
            if rank is None:
                raise Refusal(f"op {op.type} works on local values of one rank")
            given = [None if n is None else self.rank_values.read(n, rank) for n in ins]
            made: Sequence[int | None] = self.operators.on_one_rank(op_class, op, given, rank, outs)
        else:
            given = self._operands(op_class, ins, scope, rank)
            if rank is not None and isinstance(scope, PerRank) and EMPTY in given:
                if self.operators.gives_nothing(op_class, given, rank):
                    made = [EMPTY] * len(outs)
                    _write(scope, outs, made)
                    return
                owners_value = self.rank_values.owners_value
                given = [owners_value(n, rank) if v == EMPTY and n is not None else v for n, v in zip(ins, given, strict=True)]
            try:
                made = self.operators.on_all_ranks(op_class, op, tuple(given))
            except Refusal as e:
                if not op_class.no_row:
                    raise
                if isinstance(scope, AllRanks):  # each rank may have local values to which no rule need apply
                    for r in range(self.n):
                        self.operator(op, PerRank(self.rank_values, r), program, block, code)
                    return
                if rank is None:
                    raise
                try:
                    made = self.operators.on_one_rank(op_class, op, given, rank, outs)
                except Refusal:
                    raise e from None
        _write(scope, outs, made)

    def _checked_class(
        self, op: Operator, scope: NameScope, code: int | None
    ) -> tuple[OperatorClass, Sequence[str | None], Sequence[str | None]]:
        """The operator's class, and the names that it reads and writes in slot order."""
        found = self._classes_by_code.get(code) if code is not None else None
        if found is not None and (not found[1] or rank_of(scope) is not None):
            for n in found[1]:  # variables that other ranks may not declare
                scope.signature(n)
            return found[0]
        known = self.operators.class_of(op, scope)
        if known[0].definition.control.abstract:
            raise Refusal(f"op {op.type} is a placeholder for communication; lower the program first")
        if known[0].definition.effect is Effect.P2P:
            raise Refusal(f"op {op.type} communicates, in the program for one device")
        some = [n for n in (*known[1], *known[2]) if n is not None and n in self.declared.differs]
        if code is not None and all(map(self.declared.is_declared_equally, some)):
            self._classes_by_code[code] = known, some
        return known

    def _operands(self, op_class: OperatorClass, ins: Sequence[str | None], scope: NameScope, rank: int | None) -> list[int | None]:
        if op_class.definition.comm.move is not None and ins[0] is not None:
            return [self.moved_operand(op_class, ins[0], scope, rank)]
        if rank is not None and isinstance(scope, PerRank):
            return [None if n is None else self.rank_values.read(n, rank) for n in ins]
        read = scope.read
        return [None if n is None else read(n) for n in ins]

    def run_on_rank(self, r: int, k: int, op: Operator, program: Program, code: int) -> None:
        """Run operator k of rank r, which does not communicate."""
        try:
            self.operator(op, PerRank(self.rank_values, r), program, program.global_block(), code)
        except NotHere:
            if k not in self.rank_classes.of[r].dead(self.rank_classes.ops):
                raise
            for n in op.output_arg_names:
                self.rank_values.write(n, r, UNDEFINED)

    def moved_operand(self, op_class: OperatorClass, name: str, scope: Any, rank: int | None) -> int:
        """The operand of a collective. If it is `at` a root of the collective's own group, only the root must have it."""
        signature = scope.signature(name)
        entry = entry_of(signature[1], op_class.attrs.get("group", ""))
        if entry is None or entry.root is None or not isinstance(scope, (AllRanks, PerRank)):
            return self.rank_values.read(name, scope.rank) if isinstance(scope, PerRank) else scope.read(name)
        others = tuple(e for e in signature[1] if e is not entry and e.root is not None)
        if isinstance(scope, RootRanks):
            others = tuple(e for e in others if e not in scope.roots)
        if others and any(not self.mesh.holds(others, r) for r in (range(self.n) if rank is None else (rank,))):
            raise Refusal(f"%{name} is {show_placement(signature[1])}, and not every rank that reads it has it")
        try:
            return self.rank_values.read(name, rank or 0, anywhere=True)
        except NotHere:
            raise
        except Refusal as e:
            if rank is None or self.mesh.index(entry.group, rank) == entry.root:
                raise
            raise NotYet(str(e)) from None


def _write(scope: NameScope, names: Sequence[str | None], values: Sequence[int | None]) -> None:
    for n, v in zip(names, values, strict=True):
        if n is not None and v is not None:
            scope.write(n, v)


def _index(block: Block, op: Operator) -> int:
    return next((k for k, o in enumerate(block.oplist) if o is op), -1)
