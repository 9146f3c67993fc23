"""Specialize: one program per rank. The only place that knows a rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

from ..ir import flow
from ..ir.errors import TranspileError
from ..ir.opdef import OPS, Effect
from ..ir.operator import Operator, Role, op_types
from ..ir.parts import Coords, coords_of, holds
from ..ir.program import Block, Program
from ..ir.sizes import StandInShapes
from ..ir.sub_blocks import runs_bodies
from ..ir.types import Local, Placement
from ..verify.rank_program import RankRecipe
from .cluster import SERVERS
from .lowering.server_exchange import SERVED, ServerExchange
from .lowering.transfers import TRANSFER, Transfers
from .lowering.write_algorithm import MessageRounds, others, written_out
from .placement.propagate import where

_PLACEMENT = attrgetter("placement")
_LOCAL: Placement = (Local(),)


class Rooted:
    """Neighbouring operators whose results lie at roots: those of each root, with their numbers."""

    def __init__(self, ops: Iterable[tuple[Placement, Operator]]):
        self.at: dict[int, tuple[Placement, list[tuple[int, Operator]]]] = {}  # by the id of the roots, of which there are a few objects
        for k, (roots, op) in enumerate(ops):
            self.at.setdefault(id(roots), (roots, []))[1].append((k, op))

    def of(self, coords: Coords, held: dict[int, bool]) -> list[Operator]:
        """The operators that a rank has, in order. `held` says of roots, by id, whether they are the rank's."""
        for key, (roots, _) in self.at.items():
            if key not in held:
                held[key] = holds(roots, coords)
        mine = [ops for key, (_, ops) in self.at.items() if held[key]]
        return [op for _, op in (mine[0] if len(mine) == 1 else sorted(chain(*mine)))]


class _Trainer(NamedTuple):
    """What is left of a trainer's program beside servers. `before`: its operators before, so that nothing else gets their ids."""

    before: list[list[Operator]]
    ops: list[Operator]
    names: list[str]
    blocks: int


class Specializer:
    """Makes rank programs of a program that speaks for all ranks. What does not name a rank is shared by all of them.

    An operator whose results lie at a root runs there only; collectives with an algorithm become send, recv and sum, round by
    round (see hops.py), and a transfer a send on one rank and a recv on another (see transfers.py).
    """

    def __init__(self, program: Program):
        self.program = program
        self.sizes = [StandInShapes(b) for b in program.blocks]
        self.roots_of: list[dict[int, Placement]] = []  # by block: the roots of the placements of what is declared there, by their ids
        self.segments = [self._segments(b) for b in program.blocks]
        ops = program.global_block().oplist if SERVERS in program.groups else ()
        self.trainers: dict[tuple[int, ...], _Trainer] = {}  # by the ids of all operators before
        self.updates = any(op.role is Role.OPTIMIZE for op in ops)
        self.kept, self.away = _beside(program)

    def _segments(self, block: Block) -> list[tuple[Operator, ...] | Rooted | ServerExchange | MessageRounds | Transfers]:
        """Runs of operators that every rank has, runs of operators that some ranks have, waves of messages and transfers, in order."""
        find = block.find if block.idx else block.descs.get
        different = {id(q): q for q in map(_PLACEMENT, block.descs.values())}  # most values lie at one of a few objects
        roots_of: dict[int, Placement] = {k: roots for k, q in different.items() if (roots := tuple([e for e in q if e.root is not None]))}
        if block.idx:  # a branch writes what enclosing blocks declare
            roots_of.update(self.roots_of[block.parent_idx])
        self.roots_of.append(roots_of)
        same: dict[Placement, Placement] = {}
        carried = {t for t in op_types(block.oplist) if OPS[t].algorithm_method}
        beside = not op_types(block.oplist).isdisjoint((*SERVED, TRANSFER))
        if not roots_of and not beside and not any(op.type in carried and written_out(op) for op in block.oplist):
            return [tuple(block.oplist)]

        def kind(op: Operator) -> tuple:
            if op.type in SERVED:
                return (ServerExchange,)
            if op.type in carried and written_out(op):
                return (MessageRounds, *(op.attrs[a] for a in ("algorithm", "group", "wave")))
            if op.type == TRANSFER:
                return (Transfers,)
            return (Rooted,) if at_roots(op) else ()

        def at_roots(op: Operator) -> Placement:
            d = find(op.output_arg_names[0]) if op.output_arg_names else None
            found = () if d is None else roots_of.get(id(d.placement), ())
            if found and OPS[op.type].move is not None:  # everyone that may hold the operand takes part
                found = tuple(e for e in others(self.program, block, op) if e.root is not None)
                return same.setdefault(found, found)
            return found

        out: list[tuple[Operator, ...] | Rooted | ServerExchange | MessageRounds | Transfers] = []
        for key, run in groupby(block.oplist, key=kind):
            ops = tuple(run)
            if not key:
                out.append(ops)
            elif key[0] is MessageRounds:
                out += [MessageRounds(block, together, len(out) + k) for k, together in enumerate(_independent(ops))]
            elif key[0] is ServerExchange:
                out += [ServerExchange(together) for together in _independent(ops)]
            else:
                out.append(Rooted((at_roots(op), op) for op in ops) if key[0] is Rooted else Transfers(block, ops, self.sizes[block.idx]))
        return out

    @property
    def is_common(self) -> bool:
        """Do rank programs follow from the program for all ranks: its operators, those at roots there alone, and collectives carried out by
        rounds that are proved among all ranks?"""
        groups = self.program.groups
        if SERVERS in groups or any(sum(map(len, sets)) != self.program.world_size for sets in groups.values()):
            return False
        first, *inner = self.segments
        if any(not isinstance(s, tuple) for segments in inner for s in segments):
            return False
        return all(isinstance(s, tuple) or (s.holds_for_all() if isinstance(s, MessageRounds) else self._follows(s)) for s in first)

    @property
    def exchanges(self) -> tuple[int, int]:
        """How many collectives of block 0 the ranks carry out by messages, and by how many messages."""
        found = [s.count() for s in self.segments[0] if isinstance(s, MessageRounds)]
        return sum(c for c, _ in found), sum(m for _, m in found)

    @staticmethod
    def _follows(segment: Rooted | ServerExchange | Transfers) -> bool:
        """Are these operators at roots that run there by themselves?"""
        if not isinstance(segment, Rooted):
            return False
        return not any(runs_bodies(op) for _, ops in segment.at.values() for _, op in ops)

    def recipe(self, op: Operator, rank: int) -> RankRecipe | None:
        """The rank's part of the rounds that carry a collective of block 0 out; None for an operator that is not written out so."""
        found = self._rounds.get(id(op))
        return None if found is None else found[0].recipe(found[1], rank)

    @cached_property
    def _rounds(self) -> dict[int, tuple[MessageRounds, int]]:
        """Where an operator that is written out stands, by its id."""
        return {id(op): (s, k) for s in self.segments[0] if isinstance(s, MessageRounds) for k, op in enumerate(s.ops)}

    def rank_program(self, rank: int) -> Program:
        """The program of one rank. Ranks that run alike share their operators, and the records of variables."""
        program = self.program
        new = program.copy()
        new.rank = rank
        coords = coords_of(program.groups, rank, program.turns)
        for block, segments in zip(new.blocks, self.segments, strict=True):
            if all(isinstance(s, tuple) for s in segments):
                continue
            ops: list[Operator] = []
            block.oplist = ops
            held: dict[int, bool] = {}
            for s in segments:
                if isinstance(s, tuple):
                    ops.extend(s)
                elif isinstance(s, (MessageRounds, Transfers)):
                    s.write(rank, coords, block)
                elif isinstance(s, ServerExchange):
                    s.write(rank, block, self.kept)
                else:
                    ops.extend(s.of(coords, held))
        if any(g not in coords for g in program.groups):
            _leave_out(new, coords, self.away, self.updates)
        elif self.updates:
            self._leave_out_on_trainer(new, coords)
        new.frozen = True
        return new

    def _leave_out_on_trainer(self, new: Program, coords: Coords) -> None:
        """Trainers have no elements of what lies on servers: those that have the same operators leave out the same."""
        before = [b.oplist for b in new.blocks]
        key = tuple(map(id, chain(*before)))
        if key not in self.trainers:
            _leave_out(new, coords, None, self.updates)
            self.trainers[key] = _Trainer(before, [*new.global_block().oplist], [*new.global_block().descs], len(new.blocks))
            return
        left, block = self.trainers[key], new.global_block()
        block.oplist, block.descs = [*left.ops], {n: block.descs[n] for n in left.names}
        new.drop_blocks(left.blocks)


def _independent(ops: Sequence[Operator]) -> Iterator[list[Operator]]:
    """Neighbours, apart where one needs what another before it makes, or writes what that reads."""
    run: list[Operator] = []
    made: set[str] = set()
    read: set[str] = set()
    for op in ops:
        ins, outs = op.input_arg_names, op.output_arg_names
        if not made.isdisjoint((*ins, *outs)) or not read.isdisjoint(outs):
            yield run
            run, made, read = [], set(), set()
        run.append(op)
        made.update(outs)
        read.update(ins)
    yield run


def _beside(program: Program) -> tuple[bool, set[str]]:
    """Do servers keep anything, and what do they have nothing of: what trainers alone pull; or, where they keep nothing, all that does not
    lie with them."""
    if SERVERS not in program.groups:
        return False, set()
    block = program.global_block()
    descs = block.descs
    there = {n for n, d in descs.items() if any(e.group == SERVERS for e in d.placement)}
    if not any(descs[n].persistable for n in there):
        return False, set(descs) - there
    pulled = [descs[n] for op in block.oplist if op.type in SERVED for n in op.output_arg_names]
    return True, {d.name for d in pulled if not d.placement and not d.persistable}


def _leave_out(program: Program, coords: Coords, away: Collection[str] | None, updates: bool) -> None:
    """Take out of a rank's program what other ranks compute: on a server what lies over the trainers' groups, with what is made of that and
    what nobody then needs; everywhere what has elements on other servers only, unless it is read. Without `updates` all state is made.
    `away` is None on a trainer, and on a server what servers have nothing of."""
    block, is_server = program.global_block(), away is not None
    descs = block.descs
    gone = {n for n, d in descs.items() if any(e.group and e.group not in coords for e in d.placement)}.union(away or ())
    left = _for_servers(program, coords, gone) if is_server else block.oplist
    ends = {n for n, d in descs.items() if d.persistable and n not in gone and not (updates and _empty(d.placement, coords))}
    unless = set(descs) if is_server else {n for n, d in descs.items() if d.placement == _LOCAL or _empty(d.placement, coords)}
    block.oplist = _needed(program, left, ends, unless)
    if len(program.blocks) > 1 and not any(runs_bodies(op) for op in block.oplist):
        program.drop_blocks(1)
    named = set(chain.from_iterable(chain(*flow.touches(program, op)) for op in block.oplist))
    for n in [n for n, d in descs.items() if n in gone or n in unless and n not in named and not d.persistable]:
        del descs[n]


def _for_servers(program: Program, coords: Coords, gone: set[str]) -> list[Operator]:
    """The operators that a server has of a program; what the others compute is added to what is `gone`. Raises TranspileError for operators
    that would leave a server without what it keeps."""
    block, left = program.global_block(), []
    descs = block.descs
    for op in block.oplist:
        reads, writes = flow.touches(program, op)
        if gone.isdisjoint(reads) and gone.isdisjoint(writes) and op.attrs.get("group", "") in ("", *coords):
            named = (*reads, *writes) if op.sub_blocks() else ()
            elsewhere = next((n for n in named if n in descs and not holds(descs[n].placement, coords)), None)
            if elsewhere is not None:
                raise _not_served(op, f"must run on every server, but %{elsewhere} is stored on another one")
            left.append(op)
            continue
        kept = next((n for n in writes if n in descs and n not in gone and descs[n].persistable and {*reads} != {n}), None)
        if kept is not None:
            raise _not_served(op, f"writes %{kept}, which servers keep, and reads what trainers compute: a server has no data")
        gone.update(n for n in writes if n in descs and not descs[n].persistable)
    return left


def _not_served(op: Operator, what: str) -> TranspileError:
    advice = "take a strategy without servers for this program, such as strategies.zero1()"
    return TranspileError(f"op {op.type} {what}; {advice}{where(op)}")


def _empty(placement: Placement, coords: Coords) -> bool:
    """Has the rank no elements of what lies in flat ranges on servers?"""
    for e in placement:
        if e.bounds is not None and e.group == SERVERS:
            return coords[SERVERS][0] not in e.bounds.filled
    return False


def _needed(program: Program, ops: Sequence[Operator], ends: Iterable[str], unless: Collection[str]) -> list[Operator]:
    """The operators that are needed: all but those that write nothing but what `unless` names, of which nothing is read or is an end."""
    needed, out = set(ends), []
    for op in reversed(ops):
        reads, writes = flow.touches(program, op)
        talks = OPS[op.type].effect not in (Effect.PURE, Effect.RANDOM)
        if talks or not needed.isdisjoint(writes) or not all(n in unless for n in writes):
            needed.update(reads)
            out.append(op)
    return out[::-1]
