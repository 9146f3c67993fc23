"""HostRings: on several hosts, collectives inside a host, send and receive between hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...ir.operator import Operator
from ...ir.program import ProgramPair
from ...ir.types import At, Entry, Partial
from ..pass_ import Job, Pass
from ..writer import Writer, each_op


@dataclass(frozen=True)
class HostRings(Pass):
    """Lower all_reduce and reduce of sums, and broadcast, over `dp`: a collective in each `node`, ring hops along a `rail` of the hosts.

    all_reduce: reduce in the node; the node's first rank carries the sum round the hosts to one of them and back; broadcast in the node.
    reduce, broadcast: the same on the rail of the root. Where a host has one device there is the ring alone. The ring forms cross hosts by
    send and recv as they are.
    Source: "Broadcast, AllReduce in a single machine. And Broadcast, AllReduce, Send, Recv in multiple machines", Paddle's NCCL design
    document.
    """

    group: str = "dp"
    requires = ("lowered",)

    def run(self, pair: ProgramPair, job: Job) -> ProgramPair:
        if job.mesh.hosts == 1:
            return pair
        turn = 0
        lower = {"all_reduce": self._all_reduce, "reduce": self._reduce, "broadcast": self._broadcast}

        def visit(writer: Writer, op: Operator) -> None:
            nonlocal turn
            if op.type in lower and op.attrs["group"] == self.group and op.attrs.get("op", "sum") == "sum":
                lower[op.type](writer, op, job.mesh, turn % job.mesh.hosts)
                turn += 1
            else:
                writer.keep(op)

        return ProgramPair(each_op(pair.main, visit), each_op(pair.startup, visit))

    def _all_reduce(self, writer: Writer, op: Operator, cluster: Any, host: int) -> None:
        x, out, kind = op.input_arg_names[0], op.output_arg_names[0], op.attrs["op"]
        if cluster.devices_per_host == 1:
            at_host = self._value(writer, op, out, "rail", At(host, self.group))
            writer.builder(near=op).ring_reduce(x, group=self.group, op=kind, root=host, out={"Out": at_host})
            writer.builder(near=op).ring_broadcast(at_host, group=self.group, root=host, out={"Out": out})
            return
        node, rail, hosts = (self._value(writer, op, out, word, *entries) for word, entries in (
            ("node", (Partial(kind, "rail"), At(0, "node"))), ("rail", (At(host, "rail"), At(0, "node"))), ("hosts", (At(0, "node"),))
        ))  # fmt: skip
        b = writer.builder(near=op)
        b.reduce(x, group="node", op=kind, root=0, out={"Out": node})
        b.ring_reduce(node, group="rail", op=kind, root=host, out={"Out": rail})
        b.ring_broadcast(rail, group="rail", root=host, out={"Out": hosts})
        b.broadcast(hosts, group="node", root=0, out={"Out": out})

    def _reduce(self, writer: Writer, op: Operator, cluster: Any, turn: int) -> None:
        x, out, kind = op.input_arg_names[0], op.output_arg_names[0], op.attrs["op"]
        host, local = divmod(op.attrs["root"], cluster.devices_per_host)
        if cluster.devices_per_host == 1:
            writer.builder(near=op).ring_reduce(x, group=self.group, op=kind, root=host, out={"Out": out})
            return
        node = self._value(writer, op, out, "node", Partial(kind, "rail"), At(local, "node"))
        b = writer.builder(near=op)
        b.reduce(x, group="node", op=kind, root=local, out={"Out": node})
        b.ring_reduce(node, group="rail", op=kind, root=host, out={"Out": out})

    def _broadcast(self, writer: Writer, op: Operator, cluster: Any, turn: int) -> None:
        x, out = op.input_arg_names[0], op.output_arg_names[0]
        host, local = divmod(op.attrs["root"], cluster.devices_per_host)
        if cluster.devices_per_host == 1:
            writer.builder(near=op).ring_broadcast(x, group=self.group, root=host, out={"Out": out})
            return
        hosts = self._value(writer, op, out, "hosts", At(local, "node"))
        b = writer.builder(near=op)
        b.ring_broadcast(x, group="rail", root=host, out={"Out": hosts})
        b.broadcast(hosts, group="node", root=local, out={"Out": out})

    @staticmethod
    def _value(writer: Writer, op: Operator, out: str, word: str, *entries: Entry) -> str:
        name = f"{out}.{word}"
        while name in writer.block.descs:
            name += "1"
        writer.declare(name, writer.block.desc(out), entries)
        return name
