"""The basic rewrites as passes, `rewritten`, which runs passes, and `simplified`, which runs the bit-exact rewrites in one walk."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.errors import ProgramError, nearest
from ..ir.flow import leaves
from ..ir.operator import Operator
from ..ir.pass_base import ONE_DEVICE, Job, Pass, named
from ..ir.program import Program
from ..ir.types import TensorType
from .constants import MOST_BYTES, Constants
from .equal import Equal
from .identities import Identities
from .live import live_ops
from .walk import NameFacts, Rule, TypeQuery


@named
@dataclass(frozen=True, repr=False)
class FoldConstants(Pass):
    """Compute constant values once: those that follow from attributes and known sizes. Values above `kb` kilobytes are left."""

    kb: int = MOST_BYTES // 1024
    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        return _walked(program, job, lambda walk: [Constants(walk, most_bytes=1024 * self.kb)])


@named
@dataclass(frozen=True, repr=False)
class DropIdentities(Pass):
    """Remove operators that leave a value unchanged (copies, casts to the same dtype, `x * 1`), and merge two transposes or reshapes."""

    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        def rules(walk: NameFacts) -> list[Rule]:
            constants = Constants(walk)
            return [constants.note, Identities(walk, constants)]

        return _walked(program, job, rules)


@named
@dataclass(frozen=True, repr=False)
class MergeEqual(Pass):
    """Merge equal operators of one section: same type, inputs and attributes. Random operators are never merged."""

    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        return _walked(program, job, lambda walk: [Equal(walk)])


@named
@dataclass(frozen=True, repr=False)
class DropDead(Pass):
    """Remove operators that no fetch, persistable variable or effect needs."""

    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        return with_ops(program, live_ops(program, job.fed, job.fetched(program)))


EXACT: tuple[Pass, ...] = (FoldConstants(), DropIdentities(), MergeEqual(), DropDead())


def rewritten(
    program: Program,
    passes: Iterable[Pass] = EXACT,
    fetch: Iterable[Any] | None = None,
    fed: Iterable[Any] = (),
    log: list[str] | None = None,
) -> Program:
    """The program after the passes, in their order; the default passes keep every bit of the results. `fetch` are the variables, or names,
    that will be fetched; without `fetch`, values that no operator reads are kept. `fed` are fed variables that are not declared as data.
    Reasons why passes left operators unchanged go to `log`.

    >>> import fluidx as fx
    >>> p = fx.Program.parse_from_string('''program p {
    ...   data %x: f32[-1,2]
    ...   %y: f32[-1,2] = scale(%x) {bias=0.0, bias_after_scale=true, scale=1.0}
    ...   %z: f32[-1,2] = tanh(%y)
    ... }''')
    >>> print(fx.rewrite.rewritten(p, [fx.rewrite.DropIdentities()]).ops[0])
    %z = tanh(%x)
    """
    if not isinstance(program, Program):
        raise ProgramError(f"rewritten takes a Program, got {type(program).__name__}")
    names = leaves(program) if fetch is None else [_declared(program, v) for v in fetch]
    job = Job(fetch=tuple(names), fed=frozenset(_declared(program, v) for v in fed), log=[] if log is None else log)
    for one in passes:
        if not isinstance(one, Pass):
            raise ProgramError(f"rewritten: {one!r} is not a rewrite; give objects such as fluidx.rewrite.DropDead()")
        program = one.run(program, job)
    return program


def simplified(program: Program, fetch: Iterable[str], fed: Collection[str] = ()) -> Program:
    """The program after the bit-exact rewrites, done in one walk: the executor does this before it plans a program."""
    ops = live_ops(program, fed, fetch)
    found = simplify(program, ops, _types(program), list(fetch), fed, natively=False)
    return with_ops(program, found.ops)


@dataclass(frozen=True)
class Simplified:
    """The result of `simplify`: the operators, and pairs (before, after) of those that read other names now. `asked` are the questions
    about types, with their answers, on which the result depends."""

    ops: Sequence[Operator]
    renamed: Sequence[tuple[Operator, Operator]]
    asked: Sequence[TypeQuery]

    def holds(self, types: Mapping[str, TensorType]) -> bool:
        """Is the result the same for values of these types?"""
        return all(one.holds(types) for one in self.asked)


def simplify(
    program: Program,
    ops: Sequence[Operator],
    types: Mapping[str, TensorType],
    fetch: Sequence[str],
    fed: Collection[str],
    natively: bool | None,
) -> Simplified:
    """The simplified `ops` of block 0, with bit-equal results. `natively`: whether C kernels compute constants; None: no constants are
    computed."""
    walk = NameFacts(program, ops, types, fetch, fed)
    constants = Constants(walk, bool(natively))
    fold: Rule = constants.note if natively is None else constants
    found = walk.run(ops, [fold, Identities(walk, constants), Equal(walk)])
    return Simplified(live_ops(program, fed, fetch, found) if walk.changed else ops, walk.renamed, walk.asked)


def _walked(program: Program, job: Job, rules: Any) -> Program:
    ops = program.global_block().oplist
    walk = NameFacts(program, ops, _types(program), job.fetched(program), job.fed)
    return with_ops(program, walk.run(ops, rules(walk)))


def _types(program: Program) -> dict[str, TensorType]:
    """The declared types; open axes stay open."""
    return {n: d.type for n, d in program.global_block().descs.items()}


def with_ops(program: Program, ops: Sequence[Operator], drop_state: Collection[str] = ()) -> Program:
    """A copy of the program with these operators in block 0, without variables that no operator names any more. State variables stay,
    except those in `drop_state`."""
    new = program.copy()
    block = new.global_block()
    block.oplist = list(ops)
    named = {n for b in new.blocks for op in b.oplist for n in (*op.input_arg_names, *op.output_arg_names)}
    was = {n for b in program.blocks for op in b.oplist for n in (*op.input_arg_names, *op.output_arg_names)}
    handed = {n for b in new.blocks for op in b.oplist for v in op.attrs.values() if isinstance(v, tuple) for n in v if isinstance(n, str)}
    named |= handed.union(n for n in block.descs if n not in was)
    block.descs = {n: d for n, d in block.descs.items() if n in named or d.is_data or (d.persistable and n not in drop_state)}
    return new


def _declared(program: Program, variable: Any) -> str:
    name = variable if isinstance(variable, str) else getattr(variable, "name", None)
    if name is None:
        raise ProgramError(f"expected a variable of {program.label()} or its name, got {type(variable).__name__}")
    descs = program.global_block().descs
    if name not in descs:
        raise ProgramError(f"{program.label()} declares no variable {name!r}; {nearest(name, descs, 'it declares')}")
    return name
