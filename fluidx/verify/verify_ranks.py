"""verify_ranks: do the rank programs together what one device does? check_program: is one program written as it should be?"""

from __future__ import annotations

from collections.abc import Sequence

from .._collector import collections_paused
from ..ir.change_stamps import Stamp
from ..ir.entries import is_local
from ..ir.errors import FluidxError, VerifyError
from ..ir.opdef import opdef
from ..ir.operator import Operator
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
    """Prove that the rank programs do together what `source` does on one device; raise VerifyError where they do not.

    The programs are taken as their texts say, nothing beside them. Proved are, for startup and for every step: each operator's types and
    that its operands lie as a rule of its op allows; that communication matches and cannot deadlock; that every persistable variable of the
    source is declared on every rank that keeps any and ends as this rank's part of one device's value; and the same of every value that can
    be fetched.
    """
    return _checked(source, list(mains), list(startups), label)


def verify_common(source: ProgramPair, common: ProgramPair, ranks: int, label: str = "") -> Report:
    """Prove one program for all ranks: the ranks run its operators together, and those whose results are at roots run there alone.

    Collectives are taken for what they give, whatever their algorithms. `check_rank_program` says whether a rank's program follows from it.
    """
    return _checked(source, [common.main] * ranks, [common.startup] * ranks, label, by_roots=True)


def _checked(source: ProgramPair, mains: list[Program], startups: list[Program], label: str, by_roots: bool = False) -> Report:
    try:
        with collections_paused():  # many small tuples are made and kept, and none in circles
            return _verify(source, mains, startups, label, by_roots)
    except VerifyError:
        raise
    except FluidxError as e:
        raise VerifyError(str(e)) from None
    except Exception as e:
        raise VerifyError(f"the programs cannot be looked through: {type(e).__name__}: {e}") from e


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
        table = ExpressionTable()
        loose: set[tuple] = set()
        one = SimultaneousRun(
            ProgramValues(table, RankGroups({}, 1)), RankGroups({}, 1), [single], [(single, [0])], started[0], single=True, loose=loose
        )
        one.run()
        mesh = _mesh(programs)
        # the expressions of one device know nothing of ranks, so both share the table
        twins = stamp.twins(programs)
        ranks = SimultaneousRun(ProgramValues(table, mesh), mesh, programs, twins, started[1], loose=loose, by_roots=by_roots)
        worlds += one, ranks
        _check_declared(one, ranks, is_main)
        ranks.run()
        check_memories(ranks.declared.vars.values(), programs)
        if not is_main:
            report.loaded = _to_load(source.main, one, ranks)
            started = Started(), Started(ranks.held, report.loaded)
        report.operators -= ranks.operators_at_roots
        report.collectives += ranks.meetings.count
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
        for op, program in ranks.said.ops:
            if (rounds := opdef(op.type).rounds) is not None:
                what = rounds(op.attrs)
                report.rounded[what] = report.rounded.get(what, 0) + program.global_block().desc(op.input_arg_names[0]).type.numel
        if is_main:
            report.parameters = sum(declared[n].is_parameter for n in states)
            report.states = len(states) - report.parameters
            report.values = len(proved)
            report.loaded = [n for n in report.loaded if n in one.held.unwritten]
            report.own = sum(any(e.is_own for e in declared[n].placement) for n in proved)
        else:
            report.initial = len(states)
    for world in worlds:
        world.dissolve()
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
            if p.rank is None and id(p) in seen:  # one program of all ranks
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
    """What is no int among rank and groups, or no tuple; "" when nothing is. Plans and communicators take groups for keys."""
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
    """What the source declares, the ranks declare alike."""
    program = ranks.programs[0]
    for n, d in one.declared.vars.items():
        found = ranks.declared.vars.get(n)
        if found is None:
            if d.persistable and (is_main or n in one.held.shared):
                raise fail(program, -1, f"%{n} is persistable in the source, and declared by no rank")
            continue
        if d.persistable and is_main and n in ranks.declared.differs:
            absent = [r for r in range(ranks.n) if r not in ranks.declared.differs[n]]
            if absent and all(_has_nothing_of(ranks, found.placement, r) for r in absent):
                continue
            raise fail(program, -1, f"%{n} is persistable, and rank {absent[0] if absent else 0} does not declare it as others do")
        for flag in ("persistable", "is_data", "is_parameter"):
            if getattr(found, flag) != getattr(d, flag):
                raise fail(program, -1, f"%{n} is {'' if getattr(d, flag) else 'not '}{flag} in the source, and otherwise on the ranks")
        if found.type != d.type and not is_local(found.placement):
            raise fail(program, -1, f"%{n} is {d.type} in the source, but {found.type} on the ranks; types are those of the global value")
    for n, d in ranks.declared.vars.items():
        if n not in one.declared.vars and d.is_data:
            raise fail(program, -1, f"%{n} is fed, but the source has no such variable")
        if n not in one.declared.vars and d.persistable and is_main:
            for r, p in enumerate(ranks.programs):
                for k, op in enumerate(p.global_block().oplist):
                    if n in op.output_arg_names:
                        raise fail(p, k, f"%{n} is a state variable that the source does not have: its next value is unknown", rank=r)
                if len(ranks.said.classes) == 1:
                    break


def _has_nothing_of(ranks: SimultaneousRun, placement: Placement, rank: int) -> bool:
    """Does a value lie over groups of other ranks, or is it whole on all ranks that keep anything, and this one does not?"""
    return all(rank not in ranks.mesh.where[e.group] for e in placement) if placement else rank in ranks.declared.helpers


def _to_load(main: Program, one: SimultaneousRun, ranks: SimultaneousRun) -> list[str]:
    """The state that the source's startup does not define, which is to be loaded: no rank's startup may define it."""
    for n in (*ranks.held.shared, *ranks.held.own):
        d = main.global_block().descs.get(n)
        if d is not None and d.persistable and n not in one.held.shared:
            raise _wrong(ranks, n, 0, f"%{n} has no value on one device after startup, and a rank gives it one")
    return [d.name for d in main.global_block().descs.values() if d.persistable and d.name not in one.held.shared]


def _compare(one: SimultaneousRun, ranks: SimultaneousRun, is_main: bool) -> list[str]:
    """Check what every rank holds at the end against one device; give the names that are proved."""
    proved = []
    when = "at the end of the step" if is_main else "after startup"
    for n, d in one.declared.vars.items():
        expected = one.held.value(n, 0)
        found = ranks.declared.vars.get(n)
        if found is None:
            if axis := next((axis for axis in ranks.mesh.axes if in_turn(n, axis, 0) in ranks.declared.vars), ""):
                raise fail(ranks.programs[0], -1, f"%{n} is declared for turns of {axis} alone; declare it over {axis} too")
            continue
        signature = ranks.declared.signatures[n]
        if is_local(signature[1]):
            if expected is not None and n not in ranks.held.own:
                raise _wrong(ranks, n, 0, f"%{n} is local, and no rank gives it a value {when}; one device has one")
            continue
        if expected is None:
            if d.persistable and (n in ranks.held.shared or n in ranks.held.own):
                raise _wrong(ranks, n, 0, f"%{n} has no value on one device {when}, and a rank gives it one")
            continue
        e = one.held.values.atoms[expected].e
        found_in = _in_turns(ranks, n, found.placement, when)
        seen = {_held_alike(ranks, m, e, when) for m in found_in}
        if len(seen) > 1 and len({None if a is None else ranks.held.values.of_any_turn(a) for a in seen}) > 1:
            raise _wrong(ranks, found_in[0], 0, f"%{n}: the iterations hold terms of different sums {when}")
        if d.persistable and not is_main:
            _check_empty(ranks, n, signature)
        proved.append(n)
    return proved


def _in_turns(ranks: SimultaneousRun, name: str, placement: Placement, when: str) -> list[str]:
    """The names under which the ranks have a value: one for each turn where it lies over turns."""
    axis = over_turns(placement, ranks.mesh.axes)
    if not axis:
        return [name]
    d = ranks.declared.vars[name]
    if d.persistable or d.is_data or name in ranks.held.shared or name in ranks.held.own:
        raise _wrong(ranks, name, 0, f"%{name} is spread over all iterations of {axis}: it has no value of its own {when}")
    names = [in_turn(name, axis, k) for k in range(ranks.mesh.axes[axis])]
    for k, n in enumerate(names):
        found = ranks.declared.vars.get(n)
        if found is None:
            raise fail(ranks.programs[0], -1, f"%{name} is spread over the iterations of {axis}, but no rank declares %{n}")
        if (found.type, found.placement) != (d.type, taken_in_turn(placement, axis, k)):
            raise fail(ranks.programs[0], -1, f"%{n} is {found.type} {show_placement(found.placement)}, which is no iteration of %{name}")
    return names


def _held_alike(ranks: SimultaneousRun, n: str, e: int, when: str) -> int | None:
    """What all ranks hold that hold a part of a value: the part of one device's; None where all parts are empty."""
    found, signature, table = ranks.declared.vars[n], ranks.declared.signatures[n], ranks.table
    placement = ranks.mesh.canonical(found.placement, found.type)
    seen: int | None = None
    absent = []
    for r in ranks.held.owners(signature):
        if n in ranks.declared.differs and r not in ranks.declared.differs[n]:
            if placement or r not in ranks.declared.helpers:
                absent.append(r)
            continue
        value = ranks.held.shared.get(n) if n not in ranks.held.own else ranks.held.value(n, r)
        if value is None:
            value = ranks.held.value(n, r)
        if value == EMPTY:
            continue
        if value is None or value < 0:
            raise _wrong(ranks, n, r, f"%{n} has no value on this rank {when}; one device has {table.show(e)}")
        atom = ranks.held.values.atoms[value]
        if atom.e != e or atom.placement != placement:
            raise _wrong(
                ranks, n, r, f"%{n} does not hold one device's value {when}: "
                f"expected {table.show(e)} ({show_placement(placement)}), found {ranks.operators.describe(value)}",
            )  # fmt: skip
        if seen is not None and value != seen:
            raise _wrong(ranks, n, r, f"%{n}: the ranks hold terms of different sums {when}")
        seen = value
        if n not in ranks.held.own and n not in ranks.declared.differs:
            break
    if seen is None and ranks.held.owners(signature):
        raise _wrong(ranks, n, 0, f"%{n} has no value on any rank {when}; one device has {table.show(e)}")
    if absent and (placement or found.persistable):
        raise fail(ranks.programs[absent[0]], -1, f"%{n} is not declared on this rank, which holds a part of it", rank=absent[0])
    return seen


def _check_empty(ranks: SimultaneousRun, name: str, signature: Signature) -> None:
    """A rank whose part has no elements makes it all the same: a step takes it for defined."""
    owners = ranks.held.owners(signature)
    if len(owners) == ranks.n or name in ranks.held.by_all:
        return
    placement = ranks.mesh.canonical(signature[1], signature[0])
    for r in range(ranks.n):
        if r not in owners and ranks.mesh.holds(placement, r) and not ranks.held.made(name, r):
            raise _wrong(ranks, name, r, f"%{name} is not defined on this rank after startup; its empty part is read all the same")


def _wrong(ranks: SimultaneousRun, name: str, rank: int, message: str) -> VerifyError:
    """An error at the operator that wrote the value last."""
    program = ranks.programs[rank]
    ops = program.global_block().oplist
    index = next((k for k in range(len(ops) - 1, -1, -1) if name in ops[k].output_arg_names), -1)
    return fail(program, index, message + ("" if index >= 0 else "; no operator writes it"), rank=rank)


# -- one program by itself -------------------------------------------------------------------------------------------


def check_program(program: Program) -> int:
    """Check one program by itself: names, slots, attributes, types, and that placements follow from a rule; give the number of operators.

    Values that one rank holds for itself are looked at when all ranks' programs are there.
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
        raise VerifyError(f"{program.label()} cannot be looked through: {type(e).__name__}: {e}") from e


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
        kind, _, _ = self.operators.kind(op, scope)
        if kind.no_row and not kind.definition.abstract:  # what is a placeholder for communication; lower the program first has no rule
            raise Refusal(f"op {op.type}: no rule allows its placements: {kind.no_row}")
        if why := mixed(op, block):
            raise Refusal(why)
        for b in op.sub_blocks():
            self.block(self.program.blocks[b], set(defined))
        defined.update(op.output_arg_names)
        self.count += 1


class _Declared:
    """A block, for what it declares."""

    def __init__(self, block: Block, table: ExpressionTable):
        self.at, self.table = block, table

    def signature(self, name: str) -> Signature:
        d = self.at.find(name)
        if d is None:
            raise Refusal(f"%{name} is not declared")
        return self.table.signature(d.type, d.placement)
