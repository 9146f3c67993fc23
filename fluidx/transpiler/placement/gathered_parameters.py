"""Gather parameters for use: they are stored in one placement, gathered for forward and for backward, and updated where they are stored."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...ir import flow
from ...ir.forms import FormChoice, Held, Names, Results, Slots, with_names
from ...ir.opdef import OpDef, opdef
from ...ir.operator import Operator, Role
from ...ir.program import Block
from ...ir.sub_blocks import runs_bodies
from ...ir.types import Placement
from ..cluster import SERVERS
from .derived_values import SECTIONS, DerivedValues
from .parameter_homes import Reshard, staying
from .propagate import Propagation


@dataclass(frozen=True)
class Use:
    """The placements of parameters in forward and backward. `places` has the parameters whose placement in use is not their storage
    placement; `units` gives, for each parameter, those that are gathered with it. Gathered copies are freed at the end of forward, except
    those of the last unit and of units that `reshard` leaves out, and at the end of backward. `matching` are the parameters in the scopes
    that `reshard` names.
    """

    places: Mapping[str, Placement]
    units: Mapping[str, Sequence[str]]
    reshard: Reshard = True
    matching: Container[str] = ()


class GatherForUse(Propagation):
    """A propagation that gathers a parameter before the first operator of a section that computes with it. A section has one copy; it is
    freed after its last reader. Updates read the parameter in its storage placement. For operators in a block, the parameter is gathered
    before the operator that runs the block, even if that block may not run, unless the block writes the parameter.

    A value that is computed from one parameter alone, such as its cast to 16 bits, is made before its first reader in each section, like a
    gathered parameter. If it has fewer bytes than the parameter, each rank computes its part from its part of the parameter, and the value
    is gathered in its place; else it is computed from the gathered parameter.
    """

    def __init__(self, *walk: Any, use: Use):
        super().__init__(*walk)
        self.use = use
        self.role = self.section = Role.DIST  # of the current operator; DIST: no section yet
        self.recent: list[Sequence[str]] = []  # the units that the section has gathered, in order
        # values in use: the forms and the names of the stored values, None for a value that was computed from a gathered one
        self.gathered: dict[str, tuple[Held, tuple[str, ...] | None] | None] = {}
        self.derived = DerivedValues(self, {} if SERVERS in self.axes else use.places)
        self.source = self.block.oplist = self.derived.kept
        self.watched = {*use.places, *self.derived}
        self.made: dict[str, Role] = {}  # the section in which each derived value was made last
        self.changed: set[str | None] = set()  # the names that operators have written so far
        self.making = False  # is the current operator one that makes a derived value?

    def _before(self, op: Operator, reads: Names) -> None:
        if self.making:
            return
        if op.role is not self.role and not self.block.idx:
            self._enter_section(op.role)
        for param in self.derived.families.keys() & op.output_arg_names:  # values derived from it that are read later
            self._make_at_all(self.derived.family(param), op)
        if runs_bodies(op):
            written = flow.writes(self.program, op)
            self._release(written)
            self.changed.update(self.watched.intersection(written))
            reads = flow.reads(self.program, op)
        if self.watched.isdisjoint(reads):
            return
        if self.role is Role.OPTIMIZE:
            self._release([n for n in reads if n is not None])
        elif self.role in SECTIONS and any(n in self.watched and n not in self.gathered for n in reads):
            for name in self._computes_with(op):
                self._gather_unit(name, op)
            self._make_at_all(reads, op)

    def _enter_section(self, role: Role) -> None:
        """Enter the section of operators of this role."""
        self.role = role
        section = SECTIONS.get(role, self.section)
        if section is not self.section:
            self.section, units, self.recent = section, self.recent, []
            if self.use.reshard is not False:
                units = staying(units, self.use.reshard, self.use.matching) if section is Role.BACKWARD else []
                stay = {n for unit in units for n in unit}
                self._release([n for n in self.gathered if self.derived.root(n) not in stay])

    def _gather_unit(self, name: str, op: Operator) -> None:
        """Gather a value that an operator reads, and what the section computes with of the unit of its parameter."""
        if name in self.gathered:
            return
        param = self.derived.root(name)
        unit = self.use.units.get(param, (param,))
        if self.recent[-1:] != [unit]:
            self.recent.append(unit)
        for member in unit:
            for n in self.derived.family(member):
                if n == name or n not in self.gathered and n in self.wanted[self.section]:
                    self._gather(self._gathered_for(n), op)
        self._gather(name, op)

    def _gathered_for(self, name: str) -> str:
        """The value that is gathered so that `name` can be computed."""
        while name in self.derived and not self._at_rest(name):
            name = self.derived[name].source
        return name

    def _at_rest(self, name: str) -> bool:
        """Does each rank compute its part of a derived value? It does not if the section needs the whole of a value before it, too."""
        whole = any(n in self.gathered or n in self.wanted[self.section] for n in self.derived.chain(name))
        return self.derived[name].rests and not whole

    def _gather(self, name: str, op: Operator) -> None:
        """Make the value that forward and backward use: gather it, or compute it from what was gathered."""
        if name in self.gathered:
            return
        place = self.use.places.get(name)
        if place is None:
            place = self.derived[name].in_use
            if self._at_rest(name):
                self._make(name, Role.DIST)
            else:
                self._gather(self.derived[name].source, op)
                self._make(name, self.section)
            if place in self.at[name].forms:
                self.gathered[name] = None
                return
        self.gathered[name] = self.at[name], self.names.get(name)
        self.hold(name, self._held(name, (place,)), self.bring(name, place, op, "use"))

    def _make(self, name: str, role: Role) -> None:
        """Compute a derived value from the available form of its source, once for each section: under a new name if the program has
        computed it before. It is left as it was if the parameter has changed since then."""
        op, source, *_ = self.derived[name]
        if role is Role.DIST and source in self.derived:
            self._make(source, role)
        before = self.made.get(name)
        if before is self.section or before is not None and self.derived.root(name) in self.changed:
            return
        self.made[name], self.making, out = self.section, True, name
        if before is not None:
            out = self.derived.spare[name].pop() if self.derived.spare.get(name) else self._copy_of(name)
        role = op.role if SECTIONS[op.role] is role else role
        self._operators([op.replace(outputs=dict.fromkeys(op.outputs, (out,)), role=role)])
        if before is not None:
            self.hold(name, self.at[out], out)
        self.making = False

    def _make_at_all(self, names: Iterable[str | None], op: Operator) -> None:
        """Make the derived values among these that the program has not made so far."""
        for n in names:
            if n is not None and n in self.derived and n not in self.made:
                if self.derived[n].rests:
                    self._make(n, Role.DIST)
                else:
                    self._gather(n, op)

    def _copy_of(self, name: str) -> str:
        """Declare a variable for the second value of a derived value."""
        out = self.new(name, (), "again")
        self.block.descs[out] = self.block.descs[out].changed(attrs={"copy_of": name})
        return out

    def run(self) -> None:
        super().run()
        for names in self.derived.spare.values():
            for n in names:
                del self.block.descs[n]

    def _release(self, names: Iterable[str]) -> None:
        for name in names:
            if (stored := self.gathered.pop(name, None)) is not None:
                held, under = stored
                self.hold(name, held, *(under or ()))

    @cached_property
    def wanted(self) -> Mapping[Role, Collection[str]]:
        """The parameters and derived values that operators of each section compute with."""
        found: dict[Role, set[str]] = {s: set() for s in SECTIONS.values()}
        for op in self.source:
            if op.role in SECTIONS:
                found[SECTIONS[op.role]].update(self._computes_with(op))
        return found

    def _computes_with(self, op: Operator) -> list[str]:
        """The parameters and derived values that an operator reads, and not only their shapes, without those that its blocks write."""
        places = self.watched
        if runs_bodies(op):
            written = set(flow.writes(self.program, op))
            return [n for n in flow.reads(self.program, op) if n in places and n not in written]
        if places.isdisjoint(op.input_arg_names):
            return []
        definition = opdef(op.type)
        ins = definition.flat_slots(op.inputs, definition.in_slots)
        shape_only = self._kind(op, definition, ins, definition.flat_slots(op.outputs, definition.out_slots)).pattern.shape_only
        return [n for k, n in enumerate(ins) if n is not None and n in places and k not in shape_only]

    def _brought(self, op: Operator, definition: type[OpDef], ins: Names, choice: FormChoice) -> Slots | None:
        """A parameter stored at a root has no local value elsewhere; operators that read only its shape use the gathered copy."""
        inputs = super()._brought(op, definition, ins, choice)
        used = {k: self.local(n, 0) for k, n in enumerate(ins) if n in self.gathered and choice.take[k] is None and self._rooted(n)}
        if not used:
            return inputs
        return with_names(op, definition, ins if inputs is None else definition.flat_slots(inputs, definition.in_slots), used)

    def _rooted(self, name: str | None) -> bool:
        stored = self.gathered[name] if name is not None else None
        return stored is not None and any(e.root is not None for place in stored[0].forms for e in place)

    def _write(self, op: Operator, inputs: Slots | None, outs: Names, results: Results, attrs: Any = None) -> None:
        super()._write(op, inputs, outs, results, attrs)
        for name in outs:
            if name is not None and name in self.watched:
                self.gathered.pop(name, None)
                self.changed.add(name)

    def _block(self, block: Block) -> None:
        gathered = dict(self.gathered)
        super()._block(block)
        if block.idx:
            self.gathered = gathered
