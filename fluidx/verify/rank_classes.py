"""Classes of ranks with equal programs, and the operators that the programs of all ranks have in common."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, compress, count
from typing import Any

from ..ir.change_stamps import Twins, Variables, regrouped
from ..ir.longest_increasing import longest_increasing
from ..ir.message_batches import spans
from ..ir.opdef import OPS, Effect
from ..ir.operator import BlockRef, Operator
from ..ir.program import Block, Program
from ..ir.sub_blocks import bodies
from .normal_form import ExpressionTable
from .send_recv import is_message
from .sub_blocks import check_blocks


class RankClass:
    """The ranks whose programs have the same operators. `codes`: the number of each operator in order."""

    def __init__(self, program: Program, codes: list[int], kept: Collection[str] | None):
        self.program, self.codes, self.kept = program, codes, kept
        self.common: list[int] = []  # indices of the operators that all ranks have, then the end
        self.spans: dict[int, tuple[int, int]] = {}  # by index of a send or recv: (first, last) of its batch
        self._dead: set[int] | None = None

    def dead(self, ops: Sequence[tuple[Operator, Program]]) -> set[int]:
        """Indices of operators that do not run, because no operator needs their results and no variable keeps them."""
        if self._dead is None:
            self._dead = set()
            descs = self.program.global_block().descs
            needed = set(self.kept or ())
            for k in range(len(self.codes) - 1, -1, -1):
                op = ops[self.codes[k]][0]
                runs = op.type not in OPS or OPS[op.type].effect not in (Effect.PURE, Effect.RANDOM) or bool(OPS[op.type].control.bodies)
                if runs or any(n in needed or n not in descs or descs[n].persistable for n in op.output_arg_names):
                    needed.update(op.input_arg_names)
                    for b in op.sub_blocks():
                        needed |= touched(ops[self.codes[k]][1], b)
                else:
                    self._dead.add(k)
        return self._dead


def touched(program: Program, idx: int) -> set[str]:
    """The names that a block and its sub-blocks use."""
    names: set[str] = set()
    for op in program.blocks[idx].oplist:
        names.update(op.input_arg_names, op.output_arg_names)
        for body in bodies(op):
            names |= touched(program, body.idx)
            names.update(n for n in op.attrs.get(body.results_attr, ()) if isinstance(n, str))
    return names


def collectives_in_blocks(program: Program, op: Operator) -> list[Operator]:
    """The collectives in the sub-blocks of an operator."""
    found = [o for idx in op.sub_blocks() for o in program.blocks[idx].oplist]
    return [o for o in found if o.type in OPS and OPS[o.type].effect is Effect.COLLECTIVE] + [
        c for o in found for c in collectives_in_blocks(program, o)
    ]


class RankClasses:
    """The operators of block 0 of all ranks. Equal operators have one number, and ranks with equal operators are one class.

    For a branch of a larger program, `kept` has the names that the program reads after it; its blocks were checked with the program.
    """

    def __init__(self, programs: Sequence[Program], twins: Twins, table: ExpressionTable, kept: Collection[str] | None = None):
        self.programs, self.table, self.kept = programs, table, kept
        self.n = len(programs)
        self.codes: dict[tuple, int] = {}
        self.ops: list[tuple[Operator, Program]] = []  # by code
        self.lines: dict[int, int] = {}  # for branches: code -> the number of operators that are equal except for their bodies
        self._code_of: dict[int, int] = {}
        self._keep: list[Any] = []
        self._checked_blocks: set[int] = set()
        self.classes: list[RankClass] = []
        self.of: list[RankClass] = []
        twins = regrouped(twins, _contents)
        if len(twins) == 1:
            ((first, _),) = twins
            self.ops = [(op, first) for op in first.global_block().oplist]
            self.classes.append(RankClass(first, list(range(len(self.ops))), self.kept))
            self.of = self.classes * self.n
        else:
            self._classes(twins)
        self._common()

    def _classes(self, twins: Twins) -> None:
        """Put programs with equal numbers of operators into classes."""
        found: dict[tuple[int, ...], RankClass] = {}
        of: dict[int, RankClass] = {}
        for p, ranks in twins:
            block = p.global_block()
            known = [*map(self._code_of.get, map(id, block.oplist))]
            codes = [self._code(op, p, block) if c is None else c for op, c in zip(block.oplist, known, strict=True)]
            rank_class = found.setdefault(tuple(codes), RankClass(p, codes, self.kept))
            of.update(dict.fromkeys(ranks, rank_class))
        self.classes = [*found.values()]
        self.of = [of[r] for r in range(self.n)]

    def _code(self, op: Operator, program: Program, block: Block) -> int:
        """The number of an operator; equal operators with equal sub-blocks have one number."""
        code = self._code_of.get(id(op))
        if code is not None:
            return code
        if block.idx == 0 and is_message(op):  # a message is never common to all ranks
            code = self._code_of[id(op)] = len(self.ops)
            self.ops.append((op, program))
            return code
        runs = any(isinstance(v, BlockRef) for v in op.attrs.values()) if op.attrs else False
        inner: tuple = ()
        if runs:
            self.check_blocks(program)
            for v in op.attrs.values():
                if isinstance(v, BlockRef):
                    b = program.blocks[v.idx]
                    declared = tuple((n, d.type, d.placement) for n, d in b.descs.items())
                    inner += (declared, tuple(self._code(o, program, b) for o in b.oplist))
        line = (op.type, tuple(op.inputs.items()), tuple(op.outputs.items()), self.table.attrs_id(op.attrs))
        code = self.codes.get((*line, inner))
        if code is None:
            code = self.codes[*line, inner] = len(self.ops)
            self.ops.append((op, program))
            if runs and op.type in OPS and not OPS[op.type].control.repeats:
                blocks = tuple(v.idx for v in op.attrs.values() if isinstance(v, BlockRef))
                self.lines[code] = self.codes.setdefault((*line, blocks, None), code)
        if not runs:
            self._code_of[id(op)] = code
            self._keep.append(op)
        return code

    def check_blocks(self, program: Program) -> None:
        if self.kept is None and id(program) not in self._checked_blocks:
            check_blocks(program)
            self._checked_blocks.add(id(program))

    def _spans(self, codes: Sequence[int]) -> dict[int, tuple[int, int]]:
        """{index: (first, last)} for each send or recv: the batch of messages that start together."""
        places = [*compress(count(), map(self.is_message.__getitem__, codes))]
        out: dict[int, tuple[int, int]] = {}
        begin = 0
        for j, k in enumerate(places):
            if j + 1 == len(places) or places[j + 1] != k + 1:  # neighbours only
                run = places[begin : j + 1]
                found = spans([self.ops[codes[x]][0] for x in run])
                out.update((run[x], (run[a], run[b])) for x, (a, b) in found.items())
                begin = j + 1
        return out

    def _common(self) -> None:
        """Find operators that all ranks have in one order, and their indices in each class."""
        self.is_message = message = [is_message(op) for op, _ in self.ops]
        for c in self.classes:
            c.spans = self._spans(c.codes)
        if len(self.classes) == 1:
            (c,) = self.classes
            c.common = [k for k, code in enumerate(c.codes) if self.n == 1 or not message[code]]
        else:
            line = self.lines.get
            places = [_places([line(x, x) for x in c.codes] if self.lines else c.codes) for c in self.classes]
            first = self.classes[0].codes
            chosen = [x for x, k in places[0].items() if not message[first[k]]]
            for at in places[1:]:
                chosen = [x for x in chosen if x in at]
                chosen = [chosen[k] for k in longest_increasing([at[x] for x in chosen])]
            for c, at in zip(self.classes, places, strict=True):
                c.common = [at[x] for x in chosen]
        self.length = len(self.classes[0].common)
        for c in self.classes:
            c.common.append(len(c.codes))
        self.after_gap = {k for c in self.classes for k in _gaps(c.common)}
        # branches of all ranks whose bodies differ
        common = range(self.length) if self.lines else ()
        self.different_bodies = {k for k in common if len({c.codes[c.common[k]] for c in self.classes}) > 1}


def _contents(program: Program) -> list[tuple]:
    """The contents of a program that decide what the operators of block 0 compute, without the variables of block 0."""
    return [(b.idx, b.parent_idx, b.oplist, Variables(b.descs) if k else None) for k, b in enumerate(program.blocks)]


def _places(codes: Sequence[int]) -> dict[Any, int]:
    """{number: index} of operators; a repeated operator has the key (number, k) at its k-th repetition."""
    at: dict[Any, int] = dict(zip(codes, count()))
    if len(at) == len(codes):
        return at
    at = {}
    seen: dict[int, int] = {}
    for k, code in enumerate(codes):
        times = seen[code] = seen.get(code, -1) + 1
        at[(code, times) if times else code] = k
    return at


def _gaps(places: Sequence[int]) -> list[int]:
    """The positions of indices that do not directly follow the one before."""
    return [k for k, (a, b) in enumerate(zip(chain((-1,), places), places)) if b - a != 1]
