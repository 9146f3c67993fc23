"""Observers of runs, step by step: profilers, FLUIDX_CHECK_NAN and the trace of FLUIDX_DEBUG=4; and listeners at the end of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ... import config
from ...ir.errors import ExecutionError
from ...ir.operator import Operator

if TYPE_CHECKING:
    from ...ir.program import Program
    from .bound_plan import BoundPlan
    from .call_descriptions import RemotePlan

After = Callable[[int, Operator, int, int], None]  # (number of the call, operator, start and stop in ns), called after every step

clock: Callable[[], int] = time.perf_counter_ns  # monotonic, and the same for all threads of the process


Times = list[tuple[int, int, int]]  # for each step of a run: number of the call, start and stop in ns


class Watcher(Protocol):
    """An observer of runs, such as a profiler. `observe(bound, rank)` returns a callback for the steps of a run, or None to skip the run.
    `wants(program, rank)`: would it observe a run of this program? Steps of ranks in other processes are reported when the run is over."""

    def wants(self, program: Program, rank: int | None) -> bool: ...

    def observe(self, bound: BoundPlan | RemotePlan, rank: int | None) -> After | None: ...


watchers: list[Watcher] = []

# callbacks after each run of an executor: name of the program, number of the run, names of the fetches and their global values (None for a
# value that each rank has of its own)
listeners: list[Callable[[str, int, Sequence[str], Sequence[Any]], None]] = []


class ObserverSettings(NamedTuple):
    """The observers that the environment asks for. Read once in a run, because reading the environment takes a microsecond."""

    check_nan: bool
    trace: bool

    @property
    def unfused(self) -> bool:
        """Must every operator be a separate step? The NaN check and the trace need it; a profiler does not."""
        return self.check_nan or self.trace


def settings() -> ObserverSettings:
    return ObserverSettings(config.check_nan(), config.debug_level() >= 4)


def notify_listeners(program: str, step: int, names: Sequence[str], values: Sequence[Any]) -> None:
    """Call the listeners at the end of a run."""
    for hear in listeners:
        hear(program, step, names, values)


def any_wants(programs: Sequence[Program]) -> bool:
    """Does a watcher want to observe a run of these rank programs?"""
    return any(w.wants(program, rank) for w in watchers for rank, program in enumerate(programs))


def report_times(bound: RemotePlan, rank: int, times: Times) -> None:
    """Report the step times of a run in another process to the watchers."""
    for w in watchers:
        if (after := w.observe(bound, rank)) is not None:
            for i, start, stop in times:
                after(i, bound.calls[i].op, start, stop)


def after_step(bound: BoundPlan, settings: ObserverSettings, rank: int | None = None, times: Times | None = None) -> After | None:
    """The callback after each step of the run that begins; None without observers. `rank` is None on one device. If `times` is given, the
    step times are appended to it, for `report_times`."""
    if times is not None:
        found: list[After] = [lambda i, op, start, stop: times.append((i, start, stop))]
    else:
        found = [after for w in watchers if (after := w.observe(bound, rank)) is not None] if watchers else []
    if settings.trace:
        found.append(_trace(bound, "" if rank is None else f"rank {rank}: "))
    if settings.check_nan:
        found.append(_check_nan(bound))
    return found[0] if len(found) == 1 else _all(found) if found else None


def _all(found: Sequence[After]) -> After:
    def after(i: int, op: Operator, start: int, stop: int) -> None:
        for one in found:
            one(i, op, start, stop)

    return after


def _trace(bound: BoundPlan, prefix: str) -> After:
    def after(i: int, op: Operator, start: int, stop: int) -> None:
        shapes = ", ".join(f"%{n}{list(bound.arrays[n].shape)}" for n in op.output_arg_names if n in bound.arrays)
        print(f"{prefix}{i:5d} {(stop - start) / 1e3:9.1f} us  {op.type} -> {shapes}", flush=True)

    return after


def _check_nan(bound: BoundPlan) -> After:
    def after(i: int, op: Operator, start: int, stop: int) -> None:
        for n in op.output_arg_names:
            a = bound.arrays.get(n)
            xp = np if type(a) is np.ndarray else bound.xp
            # a value that only another rank holds is undefined here
            if a is not None and n not in bound.plan.absent and a.dtype.kind not in "iub" and not xp.isfinite(a).all():
                bad = "NaN" if xp.isnan(a).any() else "infinity"
                raise ExecutionError(f"op {op.type} made {'a' if bad == 'NaN' else 'an'} {bad} in {n!r}")

    return after
