"""Unroll: write the operators on values that are cut over a time axis once for each turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from ...ir import flow
from ...ir.errors import TranspileError
from ...ir.make_op import filled, make_op
from ...ir.opdef import Effect, opdef
from ...ir.operator import Operator, rename_slots, unary
from ...ir.pass_base import Job, Pass
from ...ir.program import Program
from ...ir.sub_blocks import copy_op, runs_bodies
from ...ir.time_axes import in_turn, taken_in_turn, turn_group
from ...ir.types import Entry, Partial
from ...ir.var import Var
from ..placement.placement_walk import where

_ADDS = {"sum": "sum", "max": "elementwise_max", "min": "elementwise_min"}
_HOST = "\0host"  # a name for all effects on the host: operators with such effects keep their order


@dataclass(frozen=True)
class Unroll(Pass):
    """Write each operator that uses values cut over a time axis once for each turn; all operators of one turn come before the next turn.
    Terms of a sum over turns are added in place as they are computed. An operator that needs a finished sum is written in the last turn, at
    its original position, so it does not wait for later operators. If operators in every turn need a finished sum, all turns are written up
    to that point first.
    """

    requires = ("lowered",)
    ensures = ("unrolled",)

    def rewrite(self, program: Program, job: Job) -> Program:
        for axis in program.turns:
            program = _Unrolling(program, axis).run()
        return program


class _When(Enum):
    """The turns in which an operator is written."""

    EVERY = "every"
    FIRST = "first"
    LAST = "last"


@dataclass
class _UnrolledSegment:
    """A segment: all turns of its operators are written before the next segment. It has the names that its operators touch. For each
    operator it keeps the names that have a value of their own in each turn although they are not cut.
    """

    ops: list[tuple[Operator, _When, frozenset[str]]] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)
    made_first: set[str] = field(default_factory=set)
    made_again: set[str] = field(default_factory=set)  # names that are not cut, and that every turn writes
    late_reads: set[str] = field(default_factory=set)  # names that operators of the last turn read
    late: set[str] = field(default_factory=set)  # names that they write, and the sums that are finished there

    def add(self, op: Operator, when: _When, reads: Collection[str], writes: Collection[str], again: Collection[str]) -> None:
        self.ops.append((op, when, frozenset(self.made_again.intersection(reads))))
        if when is _When.LAST:
            self.late_reads.update(reads)
            self.late.update(writes)
            return
        self.reads.update(reads)
        if _HOST in writes:
            self.late.add(_HOST)
        if when is _When.FIRST:
            self.made_first.update(writes)
        self.made_again.update(again)


class _Unrolling:
    def __init__(self, program: Program, axis: str):
        self.source, self.axis, self.n = program, axis, program.turns[axis]
        self.program = program.copy()
        self.block = self.program.global_block()
        self.out: list[Operator] = []
        over = [d for d in self.block.descs.values() if any(e.group == axis for e in d.placement)]
        self.cut = {d.name for d in over}
        self.data = {d.name: self._data(d) for d in over if d.is_data}
        self.names = [{n: in_turn(n, axis, k) for n in self.cut} for k in range(self.n)]
        self.parted: set[tuple[str, int]] = set()
        self.added: dict[str, str] = {}  # the name of the partial sum so far, by the name of the sum
        self.finishes: dict[str, tuple[str, ...]] = {}  # final gradients that a sum finishes: [param, grad]
        for d in over:
            self._declare(d)

    def _data(self, d: Var) -> Entry:
        """The entry by which data is cut over the time axis. A rank is fed the data of all turns, and each turn takes its part."""
        self.block.descs[d.name] = d.changed(placement=tuple([e for e in d.placement if e.group != self.axis]))
        (entry,) = [e for e in d.placement if e.group == self.axis]
        assert entry.axis is not None
        return entry

    def _declare(self, d: Var) -> None:
        if d.persistable:
            raise TranspileError(
                f"%{d.name} keeps its value between steps, so it cannot be sharded over the iterations of "
                f"{self.axis}; leave it replicated"
            )
        for k, names in enumerate(self.names):
            placement = taken_in_turn(d.placement, self.axis, k)
            self.block.descs[names[d.name]] = Var(names[d.name], d.type, placement, stop_gradient=True)

    def run(self) -> Program:
        ops = self.block.oplist
        if any(runs_bodies(op) for op in ops):  # the copy of an operator copies its blocks too
            self.program.drop_blocks(1)
        segment = _UnrolledSegment()
        for op in ops:
            reads, writes = self._touched(op)
            when = self._when(op, reads, writes, segment)
            if when is None:
                self.out.append(self._copied(op))
                continue
            if when is _When.EVERY and not segment.late.isdisjoint(reads):
                self._flush(segment)
                segment = _UnrolledSegment()
            segment.add(op, when, reads, writes, self._made_again(op) if when is _When.EVERY else ())
            if self._adds_up(op):
                segment.late.update(writes)
        self._flush(segment)
        self.block.oplist = self.out
        return self.program

    def _touched(self, op: Operator) -> tuple[tuple[str, ...], tuple[str, ...]]:
        reads, writes = flow.touches(self.source, op)
        return (reads, (*writes, _HOST)) if opdef(op.type).effect is Effect.HOST else (reads, writes)

    def _adds_up(self, op: Operator) -> bool:
        return op.type == "all_reduce" and op.attrs["group"] == self.axis

    def _made_again(self, op: Operator) -> list[str]:
        """The outputs of an operator of every turn that are not cut, beside those that are."""
        if self._adds_up(op):
            return []
        outs = op.output_arg_names
        if runs_bodies(op) and (beside := [n for n in flow.writes(self.source, op) if n not in self.cut and n not in outs]):
            raise TranspileError(
                f"op {op.type} would write %{beside[0]} in every iteration of {self.axis}; use a separate "
                "operator for the values that do not depend on the batch"
                f"{where(op)}"
            )
        return [n for n in outs if n not in self.cut]

    def _when(self, op: Operator, reads: tuple[str, ...], writes: tuple[str, ...], segment: _UnrolledSegment) -> _When | None:
        """The turns in which an operator is written; None: before all turns of a new segment."""
        if self._adds_up(op) or not self.cut.isdisjoint(writes):
            return _When.EVERY
        late = segment.late
        if not (late.isdisjoint(reads) and late.isdisjoint(writes) and segment.late_reads.isdisjoint(writes)):
            return _When.LAST
        if not (segment.reads.isdisjoint(writes) and segment.made_again.isdisjoint(reads) and segment.made_again.isdisjoint(writes)):
            return _When.LAST
        first = segment.made_first
        # if the result is not cut, the operator reads only the shapes of values that are cut
        return None if self.cut.isdisjoint(reads) and first.isdisjoint(reads) and first.isdisjoint(writes) else _When.FIRST

    # -- writing ----------------------------------------------------------------------------------------------------------------

    def _flush(self, segment: _UnrolledSegment) -> None:
        for k in range(self.n):
            for op, when, again in segment.ops:
                if when is _When.EVERY or (when is _When.FIRST and k == 0) or (when is _When.LAST and k == self.n - 1):
                    self._write(op, k, again)

    def _write(self, op: Operator, k: int, again: Collection[str]) -> None:
        """Write an operator in turn k."""
        names = self.names[k]
        for n in flow.reads(self.source, op):
            if n in self.data and (n, k) not in self.parted:
                self.parted.add((n, k))
                entry = self.data[n]
                attrs = filled("part", {"group": turn_group(self.axis, k), **entry.attrs()})
                self.out.append(unary("part", n, names[n], attrs, op.site))
        if self._adds_up(op):
            self._add(op, k)
            return
        self.out.append(self._in_own_names(op, k, again))

    def _in_own_names(self, op: Operator, k: int, again: Collection[str]) -> Operator:
        """An operator in turn k, with its own names for outputs that are not cut: only the last turn writes the original name, which others
        read."""
        made = self._made_again(op) if not self.cut.isdisjoint(op.output_arg_names) else []
        if k == self.n - 1 or not (made or again):
            return self._copied(op, k)
        own = {n: in_turn(n, self.axis, k) for n in (*made, *again)}
        for n in made:
            self.block.descs[own[n]] = self.block.desc(n).changed(name=own[n], persistable=False, is_parameter=False, attrs={})
        carried = [n for n in made if n in op.input_arg_names] if runs_bodies(op) else []  # a loop works on its own copy
        self.out += [unary("assign", n, own[n], site=op.site) for n in carried if n not in again]
        copy = self._copied(op, k, {n: own[n] for n in carried})
        return copy.with_slots(rename_slots(copy.inputs, {n: own[n] for n in again}), rename_slots(copy.outputs, {n: own[n] for n in made}))

    def _copied(self, op: Operator, k: int | None = None, own: Mapping[str, str] | None = None) -> Operator:
        """A copy of an operator for turn k, with the given new names for some values; without k, one copy for all turns."""
        names = {} if k is None else {**self.names[k], **own} if own else self.names[k]
        if op.role_var and k is not None and not self.cut.isdisjoint(op.output_arg_names):
            self.finishes.update((op.role_var[i + 1], op.role_var[i : i + 2]) for i in range(0, len(op.role_var), 2))
            op = op.replace(role_var=())
        if runs_bodies(op):
            return self._with_bodies(op, names, k)
        if k is not None and op.attrs.get("group") == self.axis:
            op = op.replace(attrs={**op.attrs, "group": turn_group(self.axis, k)})
        return op.renamed(names, outputs=True) if names else op

    def _with_bodies(self, op: Operator, names: dict[str, str], k: int | None) -> Operator:
        made = len(self.program.blocks)
        copy = copy_op(op, self.source, self.block, names, "" if k is None else f".{self.axis}{k}")
        for block in self.program.blocks[made:]:
            for n, d in block.descs.items():
                if any(e.group == self.axis for e in d.placement):
                    block.descs[n] = d.changed(placement=taken_in_turn(d.placement, self.axis, k or 0))
            for j, inner in enumerate(block.oplist):
                if self._adds_up(inner):
                    raise TranspileError(
                        f"op {op.type} sums over the iterations of {self.axis} inside a sub-block; do it "
                        f"outside{where(op)}"
                    )
                if inner.attrs.get("group") == self.axis:
                    block.oplist[j] = inner.replace(attrs={**inner.attrs, "group": turn_group(self.axis, k or 0)})
        return copy

    def _add(self, op: Operator, k: int) -> None:
        """Add the term of turn k to the sum of the turns before it."""
        (x,), (out,) = op.input_arg_names, op.output_arg_names
        term, kind = self.names[k][x], op.attrs["op"]
        if k == 0:
            self.added[out] = term
            return
        target, d = out, self.block.desc(out)
        if k < self.n - 1:
            target = in_turn(out, self.axis, 0) + f"-{k}"
            owed = Partial(kind, turn_group(self.axis, 0, k))
            self.block.descs[target] = Var(target, d.type, (*d.placement, owed), stop_gradient=True)
        both = (self.added[out], term)
        finished = self.finishes.get(x, ()) if k == self.n - 1 else ()
        role_var = (finished[0], out) if finished else ()
        self.out.append(make_op(_ADDS[kind], both, (target,), filled(_ADDS[kind], {}), op.site, role_var=role_var))
        self.added[out] = target
