"""Turns: what the batch is cut into is computed part after part."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.errors import TranspileError
from ...ir.pass_base import Job, Pass
from ...ir.program import Program


@dataclass(frozen=True)
class Turns(Pass):
    """Declare an axis of time with `count` turns: the batch is cut over it inside of what ranks have, and `Unroll` writes the turns out."""

    count: int
    axis: str = "mb"

    requires = ("grouped",)

    def rewrite(self, program: Program, job: Job) -> Program:
        if self.axis in job.mesh.groups():
            raise TranspileError(f"{self.axis} is an axis of ranks of {job.mesh!r}; an axis of time needs another name: Turns(axis=...)")
        if self.count == 1:
            return program
        new = program.copy()
        new.turns = {**new.turns, self.axis: self.count}
        return new
