"""GatherWaves: move collectives next to each other, so that their messages start together."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.operator import Operator
from ...ir.pass_base import Job, Pass
from ...ir.program import Program
from ...ir.program_rewriter import SharedAttrs
from ..scheduling.delay_together import AdjacentOperators, gathered

TO_OWNERS = ("reduce", "reduce_scatter")
FROM_OWNERS = ("broadcast", "all_gather")


@dataclass(frozen=True)
class GatherWaves(Pass):
    """Move operators of each kind, a list of types, later and next to each other, until they carry `wave_mb` MiB for each rank or a result
    is needed. Such neighbours are a wave; those with an algorithm send the messages of each round together. Only independent operators
    change their order.
    """

    wave_mb: float = 4.0
    types: tuple[tuple[str, ...], ...] = (TO_OWNERS, FROM_OWNERS)
    requires = ("lowered",)

    def rewrite(self, program: Program, job: Job) -> Program:
        new = program.copy()
        block = new.global_block()
        limit = self.wave_mb * 2**20 * job.mesh.world_size

        class Wave(AdjacentOperators):
            nbytes = 0

            def add(self, op: Operator) -> bool:
                self.nbytes += block.desc(op.input_arg_names[0]).type.nbytes
                return super().add(op)

            @property
            def full(self) -> bool:
                return self.nbytes >= limit

        kinds = {t: kind for kind, types in enumerate(self.types) for t in types}
        out: list[Operator] = []
        attrs = SharedAttrs()
        waves = 0
        for found in gathered(new, kinds, lambda op: kinds[op.type], Wave):
            if not isinstance(found, AdjacentOperators):
                out += found
                continue
            out += [attrs.changed(op, wave=waves) if op.attrs.get("algorithm") else op for op in found.ops]
            waves += 1
        block.oplist = out
        return new
