"""LocalRank: a rank in this process. It plans and binds the rank's programs, and runs startup programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...ir.operator import Operator
from ...ir.program import Program
from ...ir.types import TensorType
from ..context import RunContext
from ..places import CPUPlace, Place, array_module
from ..plan.planner import plan
from ..plan.records import Plan
from ..progress import Progress
from ..run.bind import bind
from ..run.bound_plan import BoundPlan
from ..scope import Scope

_CPU = CPUPlace()


class LocalRank:
    """A rank in this process, with its variables and its communicator. `planner` plans its programs; `progress` records its operators.
    `meet` waits for all ranks on the CPU before a wait for a GPU: it names a rank that does not come, and NCCL does not."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        comm: Any,
        place: Place = _CPU,
        scope: Scope | None = None,
        planner: Callable[..., Plan] = plan,
        progress: Progress | None = None,
        meet: Callable[[], None] | None = None,
    ):
        self.rank, self.world_size, self.comm, self.place = rank, world_size, comm, place
        self.scope = Scope() if scope is None else scope
        self.xp: Any = array_module(place)
        self.current: BoundPlan | None = None  # the plan that runs, or ran last
        self._planner, self._progress, self._meet = planner, progress, meet

    def compile(
        self, program: Program, feeds: Mapping[str, TensorType], fetch: Sequence[str], fuse: bool = True, overlap: int | None = None
    ) -> BoundPlan:
        """Plan and bind a program of this rank for feeds of these types."""
        groups = {g: program.group_ranks(g, self.rank) for g in program.groups}
        ctx = RunContext(self.rank, self.world_size, self.comm, groups, program.turns)
        declared = program.global_block().descs  # a server rank declares no feed
        types, device = {n: t for n, t in feeds.items() if n in declared}, "cpu" if self.xp is np else "cuda"
        planned = self._planner(program, types, fetch, self.scope.arrays, ctx, device, fuse=fuse, overlap=overlap)
        bound = bind(planned, self.scope, ctx, self.xp)
        if self._progress is not None:
            bound.record_progress(self._progress)
        return bound

    def start(self, program: Program) -> None:
        """Run the startup program."""
        self.current = self.compile(program, {}, [])
        self.current.run({})
        self.finish()

    def begin(self, step: int) -> None:
        """Record that a step, or the startup program, begins."""
        if self._progress is not None:
            self._progress.begin(step)

    def finish(self) -> None:
        """Wait, with a deadline, for the queued GPU work."""
        if self.xp is not np:
            if self._meet is not None:
                self._meet()
            self.comm.wait()

    def running(self) -> Operator | None:
        """The current operator."""
        return None if self.current is None else self.current.compute.running()
