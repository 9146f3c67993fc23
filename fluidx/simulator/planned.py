"""The result of a planner: the strategies that were considered, with what each was predicted to take, and why the first one is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..ir.errors import TranspileError
from ..ir.program import Program
from ..transpiler.cluster import Cluster, Mesh
from ..transpiler.strategies import Strategy
from ..transpiler.transpiler import DistributeTranspiler
from ..verify import Report
from .candidates import Candidate
from .closed_forms import ClosedForm
from .explanation import show_seconds
from .memory_limit import MemoryLimit, show_size

_SHOWN = 10


class Prediction(NamedTuple):
    """What a step of a candidate is predicted to take: seconds with their interval, those of compute and of exposed communication on the
    slowest rank, the bytes of the busiest rank on its device and in host memory, and what binds the step: "compute", "communication" or
    "memory"."""

    seconds: float
    low: float
    high: float
    compute: float
    exposed: float
    memory: int
    host_memory: int
    calibrated: bool


@dataclass(frozen=True)
class Considered:
    """A candidate of the planner. `form` is what its closed form says, `predicted` what a simulation said, None if it was not simulated.
    `refused` is the reason why it cannot be taken, "" if it can; `over` the bytes by which it does not fit. `exact`: no more exact
    simulation follows: every rank and every message were simulated, and not one rank for all, or `note` says why not."""

    candidate: Candidate
    form: ClosedForm | None = None
    predicted: Prediction | None = None
    refused: str = ""
    over: int = 0
    exact: bool = False
    note: str = ""

    @property
    def strategy(self) -> Strategy:
        return self.candidate.strategy

    @property
    def trainers(self) -> Cluster | Mesh:
        """The ranks, as `transpile` takes them."""
        return self.candidate.trainers

    @property
    def bound(self) -> float:
        """A lower bound of the time of a step, in seconds."""
        return 0.0 if self.form is None else self.form.seconds

    def binds(self, limit: MemoryLimit) -> str:
        """What binds a step: the exposed communication if it is more than a tenth of the step, otherwise compute; and memory if less than a
        tenth of the limit is left."""
        if self.predicted is None:
            return ""
        what = "communication" if self.predicted.exposed > 0.1 * self.predicted.seconds else "compute"
        return what + (", memory" if self.predicted.memory > 0.9 * limit.usable else "")

    def without_time(self, reason: str) -> Considered:
        """The same candidate, refused."""
        return replace(self, refused=reason)


@dataclass(frozen=True)
class Planned:
    """What `fx.plan` found. `strategy` is the chosen one, and prints as the call that makes it; `trainers` are the ranks for it.

    `considered` are all candidates: first those that were simulated exactly, the best first, then those for which one rank was simulated,
    then those that cannot win, by their bound, then those that are refused. `limit` is the memory of a device, `report` the proof of the
    chosen one.
    """

    program: Program
    startup: Program
    batch: int
    machine: str
    limit: MemoryLimit
    considered: tuple[Considered, ...]
    report: Report
    baseline: Considered | None  # data_parallel, if it fits

    @property
    def chosen(self) -> Considered:
        return self.considered[0]

    @property
    def strategy(self) -> Strategy:
        return self.chosen.strategy

    @property
    def trainers(self) -> Cluster | Mesh:
        return self.chosen.trainers

    @property
    def predicted(self) -> Prediction:
        """The prediction for the chosen strategy."""
        assert self.chosen.predicted is not None
        return self.chosen.predicted

    @property
    def candidates(self) -> list[Considered]:
        """The candidates that were simulated and fit, the best first."""
        return [c for c in self.considered if c.predicted is not None and not c.refused]

    @property
    def refused(self) -> list[Considered]:
        """The candidates that cannot be taken, each with its reason."""
        return [c for c in self.considered if c.refused]

    def transpile(self, number: int = 0) -> DistributeTranspiler:
        """The program, transpiled by the best candidate, or by another one of `candidates`, and verified."""
        there = len(self.candidates)
        if not isinstance(number, int) or not 0 <= number < there:
            raise TranspileError(f"there is no candidate {number!r}; those that fit are 0 to {there - 1}")
        one = self.candidates[number]
        made = DistributeTranspiler(one.strategy).transpile(
            program=self.program, startup_program=self.startup, trainers=one.trainers
        )  # fmt: skip
        made.verify()
        return made

    def why(self) -> str:
        """Why the chosen strategy is the first, in one sentence."""
        return why(self.chosen, self.baseline, self.limit)

    def __str__(self) -> str:
        return "\n".join([*_heading(self), *_rows(self.candidates[:_SHOWN], self.limit), self.why()])


def _heading(p: Planned) -> Iterator[str]:
    calibrated = "" if p.predicted.calibrated else ", not calibrated"
    yield f"plan of {p.program.label()} on {p.trainers.world_size} ranks of {p.machine}, batch {p.batch}{calibrated}"
    yield f"memory: {p.limit}"
    simulated = sum(c.predicted is not None for c in p.considered)
    refused = sum(bool(c.refused) for c in p.considered)
    rest = sum(c.predicted is None and not c.refused and not c.note for c in p.considered)
    yield (
        f"{len(p.considered)} candidates: {refused} refused, {rest} not simulated because their lower bound is no better, {simulated} "
        "simulated"
    )
    exact = sum(c.exact and not c.note for c in p.considered)
    yield f"of these {exact} exactly, every rank and every message (=); the others by one rank for all, collectives in closed form"
    noted: dict[str, list[str]] = {}
    for c in p.considered:
        if c.note:
            noted.setdefault(c.note, []).append(str(c.candidate))
    yield from (f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}: {note}" for note, names in noted.items())


def _rows(shown: Sequence[Considered], limit: MemoryLimit) -> Iterator[str]:
    table = [("", "step", "memory", "exposed", "binds", "strategy")]
    for k, one in enumerate(shown):
        found = one.predicted
        assert found is not None
        memory = show_size(found.memory) + (f" + {show_size(found.host_memory)} host" if found.host_memory else "")
        number = f"{k + 1}{'=' if one.exact and not one.note else ' '}"
        table.append(
            (number, show_seconds(found.seconds), memory, show_seconds(found.exposed), one.binds(limit), str(one.candidate))
        )  # fmt: skip
    widths = [max(len(row[k]) for row in table) for k in range(5)]
    for row in table:
        cells = [f"{cell:>{w}}" for cell, w in zip(row[:4], widths[:4], strict=True)]
        yield "  ".join([*cells, f"{row[4]:{widths[4]}}", row[5]]).rstrip()


def why(chosen: Considered, baseline: Considered | None, limit: MemoryLimit) -> str:
    """Why a candidate was chosen, against data_parallel."""
    found = chosen.predicted
    assert found is not None
    if baseline is None:
        return f"{chosen.candidate}: data_parallel was not among the candidates"
    if baseline.candidate == chosen.candidate:
        return f"{chosen.candidate}: no other candidate is predicted to be faster"
    other = baseline.predicted
    if other is None or baseline.refused:
        more = "" if baseline.form is None else f", which needs {show_size(baseline.form.memory - found.memory)} more,"
        return f"{chosen.candidate} against {baseline.candidate}{more} and is refused: {baseline.refused}"
    parts = [
        *_difference(other.seconds - found.seconds, "faster", "slower", show_seconds),
        *_difference(other.exposed - found.exposed, "less exposed", "more exposed", show_seconds),
        *_difference(other.compute - found.compute, "less compute", "more compute", show_seconds),
        *_difference(other.memory - found.memory, "less", "more", show_size),
    ]
    return f"{chosen.candidate} against {baseline.candidate}: {', '.join(parts) or 'the same'}"


def _difference(by: float, better: str, worse: str, show: Any) -> Iterator[str]:
    if by:
        yield f"{show(abs(by))} {better if by > 0 else worse}"
