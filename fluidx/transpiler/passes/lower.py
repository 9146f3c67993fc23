"""Lower: replace every redistribute by communication operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...ir.make_op import filled
from ...ir.opdef import opdef
from ...ir.operator import Operator, op_types, unary
from ...ir.pass_base import Job, Pass
from ...ir.program import Block, Program, ProgramPair
from ...ir.var import Var
from ..lowering.redistribute import steps


@dataclass(frozen=True)
class Lower(Pass):
    """Replace redistributes by collectives, and by operators that need no communication (see lowering/redistribute.py)."""

    requires = ("placed",)
    ensures = ("lowered",)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        return ProgramPair(self._lower(pair.main, job), self._lower(pair.startup, job))

    def _lower(self, program: Program, job: Job) -> Program:
        new = program.copy()
        known: dict[tuple, list] = {}
        axes = job.axes(new)
        for block in new.blocks:
            ops: list[Operator] = []
            old, done = block.oplist, 0
            meeting = {t for t in op_types(old) if opdef(t).replica_collective is not None}
            for k in [k for k, op in enumerate(old) if op.type == "redistribute" or op.type in meeting]:
                ops += old[done:k]
                if old[k].type in meeting:
                    ops += self._met(block, old[k])
                else:
                    self._write(ops, block, old[k], axes, known)
                done = k + 1
            block.oplist = ops + old[done:]
        return new

    @staticmethod
    def _met(block: Block, op: Operator) -> list[Operator]:
        """The collectives, one over each group, that replace an operator which makes one value from replica-local values."""
        own = [e.group for e in block.desc(op.input_arg_names[0]).placement if e.is_own]
        if not own:
            return [op]
        collective = opdef(op.type).replica_collective
        assert collective is not None and len(own) == 1
        type_, attrs = collective
        return [unary(type_, op.input_arg_names[0], op.output_arg_names[0], filled(type_, {"group": own[0], **attrs, **op.attrs}), op.site)]

    def _write(self, ops: list[Operator], block: Block, op: Operator, axes: Mapping[str, int], known: dict[tuple, list]) -> None:
        source, target = op.input_arg_names[0], op.output_arg_names[0]
        d = block.desc(source)
        key = (d.placement, block.desc(target).placement)
        path = known.get(key)
        if path is None:
            found = steps(*key, axes, block.program.turns)
            path = known[key] = [(s.type, filled(s.type, s.attrs), s.after) for s in found]
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
