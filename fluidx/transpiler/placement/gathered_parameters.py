"""Parameters that rest in one placement and are in use in another: lent to forward and to backward, and updated where they rest."""

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
    """Where parameters lie while forward and backward work on them.

    `places` names those that are in use elsewhere than they rest, `units` those that are brought together, by each member. What is lent is
    given back at the end of forward, but for the unit that was lent last, and of backward; with `kept`, of backward only.
    """

    places: Mapping[str, Placement]
    units: Mapping[str, Sequence[str]]
    kept: bool = False


class GatherForUse(Propagation):
    """A walk that brings a parameter to its place in use in front of the first operator of a section that works on it.

    Within a section there is one copy; its last reader frees it. Operators of the update find the parameter where it rests. For what runs
    in a block it is brought in front of the operator that runs the block, whatever that decides, unless the block writes it.
    """

    def __init__(self, *walk: Any, use: Use):
        super().__init__(*walk)
        self.use = use
        self.role = self.section = Role.DIST  # the role of the operator of block 0 at hand, and the section: DIST, none yet
        self.recent: Sequence[str] = ()  # the unit that was lent last
        self.lent: dict[str, tuple[Held, tuple[str, ...] | None]] = {}  # how what is in use lies at rest, and under which names

    def _before(self, op: Operator, reads: Names) -> None:
        if op.role is not self.role and not self.block.idx:
            self._turn(op.role)
        if runs_bodies(op):
            self._take_back(flow.writes(self.program, op))
            reads = flow.reads(self.program, op)
        if self.use.places.keys().isdisjoint(reads):
            return
        if self.role is Role.OPTIMIZE:
            self._take_back([n for n in reads if n is not None])
        elif self.role in _SECTIONS and any(n in self.use.places and n not in self.lent for n in reads):
            for name in self._works_on(op):
                self._lend_unit(name, op)

    def _turn(self, role: Role) -> None:
        """Operators of this role follow."""
        self.role = role
        section = _SECTIONS.get(role, self.section)
        if section is not self.section:
            self.section = section
            if not self.use.kept:
                stay = frozenset(self.recent if section is Role.BACKWARD else ())
                self._take_back([n for n in self.lent if n not in stay])

    def _lend_unit(self, name: str, op: Operator) -> None:
        """Lend a parameter and those of its unit that the section works on."""
        if name in self.lent:
            return
        self.recent = self.use.units.get(name, (name,))
        for member in self.recent:
            if member == name or member not in self.lent and member in self.wanted[self.section]:
                self._lend(member, op)

    def _lend(self, name: str, op: Operator) -> None:
        place = self.use.places[name]
        self.lent[name] = self.at[name], self.names.get(name)
        self.hold(name, self._held(name, (place,)), self.bring(name, place, op, "use"))

    def _take_back(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.lent:
                held, under = self.lent.pop(name)
                self.hold(name, held, *(under or ()))

    @cached_property
    def wanted(self) -> Mapping[Role, Collection[str]]:
        """What each section works on."""
        found: dict[Role, set[str]] = {s: set() for s in _SECTIONS.values()}
        for op in self.source:
            if op.role in _SECTIONS:
                found[_SECTIONS[op.role]].update(self._works_on(op))
        return found

    def _works_on(self, op: Operator) -> list[str]:
        """The parameters in use whose values, not their shapes alone, an operator reads; without what its blocks write."""
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
        """What rests at roots has no shape elsewhere: where only that is read, it is that of what is in use."""
        inputs = super()._brought(op, definition, ins, choice)
        lent = {k: self.local(n, 0) for k, n in enumerate(ins) if n in self.lent and choice.take[k] is None and self._rooted(n)}
        if not lent:
            return inputs
        return with_names(op, definition, ins if inputs is None else definition.flat_slots(inputs, definition.in_slots), lent)

    def _rooted(self, name: str | None) -> bool:
        return any(e.root is not None for place in self.lent[name][0].forms for e in place)  # type: ignore[index]

    def _write(self, op: Operator, inputs: Slots | None, outs: Names, results: Results, attrs: Any = None) -> None:
        super()._write(op, inputs, outs, results, attrs)
        for name in outs if self.lent else ():
            self.lent.pop(name, None)  # type: ignore[arg-type]

    def _block(self, block: Block) -> None:
        lent = dict(self.lent)
        super()._block(block)
        if block.idx:
            self.lent = lent
