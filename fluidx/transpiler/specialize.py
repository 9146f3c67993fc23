"""Specialize: one program per rank. The only place that knows a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from ..ir.opdef import OPS
from ..ir.operator import Operator, op_types
from ..ir.parts import coords_of, holds
from ..ir.program import Block, Program
from ..ir.types import At, Placement
from .hops import Wave, others, written_out

_PLACEMENT = attrgetter("placement")


@dataclass(frozen=True)
class Rooted:
    """Neighbouring operators whose results lie at the same roots."""

    roots: Placement
    ops: tuple[Operator, ...]


class Specializer:
    """Makes rank programs of a program that speaks for all ranks. What does not name a rank is shared by all of them.

    An operator whose results lie at a root runs there only; collectives with an algorithm become send, recv and sum, round by
    round (see hops.py).
    """

    def __init__(self, program: Program):
        self.program = program
        self.roots_of: list[dict[int, Placement]] = []  # by block: the roots of the placements of what is declared there, by their ids
        self.segments = [self._segments(b) for b in program.blocks]

    def _segments(self, block: Block) -> list[tuple[Operator, ...] | Rooted | Wave]:
        """Runs of operators that every rank has, runs of operators that some ranks have, and waves of messages, in order."""
        find = block.find if block.idx else block.descs.get
        different = {id(q): q for q in map(_PLACEMENT, block.descs.values())}  # most values lie at one of a few objects
        roots_of: dict[int, Placement] = {k: roots for k, q in different.items() if (roots := tuple([e for e in q if isinstance(e, At)]))}
        if block.idx:  # a branch writes what enclosing blocks declare
            roots_of.update(self.roots_of[block.parent_idx])
        self.roots_of.append(roots_of)
        carried = {t for t in op_types(block.oplist) if OPS[t].carries}
        if not roots_of and not any(op.type in carried and written_out(op) for op in block.oplist):
            return [tuple(block.oplist)]

        def kind(op: Operator) -> tuple:
            if op.type in carried and written_out(op):
                return tuple(op.attrs[a] for a in ("algorithm", "group", "wave"))
            d = find(op.output_arg_names[0]) if op.output_arg_names else None
            roots = None if d is None else roots_of.get(id(d.placement))
            if roots and OPS[op.type].move is not None:  # everyone that may hold the operand takes part
                roots = tuple(e for e in others(self.program, block, op) if isinstance(e, At))
            return (roots,) if roots else ()

        out: list[tuple[Operator, ...] | Rooted | Wave] = []
        for key, run in groupby(block.oplist, key=kind):
            ops = tuple(run)
            if len(key) == 3:
                for together in _independent(ops):
                    out.append(Wave(block, together, len(out)))
            else:
                out.append(Rooted(key[0], ops) if key else ops)
        return out

    def rank_program(self, rank: int) -> Program:
        """The program of one rank. Ranks that run alike share their operators, and the records of variables."""
        program = self.program
        new = program.copy()
        new.rank = rank
        coords = coords_of(program.groups, rank)
        for block, segments in zip(new.blocks, self.segments, strict=True):
            if all(isinstance(s, tuple) for s in segments):
                continue
            ops: list[Operator] = []
            block.oplist = ops
            here: dict[int, bool] = {}  # by the roots, of which there are a few objects
            for s in segments:
                if isinstance(s, tuple):
                    ops.extend(s)
                elif isinstance(s, Wave):
                    s.write(rank, coords, block)
                else:
                    mine = here.get(id(s.roots))
                    if mine is None:
                        mine = here[id(s.roots)] = holds(s.roots, coords)
                    if mine:
                        ops.extend(s.ops)
        new.frozen = True
        return new


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
