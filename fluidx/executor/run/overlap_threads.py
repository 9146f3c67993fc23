"""Calls of overlapped steps: where they start, where compute waits for them, and which thread makes them."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from ...ir.operator import Operator
from ...ops import kernels
from ...ops.comm.collective_base import native_calls
from ..context import RunContext
from ..plan.records import Step
from .bound_plan import BoundPlan
from .thread_calls import NOTES, WAITS, Call, CallList


class OverlapThreads(Protocol):
    def start(self, k: int, step: Step, call: Call | None) -> None:
        """Add the start of overlapped step k."""

    def wait(self, op: Operator, k: int) -> None:
        """Add a wait of compute for overlapped step k."""


class Streams:
    """One thread queues all work on two GPU streams; `order_after` makes one stream wait for the other."""

    def __init__(self, comm: Any, bound: BoundPlan):
        self.comm, self.compute = comm, bound.compute
        self.marks: dict[int, Any] = {}

    def start(self, k: int, step: Step, call: Call | None) -> None:
        if call is not None:
            self.compute.add(step.op, call, k)
        if step.marked:
            self.compute.add(step.op, partial(self._mark, k), NOTES)

    def wait(self, op: Operator, k: int) -> None:
        self.compute.add(op, partial(self._wait, k), WAITS)

    def _mark(self, k: int) -> None:
        self.marks[k] = self.comm.mark()

    def _wait(self, k: int) -> None:
        self.comm.order_after(self.marks[k])


class Threads:
    """Two threads of a CPU rank count for each other how many overlapped steps may start, and how many have ended."""

    def __init__(self, ctx: RunContext, bound: BoundPlan):
        self.ctx, self.bound, self.compute = ctx, bound, bound.compute
        self.numbers: dict[int, int] = {}  # step k -> its position among the overlapped steps, from 1

    def start(self, k: int, step: Step, call: Call | None) -> None:
        if self.bound.overlapped is None:
            self.bound.overlapped = CallList()
        track, op, number = self.bound.overlapped, step.op, len(self.numbers) + 1
        self.numbers[k] = number
        if self.compute.numbers[-1:] == [NOTES]:  # no compute between this step and the one before: they start together
            self.compute.drop()
        else:
            track.add(op, self._call("follow", True, number), NOTES)
        self.compute.add(op, self._call("reach", False, number), NOTES)
        if call is not None:
            track.add(op, call, k)
        if step.marked:
            track.add(op, self._call("reach", True, number), NOTES)

    def wait(self, op: Operator, k: int) -> None:
        self.compute.add(op, self._call("follow", False, self.numbers[k]), WAITS)

    def _call(self, name: str, beside: bool, at: int) -> Call:
        calls = native_calls(self.ctx, name, beside, at)
        return partial(getattr(self.ctx.comm, name), beside, at) if calls is None else kernels.NativeStep(calls)
