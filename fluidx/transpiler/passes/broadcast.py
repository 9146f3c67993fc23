"""BroadcastStartup: broadcast replicated state from one rank at the end of startup, so that all ranks begin with equal values."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.errors import TranspileError
from ...ir.make_op import filled
from ...ir.operator import unary
from ...ir.pass_base import Job, Pass
from ...ir.program import ProgramPair
from ...ir.program_rewriter import Writer
from ..cluster import DATA, SERVERS
from ..placement.roots import RootChunk, assign


@dataclass(frozen=True)
class BroadcastStartup(Pass):
    """Broadcast every replicated persistable, parameters and the optimizer's state alike, after the last operator that writes it: from
    `root`, or from owners that are balanced by bytes.

    Source: the `ncclBcast` operators of Paddle's NCCL design document.
    """

    group: str = DATA
    root: int | None = None
    requires = ("placed",)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        ranks = job.mesh.axes.get(self.group, 1)
        if self.root is not None and (not isinstance(self.root, int) or isinstance(self.root, bool) or not 0 <= self.root < ranks):
            raise TranspileError(f"BroadcastStartup: root={self.root!r} is not a rank of {self.group}, which has {ranks}")
        if ranks == 1:
            return pair
        writer = Writer(pair.startup)
        descs = writer.block.descs
        last = {n: k for k, op in enumerate(writer.old) for n in op.output_arg_names}
        cut = {self.group, SERVERS}
        whole = [d for n, d in descs.items() if n in last and d.persistable and cut.isdisjoint(e.group for e in d.placement)]
        chunks = [RootChunk(d.name, 0, d.type.numel, d.type.nbytes) for d in whole]
        owner = {c.param: c.root if self.root is None else self.root for c in assign(chunks, ranks)}
        attrs = [filled("broadcast", {"group": self.group, "root": root}) for root in range(ranks)]
        for k, op in enumerate(writer.old):
            writer.keep(op)
            for n in op.output_arg_names:
                if n in owner and last[n] == k:
                    writer.keep(unary("broadcast", n, n, attrs[owner[n]], op.site))
        return ProgramPair(pair.main, writer.program)
