"""Specialize: the program of one rank, from the program that speaks for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..ir.errors import TranspileError
from ..ir.operator import Operator, Role
from ..ir.program import Block, Program
from ..ir.types import At, TensorType

_RINGS = ("ring_reduce", "ring_broadcast")


@dataclass
class _Run:
    """Neighbouring ring operators of one kind, group and wave: they travel together, hop by hop."""

    ops: list[Operator]


class Specializer:
    """Makes rank programs. What depends on the rank is found once; the rest is shared by all rank programs."""

    def __init__(self, program: Program):
        self.program = program
        block = program.global_block()
        self.parts: list[list[Operator] | Operator | _Run] = []
        shared: list[Operator] = []
        for op in block.oplist:
            owned = op.owner and op.owner.partition(":")[0] in program.groups
            ring = op.type in _RINGS
            if not owned and not ring:
                shared.append(op)
                continue
            if shared:
                self.parts.append(shared)
                shared = []
            last = self.parts[-1] if self.parts else None
            if ring and isinstance(last, _Run) and self._alike(last.ops[-1], op):
                last.ops.append(op)
            else:
                self.parts.append(_Run([op]) if ring else op)
        if shared:
            self.parts.append(shared)
        self.owned_vars = [(n, *_owner(d.attrs["owner"])) for n, d in block.descs.items() if d.attrs and "owner" in d.attrs]
        self.serial = 0

    @staticmethod
    def _alike(a: Operator, b: Operator) -> bool:
        return a.type == b.type and a.owner == b.owner and all(a.attrs[k] == b.attrs[k] for k in ("group", "wave"))

    def rank_program(self, rank: int) -> Program:
        """The program of `rank`: its own operators, ring forms written out as send, recv and sum."""
        program = self.program
        new = program.copy()
        new.rank = rank
        block = new.global_block()
        block.oplist = out = []
        others: set[str] = set()
        own: set[str] = set()
        for part in self.parts:
            if isinstance(part, list):
                out.extend(part)
            elif isinstance(part, Operator):
                runs = self._runs(part, rank)
                (own if runs else others).update(part.output_arg_names)
                if runs:
                    out.append(part.replace(owner=""))
            elif self._runs(part.ops[0], rank):
                self._ring(part, rank, block)
        for name, group, index in self.owned_vars:
            ranks = program.group_ranks(group, rank)
            if ranks.index(rank) != index:
                del block.descs[name]
        for name in others - own:
            d = block.descs.get(name)
            if d is not None and not d.persistable and any(isinstance(p, At) for p in d.placement):
                del block.descs[name]
        new.frozen = True
        return new

    def _runs(self, op: Operator, rank: int) -> bool:
        group, _, index = op.owner.partition(":")
        if not index or group not in self.program.groups:
            return True
        ranks = self.program.group_ranks(group, rank)
        return rank in ranks and ranks.index(rank) == int(index)

    def _ring(self, run: _Run, rank: int, block: Block) -> None:
        first = run.ops[0]
        group = first.attrs["group"]
        ranks = self.program.group_ranks(group, rank)
        if first.type == "ring_reduce":
            self._ring_reduce(run.ops, group, ranks, rank, block)
        else:
            self._ring_broadcast(run.ops, group, ranks, rank, block)

    def _ring_reduce(self, ops: Iterable[Operator], group: str, ranks: tuple[int, ...], rank: int, block: Block) -> None:
        """Hop h of n - 1: rank root + h sends its partial sum to root + h + 1, which adds its own term."""
        n, me, out = len(ranks), ranks.index(rank), block.oplist
        to, source = ranks[(me + 1) % n], ranks[(me - 1) % n]
        held: dict[int, str] = {}  # operator index -> the partial sum that this rank holds
        ops = list(ops)
        last: list[tuple[Operator, str]] = []
        for k, op in enumerate(ops):
            held[k] = op.input_arg_names[0]
        for hop in range(1, n):
            batch = self._batch(ops[0], "reduce", hop)
            added = []
            for k, op in enumerate(ops):
                place = (me - op.attrs["root"] - 1) % n  # 0 starts the chain, n - 1 is the root
                if place == hop - 1:
                    out.append(_send(held[k], to, group, batch, op))
            for k, op in enumerate(ops):
                place = (me - op.attrs["root"] - 1) % n
                if place == hop:
                    x = op.input_arg_names[0]
                    d = block.descs[x]
                    name = op.output_arg_names[0]
                    incoming = f"{name}.in"
                    total = f"{name}.hop{hop}"
                    block.descs[incoming] = d.changed(name=incoming, placement=(), persistable=False, attrs={})
                    block.descs[total] = d.changed(name=total, placement=(), persistable=False, attrs={})
                    out.append(_recv(incoming, d.type, source, group, batch, op))
                    added.append(Operator("sum", {"X": (incoming, x)}, {"Out": (total,)}, {}, Role.DIST, (), "", op.site))
                    held[k] = total
                    if place == n - 1:
                        last.append((op, total))
            out.extend(added)
        for op in ops:
            if n > 1 and (me - op.attrs["root"] - 1) % n != n - 1:
                block.descs.pop(op.output_arg_names[0], None)  # exists on its root only
        if n == 1:
            last = [(op, held[k]) for k, op in enumerate(ops)]
        for op, total in last:
            out.append(self._finish(op, total, n))

    @staticmethod
    def _finish(op: Operator, total: str, n: int) -> Operator:
        name, site = op.output_arg_names[0], op.site
        if op.attrs["op"] == "avg":
            attrs = {"scale": 1.0 / n, "bias": 0.0, "bias_after_scale": True}
            return Operator("scale", {"X": (total,)}, {"Out": (name,)}, attrs, Role.DIST, (), "", site)
        if op.attrs["op"] != "sum":
            raise TranspileError(f"ring_reduce of op={op.attrs['op']!r} cannot be written as partial sums")
        return Operator("assign", {"X": (total,)}, {"Out": (name,)}, {}, Role.DIST, (), "", site)

    def _ring_broadcast(self, ops: list[Operator], group: str, ranks: tuple[int, ...], rank: int, block: Block) -> None:
        """Hop h of n - 1: rank root + h - 1 sends the value on to root + h."""
        n, me, out = len(ranks), ranks.index(rank), block.oplist
        to, source = ranks[(me + 1) % n], ranks[(me - 1) % n]
        have: dict[int, str] = {}
        for k, op in enumerate(ops):
            x, y = op.input_arg_names[0], op.output_arg_names[0]
            if x != y and (me == op.attrs["root"] or n == 1):
                out.append(Operator("assign", {"X": (x,)}, {"Out": (y,)}, {}, Role.DIST, (), "", op.site))
            have[k] = y
        for hop in range(1, n):
            batch = self._batch(ops[0], "broadcast", hop)
            for k, op in enumerate(ops):
                if (me - op.attrs["root"]) % n == hop - 1:
                    out.append(_send(have[k], to, group, batch, op))
            for k, op in enumerate(ops):
                if (me - op.attrs["root"]) % n == hop:
                    out.append(_recv(have[k], block.descs[have[k]].type, source, group, batch, op))

    @staticmethod
    def _batch(op: Operator, what: str, hop: int) -> str:
        return f"{what}.wave{op.attrs['wave']}.hop{hop}"


def _owner(text: str) -> tuple[str, int]:
    group, _, index = text.partition(":")
    return group, int(index)


def _send(x: str, peer: int, group: str, batch: str, near: Operator) -> Operator:
    attrs = {"peer": peer, "group": group, "batch": batch, "stream": "comm"}
    return Operator("send", {"X": (x,)}, {}, attrs, Role.DIST, (), "", near.site)


def _recv(out: str, t: TensorType, peer: int, group: str, batch: str, near: Operator) -> Operator:
    attrs = {"peer": peer, "shape": t.shape, "dtype": t.dtype, "group": group, "batch": batch, "stream": "comm"}
    return Operator("recv", {}, {"Out": (out,)}, attrs, Role.DIST, (), "", near.site)
