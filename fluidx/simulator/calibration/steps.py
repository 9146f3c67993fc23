"""Run programs under a profiler, on one device and on ranks that all compute at once, and take the times of their steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...executor.executor import Executor
from ...executor.places import CPUPlace, Place
from ...executor.ranks.parallel_executor import ParallelExecutor
from ...executor.run import observers
from ...executor.scope import Scope
from ...ir.program import ProgramPair
from ...profiler import timeline
from ...profiler.profile import Profile
from ..step_table import TimedStep
from .programs import CalibrationProgram
from .traces import Statistic, timed_steps

Clock = Callable[[], float]
_LEAST, _MOST = 5, 40  # runs of a program


def steps_of(
    programs: Iterable[Callable[[], CalibrationProgram]], places: Sequence[Place] | None, seconds: float, statistic: Statistic,
    clock: Clock = time.perf_counter,
) -> list[TimedStep]:  # fmt: skip
    """The times of the steps of programs. Each runs for about `seconds`: on one device without `places`, otherwise on all places at once.
    Steps whose spread is above 10 % run once more for as long."""
    profile = Profile()
    for make in programs:
        program = make()
        run, close = _runner(program, places)
        try:
            run()  # touches its memory for the first time
            observed = Profile()
            _observe(observed, run, seconds, clock)
            if _uncertain(observed, statistic):
                _observe(observed, run, seconds, clock)
            profile.runs += observed.runs
        finally:
            close()
    return list(timed_steps(timeline.events(profile.runs), statistic).steps)


def _uncertain(profile: Profile, statistic: Statistic) -> bool:
    """Do steps with a spread above 10 % take a tenth of the time or more?"""
    steps = timed_steps(timeline.events(profile.runs), statistic).steps
    return sum(s.seconds for s in steps if s.spread > 0.1) > 0.1 * sum(s.seconds for s in steps)


def _observe(profile: Profile, run: Callable[[], Any], seconds: float, clock: Clock) -> None:
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
    pairs = [ProgramPair(program.main, program.startup)] * len(places)
    ranks = ParallelExecutor(pairs, places=places, verify=False)
    ranks.run_startup()
    return lambda: ranks.run(program.fetch, program.feed, return_merged=False), ranks.close
