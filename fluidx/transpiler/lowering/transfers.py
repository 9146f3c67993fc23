"""Transfers: a value that one rank has and another one wants, written out for a rank as a send or a recv."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ...ir.errors import TranspileError
from ...ir.make_op import filled, make_op
from ...ir.operator import Frozen, Operator
from ...ir.parts import Coords, holds, local_type
from ...ir.program import Block
from ...ir.sizes import StandInShapes
from ...ir.types import ANY, Placement
from ..placement.propagate import where

TRANSFER = "transfer"


@dataclass
class Transfers:
    """Neighbouring transfers. `sizes` are those of the block's variables."""

    block: Block
    ops: tuple[Operator, ...]
    sizes: StandInShapes
    written: dict[tuple, Operator] = field(default_factory=dict)  # ranks whose parts are of one shape share operators

    def write(self, rank: int, coords: Coords, block: Block) -> None:
        """Append what the rank does to `block`."""
        for op in self.ops:
            group, source, target = op.attrs["group"], op.attrs["root"], op.attrs["to"]
            place = self.block.desc(op.output_arg_names[0]).placement
            rest = tuple(e for e in place if e.group != group)
            index = coords[group][0]
            if index not in (source, target) or not holds(rest, coords):
                continue
            members = self.block.program.group_ranks(group, rank)
            message = self._send(op, members[target]) if index == source else self._recv(op, members[source], rest, coords)
            block.oplist.append(message)

    def _send(self, op: Operator, peer: int) -> Operator:
        key = id(op), peer
        if key not in self.written:
            attrs = filled("send", {"peer": peer, "group": op.attrs["group"], "batch": op.attrs["batch"]})
            self.written[key] = self._message(op, "send", attrs)
        return self.written[key]

    def _recv(self, op: Operator, peer: int, rest: Placement, coords: Coords) -> Operator:
        whole = self.block.desc(op.output_arg_names[0]).type
        shape = tuple(map(int, local_type(whole, rest, coords).shape))  # an attribute has numbers, and no names
        key = id(op), peer, shape
        if key not in self.written:
            attrs = {"peer": peer, "shape": shape, "dtype": whole.dtype, "group": op.attrs["group"], "batch": op.attrs["batch"]}
            self.written[key] = self._message(op, "recv", filled("recv", {**attrs, **(self._open(op) if ANY in shape else {})}))
        return self.written[key]

    @staticmethod
    def _message(op: Operator, kind: str, attrs: Frozen) -> Operator:
        xs, outs = (op.input_arg_names, ()) if kind == "send" else ((), op.output_arg_names)
        return make_op(kind, xs, outs, attrs, op.site)

    def _open(self, op: Operator) -> dict[str, object]:
        """How long the open axes of what is received are."""
        name = op.input_arg_names[0]
        found = self.sizes.multiple(name, self._fed)
        if found is None:
            raise TranspileError(
                f"%{name} {self.block.desc(name).type} goes from {op.attrs['root']} to {op.attrs['to']} over {op.attrs['group']}, and "
                f"its size does not follow from the size of one feed; move the stage border to a value whose size does{where(op)}"
            )
        return {"like": found[0], "open": found[1]}

    @cached_property
    def _fed(self) -> list[str]:
        return [n for n, d in self.block.descs.items() if d.is_data and ANY in d.type.shape]
