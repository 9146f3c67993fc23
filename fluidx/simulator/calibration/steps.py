"""Run programs under a profiler, on one device and on ranks that all compute at once, and take the times of their steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ...executor.executor import Executor
from ...executor.places import CPUPlace, Place
from ...executor.ranks.parallel_executor import ParallelExecutor
from ...executor.run import observers
from ...executor.scope import Scope
from ...ir.errors import ExecutionError
from ...ir.program import Program, ProgramPair
from ...profiler import timeline
from ...profiler.profile import Profile
from ...transpiler.transpiler import DistributeTranspiler
from ..step_table import TimedStep
from .programs import CalibrationProgram, Feed
from .records import CurvePoint
from .traces import Statistic, relative_spread, timed_steps

Clock = Callable[[], float]
_LEAST, _MOST = 5, 40  # runs of a program


def steps_of(
    programs: Iterable[Callable[[], CalibrationProgram | None]], places: Sequence[Place] | None, seconds: float, statistic: Statistic,
    clock: Clock = time.perf_counter,
) -> list[TimedStep]:  # fmt: skip
    """The times of the steps of programs. Each runs for about `seconds`: on one device without `places`, otherwise on all places at once.
    A program with steps whose spread is above 10 % runs once more for as long. Programs that fail are left out."""
    profile = Profile()
    for make in programs:
        if (program := make()) is not None:
            with suppress(ExecutionError, ValueError):  # a sample with longer axes
                profile.runs += _observed(program, places, seconds, statistic, clock).runs
    return list(timed_steps(timeline.events(profile.runs), statistic).steps)


def _observed(
    program: CalibrationProgram, places: Sequence[Place] | None, seconds: float, statistic: Statistic, clock: Clock
) -> Profile:
    profile = Profile()
    run, close = _runner(program, places)
    try:
        run()  # touches its memory for the first time
        observe(profile, run, seconds, clock)
        if seconds and _uncertain(profile, statistic):
            observe(profile, run, seconds, clock)
    finally:
        close()
    return profile


def one_device_run(statistic: Statistic, clock: Clock, count: int = 100) -> CurvePoint:
    """The time of a run on one device that fills one element."""
    main = Program("empty")
    main.global_block().create_var("x", (1,), "float32", persistable=True)
    main.global_block().append_op("fill_constant", {}, {"Out": "x"}, {"shape": (1,), "value": 0.0})
    run, close = _runner(CalibrationProgram(main, Program("empty startup"), {}, []), None)
    try:
        times = timed_runs(run, clock, count)
    finally:
        close()
    return CurvePoint(0, statistic(times), relative_spread(times))


def timed_runs(run: Callable[[], Any], clock: Clock, count: int) -> list[float]:
    """The seconds of runs, without the first fifth of them."""
    times = []
    for _ in range(count):
        start = clock()
        run()
        times.append(clock() - start)
    return times[count // 5 :]


def _uncertain(profile: Profile, statistic: Statistic) -> bool:
    """Do steps with a spread above 10 % take a tenth of the time or more?"""
    steps = timed_steps(timeline.events(profile.runs), statistic).steps
    return sum(s.seconds for s in steps if s.spread > 0.1) > 0.1 * sum(s.seconds for s in steps)


def observe(profile: Profile, run: Callable[[], Any], seconds: float, clock: Clock) -> None:
    """Make runs for about so many seconds, seen by the profile."""
    observers.watchers.append(profile)
    try:
        end, count = clock() + seconds, 0
        while count < _LEAST or (clock() < end and count < _MOST):
            run()
            count += 1
    finally:
        observers.watchers.remove(profile)


def _runner(program: CalibrationProgram, places: Sequence[Place] | None) -> tuple[Callable[[], Any], Callable[[], None]]:
    """A call that runs the program once, and one that ends its executor."""
    if places is None:
        one, scope = Executor(CPUPlace()), Scope()
        one.run(program.startup, scope=scope)
        return lambda: one.run(program.main, feed=program.feed, fetch_list=program.fetch, scope=scope), one.close
    ranks, feed = started_job(program, places)
    return lambda: ranks.run(program.fetch, feed), ranks.close


def started_job(program: CalibrationProgram, places: Sequence[Place]) -> tuple[ParallelExecutor, Feed]:
    """An executor whose ranks each do what one device does, after its startup program, and the feed of all ranks."""
    programs, n = _of_ranks(program, len(places)), len(places)
    ranks = ParallelExecutor(programs, places=places, verify=False)
    ranks.run_startup()
    return ranks, {name: np.concatenate([a] * n) for name, a in program.feed.items()}


def _of_ranks(program: CalibrationProgram, n: int) -> Any:
    """Programs of ranks that each compute what one device does. What is trained is trained by all: gradients come from the caches of other
    cores, and batch normalization is split as it is in jobs."""
    if program.feed:
        made = DistributeTranspiler("data_parallel")
        return made.transpile(program=program.main, startup_program=program.startup, trainers=n)
    for p in (program.main, program.startup):
        p.groups = {"all": (tuple(range(n)),)}
    return [ProgramPair(program.main, program.startup)] * n
