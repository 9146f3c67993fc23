"""A simulated run in the form of a measured one, so that the profiler's table and timeline show both."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from ..executor.plan.cost import Cost, communicates
from ..executor.plan.records import Plan, Step
from ..executor.run.call_descriptions import CallDescription
from ..hardware.records import Device
from ..profiler.ceilings import Ceilings
from ..profiler.profile import Profile
from ..profiler.rank_run import RankRun
from .events import EvenProgress, SimulatedRun
from .folding import FoldedRanks
from .schedule import Compute, Wait


def profile_of(folded: FoldedRanks, run: SimulatedRun, plans: Sequence[Plan], world_size: int, most: int) -> Profile:
    """A profile of one run of the first `most` ranks."""
    profile = Profile()
    described = [_calls(plan) for plan in plans]
    times = [list(_times(folded, run, k, plans[k])) for k in range(len(plans))]
    for rank in range(min(world_size, most)):
        k = folded.class_of[rank]
        profile.runs.append(RankRun(plans[k], described[k], rank, world_size, 0, times[k], own_threads=1))
    return profile


def ceilings_of(device: Device, threads: int) -> Ceilings:
    """The ceilings of a device, as a profile shows them."""
    flops = device.flops.get("float32") or next(iter(device.flops.values()))
    reached = 1e-9 * flops.value * device.share.value, 1e-9 * device.bandwidth.value * device.bandwidth_share.value
    return Ceilings(threads, *reached, 1e6 * device.call.value)


def _calls(plan: Plan) -> list[CallDescription]:
    """The calls of a plan, a wait before the step that waits: call 2k + 1 is step k, call 2k its wait."""
    found = []
    for step in plan.steps:
        found.append(CallDescription(step.op, step.op.type, "wait", True, Cost()))
        found.append(_described(plan, step))
    if plan.steps:
        found.append(CallDescription(plan.steps[-1].op, plan.steps[-1].op.type, "wait", True, Cost()))
    return found


def _described(plan: Plan, step: Step) -> CallDescription:
    types = " + ".join(dict.fromkeys(op.type for op in step.ops))
    return CallDescription(step.op, types, step.kernel, communicates(step), plan.cost(step), step.overlapped)


def _times(folded: FoldedRanks, run: SimulatedRun, k: int, plan: Plan) -> Iterator[tuple[int, int, int]]:
    for i, item in enumerate(folded.schedules[k].items):
        span = run.spans[k][i]
        if isinstance(item, Wait):
            if span.ended > span.came:
                yield 2 * item.steps[0], _ns(span.came), _ns(span.ended)
        elif isinstance(item, Compute):
            marks = [*accumulate(item.seconds, initial=0.0)]
            at = _clock(run.pieces[k].get(i, ()))
            for step, start, stop in zip(item.steps, marks, marks[1:], strict=False):
                if step >= 0 and stop > start:
                    yield 2 * step + 1, _ns(at(start)), _ns(at(stop))
        else:
            yield 2 * item.steps[0] + 1, _ns(span.began if item.beside else span.came), _ns(span.ended)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _clock(pieces: Sequence[EvenProgress]):  # type: ignore[no-untyped-def]
    """The time at which so much work of a compute item was done."""
    done = [p.done for p in pieces]

    def at(work: float) -> float:
        if not pieces:
            return 0.0
        p = pieces[max(0, bisect_right(done, work) - 1)]
        return p.start + (p.stop - p.start) * ((work - p.done) / (p.then - p.done) if p.then > p.done else 0.0)

    return at
