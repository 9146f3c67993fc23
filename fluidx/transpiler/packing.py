"""Several operators that send values which lie alike, as one that sends them packed."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.operator import Operator
from ..ir.types import ANY, Local, Shard
from .writer import PlacingBuilder, Writer


class Packed:
    """Operators of one type, with the same attributes but for `bounds`, over values of one dtype that lie alike: three steps to write.

    Flat ranges must be ranges of all the values together, in the order of the operators.
    """

    def __init__(self, writer: Writer, ops: Sequence[Operator]):
        self.writer, self.ops = writer, ops
        self.xs = [op.input_arg_names[0] for op in ops]
        self.outs = [op.output_arg_names[0] for op in ops]
        self.whole = self.made = ""

    def pack(self) -> None:
        self.whole = self._builder().pack(self.xs, name=self._fresh(self.xs[0])).name

    def send(self) -> None:
        first = self.ops[0]
        attrs = dict(first.attrs)
        if attrs.get("bounds"):
            attrs["bounds"] = tuple(map(sum, zip(*(op.attrs["bounds"] for op in self.ops), strict=True)))
        self.made = self._builder().emit(first.type, self.whole, name=self._fresh(self.outs[0]), **attrs).name

    def unpack(self) -> None:
        shapes = tuple(self.writer.block.desc(n).type.shape for n in self.outs)
        self._builder().unpack([self.made], shapes=shapes, out={"Out": self.outs})

    def _builder(self) -> PlacingBuilder:
        return self.writer.builder(near=self.ops[0])

    def _fresh(self, name: str) -> str:
        made, k = f"{name}.packed", 0
        while made in self.writer.block.descs:
            k += 1
            made = f"{name}.packed{k}"
        return made


def can_be_packed(writer: Writer, op: Operator) -> bool:
    """Has what the operator reads and writes a size that is known, and does it lie as values do that can be packed?"""
    descs = [writer.block.desc(n) for n in (op.input_arg_names[0], op.output_arg_names[0])]
    cut = any(isinstance(e, (Shard, Local)) for d in descs for e in d.placement)
    return not cut and all(ANY not in d.type.shape and d.type.numel > 0 for d in descs)
