"""Turns: declare a time axis, over which the batch is cut into micro-batches that run one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.errors import TranspileError
from ...ir.pass_base import Job, Pass
from ...ir.program import Program


@dataclass(frozen=True)
class Turns(Pass):
    """Declare a time axis with `count` turns. The part of the batch that a rank has is cut over it; `Unroll` writes the operators of each
    turn."""

    count: int
    axis: str = "mb"

    requires = ("grouped",)

    def rewrite(self, program: Program, job: Job) -> Program:
        if self.axis in job.mesh.groups():
            raise TranspileError(f"{self.axis} is an axis of ranks of {job.mesh!r}; a time axis needs another name: Turns(axis=...)")
        if self.count == 1:
            return program
        new = program.copy()
        new.turns = {**new.turns, self.axis: self.count}
        return new
