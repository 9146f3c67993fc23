"""PackSmall: small messages to or from one root travel as one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from ...ir.operator import Operator
from ...ir.program import ProgramPair
from ..packing import Packed, can_be_packed
from ..pass_ import Job, Pass
from ..writer import Writer
from .waves import FROM_OWNERS, TO_OWNERS


@dataclass(frozen=True)
class PackSmall(Pass):
    """Of neighbouring collectives of one wave, pack those to or from one root, of one reduction and dtype, that carry less than `small_kb`
    KiB each. `types`: the kinds, as of GatherWaves."""

    small_kb: float = 64.0
    types: tuple[tuple[str, ...], ...] = (TO_OWNERS, FROM_OWNERS)
    requires = ("lowered",)

    def run(self, pair: ProgramPair, job: Job) -> ProgramPair:
        writer = Writer(pair.main)
        for kind, run in groupby(writer.old, key=self._kind):
            if kind is None:
                for op in run:
                    writer.keep(op)
            else:
                self._write(writer, list(run))
        return ProgramPair(writer.program, pair.startup)

    def _kind(self, op: Operator) -> tuple | None:
        kind = next((k for k, types in enumerate(self.types) if op.type in types), None)
        return None if kind is None else (kind, op.attrs["group"], op.attrs["wave"])

    def _write(self, writer: Writer, ops: list[Operator]) -> None:
        """One wave: what is packed before, and what is unpacked behind, so that its operators stay neighbours."""
        together: dict[object, list[Operator]] = {}
        for k, op in enumerate(ops):
            d = writer.block.desc(op.input_arg_names[0])
            small = "root" in op.attrs and can_be_packed(writer, op) and d.type.nbytes < self.small_kb * 1024
            # terms over another group stay apart from whole values
            together.setdefault((op.type, *op.attrs.values(), d.type.dtype, d.placement) if small else k, []).append(op)
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
