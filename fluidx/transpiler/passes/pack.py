"""PackSmall: pack small messages to or from one root into one message."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from ...ir.operator import Operator
from ...ir.pass_base import Job, Pass
from ...ir.program import Program
from ...ir.program_rewriter import Writer
from ..lowering.pack_messages import Packed, can_be_packed
from .gather_waves import FROM_OWNERS, TO_OWNERS


@dataclass(frozen=True)
class PackSmall(Pass):
    """Among neighbouring collectives of one wave, pack those with the same root, reduction and dtype that carry less than `small_kb` KiB
    each. `types` are the lists of types of GatherWaves."""

    small_kb: float = 64.0
    types: tuple[tuple[str, ...], ...] = (TO_OWNERS, FROM_OWNERS)
    requires = ("lowered",)

    def rewrite(self, program: Program, job: Job) -> Program:
        writer = Writer(program)
        kinds = {t: kind for kind, types in enumerate(self.types) for t in types}
        small = _Small(writer, self.small_kb * 1024)

        def wave(op: Operator) -> tuple | None:
            kind = kinds.get(op.type)
            return None if kind is None else (kind, op.attrs["group"], op.attrs["wave"])

        for found, run in groupby(writer.old, key=wave):
            if found is None:
                for op in run:
                    writer.keep(op)
            else:
                self._write(writer, list(run), small)
        return writer.program

    @staticmethod
    def _write(writer: Writer, ops: list[Operator], small: _Small) -> None:
        """Write one wave: first all packs, then the collectives, then all unpacks, so that the collectives stay neighbours."""
        together: dict[object, list[Operator]] = {}
        for op in ops:
            together.setdefault(small.kind(op) or id(op), []).append(op)
        sent = [(members, Packed(writer, members)) for members in together.values()]
        packs = [p for members, p in sent if len(members) > 1]
        for p in packs:
            p.pack()
        for members, p in sent:
            if len(members) > 1:
                p.send()
            else:
                writer.keep(members[0])
        for p in packs:
            p.unpack()


class _Small:
    """The kinds of operators that send small values to or from a root; operators of one kind are packed together."""

    def __init__(self, writer: Writer, most: float):
        self.writer, self.most, self.descs = writer, most, writer.block.descs
        self.known: dict[tuple, tuple | None] = {}  # attributes, types and placements are few objects

    def kind(self, op: Operator) -> tuple | None:
        x, out = self.descs[op.input_arg_names[0]], self.descs[op.output_arg_names[0]]
        key = op.type, id(op.attrs), id(x.type), id(x.placement), id(out.type), id(out.placement)
        if key not in self.known:
            small = "root" in op.attrs and can_be_packed(self.writer, op) and x.type.nbytes < self.most
            # partial sums over another group are not packed with replicated values
            self.known[key] = (op.type, *op.attrs.values(), x.type.dtype, x.placement) if small else None
        return self.known[key]
