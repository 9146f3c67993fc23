"""Rings: divide the collectives of each group among several communicators, so that those of NCCL run at the same time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ...ir.opdef import opdef
from ...ir.operator import Operator
from ...ir.pass_base import Job, Pass
from ...ir.program import Program, ProgramPair
from ...ir.program_rewriter import SharedAttrs


@dataclass(frozen=True)
class Rings(Pass):
    """Send the collectives of each group over its `rings` in turns: bucket k over ring k modulo `rings`. nccl_init makes a communicator for
    each ring. Collectives with an algorithm, and adaptive sums, travel as messages, on ring 0. Results do not change; ranks that are
    threads or processes have no rings.

    Source: `nccl_comm_num` of fluid's DistributeTranspilerConfig.
    """

    rings: int = 2
    requires = ("lowered",)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        return ProgramPair(self._divided(pair.main), self._divided(pair.startup))

    def _divided(self, program: Program) -> Program:
        new, attrs, turn = program.copy(), SharedAttrs(), Counter[str]()

        def on_ring(op: Operator) -> Operator:
            if op.type == "nccl_init":
                return attrs.changed(op, rings=self.rings)
            if "ring" not in op.attrs or op.attrs["algorithm"] or opdef(op.type).comm.algorithm_method == "adaptive":
                return op  # it travels as messages
            turn[op.attrs["group"]] += 1
            return attrs.changed(op, ring=(turn[op.attrs["group"]] - 1) % self.rings)

        block = new.global_block()
        block.oplist = [on_ring(op) for op in block.oplist]
        return new
