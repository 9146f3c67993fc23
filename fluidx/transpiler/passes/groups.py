"""InitGroups: declare the groups of ranks, and create their communicators at the beginning of startup."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.pass_base import ONE_DEVICE, Job, Pass
from ...ir.program import ProgramPair
from ...ir.program_rewriter import Writer


@dataclass(frozen=True)
class InitGroups(Pass):
    """Declare the groups of ranks in both programs, and put one nccl_init for each group at the beginning of startup.

    Source: the `ncclInit` operator of Paddle's NCCL design document.
    """

    ensures = ("grouped",)
    ends = (ONE_DEVICE,)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        groups = job.mesh.groups()
        main = pair.main.copy()
        main.groups = dict(groups)
        writer = Writer(pair.startup)
        writer.program.groups = dict(groups)
        for group in groups:
            writer.builder().nccl_init(group=group)
        for op in writer.old:
            writer.keep(op)
        return ProgramPair(main, writer.program)
