"""Gather parameters for use: they are stored in one placement, gathered for forward and for backward, and updated where they are stored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
from .propagate import Propagation

_SECTIONS = {Role.FORWARD: Role.FORWARD, Role.LOSS: Role.FORWARD, Role.BACKWARD: Role.BACKWARD}


@dataclass(frozen=True)
class Use:
    """The placements of parameters in forward and backward. `places` has the parameters whose placement in use is not their storage
    placement; `units` gives, for each parameter, those that are gathered with it. Gathered copies are freed at the end of forward, except
    those of the last unit, and at the end of backward; with `kept`, only at the end of backward.
    """

    places: Mapping[str, Placement]
    units: Mapping[str, Sequence[str]]
    kept: bool = False


class GatherForUse(Propagation):
    """A propagation that gathers a parameter before the first operator of a section that computes with it. A section has one copy; it is
    freed after its last reader. Updates read the parameter in its storage placement. For operators in a block, the parameter is gathered
    before the operator that runs the block, even if that block may not run, unless the block writes the parameter.
    """

    def __init__(self, *walk: Any, use: Use):
        super().__init__(*walk)
        self.use = use
        self.role = self.section = Role.DIST  # of the current operator; DIST: no section yet
        self.recent: Sequence[str] = ()  # the unit that was gathered last
        self.gathered: dict[str, tuple[Held, tuple[str, ...] | None]] = {}  # the stored values: forms, and names

    def _before(self, op: Operator, reads: Names) -> None:
        if op.role is not self.role and not self.block.idx:
            self._enter_section(op.role)
        if runs_bodies(op):
            self._release(flow.writes(self.program, op))
            reads = flow.reads(self.program, op)
        if self.use.places.keys().isdisjoint(reads):
            return
        if self.role is Role.OPTIMIZE:
            self._release([n for n in reads if n is not None])
        elif self.role in _SECTIONS and any(n in self.use.places and n not in self.gathered for n in reads):
            for name in self._computes_with(op):
                self._gather_unit(name, op)

    def _enter_section(self, role: Role) -> None:
        """Enter the section of operators of this role."""
        self.role = role
        section = _SECTIONS.get(role, self.section)
        if section is not self.section:
            self.section = section
            if not self.use.kept:
                stay = frozenset(self.recent if section is Role.BACKWARD else ())
                self._release([n for n in self.gathered if n not in stay])

    def _gather_unit(self, name: str, op: Operator) -> None:
        """Gather a parameter and the others of its unit that the section computes with."""
        if name in self.gathered:
            return
        self.recent = self.use.units.get(name, (name,))
        for member in self.recent:
            if member == name or member not in self.gathered and member in self.wanted[self.section]:
                self._gather(member, op)

    def _gather(self, name: str, op: Operator) -> None:
        place = self.use.places[name]
        self.gathered[name] = self.at[name], self.names.get(name)
        self.hold(name, self._held(name, (place,)), self.bring(name, place, op, "use"))

    def _release(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.gathered:
                held, under = self.gathered.pop(name)
                self.hold(name, held, *(under or ()))

    @cached_property
    def wanted(self) -> Mapping[Role, Collection[str]]:
        """The parameters that each section computes with."""
        found: dict[Role, set[str]] = {s: set() for s in _SECTIONS.values()}
        for op in self.source:
            if op.role in _SECTIONS:
                found[_SECTIONS[op.role]].update(self._computes_with(op))
        return found

    def _computes_with(self, op: Operator) -> list[str]:
        """The parameters whose values an operator reads, and not only their shapes, without those that its blocks write."""
        places = self.use.places
        if runs_bodies(op):
            written = set(flow.writes(self.program, op))
            return [n for n in flow.reads(self.program, op) if n in places and n not in written]
        if places.keys().isdisjoint(op.input_arg_names):
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
        return any(e.root is not None for place in self.gathered[name][0].forms for e in place)  # type: ignore[index]

    def _write(self, op: Operator, inputs: Slots | None, outs: Names, results: Results, attrs: Any = None) -> None:
        super()._write(op, inputs, outs, results, attrs)
        for name in outs if self.gathered else ():
            self.gathered.pop(name, None)  # type: ignore[arg-type]

    def _block(self, block: Block) -> None:
        gathered = dict(self.gathered)
        super()._block(block)
        if block.idx:
            self.gathered = gathered
