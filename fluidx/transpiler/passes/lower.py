"""Lower: every redistribute becomes communication operators."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.errors import TranspileError, nearest
from ...ir.operator import Operator, Role
from ...ir.program import Block, Program, ProgramPair, Var
from ..lowerings import ALGORITHMS, steps
from ..pass_ import Job, Pass
from ..writer import complete


@dataclass(frozen=True)
class Lower(Pass):
    """Replace redistributes by operators. `by` names the algorithm: "collective" or "ring" (see lowerings.py)."""

    by: str = "collective"
    requires = ("placed",)
    ensures = ("lowered",)

    def run(self, pair: ProgramPair, job: Job) -> ProgramPair:
        if self.by not in ALGORITHMS:
            raise TranspileError(f"unknown algorithm by={self.by!r}; {nearest(str(self.by), ALGORITHMS, 'there are')}")
        return ProgramPair(self._lower(pair.main, job), self._lower(pair.startup, job))

    def _lower(self, program: Program, job: Job) -> Program:
        new = program.copy()
        known: dict[tuple, list] = {}
        for block in new.blocks:
            ops: list[Operator] = []
            for op in block.oplist:
                if op.type == "redistribute":
                    self._write(ops, block, op, job, known)
                else:
                    ops.append(op)
            block.oplist = ops
        return new

    def _write(self, ops: list[Operator], block: Block, op: Operator, job: Job, known: dict[tuple, list]) -> None:
        source, target = op.input_arg_names[0], op.output_arg_names[0]
        d = block.desc(source)
        key = (d.placement, block.desc(target).placement)
        path = known.get(key)
        if path is None:
            path = known[key] = [(s.type, complete(s.type, s.attrs), s.after) for s in steps(*key, job.mesh.axes, ALGORITHMS[self.by])]
        for k, (type_, attrs, after) in enumerate(path):
            out = target
            if k < len(path) - 1:
                out = f"{target}.by{k + 1}"
                block.descs[out] = Var(out, d.type, after, stop_gradient=True)
            ops.append(Operator(type_, {"X": (source,)}, {"Out": (out,)}, attrs, role=Role.DIST, site=op.site))
            source = out
        if not path:
            ops.append(Operator("assign", {"X": (source,)}, {"Out": (target,)}, {}, role=Role.DIST, site=op.site))
