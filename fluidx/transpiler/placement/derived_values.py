"""Values that operators compute from one parameter alone, such as its cast to 16 bits: they are made and gathered like the parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...ir import flow
from ...ir.forms import Names
from ...ir.opdef import Effect, OpDef, opdef
from ...ir.operator import Operator, Role, attrs_key
from ...ir.sub_blocks import runs_bodies
from ...ir.types import REPLICATE, Placement
from .propagate import Propagation

SECTIONS = {Role.FORWARD: Role.FORWARD, Role.LOSS: Role.FORWARD, Role.BACKWARD: Role.BACKWARD}


class Derived(NamedTuple):
    """A value that `op` computes from `source`, which is a parameter or another derived value. `in_use`: its placement if the parameter is
    gathered. `rests`: whether each rank can compute its part from its part of the parameter, in fewer bytes than all values between them
    have."""

    op: Operator
    source: str
    in_use: Placement
    rests: bool


class DerivedValues(dict[str, Derived]):
    """The derived values of block 0, in order. `kept` are the other operators of the block. A value that the program computes a second
    time, as recompute does, is one value with two names: `spare` has the second ones, for the value that a later section computes again.

    An operator makes a derived value if it is a function of one parameter, constants and values that no section writes, reduces nothing,
    and takes the parameter as it is gathered. Its result must be written once, and read by operators of forward and backward alone.
    """

    def __init__(self, walk: Propagation, places: Mapping[str, Placement]):
        super().__init__()
        self.walk, self.places = walk, places
        self.again: dict[str, str] = {}
        self.spare: dict[str, list[str]] = {}
        self.constants: dict[str, Operator] = {}
        self.resting: dict[str, Placement | None] = {}  # the placements of values that ranks compute from their parts of a parameter
        self.known: dict[tuple, str] = {}
        self.families: dict[str, list[str]] = {}
        self.written: dict[str, int] = {}
        self.read, self.elsewhere, self.in_blocks = set[str](), set[str](), set[str]()
        self._look()
        others = [op for op in walk.block.oplist if not self._derives(op)]
        first = {id(self.constants[n]): self.constants[n] for d in self.values() for n in d.op.input_arg_names if n in self.constants}
        rest = [op.renamed(self.again) if self.again else op for op in others if id(op) not in first]
        self.kept = [*(op.replace(role=Role.FORWARD) for op in first.values()), *rest]

    def _look(self) -> None:
        """Find what operators of sections write and read, what blocks read, and what other operators read."""
        for block in self.walk.program.blocks:
            for op in block.oplist:
                reads, writes = flow.touches(self.walk.program, op)
                if op.role not in SECTIONS:
                    self.elsewhere.update(reads)
                if op.role in SECTIONS or block.idx:
                    self.read.update(reads)
                    for n in writes:
                        self.written[n] = self.written.get(n, 0) + 1
                if block.idx or runs_bodies(op):
                    self.in_blocks.update(reads)

    def chain(self, name: str) -> list[str]:
        """The values from which a derived value is computed, from the nearest to the parameter."""
        found = []
        while name in self:
            found.append(name := self[name].source)
        return found

    def family(self, param: str) -> list[str]:
        """A parameter and the values derived from it."""
        return self.families.get(param, [param])

    def root(self, name: str) -> str:
        """The parameter from which a value is derived; the name itself if it is not derived."""
        return self.chain(name)[-1] if name in self else name

    def _derives(self, op: Operator) -> bool:
        """Does an operator make a derived value? It is then recorded."""
        definition = opdef(op.type)
        if op.role not in SECTIONS or definition.effect is not Effect.PURE or definition.control.bodies or definition.control.bind:
            return False
        if not op.input_arg_names and len(op.output_arg_names) == 1 and self.written.get(op.output_arg_names[0]) == 1:
            self.constants[op.output_arg_names[0]] = op
            return False
        op = op.renamed({n: self.again[n] for n in op.input_arg_names if n in self.again})
        source = self._source(op)
        if source is None or op.role_var or definition.storage.same_variable or len(op.output_arg_names) != 1:
            return False
        (out,) = op.output_arg_names
        if self.written[out] > 1 or out in self.walk.keep or out in self.elsewhere or out not in self.read:
            return False
        return self._same(op, out) or self._recorded(op, definition, source, out)

    def _source(self, op: Operator) -> str | None:
        """The one parameter or derived value that an operator reads, beside constants and state that no section writes."""
        found = {n for n in op.input_arg_names if n in self or n in self.places}
        rest = [n for n in op.input_arg_names if n not in found]
        if len(found) != 1 or not all(n in self.constants or self._is_settled(n) for n in rest):
            return None
        (name,) = found
        return None if self.root(name) in self.written else name

    def _is_settled(self, name: str) -> bool:
        """Is it state that no section writes, whole on every rank?"""
        return name in self.walk.keep and name not in self.written and self.walk.at[name].forms == (REPLICATE,)

    def _same(self, op: Operator, out: str) -> bool:
        """Is it a value that recompute computes a second time?"""
        if "copy_of" not in self.walk.block.descs[out].attrs:
            self.known.setdefault(self._key(op), out)
            return False
        first = self.known.get(self._key(op), "")
        if first not in self or out in self.in_blocks or self.walk.types[first] != self.walk.types[out]:
            return False
        self.again[out] = first
        self.spare.setdefault(first, []).append(out)
        return True

    @staticmethod
    def _key(op: Operator) -> tuple:
        return op.type, attrs_key(op.attrs), op.device, *op.input_arg_names

    def _recorded(self, op: Operator, definition: type[OpDef], source: str, out: str) -> bool:
        ins, outs = definition.flat_slots(op.inputs, definition.in_slots), definition.flat_slots(op.outputs, definition.out_slots)
        pattern = self.walk._kind(op, definition, ins, outs).pattern
        if pattern.reduced or pattern.keyed or all(k in pattern.shape_only for k, n in enumerate(ins) if n == source):
            return False
        gathered = self[source].in_use if source in self else self.places[source]
        in_use = self._made_from(gathered, op, definition, source, ins, outs)
        if in_use is None:
            return False
        stored = self.resting[source] if source in self else self.walk.at[source].forms[0]
        rest = None if stored is None else self._made_from(stored, op, definition, source, ins, outs)
        self.resting[out] = rest if rest is not None and any(e.is_cut for e in rest) else None
        self[out] = Derived(op, source, in_use, False)
        self.families.setdefault(self.root(out), [self.root(out)]).append(out)
        nbytes = min(self.walk.types[n].nbytes for n in self.chain(out))
        if self.resting[out] is not None and self.walk.types[out].nbytes < nbytes:
            self[out] = self[out]._replace(rests=True)
        return True

    def _made_from(
        self, place: Placement, op: Operator, definition: type[OpDef], source: str, ins: Names, outs: Names
    ) -> Placement | None:  # fmt: skip
        """The placement of the result if the operand has this placement; None if an operand would be moved."""
        at = self.walk.at
        before = {n: at.get(n) for n in op.input_arg_names}
        at.update({n: self.walk._held(n, (place if n == source else REPLICATE,)) for n in before})
        choice = self.walk.choose(op, definition, ins, outs)
        for n, held in before.items():
            if held is None:
                del at[n]
            else:
                at[n] = held
        moved = any(take is not None and take < 0 for take, n in zip(choice.take, ins, strict=True) if n == source)
        return None if moved or choice.parts else choice.outs[0][1]
