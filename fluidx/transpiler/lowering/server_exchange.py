"""Write push and pull for a rank: each trainer sends every server a piece of its term, servers add these up, and send the new values back.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014), and the send and recv operators of fluid's
DistributeTranspiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

from ...ir.make_op import filled, make_op
from ...ir.operator import Operator
from ...ir.parts import Coords
from ...ir.program import Block
from ...ir.types import Local, TensorType
from ...ir.var import Var
from .messages import recv, send

SERVED = ("push", "pull")


class _Piece(NamedTuple):
    """Elements [start, stop) of a flattened value, and the rank of the server that has them."""

    server: int
    start: int
    stop: int


class ServerExchange:
    """Independent pushes and pulls: their messages start together. The first trainer may send values for all trainers; the other trainers
    have equal programs. `kept`: do servers also store replicated state?"""

    def __init__(self, ops: Sequence[Operator], kept: bool):
        self.ops, self.kept = ops, kept
        self.written: dict[int, tuple[list[Operator], dict[str, Var]]] = {}  # by rank; all trainers after the first use the second's

    def is_common(self) -> bool:
        return False

    def write_with_two_trainers(self, rank: int, block: Block) -> None:
        """Append the operators of a rank as if there were only two trainers."""
        ops, made = self._written(rank, block, few=True)
        block.oplist += ops
        block.descs.update(made)

    def write(self, rank: int, coords: Coords, block: Block) -> None:
        trainers = block.program.groups[self.ops[0].attrs["trainers"]][0]
        alike = trainers[1] if rank in trainers[1:] else rank
        if alike not in self.written:
            self.written[alike] = self._written(rank, block)
        ops, made = self.written[alike]
        block.oplist += ops
        block.descs.update(made)

    def _written(self, rank: int, block: Block, few: bool = False) -> tuple[list[Operator], dict[str, Var]]:
        batch = f"{self.ops[0].type}.{self.ops[0].output_arg_names[0]}"
        made: dict[str, Var] = {}
        written = [_Writing(op, rank, block, batch, self.kept, made, few) for op in self.ops]
        stages = [w.before for w in written], [w.messages for w in written], [w.behind for w in written]
        return [*chain.from_iterable(chain(*stages))], made


def _pieces(op: Operator, everyone: tuple[int, ...], t: TensorType) -> list[_Piece]:
    if not op.attrs["bounds"]:
        return [_Piece(everyone[op.attrs["root"]], 0, t.numel)]
    return [_Piece(everyone[k], a, b) for k, (a, b) in enumerate(pairwise(op.attrs["bounds"])) if a < b]


class _Writing:
    """Writes the operators of one rank for a push or a pull: it cuts local values, sends and receives, and combines the results."""

    def __init__(self, op: Operator, rank: int, block: Block, batch: str, kept: bool, declared: dict[str, Var], few: bool):
        self.op, self.rank, self.declared = op, rank, declared
        self.how = {"group": op.attrs["group"], "batch": batch}
        self.before: list[Operator] = []
        self.messages: list[Operator] = []
        self.behind: list[Operator] = []
        self.x, self.out = op.input_arg_names[0], op.output_arg_names[0]
        d = block.desc(self.out)
        self.type, self.placement = d.type, d.placement
        groups = block.program.groups
        (everyone,) = groups[op.attrs["group"]]
        self.trainers = groups[op.attrs["trainers"]][0]
        if few:
            everyone, self.trainers = everyone[:2] + everyone[len(self.trainers) :], self.trainers[:2]
        self.takers = everyone if kept and d.persistable else self.trainers
        pieces = _pieces(op, groups[op.attrs["group"]][0], self.type)
        (self.push if op.type == "push" else self.pull)(pieces)

    def push(self, pieces: list[_Piece]) -> None:
        """Trainers send their terms; a server receives one from each trainer and adds them up."""
        senders = self.trainers[:1] if self.op.attrs["same"] else self.trainers
        if self.rank in senders:
            for p in pieces:
                self.send(self.part(self.x, p), p.server)
        if self.op.attrs["bounds"] and all(p.server != self.rank for p in pieces):
            none = self.local(f"{self.out}.none", (0,))
            self.behind += [
                self.made("fill_constant", [], none, shape=(0,), dtype=self.type.dtype),
                self.made("unpack", [none], self.out, shapes=((0,),)),
            ]
        for p in pieces:
            if p.server == self.rank:
                terms = [self.recv(f"{self.out}.of{r}", r, self.shape(p)) for r in senders]
                self.behind.append(self.made("sum", terms, self.out))

    def pull(self, pieces: list[_Piece]) -> None:
        """Servers send their pieces to every trainer, and replicated state also to each other."""
        for p in pieces:
            if p.server == self.rank:
                for r in self.takers:
                    if r != self.rank:
                        self.send(self.x, r)
        if self.rank in self.takers:
            if len(pieces) > 1:
                self.behind.append(self.made("unpack", [self.arrived(p) for p in pieces], self.out, shapes=(self.type.shape,)))
            elif pieces[0].server == self.rank:
                self.behind.append(self.made("assign", [self.x], self.out))
            else:
                self.recv(self.out, pieces[0].server, self.type.shape, self.placement)

    def arrived(self, p: _Piece) -> str:
        """The name of a piece: the rank's own, or the one received from its server."""
        return self.x if p.server == self.rank else self.recv(f"{self.out}.from{p.start}", p.server, self.shape(p))

    def shape(self, p: _Piece) -> tuple[int, ...]:
        return (p.stop - p.start,) if self.op.attrs["bounds"] else self.type.shape

    def part(self, name: str, p: _Piece) -> str:
        if not self.op.attrs["bounds"]:
            return name
        made = self.local(f"{self.out}.part{p.start}", self.shape(p))
        self.before.append(self.made("chunk", [name], made, start=p.start, stop=p.stop))
        return made

    def local(self, name: str, shape: tuple[int, ...]) -> str:
        self.declared[name] = Var(name, TensorType(self.type.dtype, shape), (Local(),), stop_gradient=True)
        return name

    def send(self, name: str, peer: int) -> None:
        self.messages.append(send(self.op, name, peer=peer, **self.how))

    def recv(self, name: str, peer: int, shape: tuple[int, ...], placement: Any = None) -> str:
        if placement is None:
            self.local(name, shape)
        self.messages.append(recv(self.op, name, TensorType(self.type.dtype, shape), peer=peer, **self.how))
        return name

    def made(self, type_: str, xs: list[str], out: str, **attrs: Any) -> Operator:
        return make_op(type_, xs, (out,), filled(type_, attrs), self.op.site)
