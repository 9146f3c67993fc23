"""The buffers of one rank while sends and receives carry out a collective: which variable has which elements of the value."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from ...ir.errors import TranspileError
from ...ir.make_op import filled, make_op
from ...ir.offsets import Offsets
from ...ir.opdef import opdef
from ...ir.operator import Operator
from ...ir.parts import Coords, holds, local_type
from ...ir.program import Block
from ...ir.types import Local, TensorType
from ...ir.unique_name import UnusedNames
from ...ir.var import Var
from ...verify.recipe import ranges_of
from ..algorithms import RankRound, Transfer
from .messages import recv


class CollectivePlan(NamedTuple):
    """One collective: the type of the value that the ranks of the group hold together, the bounds of its blocks, and the rounds of each
    rank."""

    type: TensorType
    ranks: int  # of the group
    marks: Offsets
    parts: Callable[[int], Sequence[RankRound]]  # of a rank, by its number in the group
    boxes: Mapping[tuple[int, int], tuple[int, ...]]  # the shapes of blocks that are not ranges of the flat value
    most: int  # the most elements of a message
    made: dict[tuple[str, TensorType], Var]  # declarations of local variables, shared by ranks
    ops: dict[tuple, Operator]  # operators on them, shared by ranks

    @property
    def size(self) -> int:
        return self.type.numel

    def messages(self, t: Transfer) -> list[tuple[int, int]]:
        """The ranges that a transfer sends, one for each message; the range after the value is one message."""
        a, b = self.marks[t.start], self.marks[t.stop]
        if a < b <= a + self.most or a >= self.size:
            return [(a, b)]
        return [(k, min(k + self.most, b)) for k in range(a, b, self.most)]


class Piece(NamedTuple):
    """Elements [start, stop) of a flat value, in the variable `name` of type `type`, which begins at element `at`."""

    start: int
    stop: int
    name: str
    at: int
    type: TensorType


class Arrived(NamedTuple):
    start: int
    stop: int
    name: str
    source: int
    add: bool


class Received(NamedTuple):
    final: bool  # is it the last round?
    arrived: list[Arrived]


class CollectiveOnRank:
    """The buffers of one rank during one collective."""

    def __init__(self, block: Block, op: Operator, plan: CollectivePlan, me: int, coords: Coords):
        self.block, self.op, self.plan, self.me = block, op, plan, me
        self.x, self.out = op.input_arg_names[0], op.output_arg_names[0]
        self.out_type = self._local(self.out, coords)
        marks, method = plan.marks, opdef(op.type).comm.algorithm_method
        (start, stop), self.wanted = ranges_of(method, marks, plan.size, me, plan.ranks)
        self.held = [Piece(start, stop, self.x, start, self._local(self.x, coords))] if start < stop else []
        self.keeps_result = holds(block.desc(self.out).placement, coords)
        self.parts = plan.parts(me)
        self.last = next((part for part in reversed(self.parts) if part.takes), None)
        self._used: set[str] = set()
        self._unused = UnusedNames(self._used.__contains__, lambda k: str(k + 1))

    def _local(self, name: str, coords: Coords) -> TensorType:
        d = self.block.desc(name)
        return local_type(d.type, d.placement, coords)

    # -- one round ----------------------------------------------------------------------------------------------------

    def receive(self, part: RankRound, members: Sequence[int], how: dict[str, str]) -> Received:
        arrived = []
        coming = [(a, b, t) for t in part.takes for a, b in self.plan.messages(t)]
        final = part is self.last
        for a, b, t in coming:
            what = self._type(a, b)
            name = self.out if not t.add and final and len(coming) == 1 and self._is_result(a, b) else self._new(a, b, "in", what)
            self.block.oplist.append(recv(self.op, name, what, peer=members[t.source], **how))
            arrived.append(Arrived(a, b, name, t.source, t.add))
        return Received(final, arrived)

    def settle(self, now: Received) -> None:
        """Add up and store the values received in a round; terms are added in the order of ranks."""
        together: dict[tuple[int, int], list[Arrived]] = {}
        for m in now.arrived:
            together.setdefault((m.start, m.stop), []).append(m)
        for (a, b), found in together.items():
            name = found[0].name
            if found[0].add:
                terms = sorted([(m.source, m.name) for m in found] + [(self.me, self.take(a, b, "term"))])
                done = now.final and len(together) == 1 and self._is_result(a, b)
                name = self.out if done else self._new(a, b, "part", self._type(a, b))
                self._op("sum", {"X": [n for _, n in terms]}, name)
            self._keep(a, b, name)

    def _is_result(self, a: int, b: int) -> bool:
        """Are these elements exactly the operator's result, and is its output variable free?"""
        if (a, b) != self.wanted or self._type(a, b) != self.out_type:
            return False
        return all(p.name != self.out for p in self.held)  # the operator may write over its operand

    # -- elements -----------------------------------------------------------------------------------------------------

    def _type(self, a: int, b: int) -> TensorType:
        """The type in which elements travel: flat, except the full value, which keeps its shape."""
        whole = self.plan.type
        return whole if b - a == self.plan.size else TensorType(whole.dtype, (b - a,))

    def take(self, a: int, b: int, word: str) -> str:
        """A variable that holds exactly the elements [a, b), in the shape in which they travel."""
        found = self.held[self._among(a, b)]
        if sum(min(p.stop, b) - max(p.start, a) for p in found) < b - a:
            raise TranspileError(
                f"{self.op.to_string()}: the algorithm sends elements {a} to {b} (exclusive) of %{self.x} from rank {self.me} of group "
                f"{self.op.attrs['group']}, which does not have them"
            )
        what, first = self._type(a, b), found[0]
        if len(found) == 1 and (first.at, first.type) == (a, what):
            return first.name
        name = self._new(a, b, word, what)
        if len(found) == 1 and len(what.shape) == 1:
            self._op("chunk", {"X": [first.name]}, name, start=a - first.at, stop=b - first.at)
        else:
            self._op("unpack", {"X": [self._part(p, a, b, word) for p in found]}, name, shapes=(what.shape,))
        self._keep(a, b, name)
        return name

    def _part(self, p: Piece, a: int, b: int, word: str) -> str:
        """A variable with the elements of a piece that are in [a, b), in any shape."""
        a, b = max(p.start, a), min(p.stop, b)
        if b - a == p.type.numel:
            return p.name
        name = self._new(a, b, word, TensorType(p.type.dtype, (b - a,)))
        self._op("chunk", {"X": [p.name]}, name, start=a - p.at, stop=b - p.at)
        return name

    def _keep(self, a: int, b: int, name: str) -> None:
        """Record that `name` holds the elements [a, b) from now on."""
        at = self._among(a, b)
        t = self.block.descs[name].type if name != self.out else self.out_type
        now = [Piece(a, b, name, a, t)]
        if at.start < at.stop:
            first, last = self.held[at.start], self.held[at.stop - 1]
            if first.start < a:
                now.insert(0, first._replace(stop=a))
            if b < last.stop:
                now.append(last._replace(start=b))
        self.held[at] = now

    def _among(self, a: int, b: int) -> slice:
        """The slice of the pieces that overlap [a, b); pieces are sorted and do not overlap each other."""
        held, begin = self.held, attrgetter("start")
        first, stop = bisect_right(held, a, key=begin), bisect_left(held, b, key=begin)
        return slice(first - 1 if first and held[first - 1].stop > a else first, stop)

    def finish(self) -> None:
        """Write the operator's result from the pieces."""
        if not self.keeps_result:
            return
        a, b = self.wanted
        found = self.held[self._among(a, b)]
        if [p.name for p in found] == [self.out]:
            return
        if not found:  # this rank's part has no elements
            none = self._new(a, b, "none", TensorType(self.out_type.dtype, (0,)))
            self._op("chunk", {"X": [self.x]}, none, start=0, stop=0)
            self._op("unpack", {"X": [none]}, self.out, shapes=(self.out_type.shape,))
        elif len(found) == 1 and (found[0].at, found[0].type) == (a, self.out_type):
            self._op("assign", {"X": [found[0].name]}, self.out)
        else:
            self._op("unpack", {"X": [self._part(p, a, b, "end") for p in found]}, self.out, shapes=(self.out_type.shape,))

    def _new(self, a: int, b: int, word: str, t: TensorType) -> str:
        """Declare a variable that only this rank has."""
        name = self._unused(f"{self._base(a, b)}.{word}")
        self._used.add(name)
        made = self.plan.made
        declared = made.get((name, t))
        if declared is None:
            declared = made[name, t] = Var(name, t, (Local(),), stop_gradient=True)
        self.block.descs[name] = declared
        return name

    def _base(self, a: int, b: int) -> str:
        """The beginning of names of variables with these elements."""
        return self.out if b - a == self.plan.size else f"{self.out}.from{a}"

    def _op(self, type_: str, ins: Mapping[str, Sequence[str]], out: str, **attrs: Any) -> None:
        xs = tuple([n for names in ins.values() for n in names])
        key = type_, xs, out, *attrs.items()
        op = self.plan.ops.get(key)
        if op is None:
            op = make_op(type_, xs, (out,), filled(type_, attrs), self.op.site)
            self.plan.ops[key] = op
        self.block.oplist.append(op)
