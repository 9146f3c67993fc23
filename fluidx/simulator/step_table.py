"""StepTable: measured times of steps, and the times of other steps from those of the nearest ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import exp, log, sqrt
from operator import itemgetter
from typing import Any, NamedTuple

from .work import StepWork

_NEIGHBOURS = 4
_OTHER_TAIL, _OTHER_DTYPE, _OTHER_OP = 0.5, 1.0, 2.0  # distances of a step with another tail, another dtype, another operator
_FAR = 0.08  # spread that one unit of distance adds; a unit is a factor e in one size


class TimedStep(NamedTuple):
    """The time of some work: seconds, and their relative spread."""

    work: StepWork
    seconds: float
    spread: float


class Rates(NamedTuple):
    """The rates to which times are compared: operations and bytes a second, and the seconds of the least call."""

    flops: float
    nbytes: float
    call: float

    def seconds(self, work: StepWork) -> float:
        """What the work takes at these rates.

        >>> Rates(1e9, 1e9, 1e-6).seconds(StepWork("relu", "native", (), 1000, 2000))
        4e-06
        """
        return work.flops / self.flops + work.nbytes / self.nbytes + self.call


class Found(NamedTuple):
    """A time in a table: seconds, their relative spread, and how far the nearest measured step is; 0 is the step itself."""

    seconds: float
    spread: float
    distance: float


class StepTable:
    """Times of steps by their work.

    A step that is not in the table takes its time at the `rates`, times the factor by which the nearest steps of the same operators are
    slower or faster than these rates. Near is what has similar sizes: operations, bytes, and axes of the operands on a logarithmic scale.

    >>> rates = Rates(1e9, 1e9, 0.0)
    >>> works = [StepWork("relu", "native", (), n, 8 * n) for n in (1000, 2000, 4000)]
    >>> table = StepTable([TimedStep(works[0], 18e-6, 0.0), TimedStep(works[2], 72e-6, 0.0)], rates)
    >>> table.find(works[0]), round(1e6 * table.find(works[1]).seconds, 3)
    (Found(seconds=1.8e-05, spread=0.0, distance=0.0), 36.0)
    """

    def __init__(self, steps: Iterable[TimedStep], rates: Rates):
        self.rates = rates
        self.exact: dict[tuple, TimedStep] = {}
        self._groups: dict[Any, list[tuple[TimedStep, tuple[float, ...]]]] = defaultdict(list)
        for step in steps:
            w = step.work
            self.exact[w.key] = step
            placed = step, w.sizes
            for group in ((w.ops, w.kernel), w.first, w.kind):
                if group:
                    self._groups[group].append(placed)

    def find(self, work: StepWork, alike: bool = False) -> Found | None:
        """The time of some work, or None if no step is like it. `alike`: only from steps of the same operators."""
        if (known := self.exact.get(work.key)) is not None:
            return Found(known.seconds, known.spread, 0.0)
        near = self._near(work, alike)
        if not near:
            return None
        weights = [1 / (d**4 + 1e-6) for d, _ in near]
        logs = [log(step.seconds / self.rates.seconds(step.work)) for _, step in near]
        total = sum(weights)
        mean = sum(w * x for w, x in zip(weights, logs, strict=True)) / total
        scatter = sqrt(sum(w * (x - mean) ** 2 for w, x in zip(weights, logs, strict=True)) / total)
        distance, nearest = near[0]
        return Found(exp(mean) * self.rates.seconds(work), min(1.0, nearest.spread + scatter + _FAR * distance), distance)

    def _near(self, work: StepWork, alike: bool) -> list[tuple[float, TimedStep]]:
        """The nearest steps and their distances, nearest first."""
        sizes = work.sizes
        for group in ((work.ops, work.kernel), work.first, work.kind):
            if group and (some := self._groups.get(group)):
                near = [(_distance(work, sizes, step.work, its), step) for step, its in some]
                return sorted(near, key=itemgetter(0))[:_NEIGHBOURS]
            if alike:
                break
        return []


def _distance(work: StepWork, sizes: tuple[float, ...], other: StepWork, its: tuple[float, ...]) -> float:
    same = work.first == other.first and len(sizes) == len(its)
    apart = sqrt(sum((a - b) ** 2 for a, b in zip(sizes, its))) if same else abs(sizes[0] - its[0]) + abs(sizes[1] - its[1])
    return apart + _OTHER_TAIL * (work.ops != other.ops) + _OTHER_DTYPE * (work.dtype != other.dtype) + _OTHER_OP * (not same)
