"""SumOnServers: what would be added up among the trainers is added up by ranks behind them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from ...ir.errors import TranspileError
from ...ir.make_op import filled
from ...ir.opdef import Effect, opdef
from ...ir.operator import Operator, unary
from ...ir.parts import bounds
from ...ir.pass_base import Job, Pass
from ...ir.program import Program, ProgramPair
from ...ir.program_rewriter import Writer
from ...ir.types import ANY, Partial, Placement
from ...view.diff import show_bytes
from ..cluster import SERVERS
from ..lowering.redistribute import steps
from ..placement.parameter_homes import pieces_of
from ..placement.propagate import where
from ..scheduling.delay_together import Waiting


@dataclass(frozen=True)
class SumOnServers(Pass):
    """Replace all_reduces of sums over `group`: every trainer pushes slice k of its term to server k, which adds the slices up, and pulls
    the sums from all servers.

    Slices are alike but for one element. A sum is pulled where somebody needs it, or together with the next push, so that each link is in
    use both ways. What is a maximum, or of open size, or in a block, stays among the trainers.
    Sources: the servers of BytePS (Jiang et al. 2020), of Google's Reduction Server, and of Herring (Thangakrishnan et al. 2020).
    """

    servers: int = 1
    group: str = "dp"
    requires = ("lowered",)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        writer, waiting, served = Writer(pair.main), Waiting(pair.main), 0
        for op in writer.old:
            waiting.before([op])
            if not self._served(writer, op):
                writer.keep(op)
                continue
            x, out = op.input_arg_names[0], op.output_arg_names[0]
            d, summed = writer.block.desc(out), f"{out}.served"
            sizes = [b - a for a, b in pairwise(bounds(d.type.numel, self.servers))]
            trainers = job.mesh.axes[self.group]
            there: Placement = (pieces_of(dict(enumerate(sizes, trainers)), SERVERS, trainers + len(sizes)),)
            writer.declare(summed, d, there)
            served += 1
            self._move(writer, op, x, summed, job)
            waiting.rest()
            waiting.add((out,), partial(self._move, writer, op, summed, out, job))
            job.log.append(f"%{out}: {show_bytes(d.type.nbytes)} added up by {self.servers} server{'s' * (self.servers > 1)}")
        waiting.rest()
        if not served:
            self._check_served(pair.main)
        return ProgramPair(writer.program, pair.startup)

    def _check_served(self, main: Program) -> None:
        """Sums in blocks stay among the trainers, since servers do not know when they run: beside others, not where these are all."""
        ops = [op for block in main.blocks[1:] for op in block.oplist if opdef(op.type).effect is Effect.COLLECTIVE]
        if ops:
            raise TranspileError(
                f"op {ops[0].type} is in a sub-block, and servers do not know when it runs; data_parallel() takes such programs, and "
                f"micro_batches(k, of=reduction_servers()) accumulates gradients{where(ops[0])}"
            )

    def _served(self, writer: Writer, op: Operator) -> bool:
        if op.type != "all_reduce" or op.attrs["group"] != self.group:
            return False
        d = writer.block.desc(op.input_arg_names[0])
        return d.placement == (Partial("sum", self.group),) and ANY not in d.type.shape and d.type.numel > 0

    @staticmethod
    def _move(writer: Writer, op: Operator, x: str, out: str, job: Job) -> None:
        """Write the push or the pull that `out` is made of `x` by."""
        old, new = (writer.block.desc(n).placement for n in (x, out))
        (step,) = steps(old, new, {SERVERS: job.mesh.world_size, **job.mesh.axes})
        writer.keep(unary(step.type, x, out, filled(step.type, step.attrs), op.site))
