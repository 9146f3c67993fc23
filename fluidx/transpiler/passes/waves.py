"""GatherWaves: communication that would start one by one starts together."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import flow
from ...ir.operator import Operator
from ...ir.program import Program, ProgramPair
from ..pass_ import Job, Pass

TO_OWNERS = ("reduce", "reduce_scatter")
FROM_OWNERS = ("broadcast", "all_gather")


@dataclass(frozen=True)
class GatherWaves(Pass):
    """Move operators of the given kinds, lists of types, later, next to their like, until they carry `wave_mb` MiB for each rank or someone
    needs a result.

    Collectives of one wave that have an algorithm travel together, hop by hop. Only independent operators change their order.
    """

    wave_mb: float = 4.0
    types: tuple[tuple[str, ...], ...] = (TO_OWNERS, FROM_OWNERS)
    requires = ("lowered",)

    def run(self, pair: ProgramPair, job: Job) -> ProgramPair:
        return ProgramPair(self._gather(pair.main, job), pair.startup)

    def _gather(self, program: Program, job: Job) -> Program:
        new = program.copy()
        block = new.global_block()
        limit = self.wave_mb * 2**20 * job.mesh.world_size
        out: list[Operator] = []
        kinds = {t: kind for kind, types in enumerate(self.types) for t in types}
        held: dict[int, list[Operator]] = {}  # kind -> operators that wait
        made: dict[int, set[str]] = {}  # kind -> what they make, and what they read
        read: dict[int, set[str]] = {}
        touched: set[str] = set()  # all of that, and some of what has gone: most operators have nothing to do with it
        size: dict[int, float] = {}
        waves = 0

        def flush(kind: int) -> None:
            nonlocal waves
            for op in held.pop(kind):
                out.append(op.replace(attrs={**op.attrs, "wave": waves}) if op.attrs.get("algorithm") else op)
            waves += 1
            del made[kind], read[kind], size[kind]

        for op in block.oplist:
            kind = kinds.get(op.type)
            if held:
                ins, outs = flow.touches(new, op)
                if not (touched.isdisjoint(ins) and touched.isdisjoint(outs)):
                    # operators of one kind may make and read the same, if none reads what another makes
                    late = [k for k, names in made.items() if not names.isdisjoint(ins)]
                    late += [k for k, names in made.items() if k != kind and not (names.isdisjoint(outs) and read[k].isdisjoint(outs))]
                    for k in dict.fromkeys(late):
                        flush(k)
            if kind is None:
                out.append(op)
                continue
            if kind not in held:
                if not held:
                    touched.clear()
                held[kind], made[kind], read[kind], size[kind] = [], set(), set(), 0.0
            held[kind].append(op)
            (x,), outs = op.input_arg_names, op.output_arg_names
            made[kind].update(outs)
            read[kind].add(x)
            touched.update(outs, (x,))
            size[kind] += block.desc(x).type.nbytes
            if size[kind] >= limit:
                flush(kind)
        for kind in list(held):
            flush(kind)
        block.oplist = out
        return new
