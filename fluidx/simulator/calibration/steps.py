"""Programs that run in turns under a profiler, on one device and on ranks that all compute at once, and the times of their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

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
from ..work import StepWork
from .probe import Clock, Speed
from .programs import CalibrationProgram, Feed
from .records import CurvePoint
from .traces import PlaceTimes, Statistic, relative_spread

_LEAST, _MOST = 2, 40  # runs of a program in a turn
_RUNS = 20  # of an empty program in a turn


class Running(NamedTuple):
    """A program that was started: a call that runs it once, and one that ends its executor."""

    run: Callable[[], Any]
    close: Callable[[], Any]


class StepTurns:
    """Programs whose steps are timed in turns: on one device without `places`, otherwise on all places at once. Each runs for about
    `seconds` in a turn. Programs that fail are left out."""

    def __init__(self, programs: Iterable[Callable[[], CalibrationProgram | None]], places: Sequence[Place] | None, seconds: float):
        self.seconds = seconds
        self.turns: list[PlaceTimes] = []
        self._running: list[Running] = []
        for make in programs:
            if (program := make()) is None:
                continue
            with suppress(ExecutionError, ValueError):  # a sample with longer axes
                started = running(program, places)
                try:
                    started.run()  # touches its memory for the first time
                    self._running.append(started)
                except BaseException:
                    started.close()
                    raise

    def turn(self, clock: Clock) -> None:
        found = PlaceTimes()
        for program in self._running:
            program.run()  # what ran before it has the caches
            profile = Profile()
            observe(profile, program.run, self.seconds, clock)
            found.add(timeline.events(profile.runs))
        self.turns.append(found)

    def close(self) -> None:
        for program in self._running:
            program.close()


class EmptyTurns:
    """Runs of a program that does nothing but fill one element."""

    def __init__(self, places: Sequence[Place] | None = None):
        self._running = running(_empty(), places)
        self.turns: list[float] = []

    def turn(self, clock: Clock) -> None:
        self._running.run()
        times = []
        for _ in range(_RUNS):
            start = clock()
            self._running.run()
            times.append(clock() - start)
        self.turns.append(sorted(times)[_RUNS // 2])

    def close(self) -> None:
        self._running.close()

    def point(self, speeds: Sequence[Speed], usual: Speed, statistic: Statistic) -> CurvePoint:
        """The time of a run. `speeds` are those of the machine in each turn."""
        times = [t / speed.over(usual) for t, speed in zip(self.turns, speeds, strict=True)]
        return CurvePoint(0, statistic(times), relative_spread(times))


def steps_in_turns(some: Iterable[tuple[StepTurns, Sequence[Speed]]], usual: Speed, statistic: Statistic) -> tuple[TimedStep, ...]:
    """The times of steps at the `usual` speed of the machine, from programs and the speed in each of their turns."""
    found = PlaceTimes()
    for programs, speeds in some:
        for turn, speed in zip(programs.turns, speeds, strict=True):
            found.add_turn(turn, statistic, partial(_slower, speed, usual))
    return found.steps(statistic)


def _slower(speed: Speed, usual: Speed, work: StepWork) -> float:
    return speed.over(usual, work.flops, work.nbytes)


def observe(profile: Profile, run: Callable[[], Any], seconds: float, clock: Clock, least: int = _LEAST) -> None:
    """Make runs for about so many seconds, seen by the profile."""
    observers.watchers.append(profile)
    try:
        end, count = clock() + seconds, 0
        while count < least or (clock() < end and count < _MOST):
            run()
            count += 1
    finally:
        observers.watchers.remove(profile)


def running(program: CalibrationProgram, places: Sequence[Place] | None) -> Running:
    """Start a program on one device, or on all places."""
    if places is None:
        one, scope = Executor(CPUPlace()), Scope()
        one.run(program.startup, scope=scope)
        return Running(lambda: one.run(program.main, feed=program.feed, fetch_list=program.fetch, scope=scope), one.close)
    ranks, feed = started_job(program, places)
    return Running(lambda: ranks.run(program.fetch, feed), ranks.close)


def _empty() -> CalibrationProgram:
    main = Program("empty")
    main.global_block().create_var("x", (1,), "float32", persistable=True)
    main.global_block().append_op("fill_constant", {}, {"Out": "x"}, {"shape": (1,), "value": 0.0})
    startup = Program("empty startup")
    startup.global_block().create_var("x", (1,), "float32", persistable=True)
    startup.global_block().append_op("fill_constant", {}, {"Out": "x"}, {"shape": (1,), "value": 0.0})
    return CalibrationProgram(main, startup, {}, [])


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
