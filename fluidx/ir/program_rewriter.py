"""Writer and PlacingBuilder: build a new program from an old one by keeping, replacing and inserting operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .builder import Builder
from .errors import ProgramError
from .opdef import OpDef, opdef
from .operator import Frozen, Operator, Role
from .parts import entry_of
from .program import Program
from .rows import PlacementRow, cut_twice, fits, rows
from .types import Entry, Local, Placement, TensorType, show_placement
from .var import Var


class Writer:
    """A copy of a program with an empty block 0, and the old operators to take."""

    def __init__(self, program: Program):
        self.program = program.copy()
        self.block = self.program.global_block()
        self.old = self.block.oplist
        self.block.oplist = []

    def keep(self, op: Operator) -> None:
        self.block.oplist.append(op)

    def builder(self, role: Role = Role.DIST, near: Operator | None = None) -> PlacingBuilder:
        """A builder that appends to block 0. New operators get the call site of `near`."""
        return PlacingBuilder(self, role, near)

    def declare(self, name: str, like: Var, placement: Placement = ()) -> Var:
        """Declare a value with the type of `like` and the given placement."""
        return self.block.declare(Var(name, like.type, placement, stop_gradient=True))


def each_op(program: Program, visit: Callable[[Writer, Operator], None]) -> Program:
    """A new program, made by `visit(writer, op)` for every operator of block 0."""
    writer = Writer(program)
    for op in writer.old:
        visit(writer, op)
    return writer.program


class PlacingBuilder(Builder):
    """A Builder that gives new results the placements of the ops' placement rules. A result that is already declared keeps its type and
    placement."""

    def __init__(self, writer: Writer, role: Role, near: Operator | None):
        super().__init__(writer.block, role)
        self.program = writer.program
        self.site, self.device = near.site if near is not None else None, ""

    def group_size(self, group: str) -> int:
        """The number of ranks in a group."""
        return len(self.program.groups[group][0])

    def _write(
        self, op_type: str, inputs: dict[str, tuple[str, ...]], outputs: dict[str, tuple[str, ...]], attrs: Mapping[str, Any]
    ) -> Operator:
        descs = self.block.descs
        new = {n for names in outputs.values() for n in names if n not in descs}
        op = super()._write(op_type, inputs, outputs, attrs)
        if new:
            made = op.output_arg_names
            places = result_places(self.program, opdef(op_type), op, [descs[n].type for n in made])
            descs.update((n, Var(n, descs[n].type, q, stop_gradient=True)) for n, q in zip(made, places, strict=True) if n in new)
        return op


def result_places(program: Program, definition: type[OpDef], op: Operator, types: list[TensorType]) -> list[Placement]:
    """The placements of an operator's results, by its placement rules. Raises ProgramError if no rule allows the placements of its
    operands."""
    block = program.global_block()
    ins = definition.flat_slots(op.inputs, definition.in_slots)
    descs = [None if n is None else block.desc(n) for n in ins]
    places = [() if d is None else d.placement for d in descs]
    if any(e.is_local for q in places for e in q):
        return [(Local(),)] * len(types)
    if definition.comm.move is not None:
        group = op.attrs["group"]
        (place,) = places
        moved = definition.comm.move(entry_of(place, group), **op.attrs)
        rest = tuple(e for e in place if e.group != group)
        return [rest if moved is None else (*rest, moved)] * len(types)
    if not any(places):
        return [()] * len(types)
    in_types = [None if d is None else d.type for d in descs]
    p = definition.pattern_of(in_types, types, op.attrs)
    table = rows(p)
    found: list[list[Entry]] = [[] for _ in types]
    chosen: list[PlacementRow] = []
    for group, sets in program.groups.items():
        entries = [entry_of(q, group) for q in places]
        if not any(entries):
            continue
        said = ((r, fits(r, p, entries, None, [*in_types, *types], group, len(sets[0]))) for r in table)
        row, made = next((pair for pair in said if pair[1] is not None), (None, None))
        if row is None or made is None or cut_twice(chosen := [*chosen, row]):
            listed = ", ".join(f"%{n} is {show_placement(q)}" for n, q in zip(ins, places, strict=True) if n is not None)
            raise ProgramError(f"op {op.type}: no rule allows its inputs' placements over {group}: {listed}; redistribute one of them")
        for q, e in zip(found, made, strict=True):
            if e is not None:
                q.append(e)
    return [tuple(q) for q in found]


class SharedAttrs:
    """Changes attributes of operators; operators that shared an attribute object share the new one."""

    def __init__(self) -> None:
        self._made: dict[tuple, tuple[Frozen, Frozen]] = {}  # with the originals, which keeps their ids unique

    def changed(self, op: Operator, **changes: Any) -> Operator:
        key = id(op.attrs), *changes.items()
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = op.attrs, Frozen({**op.attrs, **changes})
        return op.replace(attrs=made[1])
