"""Transfers: move a value from one rank to another; each rank gets a send or a recv."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ...ir.errors import TranspileError
from ...ir.operator import Operator
from ...ir.parts import Coords, coords_of, holds, local_type
from ...ir.program import Block
from ...ir.sizes import StandInShapes
from ...ir.types import ANY, TensorType
from ...verify.transfer_messages import transfers_follow
from ..placement.placement_walk import where
from .messages import recv, send


@dataclass
class Transfers:
    """Neighbouring transfers. `sizes` are those of the block's variables."""

    block: Block
    ops: tuple[Operator, ...]
    sizes: StandInShapes
    written: dict[tuple, Operator] = field(default_factory=dict)  # ranks with parts of the same shape share operators

    def is_common(self) -> bool:
        return transfers_follow(self.ops, self.block.program)

    def count(self) -> tuple[int, int]:
        """The number of transfers in the sets of their groups, which is also that of the messages."""
        program, found = self.block.program, 0
        for op in self.ops:
            sets = program.groups[op.attrs["group"]]
            place = self.block.desc(op.output_arg_names[0]).placement
            roots = tuple(e for e in place if e.root is not None and e.group != op.attrs["group"])
            found += sum(holds(roots, coords_of(program.groups, s[0], program.turns)) for s in sets) if roots else len(sets)
        return found, found

    def write(self, rank: int, coords: Coords, block: Block) -> None:
        for op in self.ops:
            group, source, target = op.attrs["group"], op.attrs["root"], op.attrs["to"]
            d = self.block.desc(op.output_arg_names[0])
            rest = tuple(e for e in d.placement if e.group != group)
            index = coords[group][0]
            if index not in (source, target) or not holds(rest, coords):
                continue
            members = self.block.program.group_ranks(group, rank)
            peer, t = (members[target], None) if index == source else (members[source], local_type(d.type, rest, coords))
            key = id(op), peer, t
            if key not in self.written:
                self.written[key] = self._message(op, peer, t)
            block.oplist.append(self.written[key])

    def _message(self, op: Operator, peer: int, t: TensorType | None) -> Operator:
        """A send, or the recv of a value of type `t`."""
        how = {"peer": peer, "group": op.attrs["group"], "batch": op.attrs["batch"]}
        if t is None:
            return send(op, op.input_arg_names[0], **how)
        whole = TensorType(t.dtype, tuple(map(int, t.shape)))  # an attribute has numbers, not names of axes
        return recv(op, op.output_arg_names[0], whole, **how, **(self._open(op) if ANY in whole.shape else {}))

    def _open(self, op: Operator) -> dict[str, object]:
        """Attributes with the sizes of the open axes of the received value."""
        name = op.input_arg_names[0]
        found = self.sizes.multiple(name, self._fed)
        if found is None:
            raise TranspileError(
                f"%{name} {self.block.desc(name).type} goes from {op.attrs['root']} to {op.attrs['to']} over {op.attrs['group']}, and "
                f"its size does not follow from the size of one feed; move the stage border to a value with such a size{where(op)}"
            )
        return {"like": found[0], "open": found[1]}

    @cached_property
    def _fed(self) -> list[str]:
        return [n for n, d in self.block.descs.items() if d.is_data and ANY in d.type.shape]
