"""Check of one rank's program against the program for all ranks, so that the proof of the latter holds for the rank too.

The rank has the operators of the program for all ranks in order, without those whose results are at other ranks. A transfer is replaced by
the rank's message. A collective with an algorithm is replaced by the rank's messages in its rounds: each message must send the elements,
with the terms, that the rounds say. The rounds are proved for all ranks at once (recipe.py), so ranks that follow them get the result of
the collective.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from ..ir.message_batches import spans
from ..ir.opdef import OPS, opdef
from ..ir.operator import Operator
from ..ir.parts import Coords, coords_of, entry_of, holds, local_type
from ..ir.program import Block, Program
from ..ir.types import Local, Placement, TensorType
from ..ir.var import Var
from .recipe import ranges_of
from .refusal import Refusal
from .transfer_messages import TRANSFER, TransferMessages

_LOCAL: Placement = (Local(),)
_NOTHING, _OWN = 0, 1  # versions of elements: not on the rank; the rank's operand


class RoundTransfer(Protocol):
    """Blocks [start, stop) are sent from member `source` of a group to `target`, which adds them (`add`) or replaces its own by them."""

    @property
    def source(self) -> int: ...

    @property
    def target(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def add(self) -> bool: ...


class RankRecipe(NamedTuple):
    """One member's part of the rounds of a collective."""

    type: TensorType  # of the global value
    marks: Sequence[int]  # the bounds of its blocks
    transfers: Sequence[tuple[int, RoundTransfer]]  # (round, transfer) in order, without empty blocks
    messages: Callable[[Any], Sequence[tuple[int, int]]]  # the element ranges that are sent for a transfer


Recipes = Callable[[Operator, int], "RankRecipe | None"]  # (operator, rank) -> its part; None for a collective that stays one operator


class RunsAt:
    """The roots at which operators of a program for all ranks run: those of their results.

    A collective runs at the roots of its operand and result over other groups than its own, except groups that contain its own.
    """

    def __init__(self, groups: Mapping[str, Sequence[Sequence[int]]], descs: Mapping[str, Var]):
        self.groups, self.descs = groups, descs
        self._rooted: dict[int, Placement] = {}  # by the id of a placement, which the descs keep alive
        self._within: dict[tuple[str, str], bool] = {}

    def of(self, op: Operator) -> Placement:
        outs = op.output_arg_names
        if not outs or outs[0] not in self.descs:
            return ()
        if (definition := OPS.get(op.type)) is None or definition.comm.move is None:
            return self._roots(outs[0])
        found = dict.fromkeys((*[e for n in op.input_arg_names[:1] for e in self._roots(n)], *self._roots(outs[0])))
        if not found:
            return ()
        group = op.attrs["group"]
        return tuple([e for e in found if e.group != group and not self._is_within(group, e.group)])

    def _roots(self, name: str) -> Placement:
        place = self.descs[name].placement
        if not place:
            return ()
        roots = self._rooted.get(id(place))
        if roots is None:
            roots = self._rooted[id(place)] = tuple([e for e in place if e.root is not None])
        return roots

    def _is_within(self, inner: str, outer: str) -> bool:
        """True if each set of `inner` is within one set of `outer`."""
        found = self._within.get((inner, outer))
        if found is None:
            large = {r: k for k, members in enumerate(self.groups.get(outer, ())) for r in members}
            sets = self.groups.get(inner)  # None for a time axis, whose sets have one rank
            found = sets is not None and all(len({large.get(r, -1) for r in members}) == 1 for members in sets)
            found = self._within[inner, outer] = found and all(r in large for members in sets or () for r in members)
        return found


def check_rank_program(common: Program, mine: Program, rank: int, recipes: Recipes) -> None:
    """Raise Refusal unless the program of a rank follows from the program for all ranks."""
    if (mine.rank, mine.groups, mine.turns, mine.random_seed) != (rank, common.groups, common.turns, common.random_seed):
        raise Refusal("its rank, groups or seed are not those of the program for all ranks")
    if len(mine.blocks) != len(common.blocks):
        raise Refusal("it has other blocks than the program for all ranks")
    for theirs, own in zip(common.blocks[1:], mine.blocks[1:], strict=True):
        if (theirs.parent_idx, theirs.oplist, theirs.descs) != (own.parent_idx, own.oplist, own.descs):
            raise Refusal(f"block {own.idx} is not that of the program for all ranks")
    _check_variables(common.global_block(), mine.global_block())
    ops = mine.global_block().oplist
    if ops != common.global_block().oplist:
        _Follower(common, mine, rank, recipes).run()


def _check_variables(common: Block, mine: Block) -> None:
    descs = mine.descs
    if descs == common.descs:
        return
    for name, d in common.descs.items():
        found = descs.get(name)
        if found is not d and found != d:
            raise Refusal(f"%{name} is not declared as in the program for all ranks")
    for name, d in descs.items():
        if name not in common.descs and (d.placement != _LOCAL or d.persistable or d.is_data):
            raise Refusal(f"%{name} is not declared in the program for all ranks")


class _ElementRange(NamedTuple):
    """Elements [start, stop) of the value of collective number `of`, in a variable of the rank.

    Elements from `cuts[k]` on, up to `cuts[k + 1]`, have the version `versions[k]`.
    """

    of: int
    start: int
    stop: int
    cuts: tuple[int, ...]
    versions: tuple[int, ...]


class _Versions:
    """Numbers for versions of elements. A version is the set of terms that were added: the rank's own, and each received one."""

    def __init__(self) -> None:
        self.sets: list[frozenset[int]] = [frozenset(), frozenset((0,))]
        self.numbers = {s: k for k, s in enumerate(self.sets)}
        self.arrived = 0

    def arrival(self) -> int:
        """The version of the elements of a new message."""
        self.arrived += 1
        return self.of(frozenset((self.arrived,)))

    def of(self, terms: frozenset[int]) -> int:
        number = self.numbers.get(terms)
        if number is None:
            number = self.numbers[terms] = len(self.sets)
            self.sets.append(terms)
        return number

    def sum(self, a: int, b: int) -> int:
        """The version of a sum. Raises Refusal if a term is in both, or one has no terms."""
        x, y = self.sets[a], self.sets[b]
        if not x or not y or not x.isdisjoint(y):
            raise Refusal("elements that the rank does not have are added, or a term is added twice")
        return self.of(x | y)


class _Elements:
    """The versions that the rounds give the elements of a collective's value on a rank."""

    def __init__(self, recipe: RankRecipe, start: int, stop: int):
        self.size = recipe.marks[-1]
        self.cuts, self.versions = [0], [_OWN]
        if (start, stop) != (0, self.size):
            self.versions = [_NOTHING]
            if start < stop:
                self.put(start, stop, [_OWN])

    def _cut(self, at: int) -> int:
        """Split at an element; return the index of the range that begins there."""
        k = bisect_right(self.cuts, at) - 1
        if self.cuts[k] == at:
            return k
        self.cuts.insert(k + 1, at)
        self.versions.insert(k + 1, self.versions[k])
        return k + 1

    def between(self, start: int, stop: int) -> slice:
        first = self._cut(start)
        return slice(first, len(self.cuts) if stop >= self.size else self._cut(stop))

    def put(self, start: int, stop: int, versions: Sequence[int]) -> None:
        """Set the versions of elements: one for all, or one for each range."""
        at = self.between(start, stop)
        count = at.stop - at.start
        self.versions[at] = versions if len(versions) == count else [*versions] * count

    def part(self, of: int, start: int, stop: int) -> _ElementRange:
        if start == stop:
            return _ElementRange(of, start, stop, (), ())
        at = self.between(start, stop)
        return _joined(of, start, stop, self.cuts[at], self.versions[at])


def _joined(of: int, start: int, stop: int, cuts: Sequence[int], versions: Sequence[int]) -> _ElementRange:
    """A range of elements, where adjacent cuts of one version are joined."""
    if len(cuts) > 1:
        keep = [k for k in range(len(cuts)) if not k or versions[k] != versions[k - 1]]
        if len(keep) < len(cuts):
            cuts, versions = [cuts[k] for k in keep], [versions[k] for k in keep]
    return _ElementRange(of, start, stop, tuple(cuts), tuple(versions))


class _Collective:
    """One collective with an algorithm, on one rank."""

    def __init__(self, number: int, op: Operator, recipe: RankRecipe, me: int, block: Block, coords: Coords):
        self.number, self.op, self.recipe, self.me = number, op, recipe, me
        self.x, self.out = op.input_arg_names[0], op.output_arg_names[0]
        method = opdef(op.type).comm.algorithm_method
        self.has, self.wanted = ranges_of(method, recipe.marks, recipe.marks[-1], me, coords[op.attrs["group"]][1])
        self.in_type, self.out_type = (_local(block, n, coords) for n in (self.x, self.out))
        self.keeps = holds(block.desc(self.out).placement, coords)
        if self.has[0] < self.has[1] and self.in_type.numel != self.has[1] - self.has[0]:
            raise Refusal(f"%{self.x} is {self.in_type} on this rank, and its blocks are elements {self.has[0]} to {self.has[1]}")
        if self.keeps and self.out_type.numel != self.wanted[1] - self.wanted[0]:
            raise Refusal(f"%{self.out} is {self.out_type} on this rank, and its blocks are elements {self.wanted[0]} to {self.wanted[1]}")
        for name, own, checked in ((self.x, self.has, ("spread", "exchange")), (self.out, self.wanted, ("reduce", "exchange"))):
            if method in checked and own[0] < own[1]:
                self._check_own(block.desc(name), own, coords)
        self.elements = _Elements(recipe, *self.has)
        self.rounds: dict[int, list[RoundTransfer]] = {}
        for k, t in recipe.transfers:
            self.rounds.setdefault(k, []).append(t)

    def _check_own(self, d: Var, own: tuple[int, int], coords: Coords) -> None:
        """Check that the rank's block has the elements that the placement gives the rank."""
        group = self.op.attrs["group"]
        entry, size = entry_of(d.placement, group), self.recipe.type.numel
        n = coords[group][1]
        if entry is None or entry.root is not None:
            found = (0, size) if entry is not None and entry.root == self.me else own
        elif entry.bounds is not None:
            found = entry.range_of(self.me, n, size)
        else:
            row = size // max(1, self.recipe.type.shape[0])
            start, stop = entry.range_of(self.me, n, self.recipe.type.shape[0])
            found = start * row, stop * row
            if entry.axis:
                raise Refusal(f"%{d.name} is sharded along axis {entry.axis}, so its shards are not flat ranges")
        if found != own:
            raise Refusal(f"%{d.name} is elements {found[0]} to {found[1]} on this rank, and its block is {own[0]} to {own[1]}")


def _local(block: Block, name: str, coords: Coords) -> TensorType:
    d = block.desc(name)
    return local_type(d.type, d.placement, coords)


class _Follower:
    """Reads a rank's operators side by side with those of the program for all ranks. `at`: the next operator of the rank."""

    def __init__(self, common: Program, mine: Program, rank: int, recipes: Recipes):
        self.common, self.rank, self.recipes = common, rank, recipes
        self.block, self.theirs = mine.global_block(), common.global_block().descs
        self.ops, self.at = self.block.oplist, 0
        self.coords = coords_of(common.groups, rank, common.turns)
        self.roots = RunsAt(common.groups, self.theirs)
        self.transfers = TransferMessages(common, rank, self.coords)

    def run(self) -> None:
        for written, run in groupby(self.common.global_block().oplist, key=_algorithm):
            if written is None:
                self._follow_operators(list(run))
            else:
                self._follow_collectives([op for op in run if holds(self.roots.of(op), self.coords)])
        if self.at != len(self.ops):
            raise Refusal(f"op {self.ops[self.at].to_string()} is not in the program for all ranks")
        self.transfers.check_batches(self.ops)

    def _follow_operators(self, run: list[Operator]) -> None:
        """Follow operators that the rank has unchanged, without those whose results are at other ranks."""
        ops, at = self.ops, self.at
        for op in run:
            roots = self.roots.of(op)
            if roots and not holds(roots, self.coords):
                continue
            if op.type == TRANSFER:
                if not self.transfers.has_message(op):
                    continue
                right = at < len(ops) and self.transfers.allow(op, ops[at])
            else:
                right = at < len(ops) and (ops[at] is op or ops[at] == op)
            if not right:
                found = ops[at].to_string() if at < len(ops) else "its end"
                raise Refusal(f"it has {found} where the program for all ranks has {op.to_string()}")
            at += 1
        self.at = at

    def _follow_collectives(self, run: list[Operator]) -> None:
        """Follow collectives that are replaced by messages."""
        begin = 0
        while begin < len(run):
            begin = self._exchange(run, begin)

    def _exchange(self, run: list[Operator], begin: int) -> int:
        """Follow the collectives that start together; return the index of the next one."""
        first = self.recipes(run[begin], self.rank)
        if first is None:
            self._follow_operators([run[begin]])
            return begin + 1
        stop = begin + 1
        made, read = {*run[begin].output_arg_names}, {*run[begin].input_arg_names}
        while stop < len(run) and self.recipes(run[stop], self.rank) is not None:
            ins, outs = run[stop].input_arg_names, run[stop].output_arg_names
            if not made.isdisjoint((*ins, *outs)) or not read.isdisjoint(outs):  # a collective that depends on another starts later
                break
            made.update(outs)
            read.update(ins)
            stop += 1
        _Exchange(self, run[begin:stop]).run()
        return stop


def _algorithm(op: Operator) -> tuple | None:
    """A key that is equal for collectives that may start together; None for operators without an algorithm."""
    if not OPS[op.type].comm.algorithm_method or not op.attrs["algorithm"]:
        return None
    return op.attrs["algorithm"], op.attrs["group"], op.attrs["wave"]


class _Exchange:
    """Collectives of one algorithm that start each round together, on one rank."""

    def __init__(self, follower: _Follower, run: Sequence[Operator]):
        self.follower, self.ops, self.block = follower, follower.ops, follower.block
        self.versions = _Versions()
        self.group = run[0].attrs["group"]
        self.peers = follower.common.group_ranks(self.group, follower.rank)
        me = self.peers.index(follower.rank)
        self.members: list[_Collective] = []
        self.parts: dict[str, _ElementRange] = {}
        self.types: dict[str, TensorType] = {}
        for k, op in enumerate(run):
            recipe = follower.recipes(op, follower.rank)
            assert recipe is not None
            m = _Collective(k, op, recipe, me, self.block, follower.coords)
            if m.x in self.parts:
                raise Refusal(f"%{m.x} is read by two collectives that start together")
            self.members.append(m)
            self.parts[m.x], self.types[m.x] = m.elements.part(k, *m.has), m.in_type
        self.outs = {m.out: m for m in self.members if m.keeps}

    def run(self) -> None:
        for k in sorted({k for m in self.members for k in m.rounds}):
            self._local_operators()
            self._round([(m, m.rounds[k]) for m in self.members if k in m.rounds])
        self._local_operators()
        for m in self.outs.values():
            made = self.parts.get(m.out)
            empty = m.wanted[0] == m.wanted[1]
            right = made is not None and (made.start == made.stop if empty else made == m.elements.part(m.number, *m.wanted))
            if made is None or not right or self.types[m.out] != m.out_type:
                raise Refusal(f"%{m.out} is not what {m.op.to_string()} gives")
            if _NOTHING in made.versions:
                raise Refusal(f"%{m.out} has elements that nothing was received for")

    def _round(self, now: Sequence[tuple[_Collective, Sequence[RoundTransfer]]]) -> None:
        """Check the messages of one round: they start together, and are the sends and receives that the rounds say, in order."""
        me = now[0][0].me
        sends = [(m, t, a, b) for m, ts in now for t in ts if t.source == me for a, b in m.recipe.messages(t)]
        receives = [(m, t, a, b) for m, ts in now for t in ts if t.target == me for a, b in m.recipe.messages(t)]
        at = self.follower.at
        batch = self.ops[at : at + len(sends) + len(receives)]
        if len(batch) < len(sends) + len(receives):
            raise Refusal("it ends before the last round of its messages")
        label = batch[0].attrs.get("batch")
        before, behind = (self.ops[k] if 0 <= k < len(self.ops) else None for k in (at - 1, at + len(batch)))
        if len(batch) > 1 and spans(batch).get(0) != (0, len(batch) - 1):
            raise Refusal(f"the messages of one round do not start together at {batch[0].to_string()}")
        if label and any(o is not None and o.attrs.get("batch") == label and o.type in ("send", "recv") for o in (before, behind)):
            raise Refusal(f"messages of two rounds start together at {batch[0].to_string()}")
        for op, (m, t, a, b) in zip(batch, sends, strict=False):
            self._check_send(op, m, t.target, a, b)
        for op, (m, t, a, b) in zip(batch[len(sends) :], receives, strict=True):
            self._check_recv(op, m, t, a, b)
        self.follower.at = at + len(batch)

    def _check_send(self, op: Operator, m: _Collective, target: int, a: int, b: int) -> None:
        if op.type != "send" or (op.attrs["peer"], op.attrs["group"]) != (self.peers[target], self.group):
            raise Refusal(f"it has {op.to_string()} where the rounds of {m.op.to_string()} send to rank {self.peers[target]}")
        found = self.parts.get(op.input_arg_names[0])
        if found is None or found != m.elements.part(m.number, a, b) or _NOTHING in found.versions:
            raise Refusal(f"{op.to_string()} does not send elements {a} to {b} of {m.op.to_string()} as the rounds say")

    def _check_recv(self, op: Operator, m: _Collective, t: RoundTransfer, a: int, b: int) -> None:
        if op.type != "recv" or (op.attrs["peer"], op.attrs["group"]) != (self.peers[t.source], self.group):
            raise Refusal(f"it has {op.to_string()} where the rounds of {m.op.to_string()} receive from rank {self.peers[t.source]}")
        arrived = self.versions.arrival()
        self._write(op, _ElementRange(m.number, a, b, (a,), (arrived,)), TensorType(op.attrs["dtype"], tuple(op.attrs["shape"])))
        if self.types[op.output_arg_names[0]].dtype != m.recipe.type.dtype:
            raise Refusal(f"{op.to_string()} receives another dtype than {m.recipe.type.dtype}")
        at = m.elements.between(a, b)
        old = m.elements.versions[at]
        m.elements.versions[at] = [self.versions.sum(v, arrived) for v in old] if t.add else [arrived] * len(old)

    def _write(self, op: Operator, part: _ElementRange, t: TensorType) -> None:
        """An operator writes elements to a variable that only this rank declares, or to a result."""
        (name,) = op.output_arg_names
        member, d = self.outs.get(name), self.block.descs[name]
        wanted = member.out_type if member is not None else d.type
        if member is None and (name in self.follower.theirs or name in self.parts):
            raise Refusal(f"{op.to_string()} writes %{name}, which is not a variable of this rank only")
        if wanted != t or t.numel != part.stop - part.start:
            raise Refusal(f"{op.to_string()} makes {t}, and %{name} is {wanted}")
        self.parts[name], self.types[name] = part, t

    # -- operators between the messages -----------------------------------------------------------------------------------------

    def _local_operators(self) -> None:
        """Follow operators that concatenate, slice or add elements, up to the next message or operator of the program for all ranks."""
        ops = self.ops
        while self.follower.at < len(ops):
            op = ops[self.follower.at]
            follow = _LOCAL_OPERATORS.get(op.type)
            if follow is None or not self._is_own(op):
                return
            if any(n not in self.parts for n in op.input_arg_names):
                return  # it belongs to later collectives
            follow(self, op, [self.parts[n] for n in op.input_arg_names])
            self.follower.at += 1

    def _is_own(self, op: Operator) -> bool:
        return len(op.output_arg_names) == 1 and (op.output_arg_names[0] in self.outs or op.output_arg_names[0] not in self.follower.theirs)

    def _sum(self, op: Operator, xs: Sequence[_ElementRange]) -> None:
        first, *rest = xs
        if any((x.of, x.start, x.stop) != (first.of, first.start, first.stop) for x in rest):
            raise Refusal(f"{op.to_string()} adds different elements")
        cuts = sorted({c for x in xs for c in x.cuts})
        versions = []
        for c in cuts:
            at = [x.versions[bisect_right(x.cuts, c) - 1] for x in xs]
            made = at[0]
            for v in at[1:]:
                made = self.versions.sum(made, v)
            versions.append(made)
        types = {self.types[n] for n in op.input_arg_names}
        if len(types) > 1 or op.attrs != OPS["sum"].complete_attrs({}):
            raise Refusal(f"{op.to_string()} adds {', '.join(map(str, types))}")
        self._write(op, _joined(first.of, first.start, first.stop, cuts, versions), types.pop())

    def _chunk(self, op: Operator, xs: Sequence[_ElementRange]) -> None:
        (x,) = xs
        a, b = op.attrs["start"], op.attrs["stop"]
        if not 0 <= a <= b <= x.stop - x.start:
            raise Refusal(f"{op.to_string()} takes elements that %{op.input_arg_names[0]} does not have")
        part = _slice(x, x.start + a, x.start + b)
        self._write(op, part, TensorType(self.types[op.input_arg_names[0]].dtype, (b - a,)))

    def _unpack(self, op: Operator, xs: Sequence[_ElementRange]) -> None:
        first = xs[0]
        cuts: list[int] = []
        versions: list[int] = []
        stop = first.start
        for x in xs:
            if (x.of, x.start) != (first.of, stop):
                raise Refusal(f"{op.to_string()} concatenates elements that are not adjacent")
            cuts += x.cuts
            versions += x.versions
            stop = x.stop
        (shape,) = op.attrs["shapes"]
        self._write(op, _joined(first.of, first.start, stop, cuts, versions), TensorType(self.types[op.input_arg_names[0]].dtype, shape))

    def _assign(self, op: Operator, xs: Sequence[_ElementRange]) -> None:
        self._write(op, xs[0], self.types[op.input_arg_names[0]])


def _slice(x: _ElementRange, start: int, stop: int) -> _ElementRange:
    if start == stop:
        return _ElementRange(x.of, start, stop, (), ())
    first, last = bisect_right(x.cuts, start) - 1, bisect_right(x.cuts, stop - 1)
    return _ElementRange(x.of, start, stop, (start, *x.cuts[first + 1 : last]), x.versions[first:last])


_LOCAL_OPERATORS: dict[str, Callable[[_Exchange, Operator, Sequence[_ElementRange]], None]] = {
    "sum": _Exchange._sum,
    "chunk": _Exchange._chunk,
    "unpack": _Exchange._unpack,
    "assign": _Exchange._assign,
}
