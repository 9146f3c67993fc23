"""Write a collective with an algorithm for a rank: send, recv and sum operators, round by round.

This writer serves all algorithms. A schedule (see algorithms/) says which blocks go where; here blocks become ranges of flat arrays, and
rank_buffers.py records which variable holds which elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import prod

from ...ir.errors import TranspileError
from ...ir.make_op import filled, make_op
from ...ir.offsets import Offsets
from ...ir.opdef import OPS, opdef
from ...ir.operator import Operator
from ...ir.parts import Coords, coords_of, holds, local_type
from ...ir.program import Block, Program
from ...ir.types import ANY, Placement, TensorType
from ...verify.rank_program import RankRecipe
from ..algorithms import RankRound, Refused, algorithm, check_rounds_of, count_messages, parts, schedule
from ..algorithms.symbolic_check import block_marks
from ..cluster import NODE
from .adasum import AdasumOnRank
from .rank_buffers import CollectiveOnRank, CollectivePlan
from .strided_collectives import Boxed

_LARGEST = 4 * 2**20  # bytes of one message
_MOST_GROUPS = 256
_COVERS: dict[tuple[int, int], tuple[bool, Sequence, Sequence]] = {}


def written_out(op: Operator) -> bool:
    """Does Specialize write this operator out as sends and receives?"""
    return bool(OPS[op.type].comm.algorithm_method and op.attrs["algorithm"])


def why_no_algorithm(op: Operator, t: TensorType, n: int) -> str:
    """The reason why no algorithm can carry out a collective among n ranks on a value of this type; "" if one can."""
    definition = opdef(op.type)
    if op.attrs.get("op", "sum") != "sum":
        return f"algorithms can only add values up, and this is {op.attrs['op']}"
    if ANY in t.shape:
        return f"messages need a known size, and {t} has open axes"
    if definition.comm.blocks is not None and _boxes(op, t, n) is None and definition.comm.blocks(t, n, op.attrs) is None:
        return f"{t} cannot be cut into a block for each of {n} ranks"
    return ""


def _boxes(op: Operator, t: TensorType, n: int) -> Sequence[tuple[int, ...]] | None:
    """The shapes of the blocks in which a value travels; None if they are ranges of the flat value."""
    boxes = opdef(op.type).comm.boxes
    return None if boxes is None else boxes(t, n, op.attrs)


def carried_by(op: Operator, name: str, n: int, hosts: int = 1) -> Operator:
    """The operator with the algorithm `name` among n ranks. Raises TranspileError if the algorithm cannot carry it out."""
    try:
        schedule(name, opdef(op.type).comm.algorithm_method, n, hosts)
    except Refused as e:
        raise TranspileError(f"{op.type} of %{op.input_arg_names[0]} over {op.attrs['group']}: {e}") from None
    return op.replace(attrs={**op.attrs, "algorithm": name})


def others(program: Program, block: Block, op: Operator) -> Placement:
    """The entries of an operator's value over groups that are independent of the operator's own group."""
    places = (*block.desc(op.input_arg_names[0]).placement, *block.desc(op.output_arg_names[0]).placement)
    groups, group = program.groups, op.attrs["group"]
    rest = [e for e in dict.fromkeys(places) if e.group != group]
    if not rest or group not in groups:  # a time axis: ranks do not communicate over it
        return tuple(rest)
    return tuple(e for e in rest if not _covers(groups.get(e.group, ()), groups[group]))


def _covers(outer: Sequence[Sequence[int]], inner: Sequence[Sequence[int]]) -> bool:
    """Is each set of ranks of `inner` contained in a set of `outer`?"""
    key = id(outer), id(inner)  # a program has few group objects, but each lists all ranks
    found = _COVERS.get(key)
    if found is None:
        if len(_COVERS) >= _MOST_GROUPS:
            _COVERS.clear()
        large = {r: k for k, s in enumerate(outer) for r in s}
        covers = all(len({large.get(r, -1 - r) for r in members}) <= 1 and all(r in large for r in members) for members in inner)
        found = _COVERS[key] = covers, outer, inner  # keeps the objects alive, so the ids stay unique
    return found[0]


@dataclass
class MessageRounds:
    """Neighbouring collectives of one algorithm, group and wave: independent ones start each round together."""

    block: Block
    ops: Sequence[Operator]
    index: int

    def __post_init__(self) -> None:
        self.program, self.group = self.block.program, self.ops[0].attrs["group"]
        self._others = [others(self.program, self.block, op) for op in self.ops]
        self._plans: dict[int, CollectivePlan] = {}

    def write(self, rank: int, coords: Coords, block: Block) -> None:
        """Append the operators of the rank to `block`, and declare the values that it receives."""
        if self.group not in coords:
            return
        members = self.program.group_ranks(self.group, rank)
        me, values = members.index(rank), []
        for k, op in enumerate(self.ops):
            if not holds(self._others[k], coords):
                continue
            plan = self._plan(k, coords, len(members))
            if plan.type.numel and len(members) > 1:
                kind = AdasumOnRank if opdef(op.type).comm.algorithm_method == "adaptive" else Boxed if plan.boxes else CollectiveOnRank
                values.append(kind(block, op, plan, me, coords))
            else:
                block.oplist.append(op)  # there is nothing to send
        rounds: dict[int, list[tuple[CollectiveOnRank, RankRound]]] = {}
        for v in values:
            for part in v.parts:
                rounds.setdefault(part.round, []).append((v, part))
        for _, now in sorted(rounds.items()):
            self._round(now, members, block)
        for v in values:
            v.finish()

    def recipe(self, k: int, rank: int) -> RankRecipe | None:
        """The rank's part of the rounds of collective k, for the check of its program; None if the collective does not use flat ranges."""
        if self.group not in (coords := coords_of(self.program.groups, rank, self.program.turns)):
            return None
        members = self.program.group_ranks(self.group, rank)
        plan = self._plan(k, coords, len(members))
        if not self._is_flat(k, plan):
            return None
        transfers = [(part.round, t) for part in plan.parts(members.index(rank)) for t in (*part.gives, *part.takes)]
        return RankRecipe(plan.type, plan.marks, transfers, plan.messages)

    def _is_flat(self, k: int, plan: CollectivePlan) -> bool:
        return bool(plan.type.numel and plan.ranks > 1 and not plan.boxes) and opdef(self.ops[k].type).comm.algorithm_method != "adaptive"

    def is_common(self) -> bool:
        """Are the rounds of each collective proved for all ranks, in flat ranges?"""
        sets, hosts = self.program.groups[self.group], len(self.program.groups.get(NODE, ())) or 1
        known: set[tuple] = set()
        for k, op in enumerate(self.ops):
            method = opdef(op.type).comm.algorithm_method
            for members in sets if any(e.is_cut for e in self._others[k]) else {len(s): s for s in sets}.values():
                plan = self._plan(k, coords_of(self.program.groups, members[0], self.program.turns), len(members))
                if not self._is_flat(k, plan):
                    return False
                key = method, len(members), plan.marks.filled
                if key not in known and check_rounds_of(op.attrs["algorithm"], method, len(members), hosts, plan.marks.filled) is not None:
                    return False
                known.add(key)
        return True

    def count(self) -> tuple[int, int]:
        """The number of collectives that the ranks carry out by messages, and the number of these messages."""
        collectives = messages = 0
        groups, hosts = self.program.groups, len(self.program.groups.get(NODE, ())) or 1
        for k, op in enumerate(self.ops):
            counts: dict[tuple[int, int], tuple[CollectivePlan, int]] = {}  # by the plan's id: the sets of a group mostly have one plan
            for members in groups[self.group]:
                coords = coords_of(groups, members[0], self.program.turns) if self._others[k] else {}
                if not holds(self._others[k], coords):
                    continue
                plan = self._plan(k, coords, len(members))
                collectives += 1
                key = id(plan), len(members)
                if key not in counts:
                    method = opdef(op.type).comm.algorithm_method
                    found = count_messages(op.attrs["algorithm"], method, len(members), hosts, plan.marks.filled, plan.messages)
                    counts[key] = plan, found
                messages += counts[key][1]
        return collectives, messages

    def _plan(self, k: int, coords: Coords, n: int) -> CollectivePlan:
        found = self._plans.get(k)
        if found is None:
            op = self.ops[k]
            definition, name = opdef(op.type), op.attrs["algorithm"]
            t = local_type(self.block.desc(op.output_arg_names[0]).type, self._others[k], coords)
            why = why_no_algorithm(op, t, n)
            if why:
                raise TranspileError(f"{op.to_string()}: {why}; leave its algorithm empty")
            hosts = len(self.program.groups.get(NODE, ())) or 1
            try:
                if (boxes := _boxes(op, t, n)) is not None:
                    marks = Offsets(accumulate(map(prod, boxes), initial=0))
                elif definition.comm.blocks is not None:
                    marks = Offsets.of(definition.comm.blocks(t, n, op.attrs))
                else:
                    marks = Offsets(block_marks(algorithm(name, hosts), n, t.numel))
                shapes = {} if boxes is None else dict(zip(pairwise(marks), boxes, strict=True))
                each = max(1, _LARGEST // max(1, t.nbytes // max(1, t.numel)))
                rounds = partial(parts, name, definition.comm.algorithm_method, n, hosts, marks.filled)
                found = CollectivePlan(t, n, marks, rounds, shapes, each, {}, {})
            except Refused as e:
                raise TranspileError(f"{op.to_string()}: {e}") from None
            if not any(e.axis is not None for e in self._others[k]):  # otherwise other ranks may have parts of other sizes
                self._plans[k] = found
        return found

    def _round(self, now: Sequence[tuple[CollectiveOnRank, RankRound]], members: Sequence[int], block: Block) -> None:
        how = {"group": self.group, "batch": f"{self.ops[0].attrs['algorithm']}.{self.index}.hop{now[0][1].round + 1}"}
        sends = [(v.op, v.take(a, b, "out"), t.target) for v, part in now for t in part.gives for a, b in v.plan.messages(t)]
        attrs = {to: filled("send", {"peer": members[to], **how}) for to in {to for _, _, to in sends}}
        for op, name, to in sends:
            block.oplist.append(make_op("send", (name,), (), attrs[to], op.site))
        arrived = [(v, v.receive(part, members, how)) for v, part in now if part.takes]
        for v, found in arrived:
            v.settle(found)
