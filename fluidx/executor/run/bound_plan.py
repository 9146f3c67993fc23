"""A plan with its arrays, ready to run."""

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
    """A plan with its arrays: `run` is one run. Where something runs beside compute on a CPU, another thread makes the calls of `beside`
    meanwhile (`run_beside`)."""

    threads: int | None = None  # a process of its own would have for its kernels

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
        """Copy the feeds in, make every call, copy the fetches out. `after` as of `walk`."""
        self.take(feed)
        self.walk(after)
        return [f.copy() for f in self.fetches]

    def take(self, feed: Mapping[str, Any]) -> None:
        """Copy the feeds in."""
        for name, buffer in self.feeds:
            put(buffer, feed[name])

    def walk(self, after: observers.After | None = None) -> None:
        """Make every call. With `after`, which is called behind every step, one step by itself after the other; the steps of all tracks
        are numbered through."""
        if after is None:
            self.compute.run()
        else:
            self.compute.run_watched(after, 0, self._finish if self.xp is not np else None)

    def record_progress(self, progress: Progress) -> None:
        """Have runs leave a trail, which follows what computes."""
        self.compute.record_progress(progress)

    def run_overlapped(self, after: observers.After | None = None) -> None:
        """What another thread does in a run, as of `run`."""
        if self.overlapped is None:
            return
        if after is None:
            self.overlapped.run()
        else:
            self.overlapped.run_watched(after, len(self.compute.steps), None)

    def _finish(self) -> None:
        """Wait for what was queued on the GPU; with a deadline where other ranks take part."""
        if self.ctx.comm is not None and self.ctx.comm.asynchronous:
            self.ctx.comm.wait()
        else:
            self.xp.cuda.get_current_stream().synchronize()
