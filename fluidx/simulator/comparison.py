"""A prediction beside a measured run: the operators whose times differ most."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..ir.errors import ExecutionError
from ..profiler import timeline
from ..profiler.profile import Profile


class Difference(NamedTuple):
    """An operator: its name, and its predicted and measured seconds in a run of a rank."""

    name: str
    predicted: float
    measured: float

    @property
    def seconds(self) -> float:
        return self.predicted - self.measured


class Comparison(NamedTuple):
    """The seconds of a run, predicted and measured, and the operators, those that differ most first."""

    predicted: float
    measured: float
    steps: tuple[Difference, ...]

    @property
    def error(self) -> float:
        """The relative error of the prediction: 0.1 is 10 % too slow."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        lines = [f"predicted {1e3 * self.predicted:.3f} ms, measured {1e3 * self.measured:.3f} ms: {self.error:+.1%}"]
        lines += [f"  {1e3 * d.seconds:+9.3f} ms  {1e3 * d.predicted:9.3f}  {1e3 * d.measured:9.3f}  {d.name}" for d in self.steps[:15]]
        if len(self.steps) > 15:
            lines.append(f"  ... and {len(self.steps) - 15} more")
        return "\n".join([lines[0], "  predicted - measured, predicted, measured", *lines[1:]])


def compare(predicted: Profile, measured: str | Path | Profile) -> Comparison:
    """Compare two runs by operator. `measured` is a Profile, or a timeline file of `fluidx trace`; the runs of the program with most calls
    count, by their median. Raises ExecutionError for a file that is no timeline, or of another program."""
    ours = _summed(timeline.events(predicted.runs))
    try:
        theirs = _summed(_events(measured))
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        why = f"an event of it has no {e}" if isinstance(e, KeyError) else str(e)
        raise ExecutionError(f"{measured} is no timeline of fluidx trace: {why}; fluidx trace FILE -o trace.json writes one") from None
    name = max(theirs, key=lambda n: len(theirs[n][1]), default=None)
    if name is None:
        raise ExecutionError(f"{measured} has no run of a program; fluidx trace writes one")
    mine = ours.get(name) or next(iter(ours.values()))
    other = theirs[name]
    if not set(mine[1]) & set(other[1]):
        raise ExecutionError(f"{measured} is a run of another program: no operator of {name!r} is one of the predicted run")
    names = [*dict.fromkeys([*mine[1], *other[1]])]
    found = [Difference(n, mine[1].get(n, 0.0), other[1].get(n, 0.0)) for n in names]
    return Comparison(mine[0], other[0], tuple(sorted(found, key=lambda d: -abs(d.seconds))))


def _events(measured: str | Path | Profile) -> Iterable[Mapping[str, Any]]:
    if isinstance(measured, Profile):
        return timeline.events(measured.runs)
    if not isinstance(measured, (str, os.PathLike)):
        raise ExecutionError(f"a measured run is a Profile, or the path of a timeline that fluidx trace wrote, got {measured!r}")
    try:
        data = json.loads(Path(measured).read_text(encoding="utf-8"))
    except OSError as e:
        raise ExecutionError(f"cannot read {measured}: {e.strerror}") from None
    except ValueError as e:
        raise ExecutionError(f"{measured} is no timeline of fluidx trace: {e}") from None
    found = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(found, list):
        raise ExecutionError(f"{measured} is no timeline of fluidx trace: it has no list of events")
    return found


def _summed(events: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, dict[str, float]]]:
    """{program: (median seconds of a run, {operator: mean seconds in a run})}."""
    lengths: dict[str, list[float]] = defaultdict(list)
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    program: dict[int, str] = {}
    for e in events:
        if e.get("ph") != "X":
            continue
        rank = e["tid"] % timeline.APART
        if e["cat"] == "run":
            program[rank] = e["args"]["program"]
            lengths[program[rank]].append(e["dur"] / 1e6)
        elif rank in program and not e["cat"].startswith("wait"):
            sums[program[rank]][f"{e['name']}: {e['args']['makes'] or e['args']['reads']}"] += e["dur"] / 1e6
    return {name: (sorted(all_)[len(all_) // 2], {n: s / len(all_) for n, s in sums[name].items()}) for name, all_ in lengths.items()}
