"""Replace several collectives on values with the same placement by one collective on the packed values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ...ir.make_op import filled, make_op
from ...ir.offsets import Offsets
from ...ir.operator import Operator
from ...ir.program_rewriter import Writer
from ...ir.types import ANY, Pieces, Placement, TensorType
from ...ir.unique_name import unused
from ...ir.var import Var


class Packed:
    """Operators of one type, with the same attributes except `bounds`, on values of one dtype and placement. They are written in three
    steps: pack, send, unpack. Flat ranges must be consecutive in the order of the operators. The packed value has the placement of its
    parts; since there may be thousands of parts, the placement rules are not used.
    """

    def __init__(self, writer: Writer, ops: Sequence[Operator]):
        self.writer, self.ops, self.descs = writer, ops, writer.block.descs
        self.xs = tuple([op.input_arg_names[0] for op in ops])
        self.outs = tuple([op.output_arg_names[0] for op in ops])
        self.whole = self.made = ""

    def pack(self) -> None:
        self.whole = self._packed(self.xs)
        self._write("pack", self.xs, (self.whole,))

    def send(self) -> None:
        first, self.made = self.ops[0], self._packed(self.outs)
        attrs: dict[str, Any] = dict(first.attrs)
        if attrs.get("bounds"):
            attrs["bounds"] = Offsets.joined([op.attrs["bounds"] for op in self.ops])
        if "layers" in attrs:
            attrs["layers"] = (0, *accumulate(self.descs[n].type.numel for n in self.xs))
        self._write(first.type, (self.whole,), (self.made,), **attrs)

    def unpack(self) -> None:
        self._write("unpack", (self.made,), self.outs, shapes=tuple([self.descs[n].type.shape for n in self.outs]))

    def _write(self, type_: str, xs: tuple[str, ...], outs: tuple[str, ...], **attrs: Any) -> None:
        site = self.ops[0].site
        self.writer.keep(make_op(type_, xs, outs, filled(type_, attrs), site))

    def _packed(self, names: Sequence[str]) -> str:
        """Declare the packed value of these names."""
        found = [self.descs[n] for n in names]
        name = unused(f"{names[0]}.packed", self.descs)
        t = TensorType(found[0].type.dtype, (sum([d.type.numel for d in found]),))
        self.writer.block.declare(Var(name, t, _together([d.placement for d in found]), stop_gradient=True))
        return name


def _together(places: Sequence[Placement]) -> Placement:
    """The placement of the concatenation of values with the same placement."""
    first = places[0]
    if len(first) == 1 and first[0].bounds is not None:
        return (Pieces(Offsets.joined([e.bounds for q in places for e in q if e.bounds is not None]), first[0].group),)
    return first


def can_be_packed(writer: Writer, op: Operator) -> bool:
    """Do the values that the operator reads and writes have known sizes, and placements that allow packing?"""
    descs = [writer.block.desc(n) for n in (op.input_arg_names[0], op.output_arg_names[0])]
    cut = any(e.axis is not None or e.is_local for d in descs for e in d.placement)
    return not cut and all(ANY not in d.type.shape and d.type.numel > 0 for d in descs)
