"""Times of steps from a timeline of the profiler, saved or not."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...ir.errors import FluidxError
from ..step_table import TimedStep
from ..work import StepWork
from .records import tensor_type

Statistic = Callable[[Sequence[float]], float]
_value = re.compile(r"%\S+ ([a-z0-9]+\[[0-9,]*\])")


class TracedSteps(NamedTuple):
    """The steps that compute in a timeline, and how many ranks ran at once."""

    steps: tuple[TimedStep, ...]
    ranks: int


class PlaceTimes:
    """The seconds of every place in the programs of a timeline, by work: {key of the work: {place: seconds}}."""

    def __init__(self) -> None:
        self.times: dict[tuple, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.works: dict[tuple, StepWork] = {}
        self.rows: set[int] = set()

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take the steps that compute from the events of a timeline."""
        at: dict[int, tuple[str, int]] = {}
        for e in events:
            if e.get("ph") != "X" or not isinstance(args := e.get("args"), Mapping):
                continue
            row, kind = e["tid"], str(e.get("cat", "")).partition(",")[0]
            if kind == "run":
                at[row] = str(e["name"]).rpartition(", run ")[0], 0
            elif kind == "operator" and args["body"] not in ("control", "wait"):
                program, number = at.get(row, ("", 0))
                at[row] = program, number + 1
                work = _work(str(e["name"]), args)
                self.works[work.key] = work
                self.times[work.key][program, number, row].append(e["dur"] / 1e6)
        self.rows |= set(at)

    def add_turn(self, turn: PlaceTimes, statistic: Statistic, slower: Callable[[StepWork], float]) -> None:
        """Add one time for each place of a turn, at the speed of a machine that is `slower` by a factor."""
        self.works.update(turn.works)
        for key, places in turn.times.items():
            factor = slower(turn.works[key])
            for place, times in places.items():
                self.times[key][place].append(statistic(times) / factor)

    def steps(self, statistic: Statistic) -> tuple[TimedStep, ...]:
        """The times of steps. Every place is timed by itself; places of equal work are averaged: one may find its operands in a cache, and
        another not."""
        return tuple([_timed(self.works[key], places.values(), statistic) for key, places in self.times.items()])


def timed_steps(events: Iterable[Mapping[str, Any]], statistic: Statistic = statistics.median) -> TracedSteps:
    """The times of steps in the events of a timeline.

    >>> event = {"ph": "X", "cat": "operator", "name": "relu", "tid": 0, "dur": 3.0,
    ...          "args": {"body": "native", "reads": "%x f32[4]", "makes": "%y f32[4]", "bytes": 32, "flops": 4}}
    >>> timed_steps([event]).steps[0].seconds
    3e-06
    """
    found = PlaceTimes()
    found.add(events)
    return TracedSteps(found.steps(statistic), max(1, len(found.rows)))


def read_trace(path: str | Path, statistic: Statistic = statistics.median) -> TracedSteps:
    """The times of steps in a file that `fluidx trace` or `profile.save` wrote. Raises FluidxError for any other file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        found = timed_steps(data["traceEvents"], statistic)
    except OSError as e:
        raise FluidxError(f"timeline {path} cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise FluidxError(
            f"{path} is not a timeline of fluidx ({type(e).__name__}: {e}); fluidx trace FILE -o {path}, or profile.save(path), writes one"
        ) from None
    if not found.steps:
        raise FluidxError(f"timeline {path} has no steps that compute; profile a run of a program, not only its startup")
    return found


def _timed(work: StepWork, places: Iterable[Sequence[float]], statistic: Statistic) -> TimedStep:
    each = [(statistic(times), relative_spread(times)) for times in places]
    total = sum(seconds for seconds, _ in each)
    spread = sum(seconds * apart for seconds, apart in each) / total if total else 0.0
    return TimedStep(work, total / len(each), spread)


def relative_spread(times: Sequence[float]) -> float:
    """Half of the distance between the quartiles, relative to the median; 1 at most.

    >>> relative_spread([1.0, 2.0, 3.0, 4.0, 5.0])
    0.5
    """
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return min(1.0, (high - low) / (2 * middle)) if middle else 0.0


def _work(ops: str, args: Mapping[str, Any]) -> StepWork:
    types = tuple([tensor_type(t) for side in ("reads", "makes") for t in _value.findall(args[side])])
    return StepWork(ops, args["body"], types, args["flops"], args["bytes"])
