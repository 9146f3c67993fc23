"""Specialize: one program per rank. The only place that knows a rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from ..ir.opdef import OPS
from ..ir.operator import Operator
from ..ir.parts import coords_of, holds
from ..ir.program import Block, Program
from ..ir.types import At, Placement
from .rings import RINGS, Ring


@dataclass(frozen=True)
class Rooted:
    """Neighbouring operators whose results lie at the same roots."""

    roots: Placement
    ops: tuple[Operator, ...]


class Specializer:
    """Makes rank programs of a program that speaks for all ranks. What does not name a rank is shared by all of them.

    An operator whose results lie at a root runs there only; ring operators become send, recv and sum, hop by hop (see rings.py).
    """

    def __init__(self, program: Program):
        self.program = program
        self.segments = [self._segments(b) for b in program.blocks]

    def _segments(self, block: Block) -> list[tuple[Operator, ...] | Rooted | Ring]:
        """Runs of operators that every rank has, runs of operators that some ranks have, and rings, in order."""
        placed = {n: d.placement for n, d in block.descs.items() if d.placement}
        different = {id(q): q for q in placed.values()}
        roots_of = {k: roots for k, q in different.items() if (roots := tuple([e for e in q if isinstance(e, At)]))}
        if not roots_of and not any(t in RINGS for t in {op.type for op in block.oplist}):
            return [tuple(block.oplist)]
        who = {n: roots_of[id(q)] for n, q in placed.items() if id(q) in roots_of} if roots_of else {}

        def kind(op: Operator) -> tuple:
            if op.type in RINGS:
                return (op.type, op.attrs["group"], op.attrs["wave"])
            if not who:
                return ()
            names = op.output_arg_names
            roots = who.get(names[0]) if names else None
            if roots and OPS[op.type].move is not None:  # everyone that may hold the operand takes part
                roots = tuple(e for e in roots if e.group != op.attrs["group"])
            return (roots,) if roots else ()

        out: list[tuple[Operator, ...] | Rooted | Ring] = []
        for key, run in groupby(block.oplist, key=kind):
            ops = tuple(run)
            out.append(ops if not key else Ring(block, list(ops), len(out)) if len(key) == 3 else Rooted(key[0], ops))
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
            for s in segments:
                if isinstance(s, tuple):
                    ops.extend(s)
                elif isinstance(s, Ring):
                    s.write(rank, coords, block)
                elif holds(s.roots, coords):
                    ops.extend(s.ops)
        new.frozen = True
        return new
