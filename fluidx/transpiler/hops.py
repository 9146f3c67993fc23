"""Collectives that have an algorithm, written out for a rank: send, recv and sum, round by round.

The one writer for all algorithms: a schedule (see algorithms/) says which blocks go where; here they become ranges of flat arrays, and the
rank keeps account of which variable holds which elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..ir.errors import TranspileError
from ..ir.opdef import OPS, opdef
from ..ir.operator import Operator, Role
from ..ir.parts import Coords, holds, local_type
from ..ir.program import Block, Program, Var
from ..ir.types import ANY, Local, Placement, Shard, TensorType
from .algorithms import Part, Refused, Transfer, algorithm, parts, schedule
from .writer import filled

_LARGEST = 4 * 2**20  # bytes of one message


def written_out(op: Operator) -> bool:
    """Does Specialize write this operator out as sends and receives?"""
    return bool(OPS[op.type].carries and op.attrs["algorithm"])


def why_whole(op: Operator, t: TensorType, n: int) -> str:
    """Why a collective among n ranks on a value of this type cannot be written out, whatever the algorithm; "" when it can."""
    definition = opdef(op.type)
    if op.attrs.get("op", "sum") != "sum":
        return f"only terms of a sum are added up on their way, and this is {op.attrs['op']}"
    if ANY in t.shape:
        return f"messages have sizes, and {t} has none yet"
    if definition.blocks is not None and definition.blocks(t, n, op.attrs) is None:
        return f"a cut along axis {op.attrs['axis']} gives no ranges of the flat value"
    return ""


def carried_by(op: Operator, name: str, n: int, hosts: int = 1) -> Operator:
    """The operator with an algorithm, which carries it among n ranks. Raises TranspileError where the algorithm does not do that."""
    try:
        schedule(name, opdef(op.type).carries, n, hosts)
    except Refused as e:
        raise TranspileError(f"{op.type} of %{op.input_arg_names[0]} over {op.attrs['group']}: {e}") from None
    return op.replace(attrs={**op.attrs, "algorithm": name})


def others(program: Program, block: Block, op: Operator) -> Placement:
    """Where an operator's value lies over the groups that have nothing to do with its own."""
    places = (*block.desc(op.input_arg_names[0]).placement, *block.desc(op.output_arg_names[0]).placement)
    groups, group = program.groups, op.attrs["group"]
    if group not in groups:  # a turn, in which every rank is by itself
        return tuple(e for e in dict.fromkeys(places) if e.group != group)
    mine = [set(s) for s in groups[group]]
    return tuple(e for e in dict.fromkeys(places) if not all(any(m <= set(s) for s in groups.get(e.group, ())) for m in mine))


class _Plan(NamedTuple):
    """One collective: the type of what the ranks of the group hold together, where it is cut into blocks, and what each rank does."""

    type: TensorType
    marks: Sequence[int]
    parts: Sequence[Sequence[Part]]
    most: int  # elements of a message
    made: dict[tuple[str, TensorType], Var]  # what ranks declare of their own, which they share

    @property
    def size(self) -> int:
        return self.marks[-1]

    def messages(self, t: Transfer) -> list[tuple[int, int]]:
        """The ranges that travel for a transfer."""
        a, b = self.marks[t.start], self.marks[t.stop]
        if a < b <= a + self.most:
            return [(a, b)]
        return [(k, min(k + self.most, b)) for k in range(a, b, self.most)]


@dataclass
class Wave:
    """Neighbouring collectives of one algorithm, group and wave: those that need nothing of each other start each round together."""

    block: Block
    ops: Sequence[Operator]
    index: int

    def __post_init__(self) -> None:
        self.program, self.group = self.block.program, self.ops[0].attrs["group"]
        self._others = [others(self.program, self.block, op) for op in self.ops]
        self._plans: dict[int, _Plan] = {}

    def write(self, rank: int, coords: Coords, block: Block) -> None:
        """Append what the rank does to `block`, and declare what it receives."""
        if self.group not in coords:
            return
        members = self.program.group_ranks(self.group, rank)
        me, values = members.index(rank), []
        for k, op in enumerate(self.ops):
            if not holds(self._others[k], coords):
                continue
            plan = self._plan(k, coords, len(members))
            if plan.type.numel and len(members) > 1:
                values.append(_Value(block, op, plan, me, coords))
            else:
                block.oplist.append(op)  # there is nothing to send
        rounds: dict[int, list[tuple[_Value, Part]]] = {}
        for v in values:
            for part in v.parts:
                rounds.setdefault(part.round, []).append((v, part))
        for _, now in sorted(rounds.items()):
            self._round(now, members, block)
        for v in values:
            v.finish()

    def _plan(self, k: int, coords: Coords, n: int) -> _Plan:
        found = self._plans.get(k)
        if found is None:
            op = self.ops[k]
            definition, name = opdef(op.type), op.attrs["algorithm"]
            t = local_type(self.block.desc(op.output_arg_names[0]).type, self._others[k], coords)
            why = why_whole(op, t, n)
            if why:
                raise TranspileError(f"{op.to_string()}: {why}; leave its algorithm empty")
            hosts = len(self.program.groups.get("node", ())) or 1
            try:
                marks = definition.blocks(t, n, op.attrs) if definition.blocks is not None else algorithm(name, hosts).cut(n, t.numel)
                filled = tuple(k for k in range(n) if marks[k] < marks[k + 1])
                each = max(1, _LARGEST // max(1, t.nbytes // max(1, t.numel)))
                found = _Plan(t, marks, parts(name, definition.carries, n, hosts, filled), each, {})
            except Refused as e:
                raise TranspileError(f"{op.to_string()}: {e}") from None
            if not any(isinstance(e, Shard) for e in self._others[k]):  # else other ranks have parts of other sizes
                self._plans[k] = found
        return found

    def _round(self, now: Sequence[tuple[_Value, Part]], members: Sequence[int], block: Block) -> None:
        how = {"group": self.group, "batch": f"{self.ops[0].attrs['algorithm']}.{self.index}.hop{now[0][1].round + 1}"}
        sends = [(v.op, v.take(a, b, "out"), t.target) for v, part in now for t in part.gives for a, b in v.plan.messages(t)]
        for op, name, to in sends:
            attrs = filled("send", {"peer": members[to], **how})
            block.oplist.append(Operator("send", {"X": (name,)}, {}, attrs, role=Role.DIST, site=op.site))
        arrived = [(v, v.receive(part, members, how)) for v, part in now if part.takes]
        for v, found in arrived:
            v.settle(found)


class _Piece(NamedTuple):
    """Elements [start, stop) of a flat value, in the variable `name` of type `type`, which begins at element `at`."""

    start: int
    stop: int
    name: str
    at: int
    type: TensorType


class _Arrived(NamedTuple):
    start: int
    stop: int
    name: str
    source: int
    add: bool


class _Round(NamedTuple):
    final: bool  # nothing comes behind it
    arrived: list[_Arrived]


class _Value:
    """What one rank holds of one collective's value while it is carried out."""

    def __init__(self, block: Block, op: Operator, plan: _Plan, me: int, coords: Coords):
        self.block, self.op, self.plan, self.me = block, op, plan, me
        self.x, self.out = op.input_arg_names[0], op.output_arg_names[0]
        self.out_type = self._local(self.out, coords)
        marks, carries = plan.marks, opdef(op.type).carries
        whole, own = (0, marks[-1]), (marks[me], marks[me + 1])
        start, stop = own if carries == "spread" else whole
        self.held = [_Piece(start, stop, self.x, start, self._local(self.x, coords))] if start < stop else []
        self.wanted = own if carries == "reduce" else whole
        self.keeps_result = holds(block.desc(self.out).placement, coords)
        self.parts = plan.parts[me]
        self.last = next((part for part in reversed(self.parts) if part.takes), None)
        self._used: Counter[str] = Counter()

    def _local(self, name: str, coords: Coords) -> TensorType:
        d = self.block.desc(name)
        return local_type(d.type, d.placement, coords)

    # -- one round ----------------------------------------------------------------------------------------------------

    def receive(self, part: Part, members: Sequence[int], how: dict[str, str]) -> _Round:
        arrived = []
        coming = [(a, b, t) for t in part.takes for a, b in self.plan.messages(t)]
        final = part is self.last
        for a, b, t in coming:
            what = self._type(a, b)
            name = self.out if not t.add and final and len(coming) == 1 and self._is_result(a, b) else self._new(a, b, "in", what)
            attrs = filled("recv", {"peer": members[t.source], "shape": what.shape, "dtype": what.dtype, **how})
            self.block.oplist.append(Operator("recv", {}, {"Out": (name,)}, attrs, role=Role.DIST, site=self.op.site))
            arrived.append(_Arrived(a, b, name, t.source, t.add))
        return _Round(final, arrived)

    def settle(self, now: _Round) -> None:
        """Add up and keep what came in a round; terms are added in the order of ranks."""
        together: dict[tuple[int, int], list[_Arrived]] = {}
        for m in now.arrived:
            together.setdefault((m.start, m.stop), []).append(m)
        for (a, b), found in together.items():
            name = found[0].name
            if found[0].add:
                terms = sorted([(m.source, m.name) for m in found] + [(self.me, self.take(a, b, "term"))])
                done = now.final and len(together) == 1 and self._is_result(a, b)
                name = self.out if done else self._new(a, b, "part", self._type(a, b))
                self._op("sum", [n for _, n in terms], name)
            self._keep(a, b, name)

    def _is_result(self, a: int, b: int) -> bool:
        """Are these elements what the operator is to give, in its shape, and is its variable free?"""
        free = all(p.name != self.out for p in self.held)  # the operator may write over its operand
        return free and (a, b) == self.wanted and self._type(a, b) == self.out_type

    # -- elements -----------------------------------------------------------------------------------------------------

    def _type(self, a: int, b: int) -> TensorType:
        """Elements travel flat; the whole value as it is."""
        whole = self.plan.type
        return whole if b - a == self.plan.size else TensorType(whole.dtype, (b - a,))

    def take(self, a: int, b: int, word: str) -> str:
        """A variable that holds the elements [a, b) and nothing else, in the shape in which they travel."""
        found = [p for p in self.held if p.start < b and a < p.stop]
        what, first = self._type(a, b), found[0]
        if len(found) == 1 and (first.at, first.type) == (a, what):
            return first.name
        name = self._new(a, b, word, what)
        if len(found) == 1 and len(what.shape) == 1:
            self._op("chunk", [first.name], name, start=a - first.at, stop=b - first.at)
        else:
            self._op("unpack", [self._part(p, a, b, word) for p in found], name, shapes=(what.shape,))
        self._keep(a, b, name)
        return name

    def _part(self, p: _Piece, a: int, b: int, word: str) -> str:
        """A variable with what is of a piece among the elements [a, b), in any shape."""
        a, b = max(p.start, a), min(p.stop, b)
        if b - a == p.type.numel:
            return p.name
        name = self._new(a, b, word, TensorType(p.type.dtype, (b - a,)))
        self._op("chunk", [p.name], name, start=a - p.at, stop=b - p.at)
        return name

    def _keep(self, a: int, b: int, name: str) -> None:
        """From now on, `name` holds the elements [a, b)."""
        rest = [p for p in self.held if p.stop <= a or b <= p.start]
        for p in self.held:
            if p.start < a < p.stop:
                rest.append(p._replace(stop=a))
            if p.start < b < p.stop:
                rest.append(p._replace(start=b))
        t = self.block.descs[name].type if name != self.out else self.out_type
        self.held = sorted([*rest, _Piece(a, b, name, a, t)])

    def finish(self) -> None:
        """Write the operator's result from what is held."""
        if not self.keeps_result:
            return
        a, b = self.wanted
        found = [p for p in self.held if p.start < b and a < p.stop]
        if [p.name for p in found] == [self.out]:
            return
        if not found:  # this rank's part has no elements
            none = self._new(a, b, "none", TensorType(self.out_type.dtype, (0,)))
            self._op("chunk", [self.x], none, start=0, stop=0)
            self._op("unpack", [none], self.out, shapes=(self.out_type.shape,))
        elif len(found) == 1 and (found[0].at, found[0].type) == (a, self.out_type):
            self._op("assign", [found[0].name], self.out)
        else:
            self._op("unpack", [self._part(p, a, b, "end") for p in found], self.out, shapes=(self.out_type.shape,))

    def _new(self, a: int, b: int, word: str, t: TensorType) -> str:
        """Declare a variable of this rank's own."""
        base = self.out if b - a == self.plan.size else f"{self.out}.from{a}"
        name = f"{base}.{word}"
        self._used[name] += 1
        if self._used[name] > 1:
            name += str(self._used[name])
        made = self.plan.made
        declared = made.get((name, t))
        if declared is None:
            declared = made[name, t] = Var(name, t, (Local(),), stop_gradient=True)
        self.block.descs[name] = declared
        return name

    def _op(self, type_: str, xs: Sequence[str], out: str, **attrs: Any) -> None:
        self.block.oplist.append(
            Operator(type_, {"X": tuple(xs)}, {"Out": (out,)}, filled(type_, attrs), role=Role.DIST, site=self.op.site)
        )
