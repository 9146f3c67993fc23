"""GatherWaves: communication that would start one by one starts together."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import flow
from ...ir.operator import Operator
from ...ir.program import Program, ProgramPair
from ..pass_ import Job, Pass
from ..writer import complete


@dataclass(frozen=True)
class GatherWaves(Pass):
    """Move operators of the given types later, next to their like, until they carry `wave_mb` MiB for each rank or someone needs a result.

    Ring operators of one wave travel together, hop by hop. Only independent operators change their order.
    """

    wave_mb: float = 4.0
    types: tuple[str, ...] = ("ring_reduce", "ring_broadcast")
    requires = ("lowered",)

    def run(self, pair: ProgramPair, job: Job) -> ProgramPair:
        return ProgramPair(self._gather(pair.main, job), pair.startup)

    def _gather(self, program: Program, job: Job) -> Program:
        new = program.copy()
        block = new.global_block()
        limit = self.wave_mb * 2**20 * job.mesh.world_size
        out: list[Operator] = []
        held: dict[str, list[Operator]] = {}  # kind -> operators that wait
        names: dict[str, set[str]] = {}  # kind -> what they make, and what they read
        reads: dict[str, set[str]] = {}
        size: dict[str, float] = {}
        waves = 0

        def flush(kind: str) -> None:
            nonlocal waves
            for op in held.pop(kind, ()):
                numbered = {**op.attrs, "wave": waves} if "wave" in op.attrs else op.attrs
                out.append(op.replace(attrs=complete(op.type, numbered)) if numbered is not op.attrs else op)
            waves += 1
            del names[kind], reads[kind], size[kind]

        for op in block.oplist:
            if not held and op.type not in self.types:
                out.append(op)
                continue
            ins, outs = flow.reads(new, op), flow.writes(new, op)
            for kind in list(held):
                if kind == op.type and names[kind].isdisjoint(ins):
                    continue
                if not (names[kind].isdisjoint(ins) and names[kind].isdisjoint(outs) and reads[kind].isdisjoint(outs)):
                    flush(kind)
            if op.type not in self.types:
                out.append(op)
                continue
            kind = op.type
            held.setdefault(kind, []).append(op)
            names.setdefault(kind, set()).update(outs)
            reads.setdefault(kind, set()).update(ins)
            size[kind] = size.get(kind, 0.0) + block.desc(ins[0]).type.nbytes
            if size[kind] >= limit:
                flush(kind)
        for kind in list(held):
            flush(kind)
        block.oplist = out
        return new
