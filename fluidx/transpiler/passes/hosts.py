"""Hierarchical: on several hosts, whole collectives inside a host, and on the rails between hosts as little as can be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ...ir.errors import TranspileError
from ...ir.make_op import filled
from ...ir.operator import Operator, unary
from ...ir.parts import coords_of, local_type
from ...ir.pass_base import Job, Pass
from ...ir.program import ProgramPair
from ...ir.program_rewriter import Writer, each_op
from ...ir.types import At, Entry, Partial, Shard
from ...ir.unique_name import unused
from ..algorithms.selection import AlgorithmTable
from ..cluster import SERVERS, need_hosts
from ..lowering.write_algorithm import carried_by, others, why_whole
from .carry import BETWEEN_HOSTS, carried, named, stays_whole


@dataclass(frozen=True)
class Hierarchical(Pass):
    """Lower collectives over `dp` to collectives over `node`, the ranks of a host, and `rail`, the ranks of one number on all hosts.

    all_reduce: reduce_scatter in the node, all_reduce of the part on the rail, all_gather in the node; what has fewer rows than a node has
    ranks is reduced to the node's first rank instead and broadcast from it. reduce, broadcast: on the node and the rail of the root.
    reduce_scatter, all_gather: the parts of dp are no parts of a node's part, so an algorithm of two levels carries them (see
    algorithms/two_level.py).
    Where a host has one device, the rail is all there is. `when`: True, False, or "auto" for where there are several hosts. `between`: the
    algorithm between hosts. `left`: collectives that are left alone.
    Sources: Horovod's hierarchical allreduce (local, cross and global communicators); "Broadcast, AllReduce in a single machine. And
    Broadcast, AllReduce, Send, Recv in multiple machines", Paddle's NCCL design document.
    """

    when: Any = "auto"
    between: str | AlgorithmTable = ""
    left: tuple[str, ...] = ()
    group: str = "dp"
    requires = ("lowered",)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        hosts = job.mesh.hosts
        if SERVERS in pair.main.groups:  # they stand beside the hosts, and gradients go to them: little is left over dp
            if self.when is True:
                raise TranspileError("hierarchical=True has no use where gradients go to servers; leave it out")
            return pair
        if self.when is True:
            need_hosts("hierarchical=True", job.mesh, "leave it off")
        each = job.mesh.world_size // hosts
        if not self.when or hosts == 1 or each == 1:
            return pair
        lower = {"all_reduce": _all_reduce, "reduce": _reduce, "broadcast": _broadcast}

        def visit(between: str | AlgorithmTable, writer: Writer, op: Operator) -> None:
            if op.type in self.left or op.attrs.get("group") != self.group or op.attrs.get("op", "sum") != "sum":
                writer.keep(op)
            elif op.type in lower:
                lower[op.type](_Levels(writer, op, job, between), each)
            else:
                writer.keep(self._parted(writer, op, job, between) if op.type in ("reduce_scatter", "all_gather") else op)

        # startup runs once: there is nothing to choose
        return ProgramPair(each_op(pair.main, partial(visit, self.between or "ring")), each_op(pair.startup, partial(visit, "ring")))

    def _parted(self, writer: Writer, op: Operator, job: Job, between: str | AlgorithmTable) -> Operator:
        n, hosts, t = job.mesh.world_size, job.mesh.hosts, writer.block.desc(op.output_arg_names[0]).type
        if why := why_whole(op, t, n):
            job.say(op, stays_whole(op, why))
            return op
        name, said = named(op, between, hosts, t.nbytes * hosts // n)
        job.say(op, said)
        return carried_by(op, f"direct/{name or BETWEEN_HOSTS[0]}", n, hosts)


@dataclass
class _Levels:
    """Writes the collectives that stand for one over all ranks."""

    writer: Writer
    op: Operator
    job: Job
    between: str | AlgorithmTable

    def value(self, word: str, *entries: Entry) -> str:
        """Declare a value like the result, in another placement."""
        out = self.op.output_arg_names[0]
        name = unused(f"{out}.{word}", self.writer.block.descs, "1".__mul__)
        self.writer.declare(name, self.writer.block.desc(out), entries)
        return name

    def inside(self, type_: str, x: str, out: str, **attrs: Any) -> None:
        self.writer.keep(unary(type_, x, out, filled(type_, {"group": "node", **attrs}), self.op.site))

    def across(self, type_: str, x: str, out: str, **attrs: Any) -> None:
        """A collective between hosts: by send and recv."""
        op = unary(type_, x, out, filled(type_, {"group": "rail", **attrs}), self.op.site)
        block = self.writer.block
        t = local_type(block.desc(out).type, others(block.program, block, op), coords_of(block.program.groups, 0, block.program.turns))
        op, said = carried(op, self.between, t, self.job.mesh.hosts)
        self.job.say(op, said)
        self.writer.keep(op)


def _all_reduce(levels: _Levels, each: int) -> None:
    x, out, kind = levels.op.input_arg_names[0], levels.op.output_arg_names[0], levels.op.attrs["op"]
    t = levels.writer.block.desc(out).type
    rows = t.shape and t.shape[0] >= each
    part = Shard(0, "node") if rows else At(0, "node")
    node, hosts = levels.value("node", Partial(kind, "rail"), part), levels.value("hosts", part)
    there, back, root = ("reduce_scatter", "all_gather", {}) if rows else ("reduce", "broadcast", {"root": 0})
    levels.inside(there, x, node, op=kind, **root)
    levels.across("all_reduce", node, hosts, op=kind)
    levels.inside(back, hosts, out, **root)


def _reduce(levels: _Levels, each: int) -> None:
    x, out, kind = levels.op.input_arg_names[0], levels.op.output_arg_names[0], levels.op.attrs["op"]
    host, local = divmod(levels.op.attrs["root"], each)
    node = levels.value("node", Partial(kind, "rail"), At(local, "node"))
    levels.inside("reduce", x, node, op=kind, root=local)
    levels.across("reduce", node, out, op=kind, root=host)


def _broadcast(levels: _Levels, each: int) -> None:
    x, out = levels.op.input_arg_names[0], levels.op.output_arg_names[0]
    host, local = divmod(levels.op.attrs["root"], each)
    hosts = levels.value("hosts", At(local, "node"))
    levels.across("broadcast", x, hosts, root=host)
    levels.inside("broadcast", hosts, out, root=local)
