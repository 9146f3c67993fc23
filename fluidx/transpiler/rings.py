"""Rings: ring_reduce and ring_broadcast of one wave, written out for a rank as send, recv and sum, hop by hop.

Source: the ring scheme of Paddle's NCCL design document: steps 1 to 3 carry partial sums to the root, step 5 carries new values on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from ..ir.operator import Operator, Role
from ..ir.parts import Coords, holds, local_type
from ..ir.program import Block, Var
from ..ir.types import Local, Placement, Shard, TensorType
from .writer import filled

RINGS = ("ring_reduce", "ring_broadcast")
_LARGEST = 4 * 2**20  # bytes of one message


class _Message(NamedTuple):
    """What travels as one: elements [start, stop) of the flat local value of `op`, to or from the rank with index `root`."""

    op: Operator
    root: int
    start: int
    stop: int
    whole: bool  # nothing else belongs to the value
    name: str
    type: TensorType


@dataclass
class Ring:
    """Neighbouring ring operators of one kind, group and wave."""

    block: Block
    ops: list[Operator]
    index: int

    @property
    def group(self) -> str:
        return self.ops[0].attrs["group"]

    def write(self, rank: int, coords: Coords, block: Block) -> None:
        """Append what the rank does to `block`, and declare what it receives."""
        others = self._others(self.ops[0])
        if not holds(others, coords):
            return
        members = self.block.program.group_ranks(self.group, rank)
        me = members.index(rank)
        write = _Reduce if self.ops[0].type == "ring_reduce" else _Broadcast
        write(self, members, me, block, coords).run(self._messages(coords) if self._cut else self._shared_messages)

    def _others(self, op: Operator) -> Placement:
        """Where the value lies over the groups that have nothing to do with the ring's."""
        places = (*self.block.desc(op.input_arg_names[0]).placement, *self.block.desc(op.output_arg_names[0]).placement)
        groups = self.block.program.groups
        mine = [set(s) for s in groups[self.group]]
        return tuple(e for e in dict.fromkeys(places) if not all(any(m <= set(s) for s in groups[e.group]) for m in mine))

    def local_type(self, op: Operator, coords: Coords) -> TensorType:
        """The type of what the ranks of the ring hold together: the value, or their part of it where another group cuts it."""
        return local_type(self.block.desc(op.output_arg_names[0]).type, self._others(op), coords)

    @cached_property
    def _cut(self) -> bool:
        return any(isinstance(e, Shard) for op in self.ops for e in self._others(op))

    @cached_property
    def _shared_messages(self) -> list[_Message]:
        return self._messages({})

    def _messages(self, coords: Coords) -> list[_Message]:
        out = []
        for op in self.ops:
            target = op.output_arg_names[0]
            t = self.local_type(op, coords)
            bounds = op.attrs["bounds"]
            ranges = [(r, a, b) for r, (a, b) in enumerate(pairwise(bounds)) if a < b] if bounds else [(op.attrs["root"], 0, t.numel)]
            each = max(1, _LARGEST // max(1, t.nbytes // max(1, t.numel)))
            for root, start, stop in ranges:
                for a in range(start, stop, each):
                    b = min(a + each, stop)
                    whole = (a, b) == (0, t.numel)
                    what = t if whole and not bounds else TensorType(t.dtype, (b - a,))
                    out.append(
                        _Message(
                            op,
                            root,
                            a,
                            b,
                            whole and not bounds,
                            f"{target}.from{a}" if len(ranges) > 1 or b - a < t.numel else target,
                            what,
                        )
                    )
        return out


@dataclass
class _Writing:
    ring: Ring
    members: tuple[int, ...]
    me: int
    block: Block
    coords: Coords

    def __post_init__(self) -> None:
        self.n = len(self.members)
        self.out = self.block.oplist

    def local(self, name: str, t: TensorType) -> str:
        self.block.descs[name] = Var(name, t, (Local(),), stop_gradient=True)
        return name

    def emit(self, type_: str, xs: tuple[str, ...], out: str, near: Operator, **attrs: Any) -> None:
        ins = {"X": xs} if xs else {}
        full = filled(type_, attrs)
        self.out.append(Operator(type_, ins, {"Out": (out,)}, full, role=Role.DIST, site=near.site))

    def send(self, x: str, to: int, batch: str, near: Operator) -> None:
        attrs = filled("send", {"peer": self.members[to % self.n], "group": self.ring.group, "batch": batch})
        self.out.append(Operator("send", {"X": (x,)}, {}, attrs, role=Role.DIST, site=near.site))

    def recv(self, out: str, t: TensorType, source: int, batch: str, near: Operator) -> None:
        peer = self.members[source % self.n]
        self.emit("recv", (), out, near, peer=peer, shape=t.shape, dtype=t.dtype, group=self.ring.group, batch=batch)

    def batch(self, hop: int) -> str:
        return f"{self.ring.ops[0].type}.{self.ring.index}.hop{hop}"

    @staticmethod
    def by_root(messages: list[_Message]) -> dict[int, list[_Message]]:
        found: dict[int, list[_Message]] = {}
        for m in messages:
            found.setdefault(m.root, []).append(m)
        return found

    def parts_of(self, op: Operator, messages: list[_Message]) -> Iterator[_Message]:
        return (m for m in messages if m.op is op)


class _Reduce(_Writing):
    """Hop h of n - 1: rank root + h sends its partial sum to root + h + 1, which adds its own term."""

    def run(self, messages: list[_Message]) -> None:
        own = {id(m): self._term(m) for m in messages}
        held = dict(own)
        roots = self.by_root(messages)
        for hop in range(1, self.n):
            batch = self.batch(hop)
            for m in roots.get((self.me - hop) % self.n, ()):
                self.send(held[id(m)], self.me + 1, batch, m.op)
            arriving = roots.get((self.me - hop - 1) % self.n, ())
            for m in arriving:
                self.recv(self.local(f"{m.name}.in", m.type), m.type, self.me - 1, batch, m.op)
            for m in arriving:
                held[id(m)] = part = self.local(f"{m.name}.part", m.type)
                self.emit("sum", (f"{m.name}.in", own[id(m)]), part, m.op)
        for op in self.ring.ops:
            mine = [held[id(m)] for m in self.parts_of(op, messages) if m.root == self.me]
            if not mine and op.attrs["bounds"]:  # nothing of it is this rank's
                x, out = op.input_arg_names[0], op.output_arg_names[0]
                mine = [self.local(f"{out}.none", TensorType(self.ring.block.desc(out).type.dtype, (0,)))]
                self.emit("chunk", (x,), mine[0], op, start=0, stop=0)
            if mine:
                self._finish(op, mine, messages)

    def _term(self, m: _Message) -> str:
        x = m.op.input_arg_names[0]
        if m.whole:
            return x
        name = self.local(f"{m.name}.term", m.type)
        self.emit("chunk", (x,), name, m.op, start=m.start, stop=m.stop)
        return name

    def _finish(self, op: Operator, mine: list[str], messages: list[_Message]) -> None:
        out = op.output_arg_names[0]
        held = [m for m in self.parts_of(op, messages) if m.root == self.me]
        if op.attrs["bounds"]:
            shape: tuple[int, ...] = (sum(m.stop - m.start for m in held),)
        else:
            shape = self.ring.local_type(op, self.coords).shape
        self.emit("unpack", tuple(mine), out, op, shapes=(shape,))


class _Broadcast(_Writing):
    """Hop h of n - 1: rank root + h - 1 sends the value on to root + h."""

    def run(self, messages: list[_Message]) -> None:
        roots = self.by_root(messages)
        held = {id(m): self._source(m, messages) for m in roots.get(self.me, ())}
        for hop in range(1, self.n):
            batch = self.batch(hop)
            for m in roots.get((self.me - hop + 1) % self.n, ()):
                self.send(held[id(m)], self.me + 1, batch, m.op)
            for m in roots.get((self.me - hop) % self.n, ()):
                # a value that comes in one message arrives where it belongs
                held[id(m)] = m.op.output_arg_names[0] if m.whole else self.local(f"{m.name}.in", m.type)
                self.recv(held[id(m)], m.type, self.me - 1, batch, m.op)
        for op in self.ring.ops:
            out = op.output_arg_names[0]
            parts = list(self.parts_of(op, messages))
            if len(parts) == 1 and parts[0].whole:
                if parts[0].root == self.me:
                    self.emit("assign", (held[id(parts[0])],), out, op)
                continue
            self.emit("unpack", tuple(held[id(m)] for m in parts), out, op, shapes=(self.ring.local_type(op, self.coords).shape,))

    def _source(self, m: _Message, messages: list[_Message]) -> str:
        x = m.op.input_arg_names[0]
        mine = [o for o in self.parts_of(m.op, messages) if o.root == self.me]
        if len(mine) == 1:
            return x
        name = self.local(f"{m.name}.out", m.type)
        self.emit("chunk", (x,), name, m.op, start=m.start - mine[0].start, stop=m.stop - mine[0].start)
        return name
