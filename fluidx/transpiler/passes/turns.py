"""Turns: what the batch is cut into is computed part after part."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.errors import TranspileError
from ...ir.pass_base import Job, Pass
from ...ir.program import ProgramPair


@dataclass(frozen=True)
class Turns(Pass):
    """Declare an axis of time with `count` turns: the batch is cut over it inside of what ranks have, and `Unroll` writes the turns out."""

    count: int
    axis: str = "mb"

    requires = ("grouped",)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        if self.axis in job.mesh.groups():
            raise TranspileError(f"{self.axis} is an axis of ranks of {job.mesh!r}; an axis of time needs another name: Turns(axis=...)")
        if self.count == 1:
            return pair
        main = pair.main.copy()
        main.turns = {**main.turns, self.axis: self.count}
        return ProgramPair(main, pair.startup)
