"""Rails: all_reduces over several hosts, slice by slice, each device of a host exchanging with those of its number on the other hosts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from ...ir.make_op import filled, make_op
from ...ir.operator import Operator, unary
from ...ir.pass_base import Job, Pass
from ...ir.program import ProgramPair, Var
from ...ir.program_rewriter import Writer
from ...ir.types import ANY, Partial, Placement, Shard, TensorType
from ...view.diff import show_bytes
from ..cluster import need_hosts
from ..lowering.slices import growth, slices, steps


@dataclass(frozen=True)
class Rails(Pass):
    """Replace all_reduces of sums over `dp` by what Fairring and Herring do, in slices of at most `slice_mb` MiB.

    Of a slice, a rank gets the host's sum of its slot (reduce_scatter in the node), sends each shard of it to the rank of its number that
    is responsible for it and adds up its own (reduce_scatter on the rail, direct), sends the sum back (all_gather on the rail, direct),
    and has the slice when the host's ranks have exchanged slots (all_gather in the node). So the hops are as many whatever the
    number of hosts. Slices overlap: those of neighbouring all_reduces follow each other, at most `parallelism` of them on their way at
    a time, and no more than `staging_mb` MiB has room for. What `grows` is larger with more hosts (slices.growth): both sizes.
    Sources: Fairring (Facebook Research); Thangakrishnan et al., "Herring: rethinking the parameter server at scale for the cloud" (2020).
    """

    slice_mb: float = 25.0
    staging_mb: float = 50.0
    parallelism: int = 4
    grows: bool = False
    requires = ("lowered",)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        need_hosts("rails", job.mesh, "take data_parallel in its place")
        if self.grows:
            more = growth(job.mesh.hosts)
            return replace(self, slice_mb=self.slice_mb * more, staging_mb=self.staging_mb * more, grows=False).rewrite_pair(pair, job)
        writer = Writer(pair.main)
        for railed, run in groupby(writer.old, key=lambda op: self._railed(writer, op)):
            ops = list(run)
            if railed:
                _ReduceRun(self, writer, job).write(ops)
            else:
                writer.block.oplist.extend(ops)
        return ProgramPair(writer.program, pair.startup)

    @staticmethod
    def _railed(writer: Writer, op: Operator) -> bool:
        if op.type != "all_reduce" or op.attrs["group"] != "dp" or op.attrs["op"] != "sum":
            return False
        t = writer.block.desc(op.output_arg_names[0]).type
        return ANY not in t.shape and t.numel > 0

    @property
    def in_flight(self) -> int:
        """How many slices are on their way at a time."""
        return max(1, min(self.parallelism, int(self.staging_mb / self.slice_mb)))


class _RailStage(NamedTuple):
    """A collective that every slice goes through, and where the slice lies behind it."""

    word: str
    type: str
    attrs: dict[str, Any]
    after: Placement


def _stages(cluster: Any) -> list[_RailStage]:
    alone = cluster.world_size == cluster.hosts  # then a slice is one slot, and all ranks are one rail
    rail = "dp" if alone else "rail"
    node: Placement = () if alone else (Shard(0, "node"),)
    across = {"group": rail, "algorithm": "direct"}
    there = [_RailStage("shard", "reduce_scatter", across, (*node, Shard(0, rail))), _RailStage("sum", "all_gather", across, node)]
    if alone:
        return there
    slot = _RailStage("slot", "reduce_scatter", {"group": "node"}, (Partial("sum", rail), *node))
    return [slot, *there, _RailStage("full", "all_gather", {"group": "node"}, ())]


class _Slice(NamedTuple):
    """Elements [start, stop) of the flat operand of an all_reduce; `name` is what the values made of it begin with."""

    op: Operator
    start: int
    stop: int
    name: str


class _ReduceRun:
    """Neighbouring all_reduces, whose slices are on their way together."""

    def __init__(self, options: Rails, writer: Writer, job: Job):
        self.options, self.writer, self.job, self.block = options, writer, job, writer.block
        self.stages = _stages(job.mesh)

    def write(self, ops: list[Operator]) -> None:
        of = [s for op in ops for s in self._slices(op)]
        for wave, now in enumerate(steps(len(of), len(self.stages), self.options.in_flight)):
            for k, stage in now:
                self._step(of[k], stage, wave)
        for op in ops:
            self._join(op, [s for s in of if s.op is op])

    def _slices(self, op: Operator) -> list[_Slice]:
        out = op.output_arg_names[0]
        t = self.block.desc(out).type
        each = t.nbytes // t.numel
        found = slices(t.numel, max(1, int(self.options.slice_mb * 2**20) // each))
        n = min(len(found), self.options.in_flight)
        staged = show_bytes(n * max(b - a for a, b in found) * each)
        stay = f"; finished slices stay until all {show_bytes(t.nbytes)} are there" if len(found) > n else ""
        self.job.log.append(f"%{out}: {len(found)} slice{'s' * (len(found) > 1)} over the rails, {n} at a time: {staged} staged{stay}")
        return [_Slice(op, a, b, f"{out}.slice{k}") for k, (a, b) in enumerate(found)]

    def _step(self, s: _Slice, k: int, wave: int) -> None:
        word, type_, attrs, after = self.stages[k]
        x = f"{s.name}.{self.stages[k - 1].word}" if k else self._cut(s)
        out = f"{s.name}.{word}"
        self.block.declare(Var(out, self.block.desc(x).type, after, stop_gradient=True))
        wave_of = {"wave": wave} if "algorithm" in attrs else {}  # slices that are as far start their messages together
        self.writer.keep(unary(type_, x, out, filled(type_, {**attrs, **wave_of}), s.op.site))

    def _cut(self, s: _Slice) -> str:
        d = self.block.desc(s.op.input_arg_names[0])
        self.block.declare(Var(s.name, TensorType(d.type.dtype, (s.stop - s.start,)), d.placement, stop_gradient=True))
        self.writer.keep(unary("chunk", d.name, s.name, filled("chunk", {"start": s.start, "stop": s.stop}), s.op.site))
        return s.name

    def _join(self, op: Operator, found: list[_Slice]) -> None:
        out = op.output_arg_names[0]
        attrs = filled("unpack", {"shapes": (self.block.desc(out).type.shape,)})
        parts = tuple(f"{s.name}.{self.stages[-1].word}" for s in found)
        self.writer.keep(make_op("unpack", parts, (out,), attrs, op.site))
