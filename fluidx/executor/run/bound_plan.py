"""BoundPlan: a plan with its arrays and calls, ready to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...ir.types import TensorType
from ..context import RunContext
from ..plan.allocation import put
from ..plan.records import Plan
from ..progress import Progress
from . import observers
from .thread_calls import CallList


class BoundPlan:
    """A plan with its arrays. `run` makes one run. If steps overlap with compute on a CPU, a second thread makes the calls of `overlapped`
    at the same time (`run_overlapped`)."""

    threads: int | None = None  # the kernel threads of the rank's own process; None here

    def __init__(self, plan: Plan, ctx: RunContext, xp: Any):
        self.plan, self.ctx, self.xp = plan, ctx, xp
        self.compute = CallList()
        self.overlapped: CallList | None = None
        self.arrays: dict[str, Any] = {}
        self.feeds: list[tuple[str, Any]] = []
        self.fetches: list[Any] = []

    @property
    def fetch_types(self) -> Sequence[TensorType]:
        return self.plan.fetch_types

    @property
    def call_lists(self) -> list[CallList]:
        return [self.compute] if self.overlapped is None else [self.compute, self.overlapped]

    def run(self, feed: Mapping[str, Any], after: observers.After | None = None) -> list[Any]:
        """Copy the feeds in, make every call, copy the fetches out. `after`: see `walk`."""
        self.take(feed)
        self.walk(after)
        return [f.copy() for f in self.fetches]

    def take(self, feed: Mapping[str, Any]) -> None:
        """Copy the feeds in."""
        for name, buffer in self.feeds:
            put(buffer, feed[name])

    def walk(self, after: observers.After | None = None) -> None:
        """Make every call. With `after`, each step is a separate call and `after` is called behind it; steps of all call lists are numbered
        consecutively."""
        if after is None:
            self.compute.run()
        else:
            self.compute.run_watched(after, 0, self._finish if self.xp is not np else None)

    def record_progress(self, progress: Progress) -> None:
        """Have runs write a progress record of the compute thread."""
        self.compute.record_progress(progress)

    def run_overlapped(self, after: observers.After | None = None) -> None:
        """The calls of the second thread in a run. `after`: see `walk`."""
        if self.overlapped is None:
            return
        if after is None:
            self.overlapped.run()
        else:
            self.overlapped.run_watched(after, len(self.compute.steps), None)

    def _finish(self) -> None:
        """Wait for queued GPU work; with a deadline if other ranks take part."""
        if self.ctx.comm is not None and self.ctx.comm.asynchronous:
            self.ctx.comm.wait()
        else:
            self.xp.cuda.get_current_stream().synchronize()
