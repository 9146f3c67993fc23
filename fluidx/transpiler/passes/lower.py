"""Lower: replace every redistribute by communication operators."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from ...ir.make_op import filled
from ...ir.opdef import opdef
from ...ir.operator import Frozen, Operator, op_types, unary
from ...ir.pass_base import Job, Pass
from ...ir.program import Block, Program, ProgramPair
from ...ir.types import Placement
from ...ir.var import Var
from ..lowering.redistribute import steps
from ..placement.stand_in_entries import GeneralPlacements, Hole, filled_holes, filled_in, holes, joined, with_stand_ins

Path = list[tuple[str, Frozen, Placement]]  # operators of one redistribute: type, attributes, and the placement after it


@dataclass(frozen=True)
class Lower(Pass):
    """Replace redistributes by collectives, and by operators that need no communication (see lowering/redistribute.py)."""

    requires = ("placed",)
    ensures = ("lowered",)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        return ProgramPair(self._lower(pair.main, job), self._lower(pair.startup, job))

    def _lower(self, program: Program, job: Job) -> Program:
        new = program.copy()
        paths = _Paths(job.axes(new), new.turns)
        for block in new.blocks:
            ops: list[Operator] = []
            old, done = block.oplist, 0
            meeting = {t for t in op_types(old) if opdef(t).comm.replica_collective is not None}
            for k in [k for k, op in enumerate(old) if op.type == "redistribute" or op.type in meeting]:
                ops += old[done:k]
                if old[k].type in meeting:
                    ops += self._met(block, old[k])
                else:
                    self._write(ops, block, old[k], paths)
                done = k + 1
            block.oplist = ops + old[done:]
        return new

    @staticmethod
    def _met(block: Block, op: Operator) -> list[Operator]:
        """The collectives, one over each group, that replace an operator which makes one value from replica-local values."""
        own = [e.group for e in block.desc(op.input_arg_names[0]).placement if e.is_own]
        if not own:
            return [op]
        collective = opdef(op.type).comm.replica_collective
        assert collective is not None and len(own) == 1
        type_, attrs = collective
        return [unary(type_, op.input_arg_names[0], op.output_arg_names[0], filled(type_, {"group": own[0], **attrs, **op.attrs}), op.site)]

    @staticmethod
    def _write(ops: list[Operator], block: Block, op: Operator, paths: _Paths) -> None:
        source, target = op.input_arg_names[0], op.output_arg_names[0]
        d = block.desc(source)
        path = paths.between(d.placement, block.desc(target).placement)
        if len(path) == 1:  # the usual case: the operator keeps its input and output names
            ops.append(op.replace(type=path[0][0], attrs=path[0][1]))
            return
        for k, (type_, attrs, after) in enumerate(path):
            out = target
            if k < len(path) - 1:
                out = f"{target}.by{k + 1}"
                block.descs[out] = Var(out, d.type, after, stop_gradient=True)
            ops.append(unary(type_, source, out, attrs, op.site))
            source = out
        if not path:
            ops.append(unary("assign", source, target, site=op.site))


class _Paths:
    """The operators that lead from one placement to another. Those of one root or flat ranges are made from those of others."""

    def __init__(self, axes: Mapping[str, int], turns: Container[str]):
        self.axes, self.turns, self.general = axes, turns, GeneralPlacements()
        self.known: dict[tuple[int, int], Path] = {}  # by the ids of the two placements, which `general` keeps
        self.alike: dict[tuple[int, ...], tuple[Path, list[list[Hole]]]] = {}

    def between(self, old: Placement, new: Placement) -> Path:
        """The operators from `old` to `new`; a program has few objects for equal placements."""
        path = self.known.get((id(old), id(new)))
        if path is None:
            path = self.known[id(old), id(new)] = self._found(old, new)
        return path

    def _found(self, old: Placement, new: Placement) -> Path:
        (m, before, _), (n, after, _) = self.general.of(old), self.general.of(new)
        key, entries = joined([(m, before), (n, after)]) if before and after else ((m, n), before or after)
        found = self.alike.get(key)
        if found is None:
            ((a,), (b,)), _ = with_stand_ins([(old,), (new,)])
            path = [(s.type, filled(s.type, s.attrs), s.after) for s in steps(a, b, self.axes, self.turns)]
            found = self.alike[key] = path, [holes(attrs, entries) for _, attrs, _ in path]
        path, open_ = found
        if not entries:
            return path
        if len(path) == 1:
            return [(path[0][0], filled_holes(path[0][1], open_[0], entries), new)]
        return [
            (type_, filled_holes(attrs, at, entries), filled_in(place, entries))
            for (type_, attrs, place), at in zip(path, open_, strict=True)
        ]
