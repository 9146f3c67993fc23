"""push and pull written out for a rank: each trainer sends every server its piece of a term, which adds them up; and the new values back.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014), and the send and recv operators of fluid's
DistributeTranspiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..ir.operator import Operator, Role
from ..ir.program import Block, Var
from ..ir.types import Local, TensorType
from .writer import filled

SERVED = ("push", "pull")


class _Piece(NamedTuple):
    """Elements [start, stop) of a flat value, and the rank of the server that has them."""

    server: int
    start: int
    stop: int


def write_served(op: Operator, rank: int, block: Block) -> None:
    """Append what a rank does in a push or a pull."""
    groups = block.program.groups
    (everyone,), trainers = groups[op.attrs["group"]], groups[op.attrs["trainers"]][0]
    writing = _Writing(op, rank, everyone, list(trainers), block)
    pieces = _pieces(op, everyone, block.desc(op.output_arg_names[0]).type)
    (writing.push if op.type == "push" else writing.pull)(pieces)


def _pieces(op: Operator, everyone: tuple[int, ...], t: TensorType) -> list[_Piece]:
    if not op.attrs["bounds"]:
        return [_Piece(everyone[op.attrs["root"]], 0, t.numel)]
    return [_Piece(everyone[k], a, b) for k, (a, b) in enumerate(pairwise(op.attrs["bounds"])) if a < b]


class _Writing:
    def __init__(self, op: Operator, rank: int, everyone: Sequence[int], trainers: list[int], block: Block):
        self.op, self.rank, self.everyone, self.trainers, self.block = op, rank, everyone, trainers, block
        self.x, self.out = op.input_arg_names[0], op.output_arg_names[0]
        self.type = block.desc(self.out).type
        self.batch = f"{op.type}.{self.out}"

    def push(self, pieces: list[_Piece]) -> None:
        """Trainers send their terms; a server receives one of each trainer and adds them up."""
        senders = self.trainers[:1] if self.op.attrs["same"] else self.trainers
        if self.rank in senders:
            parts = [self.part(self.x, p) for p in pieces]
            for part, p in zip(parts, pieces, strict=True):
                self.send(part, p.server)
        if self.op.attrs["bounds"] and all(p.server != self.rank for p in pieces):
            none = self.local(f"{self.out}.none", (0,))
            self.emit("fill_constant", [], none, shape=(0,), dtype=self.type.dtype)
            self.emit("unpack", [none], self.out, shapes=((0,),))
        for p in pieces:
            if p.server == self.rank:
                terms = [self.recv(f"{self.out}.of{r}", r, self.shape(p)) for r in senders]
                self.emit("sum", terms, self.out)

    def pull(self, pieces: list[_Piece]) -> None:
        """Servers send what they have to every trainer, and to each other what all ranks keep."""
        takers = self.everyone if self.block.desc(self.out).persistable else self.trainers
        for p in pieces:
            if p.server == self.rank:
                for r in takers:
                    if r != self.rank:
                        self.send(self.x, r)
        if self.rank in takers:
            if len(pieces) > 1:
                self.emit("unpack", [self.arrived(p) for p in pieces], self.out, shapes=(self.type.shape,))
            elif pieces[0].server == self.rank:
                self.emit("assign", [self.x], self.out)
            else:
                self.recv(self.out, pieces[0].server, self.type.shape, self.block.desc(self.out).placement)

    def arrived(self, p: _Piece) -> str:
        """The name of a piece: one's own, or what its server sends."""
        return self.x if p.server == self.rank else self.recv(f"{self.out}.from{p.start}", p.server, self.shape(p))

    def shape(self, p: _Piece) -> tuple[int, ...]:
        return (p.stop - p.start,) if self.op.attrs["bounds"] else self.type.shape

    def part(self, name: str, p: _Piece) -> str:
        if not self.op.attrs["bounds"]:
            return name
        made = self.local(f"{self.out}.part{p.start}", self.shape(p))
        self.emit("chunk", [name], made, start=p.start, stop=p.stop)
        return made

    def local(self, name: str, shape: tuple[int, ...]) -> str:
        self.block.descs[name] = Var(name, TensorType(self.type.dtype, shape), (Local(),), stop_gradient=True)
        return name

    def send(self, name: str, peer: int) -> None:
        attrs = filled("send", {"peer": peer, "group": self.op.attrs["group"], "batch": self.batch})
        self.block.oplist.append(Operator("send", {"X": (name,)}, {}, attrs, role=Role.DIST, site=self.op.site))

    def recv(self, name: str, peer: int, shape: tuple[int, ...], placement: Any = None) -> str:
        if placement is None:
            self.local(name, shape)
        self.emit("recv", [], name, peer=peer, shape=shape, dtype=self.type.dtype, group=self.op.attrs["group"], batch=self.batch)
        return name

    def emit(self, type_: str, xs: list[str], out: str, **attrs: Any) -> None:
        ins = {"X": tuple(xs)} if xs else {}
        made = Operator(type_, ins, {"Out": (out,)}, filled(type_, attrs), role=Role.DIST, site=self.op.site)
        self.block.oplist.append(made)
