"""Data flow: which operators define and read each variable, sub-blocks included, and which operators are live.

Pure functions over a program and its operators. An operator that runs sub-blocks reads the outer variables that its bodies read or
return, and writes the outer variables that they write. Variables that a body declares are local to it.

>>> from fluidx.ir import Program
>>> p = Program.parse_from_string('''program p {
...   data %x: f32[1]
...   data %go: bool[1]
...   %y: f32[1] = relu(%x)
...   while(%go, []) {sub_block=block 1}
...   block 1 in 0 { %t: f32[1] = exp(%y); %x = assign(%t) }
... }''')
>>> reads(p, p.ops[1]), writes(p, p.ops[1])
(('go', 'y'), ('x',))
>>> uses(p)
{'x': [0], 'go': [1], 'y': [1]}
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from .errors import ProgramError
from .opdef import OPS, Effect, opdef
from .operator import Operator, op_types
from .sub_blocks import bodies, check_body, runs_bodies

if TYPE_CHECKING:
    from .opdef import OpDef
    from .program import Block, Program


def reads(program: Program, op: Operator) -> tuple[str, ...]:
    """The variables that an operator reads, in order of appearance; one given twice is listed twice."""
    if not runs_bodies(op):
        return op.input_arg_names
    names = dict.fromkeys(op.input_arg_names)
    for body in bodies(op):
        block = _block(program, op, body.idx)
        names.update(dict.fromkeys(sub_reads(program, block)))
        names.update(dict.fromkeys(n for n in body.results(op) if n not in block.descs))
    return tuple(names)


def writes(program: Program, op: Operator) -> tuple[str, ...]:
    """The variables that an operator writes, in order of appearance."""
    if not runs_bodies(op):
        return op.output_arg_names
    names = dict.fromkeys(op.output_arg_names)
    for body in bodies(op):
        names.update(dict.fromkeys(sub_writes(program, _block(program, op, body.idx))))
    return tuple(names)


def touches(program: Program, op: Operator) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The variables that an operator reads, and those that it writes."""
    if not runs_bodies(op):
        return op.input_arg_names, op.output_arg_names
    return reads(program, op), writes(program, op)


def sub_reads(program: Program, block: Block) -> tuple[str, ...]:
    """The variables of enclosing blocks that the operators of `block` read."""
    return _outer(program, block, reads)


def sub_writes(program: Program, block: Block) -> tuple[str, ...]:
    """The variables of enclosing blocks that the operators of `block` write."""
    return _outer(program, block, writes)


def repeated(program: Program) -> set[int]:
    """The blocks that may run more than once in a step: bodies of loops and the blocks inside of them.

    >>> from fluidx.ir import Program
    >>> repeated(Program.parse_from_string("program p { data %go: bool[1]; while(%go, []) {sub_block=block 1}; block 1 in 0 { } }"))
    {1}
    """
    loops = [op for b in program.blocks for op in b.oplist if runs_bodies(op) and opdef(op.type).control.repeats]
    found = {idx for op in loops for idx in op.sub_blocks()}
    for b in program.blocks:  # an enclosing block stands before those inside of it
        if b.parent_idx in found:
            found.add(b.idx)
    return found


def _outer(program: Program, block: Block, which: Callable[[Program, Operator], tuple[str, ...]]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for op in block.oplist:
        for idx in op.sub_blocks() if runs_bodies(op) else ():
            check_body(op, block, idx, {})  # blocks that run each other would loop forever
        names.update(dict.fromkeys(n for n in which(program, op) if n not in block.descs))
    return tuple(names)


def _block(program: Program, op: Operator, idx: int) -> Block:
    if not 0 < idx < len(program.blocks):
        raise ProgramError(f"op {op.type} runs block {idx}; {program.label()} has blocks 1 to {len(program.blocks) - 1} to run")
    return program.blocks[idx]


def listed(program: Program, op: Operator) -> Operator:
    """An operator that runs blocks with the variables that these read in its slot for them, others not. A loop names what its body writes
    too: it may run no round, so that what it writes it reads."""
    definition = opdef(op.type)
    blocks = [(_block(program, op, body.idx), body.results(op)) for body in bodies(op)]
    reads = [n for block, results in blocks for n in (*sub_reads(program, block), *(r for r in results if r not in block.descs))]
    if not definition.control.repeats:
        return op.replace(inputs=_listing(op, definition, reads))
    ((body, _),), (out,) = blocks, definition.out_slots
    writes = sub_writes(program, body)
    return op.replace(inputs=_listing(op, definition, [*writes, *reads]), outputs={out.name: writes})


def _listing(op: Operator, definition: type[OpDef], names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The inputs of an operator, with these names in its list slot."""
    return {s.name: tuple(dict.fromkeys(names)) if s.many else op.input(s.name) for s in definition.in_slots if s.many or op.input(s.name)}


def acts(program: Program, op: Operator) -> bool:
    """Does an operator, or one in its sub-blocks, have a side effect, such as printing or communication?"""
    return _does(program, op, lambda effect: effect not in (Effect.PURE, Effect.RANDOM))


def draws(program: Program, op: Operator) -> bool:
    """Whether an operator, or one in its sub-blocks, draws random numbers."""
    return _does(program, op, lambda effect: effect is Effect.RANDOM)


def _does(program: Program, op: Operator, what: Callable[[Effect], bool]) -> bool:
    if what(opdef(op.type).effect):
        return True
    return runs_bodies(op) and any(_does(program, o, what) for body in bodies(op) for o in _block(program, op, body.idx).oplist)


# -- over a list of operators, block 0's if none is given ---------------------------------------------------------------------------


def definitions(program: Program, ops: Sequence[Operator] | None = None) -> dict[str, list[int]]:
    """The operators that write each variable, by index."""
    return _where(program, ops, writes)


def uses(program: Program, ops: Sequence[Operator] | None = None) -> dict[str, list[int]]:
    """The operators that read each variable, by index."""
    return _where(program, ops, reads)


def first_use(program: Program, ops: Sequence[Operator] | None = None) -> dict[str, int]:
    """The first operator that reads each variable, by index."""
    return {name: at[0] for name, at in uses(program, ops).items()}


def needs(program: Program, ops: Sequence[Operator] | None = None) -> tuple[str, ...]:
    """The variables that the operators read before they write them, in order of appearance."""
    found: dict[str, None] = {}
    written: set[str] = set()
    for op in program.blocks[0].oplist if ops is None else ops:
        found.update(dict.fromkeys(n for n in reads(program, op) if n not in written))
        written.update(_surely(op))
    return tuple(found)


def leaves(program: Program) -> list[str]:
    """The variables that the operators write and do not read, without state."""
    block = program.global_block()
    read = {n for op in block.oplist for n in reads(program, op)}
    made = dict.fromkeys(n for op in block.oplist for n in op.output_arg_names if n not in read)
    return [n for n in made if (d := block.descs.get(n)) is None or not d.persistable]


def _where(program: Program, ops: Sequence[Operator] | None, which: Callable[..., tuple[str, ...]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for k, op in enumerate(program.blocks[0].oplist if ops is None else ops):
        for name in dict.fromkeys(which(program, op)):
            found.setdefault(name, []).append(k)
    return found


def _surely(op: Operator) -> tuple[str, ...]:
    """The variables that an operator certainly writes. A body that returns nothing may not run at all."""
    return op.output_arg_names if not runs_bodies(op) or all(body.results_attr for body in bodies(op)) else ()


def live_ops(
    program: Program,
    needed: Iterable[str],
    keep: Callable[[Operator], bool] | None = None,
    given: Collection[str] = (),
    ops: Sequence[Operator] | None = None,
) -> list[Operator]:
    """The operators that the last values of `needed` depend on, those that `keep` holds, and what these depend on, in order.

    An operator that only writes values that are `given` is left out, unless it changes one of them in place.
    """
    wanted, live = set(needed), []
    every = program.blocks[0].oplist if ops is None else ops
    running = {t for t in op_types(every) if (d := OPS.get(t)) is None or d.control.bodies}
    for op in reversed(every):
        ins, outs = touches(program, op) if op.type in running else (op.input_arg_names, op.output_arg_names)
        if given and outs and all(n in given and n not in op.input_arg_names for n in outs):
            continue
        if not wanted.isdisjoint(outs) or (keep is not None and keep(op)):
            wanted.difference_update(_surely(op) if op.type in running else outs)
            wanted.update(ins)
            live.append(op)
    live.reverse()
    return live
