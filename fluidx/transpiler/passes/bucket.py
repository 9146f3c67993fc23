"""Bucket: pack small collectives, such as those of gradients, into larger ones."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

from ...ir.offsets import Offsets
from ...ir.operator import Operator, op_types
from ...ir.parts import bounds
from ...ir.pass_base import Job, Pass
from ...ir.program import Program, ProgramPair
from ...ir.program_rewriter import Writer
from ...ir.types import ANY, Pieces, Placement
from ..algorithms.rails import growth
from ..lowering.pack_messages import Packed, can_be_packed
from ..scheduling.delay_together import AdjacentOperators, Waiting, first_readers, gathered

MOVING = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "adasum_reduce")


@dataclass(frozen=True)
class Bucket(Pass):
    """Gather operators of the given types into buckets of at most `mb` MiB, pack each bucket, and send it when its last value is ready.

    Values of one bucket have the same dtype and placement, and are first used in the same section of the program: a value that backward
    needs does not wait for gradients. For partial sums, the first bucket has `first_mb`, so that sending begins early. Values in flat
    ranges go into the buckets that cut them (parameter_homes.InBuckets). Buckets of the types in `late` wait until a result is needed:
    buckets of gradients until backward is done. `mb=0`: each value travels by itself. With `grows`, the size grows with the number of hosts
    (rails.growth).
    Source: the buckets of PyTorch's DistributedDataParallel (Li et al. 2020); the tensor fusion of Horovod.
    """

    mb: float = 25.0
    first_mb: float = 1.0
    types: tuple[str, ...] = MOVING
    late: tuple[str, ...] = ()
    grows: bool = False
    requires = ("lowered",)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        if self.grows:
            return replace(self, mb=self.mb * growth(job.mesh.hosts), grows=False).rewrite_pair(pair, job)
        if self.mb == 0 and not self.late:
            return pair
        return ProgramPair(self._gather(pair.main), self._gather(pair.startup))

    def _gather(self, program: Program) -> Program:
        if op_types(program.global_block().oplist).isdisjoint(self.types):
            return program
        writer, kinds = Writer(program), _Kinds(program, self.types)
        filled: set[Hashable] = set()

        def begin(kind: Any) -> _Filling:
            return _Filling(kind, self, writer, filled)

        waiting = Waiting(program)
        for found in gathered(program, kinds.types, kinds.of, begin):
            if not isinstance(found, AdjacentOperators):
                waiting.before(found, writer.keep)
                continue
            ops = found.in_order()
            waiting.before(ops)
            if len(ops) == 1:
                writer.keep(ops[0])
                continue
            bucket = Packed(writer, ops)
            bucket.pack()
            bucket.send()
            waiting.add(bucket.outs, bucket.unpack)
        waiting.rest()
        return writer.program


class _Kinds:
    """The kinds of operators that may be gathered: a bucket has operators of one kind."""

    def __init__(self, program: Program, types: tuple[str, ...]):
        self.types = frozenset(types)
        self.readers = first_readers(program, self.types)
        self.descs = program.global_block().descs
        self.known: dict[tuple, int] = {}  # numbers of combinations of attributes and placements, which are few objects
        self.numbers: dict[tuple, int] = {}

    def of(self, op: Operator) -> tuple:
        x, out = self.descs[op.input_arg_names[0]], self.descs[op.output_arg_names[0]]
        key = id(op.attrs), id(x.placement), id(out.placement)
        alike = self.known.get(key)
        if alike is None:
            rest = dict(op.attrs)
            rest.pop("bounds", None)
            way = tuple(rest.items()), _alike(x.placement), _alike(out.placement)
            alike = self.known[key] = self.numbers.setdefault(way, len(self.numbers))
        return op.type, alike, x.type.dtype, self.readers[id(op)]


def _alike(placement: Placement) -> tuple:
    """The placement with the bounds of its flat ranges left out."""
    for e in placement:
        if e.bounds is not None:
            return tuple([(Pieces, e.group) if e.bounds is not None else e for e in placement])
    return placement


class _Filling(AdjacentOperators):
    """A bucket that is being filled."""

    def __init__(self, kind: Any, options: Bucket, writer: Writer, filled: set[Hashable]):
        super().__init__(kind)
        self.late = kind[0] in options.late
        self.options, self.writer, self.filled = options, writer, filled
        self.nbytes = self.limit = 0.0
        self.packs = False
        self.spans: list[tuple[int, int, int]] = []  # for flat ranges: the first and last rank with elements, and the value's number
        self.ranks = 0  # how many ranks share flat ranges; 0: there are no flat ranges
        self.sizes: dict[int, int] = {}  # the number of elements of the bucket that each rank has

    def add(self, op: Operator) -> bool:
        t = self.writer.block.descs[op.input_arg_names[0]].type
        nbytes = t.nbytes
        if not self.ops:
            self._begin(op)
        elif not self.packs or ANY in t.shape or not nbytes or self.nbytes + nbytes > self.limit or not self._beside(op):
            return False
        self.nbytes += nbytes
        if self.ranks:
            marks = Offsets.of(op.attrs["bounds"])
            for k, size in marks.sizes():
                self.sizes[k] = self.sizes.get(k, 0) + size
            insort(self.spans, (*_span(op), len(self.ops)))
        return super().add(op)

    def _begin(self, op: Operator) -> None:
        """Start the bucket with its first operator."""
        self.packs = self.options.mb > 0 and can_be_packed(self.writer, op)
        self.ranks = max(0, len(op.attrs.get("bounds", ())) - 1)
        terms = not self.ranks and any(e.op for e in self.writer.block.desc(op.input_arg_names[0]).placement)
        self.limit = (self.options.first_mb if terms and self.kind not in self.filled else self.options.mb) * 2**20

    def _beside(self, op: Operator) -> bool:
        """Do an operator's flat ranges fit between the flat ranges of the bucket without overlap?"""
        if not self.spans:
            return True
        first, last = _span(op)
        at = bisect_right(self.spans, (first, last, len(self.ops)))
        return (not at or self.spans[at - 1][1] <= first) and (at == len(self.spans) or last <= self.spans[at][0])

    @property
    def full(self) -> bool:
        if not self.ranks:
            return self.nbytes >= self.limit
        if self.ranks - 1 not in self.sizes:  # a bucket with elements has some on its last rank
            return False
        total = sum(self.sizes.values())
        return self.sizes.get(0, 0) == total // self.ranks and Offsets.of_sizes(self.sizes, self.ranks) == tuple(bounds(total, self.ranks))

    def close(self) -> None:
        self.filled.add(self.kind)

    def in_order(self) -> list[Operator]:
        return [self.ops[k] for _, _, k in self.spans] or self.ops  # flat ranges continue each other


def _span(op: Operator) -> tuple[int, int]:
    """The first and the last rank that has elements of a value in flat ranges."""
    filled = Offsets.of(op.attrs["bounds"]).filled
    return filled[0], filled[-1]
