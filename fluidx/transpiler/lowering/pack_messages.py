"""Replace several collectives on values with the same placement by one collective on the packed values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from ...ir.make_op import filled, make_op
from ...ir.offsets import Offsets
from ...ir.operator import Frozen, Operator, unary
from ...ir.program_rewriter import Writer
from ...ir.types import Pieces, Placement, TensorType
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
        self.writer.keep(make_op("pack", self.xs, (self.whole,), _packs(), self.ops[0].site))

    def send(self) -> None:
        first, self.made = self.ops[0], self._packed(self.outs)
        attrs = first.attrs
        if attrs.get("bounds"):
            attrs = Frozen({**attrs, "bounds": Offsets.joined([op.attrs["bounds"] for op in self.ops])})
        if "layers" in attrs:
            attrs = Frozen({**attrs, "layers": (0, *accumulate(self.descs[n].type.numel for n in self.xs))})
        self.writer.keep(unary(first.type, self.whole, self.made, attrs, first.site))

    def unpack(self) -> None:
        attrs = _unpacks(tuple([self.descs[n].type.shape for n in self.outs]))
        self.writer.keep(make_op("unpack", (self.made,), self.outs, attrs, self.ops[0].site))

    def _packed(self, names: Sequence[str]) -> str:
        """Declare the packed value of these names."""
        found = [self.descs[n] for n in names]
        name, first = unused(f"{names[0]}.packed", self.descs), found[0]
        t = _flat(first.type.dtype, sum([d.type.numel for d in found]))
        flat = len(first.placement) == 1 and first.placement[0].bounds is not None
        place = _together([d.placement for d in found]) if flat else first.placement
        self.writer.block.declare(Var(name, t, place, stop_gradient=True))
        return name


@lru_cache(maxsize=1)
def _packs() -> Frozen:
    return filled("pack", {})


@lru_cache(maxsize=256)
def _unpacks(shapes: tuple[tuple[int, ...], ...]) -> Frozen:
    """Among many ranks there are many small packs of few shapes."""
    return filled("unpack", {"shapes": shapes})


@lru_cache(maxsize=256)
def _flat(dtype: str, numel: int) -> TensorType:
    return TensorType(dtype, (numel,))


def _together(places: Sequence[Placement]) -> Placement:
    """The placement of the concatenation of values in flat ranges."""
    return (Pieces(Offsets.joined([e.bounds for q in places for e in q if e.bounds is not None]), places[0][0].group),)


def can_be_packed(writer: Writer, op: Operator) -> bool:
    """Do the values that the operator reads and writes have known sizes, and placements that allow packing?"""
    for n in (op.input_arg_names[0], op.output_arg_names[0]):
        d = writer.block.desc(n)
        for e in d.placement:
            if e.axis is not None or e.is_local:
                return False
        if d.type.numel <= 0:  # -1 if an axis is open
            return False
    return True
