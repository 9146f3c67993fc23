"""Entry points of the verifier: `verify_ranks` and `verify_common` for all ranks, `check_program` for one program."""

from __future__ import annotations

from collections.abc import Sequence

from .._collector import collections_paused
from ..ir.change_stamps import Stamp
from ..ir.entries import is_local
from ..ir.errors import FluidxError, VerifyError
from ..ir.opdef import opdef
from ..ir.operator import Operator, op_types
from ..ir.program import Block, Program, ProgramPair
from ..ir.time_axes import MAX_TURNS, in_turn, over_turns, taken_in_turn
from ..ir.types import Placement, show_placement
from ..ir.var import Var
from .memory_spaces import check_memories, mixed
from .mesh import RankGroups
from .normal_form import ExpressionTable
from .operator_check import OperatorClasses, Signature
from .operator_meaning import Operators
from .refusal import Refusal, fail
from .report import Report
from .simultaneous_run import SimultaneousRun
from .started import Started
from .sub_blocks import check_blocks
from .values import EMPTY, ProgramValues


def verify_ranks(source: ProgramPair, mains: Sequence[Program], startups: Sequence[Program], label: str = "") -> Report:
    """Prove that the rank programs together compute what `source` computes on one device; raise VerifyError if they do not.

    Only the program texts are used. For startup and for every step, the proof covers:

    - the types of each operator, and that a placement rule allows the placements of its operands;
    - that communication matches and cannot deadlock;
    - every persistable variable of the source: it is declared on every rank that has state, and ends as the rank's part of the value on
      one device;
    - every value that can be fetched, in the same way.
    """
    return _checked(source, list(mains), list(startups), label)


def verify_common(source: ProgramPair, common: ProgramPair, ranks: int, label: str = "") -> Report:
    """Prove one program for all ranks. All ranks run its operators together; operators with results at roots run at these roots only.

    The result of a collective does not depend on its algorithm. `check_rank_program` checks that a rank's program follows from this one.
    """
    return _checked(source, [common.main] * ranks, [common.startup] * ranks, label, by_roots=True)


def _checked(source: ProgramPair, mains: list[Program], startups: list[Program], label: str, by_roots: bool = False) -> Report:
    try:
        with collections_paused():  # many small tuples are allocated and kept, none of them in cycles
            return _verify(source, mains, startups, label, by_roots)
    except VerifyError:
        raise
    except FluidxError as e:
        raise VerifyError(str(e)) from None
    except Exception as e:
        raise VerifyError(f"the programs cannot be checked: {type(e).__name__}: {e}") from e


def _verify(source: ProgramPair, mains: list[Program], startups: list[Program], label: str, by_roots: bool) -> Report:
    if not isinstance(source, ProgramPair):
        raise VerifyError(f"the source is a ProgramPair(main, startup), got {type(source).__name__}")
    if not mains or len(mains) != len(startups):
        raise VerifyError(f"there are {len(mains)} main and {len(startups)} startup programs; every rank has one of each")
    stamp = Stamp([*mains, *startups])
    report = Report(label or mains[0].strategy or source.main.name, len(mains), stamp=stamp)
    _check_ranks(mains, startups)
    placed: dict[str, tuple[Program, Var]] = {}
    worlds: list[SimultaneousRun] = []
    started: tuple[Started, Started] | tuple[None, None] = None, None
    for programs, single, is_main in ((startups, source.startup, False), (mains, source.main, True)):
        counts = {id(p): sum(len(b.oplist) for b in p.blocks) for p in programs}
        report.operators += sum(counts[id(p)] for p in programs)
        different = {id(p): p for p in (single, *programs)}.values()
        table = ExpressionTable({t for p in different for b in p.blocks for t in op_types(b.oplist)})
        loose: set[tuple] = set()
        one = SimultaneousRun(
            ProgramValues(table, RankGroups({}, 1)), RankGroups({}, 1), [single], [(single, [0])], started[0], single=True, loose=loose
        )
        one.run()
        mesh = _mesh(programs)
        # expressions of one device do not depend on ranks, so both runs share the table
        twins = stamp.twins(programs)
        ranks = SimultaneousRun(ProgramValues(table, mesh), mesh, programs, twins, started[1], loose=loose, by_roots=by_roots)
        worlds += one, ranks
        _check_declared(one, ranks, is_main)
        ranks.run()
        check_memories(ranks.declared.vars.values(), programs)
        if not is_main:
            report.loaded = _to_load(source.main, one, ranks)
            started = Started(), Started(ranks.rank_values, report.loaded)
        report.operators -= ranks.operators_at_roots
        report.collectives += ranks.collective_calls.count
        report.messages += ranks.messages.count
        proved = _compare(one, ranks, is_main)
        declared = ranks.declared.vars
        states = [n for n in proved if declared[n].persistable]
        for n in states:
            before = placed.setdefault(n, (programs[0], declared[n]))
            if before[1].placement != declared[n].placement:
                raise fail(
                    programs[0], -1, f"%{n} is {show_placement(before[1].placement)} in startup and "
                    f"{show_placement(declared[n].placement)} in main",
                )  # fmt: skip
        for op, program in ranks.rank_classes.ops:
            if (rounds := opdef(op.type).autocast.rounds) is not None:
                what = rounds(op.attrs)
                report.rounded[what] = report.rounded.get(what, 0) + program.global_block().desc(op.input_arg_names[0]).type.numel
        if is_main:
            report.parameters = sum(declared[n].is_parameter for n in states)
            report.states = len(states) - report.parameters
            report.values = len(proved)
            report.loaded = [n for n in report.loaded if n in one.rank_values.unwritten]
            report.own = sum(any(e.is_own for e in declared[n].placement) for n in proved)
        else:
            report.initial = len(states)
    for world in worlds:
        world.clear()
    return report


def _mesh(programs: Sequence[Program]) -> RankGroups:
    try:
        return RankGroups(programs[0].groups, len(programs), programs[0].turns)
    except Refusal as e:
        raise fail(programs[0], -1, str(e)) from None


def _check_ranks(mains: Sequence[Program], startups: Sequence[Program]) -> None:
    first = mains[0]
    for programs in (mains, startups):
        seen: set[int] = set()
        for r, p in enumerate(programs):
            if p.rank is None and id(p) in seen:  # one program for all ranks
                continue
            seen.add(id(p))
            if wrong := _not_plain(p):
                raise fail(p, -1, wrong, rank=r)
            if p.rank is not None and p.rank != r:
                raise fail(p, -1, f"this is the program of rank {p.rank}, given as that of rank {r}")
            if p.groups != first.groups:
                raise fail(p, -1, f"groups are declared as {_groups(p)}, and by rank 0 as {_groups(first)}", rank=r)
            if p.turns != programs[0].turns:
                raise fail(p, -1, f"time axes are declared as {p.turns}, but by rank 0 as {programs[0].turns}", rank=r)


def _not_plain(p: Program) -> str:
    """Why rank, groups or turns have a wrong Python type; "" if they have not. Plans and communicators use groups as keys."""
    for g, sets in p.groups.items():
        if not isinstance(sets, tuple) or any(not isinstance(s, tuple) or any(type(r) is not int for r in s) for s in sets):
            return f"group {g} must be a tuple of tuples of ranks, found {sets!r}"
    for axis, n in p.turns.items():
        if type(n) is not int or not 0 < n <= MAX_TURNS:
            return f"turns of {axis} must be a number from 1 to {MAX_TURNS}, found {n!r}"
    return "" if p.rank is None or type(p.rank) is int else f"the program's rank must be an int, found {p.rank!r}"


def _groups(p: Program) -> str:
    return "; ".join(f"{g} = {' '.join(str(list(s)) for s in sets)}" for g, sets in p.groups.items()) or "none"


# -- source and ranks ------------------------------------------------------------------------------------------------


def _check_declared(one: SimultaneousRun, ranks: SimultaneousRun, is_main: bool) -> None:
    """Raise VerifyError unless the ranks declare the variables of the source as the source does."""
    program = ranks.programs[0]
    for n, d in one.declared.vars.items():
        found = ranks.declared.vars.get(n)
        if found is None:
            if d.persistable and (is_main or n in one.rank_values.shared):
                raise fail(program, -1, f"%{n} is persistable in the source, but no rank declares it")
            continue
        if d.persistable and is_main and n in ranks.declared.differs:
            absent = [r for r in range(ranks.n) if r not in ranks.declared.differs[n]]
            if absent and all(_has_nothing_of(ranks, found.placement, r) for r in absent):
                continue
            raise fail(program, -1, f"%{n} is persistable, but rank {absent[0] if absent else 0} does not declare it as others do")
        for flag in ("persistable", "is_data", "is_parameter"):
            if getattr(found, flag) != getattr(d, flag):
                raise fail(program, -1, f"%{n} is {'' if getattr(d, flag) else 'not '}{flag} in the source, but not so on the ranks")
        if found.type != d.type and not is_local(found.placement):
            raise fail(program, -1, f"%{n} is {d.type} in the source, but {found.type} on the ranks; types are those of the global value")
    _check_added_variables(one, ranks, is_main)


def _check_added_variables(one: SimultaneousRun, ranks: SimultaneousRun, is_main: bool) -> None:
    """Raise VerifyError if the ranks declare data, or state that the main programs write, which the source does not have."""
    program = ranks.programs[0]
    for n, d in ranks.declared.vars.items():
        if n not in one.declared.vars and d.is_data:
            raise fail(program, -1, f"%{n} is fed, but the source has no such variable")
        if n not in one.declared.vars and d.persistable and is_main:
            for r, p in enumerate(ranks.programs):
                for k, op in enumerate(p.global_block().oplist):
                    if n in op.output_arg_names:
                        raise fail(p, k, f"%{n} is a state variable that the source does not have: its next value is unknown", rank=r)
                if len(ranks.rank_classes.classes) == 1:
                    break


def _has_nothing_of(ranks: SimultaneousRun, placement: Placement, rank: int) -> bool:
    """True if a rank need not have a value: it is placed over groups of other ranks, or replicated and the rank has no state."""
    return all(rank not in ranks.mesh.where[e.group] for e in placement) if placement else rank in ranks.declared.helpers


def _to_load(main: Program, one: SimultaneousRun, ranks: SimultaneousRun) -> list[str]:
    """The state variables that the source's startup does not write, which must be loaded. No rank's startup may write them either."""
    for n in (*ranks.rank_values.shared, *ranks.rank_values.own):
        d = main.global_block().descs.get(n)
        if d is not None and d.persistable and n not in one.rank_values.shared:
            raise _wrong(ranks, n, 0, f"%{n} has no value on one device after startup, but a rank writes it")
    return [d.name for d in main.global_block().descs.values() if d.persistable and d.name not in one.rank_values.shared]


def _compare(one: SimultaneousRun, ranks: SimultaneousRun, is_main: bool) -> list[str]:
    """Compare the values of every rank at the end with one device; return the names that are proved."""
    proved = []
    when = "at the end of the step" if is_main else "after startup"
    for n, d in one.declared.vars.items():
        expected = one.rank_values.value(n, 0)
        found = ranks.declared.vars.get(n)
        if found is None:
            if axis := next((axis for axis in ranks.mesh.axes if in_turn(n, axis, 0) in ranks.declared.vars), ""):
                raise fail(ranks.programs[0], -1, f"%{n} is declared for turns of {axis} alone; declare it over {axis} too")
            continue
        signature = ranks.declared.signatures[n]
        if is_local(signature[1]):
            if expected is not None and n not in ranks.rank_values.own:
                raise _wrong(ranks, n, 0, f"%{n} is local, but no rank has a value {when}; one device has one")
            continue
        if expected is None:
            if d.persistable and (n in ranks.rank_values.shared or n in ranks.rank_values.own):
                raise _wrong(ranks, n, 0, f"%{n} has no value on one device {when}, but a rank writes it")
            continue
        e = one.rank_values.values.atoms[expected].e
        found_in = _in_turns(ranks, n, found.placement, when)
        seen = {_check_parts(ranks, m, e, when) for m in found_in}
        if len(seen) > 1 and len({None if a is None else ranks.rank_values.values.of_any_turn(a) for a in seen}) > 1:
            raise _wrong(ranks, found_in[0], 0, f"%{n}: the iterations have terms of different sums {when}")
        if d.persistable and not is_main:
            _check_empty(ranks, n, signature)
        proved.append(n)
    return proved


def _in_turns(ranks: SimultaneousRun, name: str, placement: Placement, when: str) -> list[str]:
    """The names of a value on the ranks: one for each iteration if it is placed over a time axis."""
    axis = over_turns(placement, ranks.mesh.axes)
    if not axis:
        return [name]
    d = ranks.declared.vars[name]
    if d.persistable or d.is_data or name in ranks.rank_values.shared or name in ranks.rank_values.own:
        raise _wrong(ranks, name, 0, f"%{name} is spread over all iterations of {axis}: it has no value of its own {when}")
    names = [in_turn(name, axis, k) for k in range(ranks.mesh.axes[axis])]
    for k, n in enumerate(names):
        found = ranks.declared.vars.get(n)
        if found is None:
            raise fail(ranks.programs[0], -1, f"%{name} is spread over the iterations of {axis}, but no rank declares %{n}")
        if (found.type, found.placement) != (d.type, taken_in_turn(placement, axis, k)):
            shown = f"{found.type} {show_placement(found.placement)}"
            raise fail(ranks.programs[0], -1, f"%{n} is {shown}, which is not an iteration of %{name}")
    return names


def _check_parts(ranks: SimultaneousRun, n: str, e: int, when: str) -> int | None:
    """Check that every rank with a part of a value has that of one device's value; return the atom, or None if all are empty."""
    found, signature, table = ranks.declared.vars[n], ranks.declared.signatures[n], ranks.table
    placement = ranks.mesh.canonical(found.placement, found.type)
    seen: int | None = None
    absent = []
    for r in ranks.rank_values.owners(signature):
        if n in ranks.declared.differs and r not in ranks.declared.differs[n]:
            if placement or r not in ranks.declared.helpers:
                absent.append(r)
            continue
        value = ranks.rank_values.shared.get(n) if n not in ranks.rank_values.own else ranks.rank_values.value(n, r)
        if value is None:
            value = ranks.rank_values.value(n, r)
        if value == EMPTY:
            continue
        if value is None or value < 0:
            raise _wrong(ranks, n, r, f"%{n} has no value on this rank {when}; one device has {table.show(e)}")
        atom = ranks.rank_values.values.atoms[value]
        if atom.e != e or atom.placement != placement:
            raise _wrong(
                ranks, n, r, f"%{n} does not hold one device's value {when}: "
                f"expected {table.show(e)} ({show_placement(placement)}), found {ranks.operators.describe(value)}",
            )  # fmt: skip
        if seen is not None and value != seen:
            raise _wrong(ranks, n, r, f"%{n}: the ranks have terms of different sums {when}")
        seen = value
        if n not in ranks.rank_values.own and n not in ranks.declared.differs:
            break
    if seen is None and ranks.rank_values.owners(signature):
        raise _wrong(ranks, n, 0, f"%{n} has no value on any rank {when}; one device has {table.show(e)}")
    if absent and (placement or found.persistable):
        raise fail(ranks.programs[absent[0]], -1, f"%{n} is not declared on this rank, which has a part of it", rank=absent[0])
    return seen


def _check_empty(ranks: SimultaneousRun, name: str, signature: Signature) -> None:
    """Check that startup also writes empty parts, because a step reads them."""
    owners = ranks.rank_values.owners(signature)
    if len(owners) == ranks.n or name in ranks.rank_values.written_by_all:
        return
    placement = ranks.mesh.canonical(signature[1], signature[0])
    for r in range(ranks.n):
        if r not in owners and ranks.mesh.holds(placement, r) and not ranks.rank_values.is_defined(name, r):
            raise _wrong(ranks, name, r, f"%{name} is not defined on this rank after startup; a step reads it, though its part is empty")


def _wrong(ranks: SimultaneousRun, name: str, rank: int, message: str) -> VerifyError:
    """An error that shows the operator that wrote the value last."""
    program = ranks.programs[rank]
    ops = program.global_block().oplist
    index = next((k for k in range(len(ops) - 1, -1, -1) if name in ops[k].output_arg_names), -1)
    return fail(program, index, message + ("" if index >= 0 else "; no operator writes it"), rank=rank)


# -- one program by itself -------------------------------------------------------------------------------------------


def check_program(program: Program) -> int:
    """Check one program by itself: names, slots, attributes, types and placement rules; return the number of operators.

    Local values of ranks are only checked by `verify_ranks`.
    """
    try:
        check_blocks(program)
        world = max(program.world_size, 1)
        checker = _Checker(program, RankGroups(program.groups, world, program.turns))
        checker.block(program.global_block(), set())
        return checker.count
    except Refusal as e:
        raise fail(program, -1, str(e)) from None
    except VerifyError:
        raise
    except Exception as e:
        raise VerifyError(f"{program.label()} cannot be checked: {type(e).__name__}: {e}") from e


class _Checker:
    def __init__(self, program: Program, mesh: RankGroups):
        self.program, self.mesh, self.count = program, mesh, 0
        table = ExpressionTable()
        self.operators = Operators(ProgramValues(table, mesh), OperatorClasses(mesh, table))

    def block(self, block: Block, defined: set[str]) -> None:
        for d in block.descs.values():
            try:
                self.mesh.canonical(d.placement, d.type)
            except Refusal as e:
                raise fail(self.program, -1, f"%{d.name}: {e}") from None
        scope = _Declared(block, self.operators.table)
        for k, op in enumerate(block.oplist):
            try:
                self.operator(op, block, scope, defined)
            except Refusal as e:
                raise fail(self.program, k, str(e), block=block.idx) from None

    def operator(self, op: Operator, block: Block, scope: _Declared, defined: set[str]) -> None:
        for n in op.input_arg_names:
            if n in defined:
                continue
            d = block.find(n)
            if d is None:
                raise Refusal(f"op {op.type} reads %{n}, which is not declared")
            if not d.is_data and not d.persistable:
                raise Refusal(f"op {op.type} reads %{n} before any operator defines it")
            defined.add(n)
        op_class, _, _ = self.operators.class_of(op, scope)
        if op_class.no_row and not op_class.definition.control.abstract:  # placeholders for communication have no rules
            raise Refusal(f"op {op.type}: no rule allows its placements: {op_class.no_row}")
        if why := mixed(op, block):
            raise Refusal(why)
        for b in op.sub_blocks():
            self.block(self.program.blocks[b], set(defined))
        defined.update(op.output_arg_names)
        self.count += 1


class _Declared:
    """The declarations of a block."""

    def __init__(self, block: Block, table: ExpressionTable):
        self.at, self.table = block, table

    def signature(self, name: str) -> Signature:
        d = self.at.find(name)
        if d is None:
            raise Refusal(f"%{name} is not declared")
        return self.table.signature(d.type, d.placement)
