"""Find loop-carried values that a loop only adds to: they can stay partial in the loop, and be reduced once after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ...ir import flow
from ...ir.entries import Entry
from ...ir.opdef import OpDef, opdef
from ...ir.operator import Operator
from ...ir.program import Block, Program
from ...ir.sub_blocks import bodies, runs_bodies
from .choose_row import PatternClass

KindOf = Callable[[Operator, type[OpDef], Sequence["str | None"], Sequence["str | None"]], PatternClass]


def only_added_to(program: Program, block: Block, name: str, kind_of: KindOf) -> bool:
    """Does a block only add to a variable of an enclosing block? Then all values computed from it are linear in it, end in the variable,
    and have no other readers. `kind_of(op, definition, ins, outs)` gives the PatternClass of an operator."""
    made = {name}
    for op in block.oplist:
        reads, writes = flow.touches(program, op)
        if made.isdisjoint(reads):
            if name in writes:
                return False
        elif not runs_bodies(op):
            if not _linear(op, opdef(op.type), made, kind_of):
                return False
            made.update(writes)
        elif not _loop_adds(program, op, name, made.intersection(reads), kind_of):
            return False
    return all(n == name or n in block.descs for n in made)


def _loop_adds(program: Program, op: Operator, name: str, read: Collection[str], kind_of: KindOf) -> bool:
    if not opdef(op.type).control.repeats or read != {name}:
        return False
    return all(only_added_to(program, program.blocks[body.idx], name, kind_of) for body in bodies(op))


def _linear(op: Operator, definition: type[OpDef], made: Collection[str], kind_of: KindOf) -> bool:
    """Does the operator have a row with partial inputs for the names in `made`, and partial results?"""
    ins, outs = definition.flat_slots(op.inputs, definition.in_slots), definition.flat_slots(op.outputs, definition.out_slots)
    kind = kind_of(op, definition, ins, outs)
    mine = [k for k, n in enumerate(ins) if n in made]
    linear = [row for row in kind.table if row.kind == "linear" and all(_is_term(row.ins[k]) for k in mine)]
    return len(outs) == 1 and any(_is_term(row.outs[0]) for row in linear)


def _is_term(e: Entry | None) -> bool:
    return e is not None and bool(e.op)


def begun(program: Program, ops: Sequence[Operator], name: str) -> int | None:
    """The index of the operator that last wrote a variable; None if the variable was read since, or if a block or a redistribute wrote
    it."""
    for k in range(len(ops) - 1, -1, -1):
        reads, writes = flow.touches(program, ops[k])
        if name in reads:
            return None
        if name in writes:
            return None if runs_bodies(ops[k]) or opdef(ops[k].type).control.abstract else k
    return None
