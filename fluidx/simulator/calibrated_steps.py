"""CalibratedSteps: costs of steps from the tables of a calibration and from the profiles beside it."""

from __future__ import annotations

from statistics import median

from ..hardware.records import Hardware
from ..ir.errors import FluidxError
from .calibration.records import Measured
from .estimate import CostEstimate
from .step_table import Found, Rates, StepTable, TimedStep
from .work import StepWork

_NEAR = 2.0  # up to this distance the steps of a profile are better than measured ones: those of half and of double the batch are nearer
_UNLIKE = 0.1  # so much farther may a step be that was taken while all ranks computed


class CalibratedSteps:
    """The costs of steps while `ranks` ranks compute at once. A step of a profile goes before the same step of the calibration, and a step
    that was timed before one from its neighbours. What was timed on one rank only is slowed down as the nearest steps are. Every spread has
    that of the machine's own speed in it, which may be another when a program runs."""

    def __init__(self, hardware: Hardware, measured: Measured, ranks: int):
        device = hardware.device
        self.name, self.drift = hardware.name, measured.spread
        self.rates = Rates(device.flops["float32"].value, device.bandwidth.value, device.call.value)
        n = min(ranks, measured.machine.cores)
        if n not in measured.steps:
            known = " and ".join(map(str, sorted(measured.steps)))
            raise FluidxError(f"{self.name} has steps of {known} ranks at once, not of {n}; run `fluidx calibrate -n {n}`")
        self.alone = self._table(measured.steps[1])
        self.busy = self.paired = None
        self.slowdown = 1.0  # of a step that is like no other, while all ranks compute
        if n > 1:
            self.busy = busy = self._table(measured.steps[n])
            both = [s for s in measured.steps[1] if s.work.key in busy.exact]
            self.paired = self._table(both)
            self.slowdown = max(1.0, median([busy.exact[s.work.key].seconds / s.seconds for s in both] or [1.0]))
        self.profile = self._table(s for p in measured.profiles if p.ranks == ranks for s in p.steps)
        self.profile_alone = self._table(s for p in measured.profiles if p.ranks == 1 != ranks for s in p.steps)

    def _table(self, steps: object) -> StepTable:
        return StepTable(steps, self.rates)  # type: ignore[arg-type]

    def estimate(self, work: StepWork) -> CostEstimate:
        """The cost of some work. Raises FluidxError if nothing like it was timed."""
        return self._estimate(work).wider(self.drift)

    def _estimate(self, work: StepWork) -> CostEstimate:
        key = work.key
        if (known := self.profile.exact.get(key)) is not None:
            return _exactly(known, "profile")
        if (known := self.profile_alone.exact.get(key)) is not None:
            return self._slowed(Found(known.seconds, known.spread, 0.0), work, "profile")
        if (known := (self.busy or self.alone).exact.get(key)) is not None:
            return _exactly(known, "measured")
        return self._interpolated(work)

    def _interpolated(self, work: StepWork) -> CostEstimate:
        if (near := self.profile.find(work, alike=True)) is not None and near.distance <= _NEAR:
            return CostEstimate(near.seconds, near.spread, "profile")
        if (near := self.profile_alone.find(work, alike=True)) is not None and near.distance <= _NEAR:
            return self._slowed(near, work, "profile")
        alone = self.alone.find(work)
        if self.busy is not None:
            busy = self.busy.find(work, alike=True)
            if busy is not None and (alone is None or busy.distance <= alone.distance + _UNLIKE):
                return CostEstimate(busy.seconds, busy.spread, "interpolated")
            if alone is not None:
                return self._slowed(alone, work, "interpolated")
        if alone is None:
            raise FluidxError(
                f"op {work.first} has no cost: neither {self.name} nor a profile beside it has a step like {work.ops} ({work.kernel}); "
                "run a program that has it under `fluidx trace`, and give the timeline to `fluidx calibrate --from`"
            )
        return CostEstimate(alone.seconds, alone.spread, "measured" if not alone.distance else "interpolated")

    def _slowed(self, found: Found, work: StepWork, source: str) -> CostEstimate:
        """A time of one rank alone, as it is while all compute."""
        factor, spread = 1.0, found.spread
        if self.busy is not None and self.paired is not None:
            with_others, without = self.busy.find(work), self.paired.find(work)
            if with_others is None or without is None:
                factor, spread = self.slowdown, spread + 0.1
            else:
                factor = max(1.0, with_others.seconds / without.seconds)
        return CostEstimate(found.seconds * factor, spread, source)


def _exactly(step: TimedStep, source: str) -> CostEstimate:
    return CostEstimate(step.seconds, step.spread, source)


