"""StepTable: measured times of steps, and the times of other steps from those of the nearest ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import exp, log, sqrt
from operator import itemgetter
from typing import Any, NamedTuple

from .work import StepWork

_NEIGHBOURS = 4
_OTHER_TAIL, _OTHER_DTYPE, _OTHER_OP = 0.5, 1.0, 2.0  # distances of a step with another tail, another dtype, another operator
_OTHER_WINDOW = 1.0  # of a convolution with another filter or stride, which runs another algorithm
_SPAN = 8.0  # factor up to which the batch may differ for one step to tell of another
_NEARLY = 0.02  # operations may differ by this: a tail has some of its own
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
    Steps that differ in the length of the first axis alone, such as those of half and of double the batch, go before all others: the factor
    is that of the line through the next shorter and the next longer one in logarithms.

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
        if (between := self._along_batch(work, alike)) is not None:
            return between
        near = self._near(work, alike)
        if not near:
            return None
        weights = [1 / (d**4 + 1e-6) for d, _ in near]
        logs = [self._log_factor(step) for _, step in near]
        total = sum(weights)
        mean = sum(w * x for w, x in zip(weights, logs, strict=True)) / total
        scatter = sqrt(sum(w * (x - mean) ** 2 for w, x in zip(weights, logs, strict=True)) / total)
        distance, nearest = near[0]
        return Found(exp(mean) * self.rates.seconds(work), min(1.0, nearest.spread + scatter + _FAR * distance), distance)

    def _log_factor(self, step: TimedStep) -> float:
        return log(step.seconds / self.rates.seconds(step.work))

    def _along_batch(self, work: StepWork, alike: bool) -> Found | None:
        """The time between the next shorter and the next longer step, where all else is equal; with steps on one side only, after the
        nearest of these. A product that was not timed with its other operators takes after the same product with others."""
        if work.elementwise:
            return None
        groups: list[Any] = [(work.ops, work.kernel), *([work.first] if work.product and not alike else [])]
        for k, group in enumerate(groups):
            lengths = [(x, step) for step, _ in self._groups.get(group, ()) if (x := batch_ratio(step.work, work)) is not None]
            if (found := self._between(work, lengths, k * _OTHER_TAIL)) is not None:
                return found
        return None

    def _between(self, work: StepWork, lengths: Sequence[tuple[float, TimedStep]], aside: float) -> Found | None:
        """The time between steps of these relative lengths, which are `aside` by so much distance."""
        shorter = max((x for x in lengths if 1 / _SPAN <= x[0] <= 1), key=itemgetter(0), default=None)
        longer = min((x for x in lengths if 1 <= x[0] <= _SPAN), key=itemgetter(0), default=None)
        known = sorted([x for x in (shorter, longer) if x is not None], key=lambda x: abs(log(x[0])))
        if not known:
            return None
        (length, nearest), (other, next_) = known[0], known[-1]
        at, beyond = self._log_factor(nearest), self._log_factor(next_)
        part = log(length) / log(length / other) if length != other else 0.0
        distance = abs(log(length)) + aside
        spread = nearest.spread + part * abs(beyond - at) + _FAR * distance
        return Found(exp(at + part * (beyond - at)) * self.rates.seconds(work), min(1.0, spread), distance)

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
    if same and work.kind == "convolution":
        apart += _OTHER_WINDOW * (work.window != other.window)
    return apart + _OTHER_TAIL * (work.ops != other.ops) + _OTHER_DTYPE * (work.dtype != other.dtype) + _OTHER_OP * (not same)


def batch_ratio(work: StepWork, other: StepWork) -> float | None:
    """How many times as long the first axis of some work's operands is as that of another's, if all else is equal; None if more differs.

    >>> from fluidx.ir.types import TensorType
    >>> half, whole, wide = (StepWork("relu", "native", (TensorType("float32", s),), s[0] * s[1], 0) for s in ((4, 6), (8, 6), (8, 12)))
    >>> batch_ratio(half, whole), batch_ratio(whole, half), batch_ratio(wide, whole), batch_ratio(half, half)
    (0.5, 2.0, None, 1.0)
    """
    found = 1.0
    for mine, its in zip(work.types[:2], other.types[:2]):
        if mine.dtype != its.dtype or len(mine.shape) != len(its.shape):
            return None
        if mine.shape == its.shape:
            continue
        if mine.shape[1:] != its.shape[1:] or not its.numel or found not in (1.0, longer := mine.shape[0] / its.shape[0]):
            return None
        found = longer
    flops = work.flops / other.flops if other.flops else found
    return found if abs(flops / found - 1) < _NEARLY else None
