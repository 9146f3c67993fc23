"""Specialize: the program of one rank, from the program that speaks for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..ir.errors import TranspileError
from ..ir.operator import Operator, Role
from ..ir.program import Block, Program, Var
from ..ir.types import At, TensorType

_RINGS = ("ring_reduce", "ring_broadcast")
_SMALL = 32 * 1024  # bytes below which messages of one root travel packed together: the copy is cheaper than a message of their own


class Specializer:
    """Makes rank programs. What depends on the rank is found once; everything else is shared by all rank programs."""

    def __init__(self, program: Program):
        self.program = program
        block = program.global_block()
        self.parts: list[list[Operator] | _Owned | _Run] = []
        shared: list[Operator] = []
        rounds: dict[tuple, int] = {}  # how often a wave of one kind has travelled before
        for op in block.oplist:
            if not op.owner and op.type not in _RINGS:
                shared.append(op)
                continue
            group, index = _owner(op.owner)
            owned = group in program.groups
            if op.type not in _RINGS and not owned:
                shared.append(op)
                continue
            if shared:
                self.parts.append(shared)
                shared = []
            last = self.parts[-1] if self.parts else None
            if op.type not in _RINGS:
                self.parts.append(_Owned(op, group, index))
            elif isinstance(last, _Run) and last.takes(op):
                last.ops.append(op)
            else:
                key = (op.type, op.attrs["group"], op.attrs["wave"])
                rounds[key] = rounds.get(key, -1) + 1
                self.parts.append(_Run([op], block, group if owned else "", index, rounds[key]))
        if shared:
            self.parts.append(shared)
        self.owned_vars = [(n, *_owner(d.attrs["owner"])) for n, d in block.descs.items() if d.attrs and "owner" in d.attrs]
        # values that operators of some ranks only define
        self.elsewhere = [
            (n, part)
            for part in self.parts
            if isinstance(part, _Owned)
            for n in part.op.output_arg_names
            if (d := block.descs.get(n)) is not None and not d.persistable and any(isinstance(p, At) for p in d.placement)
        ]

    def rank_program(self, rank: int) -> Program:
        """The program of `rank`: its own operators, ring forms written out as send, recv and sum."""
        program = self.program
        new = program.copy()
        new.rank = rank
        block = new.global_block()
        block.oplist = out = []
        index = {g: ranks.index(rank) if rank in (ranks := program.group_ranks(g, rank)) else -1 for g in program.groups}
        own: set[str] = set()
        for part in self.parts:
            if isinstance(part, list):
                out.extend(part)
            elif isinstance(part, _Owned):
                if index[part.group] == part.index:
                    out.append(part.plain)
                    own.update(part.op.output_arg_names)
            elif not part.group or index[part.group] == part.index:
                part.write(program, rank, block)
        for name, group, owner in self.owned_vars:
            if index[group] != owner:
                del block.descs[name]
        for name, _ in self.elsewhere:
            if name not in own:
                block.descs.pop(name, None)
        new.frozen = True
        return new


@dataclass
class _Owned:
    """An operator that one rank of each set of a group runs."""

    op: Operator
    group: str
    index: int

    @cached_property
    def plain(self) -> Operator:
        return self.op.replace(owner="")


@dataclass
class _Unit:
    """What travels as one message: one ring operator's value, or several small ones packed."""

    ops: list[Operator]
    root: int
    x: str
    out: str
    type: TensorType
    pack: Operator | None = None
    unpack: Operator | None = None
    incoming: Var | None = None
    part: Var | None = None
    sum: Operator | None = None


@dataclass
class _Run:
    """Neighbouring ring operators of one kind, group and wave: they travel together, hop by hop."""

    ops: list[Operator]
    block: Block
    group: str
    index: int
    round: int = 0
    by_root: dict[int, list[_Unit]] = field(default_factory=dict)

    def takes(self, op: Operator) -> bool:
        a = self.ops[-1]
        return a.type == op.type and a.owner == op.owner and all(a.attrs[k] == op.attrs[k] for k in ("group", "wave"))

    @cached_property
    def units(self) -> list[_Unit]:
        """One unit for each large value, one for the small values of each root."""
        small: dict[tuple[int, str, str], list[Operator]] = {}
        units: list[_Unit] = []
        for op in self.ops:
            t = self.block.descs[op.input_arg_names[0]].type
            if t.nbytes < _SMALL:
                small.setdefault((op.attrs["root"], t.dtype, op.attrs.get("op", "")), []).append(op)
            else:
                units.append(self._single(op))
        for (root, dtype, _), ops in small.items():
            units.append(self._single(ops[0]) if len(ops) == 1 else self._packed(ops, root, dtype))
        if self.ops[0].type == "ring_reduce":
            for u in units:
                self._prepare_sum(u)
        for u in units:
            self.by_root.setdefault(u.root, []).append(u)
        return units

    def _single(self, op: Operator) -> _Unit:
        x, out = op.input_arg_names[0], op.output_arg_names[0]
        return _Unit([op], op.attrs["root"], x, out, self.block.descs[x].type)

    def _packed(self, ops: list[Operator], root: int, dtype: str) -> _Unit:
        reduce = ops[0].type == "ring_reduce"
        xs, outs = [op.input_arg_names[0] for op in ops], [op.output_arg_names[0] for op in ops]
        shapes = tuple(self.block.descs[x].type.shape for x in xs)
        t = TensorType(dtype, (sum(self.block.descs[x].type.numel for x in xs),))
        first = ops[0].attrs
        again = f".again{self.round}" if self.round else ""
        name = f"{first['group']}.wave{first['wave']}.root{root}.{'gradients' if reduce else 'parameters'}{again}"
        suffix = f".{first['op']}" if reduce else ""
        unit = _Unit(ops, root, name, f"{name}{suffix}", t)
        unit.pack = Operator("pack", {"X": tuple(xs)}, {"Out": (name,)}, {}, Role.DIST, (), "", ops[0].site)
        unit.unpack = Operator("unpack", {"X": (unit.out,)}, {"Out": tuple(outs)}, {"shapes": shapes}, Role.DIST, (), "", ops[0].site)
        return unit

    def _prepare_sum(self, u: _Unit) -> None:
        incoming, part = f"{u.out}.in", f"{u.out}.part"
        u.incoming, u.part = Var(incoming, u.type, stop_gradient=True), Var(part, u.type, stop_gradient=True)
        u.sum = Operator("sum", {"X": (incoming, u.x)}, {"Out": (part,)}, {}, Role.DIST, (), "", u.ops[0].site)

    def write(self, program: Program, rank: int, block: Block) -> None:
        ranks = program.group_ranks(self.ops[0].attrs["group"], rank)
        for u in self.units:
            if u.pack is not None:
                for name in {u.x, u.out}:
                    block.descs[name] = Var(name, u.type, stop_gradient=True)
        if self.ops[0].type == "ring_reduce":
            self._reduce(ranks, ranks.index(rank), block)
        else:
            self._broadcast(ranks, ranks.index(rank), block)

    def _batch(self, what: str, hop: int) -> str:
        return f"{what}.wave{self.ops[0].attrs['wave']}.hop{hop}"

    def _reduce(self, ranks: Sequence[int], me: int, block: Block) -> None:
        """Hop h of n - 1: rank root + h sends its partial sum to root + h + 1, which adds its own term."""
        n, out = len(ranks), block.oplist
        out.extend(u.pack for u in self.units if u.pack is not None)
        for hop in range(1, n):
            batch = self._batch("reduce", hop)
            for u in self.by_root.get((me - hop) % n, ()):
                assert u.part is not None
                out.append(_send(u.x if hop == 1 else u.part.name, ranks[(me + 1) % n], batch, u))
            arriving = self.by_root.get((me - hop - 1) % n, ())
            for u in arriving:
                assert u.incoming is not None and u.part is not None and u.sum is not None
                block.descs[u.incoming.name], block.descs[u.part.name] = u.incoming, u.part
                out.append(_recv(u.incoming.name, ranks[(me - 1) % n], batch, u))
            out.extend(u.sum for u in arriving if u.sum is not None)
        for u in self.units:
            if u.root % n == me:
                assert u.part is not None
                out.append(_finish(u, u.x if n == 1 else u.part.name, n))
                if u.unpack is not None:
                    out.append(u.unpack)
                continue
            for op in u.ops:
                block.descs.pop(op.output_arg_names[0], None)  # exists on its root only
            if u.pack is not None:
                del block.descs[u.out]

    def _broadcast(self, ranks: Sequence[int], me: int, block: Block) -> None:
        """Hop h of n - 1: rank root + h - 1 sends the value on to root + h."""
        n, out = len(ranks), block.oplist
        for u in self.by_root.get(me, ()) if n > 1 else self.units:
            if u.pack is not None:
                out.append(u.pack)
            elif u.x != u.out:
                out.append(Operator("assign", {"X": (u.x,)}, {"Out": (u.out,)}, {}, Role.DIST, (), "", u.ops[0].site))
        for hop in range(1, n):
            batch = self._batch("broadcast", hop)
            for u in self.by_root.get((me - hop + 1) % n, ()):
                out.append(_send(u.out, ranks[(me + 1) % n], batch, u))
            for u in self.by_root.get((me - hop) % n, ()):
                out.append(_recv(u.out, ranks[(me - 1) % n], batch, u))
        # the root has the values already, unless they go to other names
        out.extend(u.unpack for u in self.units if u.unpack is not None and (u.root % n != me or not _in_place(u)))


def _in_place(u: _Unit) -> bool:
    return all(op.input_arg_names == op.output_arg_names for op in u.ops)


def _finish(u: _Unit, total: str, n: int) -> Operator:
    site, kind = u.ops[0].site, u.ops[0].attrs["op"]
    if kind == "avg":
        attrs = {"scale": 1.0 / n, "bias": 0.0, "bias_after_scale": True}
        return Operator("scale", {"X": (total,)}, {"Out": (u.out,)}, attrs, Role.DIST, (), "", site)
    if kind != "sum":
        raise TranspileError(f"ring_reduce of op={kind!r} cannot be written as partial sums")
    return Operator("assign", {"X": (total,)}, {"Out": (u.out,)}, {}, Role.DIST, (), "", site)


def _owner(text: str) -> tuple[str, int]:
    group, _, index = text.partition(":")
    return (group, int(index)) if index.isdigit() else (group, -1)


def _send(x: str, peer: int, batch: str, u: _Unit) -> Operator:
    attrs = {"peer": peer, "group": u.ops[0].attrs["group"], "batch": batch, "stream": "comm"}
    return Operator("send", {"X": (x,)}, {}, attrs, Role.DIST, (), "", u.ops[0].site)


def _recv(out: str, peer: int, batch: str, u: _Unit) -> Operator:
    attrs = {"peer": peer, "shape": u.type.shape, "dtype": u.type.dtype, "group": u.ops[0].attrs["group"], "batch": batch, "stream": "comm"}
    return Operator("recv", {}, {"Out": (out,)}, attrs, Role.DIST, (), "", u.ops[0].site)
