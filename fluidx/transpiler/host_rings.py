"""HostRings: on several hosts, collectives inside a host, send and receive between hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ir.operator import Operator
from ..ir.program import Program, Var
from .rewrite import Job, Pass, Writer


@dataclass(frozen=True)
class HostRings(Pass):
    """Lower all_reduce, reduce and broadcast over `dp` to a collective within each `node` and ring hops along a `rail` of the hosts.

    all_reduce: all_reduce in the node; the node's first rank carries the sum round the hosts to one of them and back; broadcast in the
    node.
    reduce, broadcast: the same on the rail of the root. The ring forms cross hosts by send and recv as they are.
    Source: "Broadcast, AllReduce in a single machine. And Broadcast, AllReduce, Send, Recv in multiple machines", Paddle's NCCL design
    document.
    """

    group: str = "dp"

    def run(self, job: Job) -> None:
        if job.cluster.hosts == 1:
            return
        for program in (job.main, job.startup):
            self._lower(program, job)

    def _lower(self, program: Program, job: Job) -> None:
        turn = 0
        writer = Writer(program)
        lower: dict[str, Callable[[Writer, Operator, Job, int], None]] = {
            "all_reduce": self._all_reduce, "reduce": self._reduce, "broadcast": self._broadcast,
        }  # fmt: skip
        for op in writer.old:
            if op.type in lower and op.attrs["group"] == self.group:
                lower[op.type](writer, op, job, turn % job.cluster.hosts)
                turn += 1
            else:
                writer.keep(op)

    def _names(self, writer: Writer, op: Operator) -> tuple[str, str, Var]:
        x, out = op.input_arg_names[0], op.output_arg_names[0]
        return x, out, writer.block.descs[out]

    def _scale(self, writer: Writer, op: Operator, x: str, out: str, n: int, owner: str = "") -> None:
        writer.builder(owner=owner, near=op).scale(x, scale=1.0 / n, out={"Out": out})

    def _all_reduce(self, writer: Writer, op: Operator, job: Job, root: int) -> None:
        x, out, like = self._names(writer, op)
        kind = "sum" if op.attrs["op"] == "avg" else op.attrs["op"]
        node, host = f"{out}.node", f"{out}.hosts"
        for n in (node, host):
            writer.declare(n, like.changed(persistable=False))
        b, leader = writer.builder(near=op), writer.builder(owner="node:0", near=op)
        b.all_reduce(x, group="node", op=kind, name=node)
        leader.ring_reduce(node, group="rail", op=kind, root=root, wave=0, name=host)
        leader.ring_broadcast(host, group="rail", root=root, wave=0, out={"Out": node})
        b.broadcast(node, group="node", root=0, out={"Out": out if kind == op.attrs["op"] else node})
        if kind != op.attrs["op"]:
            self._scale(writer, op, node, out, job.world_size)

    def _reduce(self, writer: Writer, op: Operator, job: Job, turn: int) -> None:
        x, out, like = self._names(writer, op)
        kind = "sum" if op.attrs["op"] == "avg" else op.attrs["op"]
        host, local = divmod(op.attrs["root"], job.cluster.devices_per_host)
        node = f"{out}.node"
        writer.declare(node, like.changed(persistable=False))
        writer.builder(near=op).reduce(x, group="node", op=kind, root=local, name=node)
        writer.builder(owner=f"node:{local}", near=op).ring_reduce(node, group="rail", op=kind, root=host, wave=0, out={"Out": out})
        if kind != op.attrs["op"]:
            self._scale(writer, op, out, out, job.world_size, f"{self.group}:{op.attrs['root']}")

    def _broadcast(self, writer: Writer, op: Operator, job: Job, turn: int) -> None:
        x, out, _ = self._names(writer, op)
        host, local = divmod(op.attrs["root"], job.cluster.devices_per_host)
        rail = writer.builder(owner=f"node:{local}", near=op)
        rail.ring_broadcast(x, group="rail", root=host, wave=0, out={"Out": out})
        writer.builder(near=op).broadcast(out, group="node", root=local, out={"Out": out})
