"""Costs: the seconds of a step, from the sheet of a device or from a calibration of this machine."""

from __future__ import annotations

from itertools import count
from typing import Any

from ..executor.plan.records import Plan, Step
from ..hardware.records import Hardware
from ..ir.errors import FluidxError
from ..ir.opdef import opdef
from .calibrated_steps import CalibratedSteps
from .calibration.machine import CalibratedMachine
from .calibration.records import Measured
from .estimate import CostEstimate
from .sheet import Sheet
from .work import FREE, StepWork, communicates, step_key, work_of

NOTHING = CostEstimate(0.0, 0.0, "measured")
_MOST = 1 << 17  # estimates that are kept
_known: dict[tuple, CostEstimate] = {}  # of all hardware in this process, by its number and the key of the step
_numbers: list[tuple[Hardware, int]] = []
_next = count(1)
_read: dict[int, Measured] = {}  # by the number of the hardware
_steps: dict[tuple[int, int], CalibratedSteps] = {}  # and by the ranks at once


class Costs:
    """The costs of steps on a hardware, while `ranks_at_once` ranks compute on one host. Estimates are kept for the whole process, by
    kernel, operators, attributes and local types. `backend` is the kind of ranks, where a calibration has several.

    >>> import fluidx as fx
    >>> from fluidx.executor.plan.dry_run import dry_plan
    >>> from fluidx.hardware.records import Device, Figure, Hardware, LinkFigures
    >>> figure = lambda value: Figure(value, "an example")
    >>> device = Device("toy", "gpu", figure(1e9), {"float32": figure(1e12)}, figure(0.5), figure(1e9), figure(0.5), figure(1e-6),
    ...                 figure(1.0), figure(0.0))
    >>> toy = Hardware("toy", "an example", 1, 1, device, LinkFigures(figure(1e-6), figure(1e9)), None, figure(1e9))
    >>> main = fx.Program("double")
    >>> with fx.program_guard(main):
    ...     y = fx.layers.scale(fx.data("x", [-1, 125], "float32"), scale=2.0)
    >>> planned = dry_plan(main, batch=500)  # 250,000 bytes read and as many written, at 0.5e9 a second, and a call of 1 us
    >>> Costs(toy).step(planned, planned.steps[0])
    CostEstimate(seconds=0.001001, spread=0.0, source='sheet')
    """

    def __init__(self, hardware: Hardware, ranks_at_once: int = 1, backend: str | None = None):
        self.hardware, self.ranks_at_once = hardware, ranks_at_once
        self._number = _number_of(hardware)
        self._source: Sheet | CalibratedSteps = Sheet(hardware)
        self.empty_run = hardware.device.call.value  # seconds of a run of an empty program
        if hardware.measured is not None:
            measured = tables(hardware)
            key = self._number, ranks_at_once
            if key not in _steps:
                if len(_steps) >= 16:
                    _steps.clear()
                _steps[key] = CalibratedSteps(hardware, measured, ranks_at_once)
            self._source = _steps[key]
            self.empty_run = measured.run(backend, ranks_at_once, hardware.name).seconds

    def around(self, plan: Plan) -> CostEstimate:
        """What a run takes beside its steps: starting it, and, where copies were measured, copying feeds in and fetches out."""
        if self.hardware.measured is None:
            return CostEstimate(self.empty_run, 0.0, "sheet")
        types = [plan.values[n].type for n in (*plan.feeds, *plan.fetches) if n in plan.values]
        copies = [self.of(StepWork("assign", "native", (t, t), 0, 2 * t.nbytes)) for t in types]
        return _sum([CostEstimate(self.empty_run, 0.0, "measured"), *copies])

    def program(self, plan: Plan) -> CostEstimate:
        """What a run on one device takes."""
        return _sum([self.around(plan), *(self.step(plan, s) for s in plan.steps)])

    def step(self, plan: Plan, step: Step) -> CostEstimate:
        """The cost of a step that computes. Raises FluidxError for a step that communicates, and for one that has no cost."""
        if step.kernel in FREE:
            return NOTHING
        key = self._number, self.ranks_at_once, step_key(step, plan.values)
        found = _known.get(key)
        if found is None:
            found = self._estimate(plan, step)
            if step.kernel != "control":
                if len(_known) >= _MOST:
                    _known.clear()
                _known[key] = found
        return found

    def _estimate(self, plan: Plan, step: Step) -> CostEstimate:
        if communicates(step):
            raise FluidxError(f"op {step.op.type} communicates: its cost is one of links, not of a device")
        if step.kernel == "control" and (inner := step.op.sub_blocks()):
            return self._branches(plan, step, inner)
        return self.of(work_of(step, plan.values))

    def of(self, work: StepWork) -> CostEstimate:
        """The cost of some work."""
        return self._source.estimate(work)

    def _branches(self, plan: Plan, step: Step, inner: Any) -> CostEstimate:
        """A branch costs what its dearest block costs. The rounds of a loop are not known."""
        if opdef(step.op.type).control.repeats:
            raise FluidxError(
                f"op {step.op.type} has no cost: how often its block runs is known at run time only; simulate the program that its block "
                "is, or write the rounds out"
            )
        found = [_sum([self.step(plan, s) for s in plan.bodies[idx]]) for idx in inner]
        return max(found)


def tables(hardware: Hardware) -> Measured:
    """The tables of a calibration, read once. Raises FluidxError if it is of another machine."""
    number = _number_of(hardware)
    if number not in _read:
        if len(_read) >= 16:
            _read.clear()
        _read[number] = Measured.from_json(hardware.measured, hardware.name)
    _read[number].machine.check(CalibratedMachine.here(), hardware.name)
    return _read[number]


def _sum(some: list[CostEstimate]) -> CostEstimate:
    total = sum(e.seconds for e in some)
    spread = sum(e.seconds * e.spread for e in some) / total if total else 0.0
    return CostEstimate(total, spread, next((e.source for e in some if e.source != "measured"), "measured"))


def _number_of(hardware: Hardware) -> int:
    """A number that equal hardware has in common."""
    for k, (known, number) in enumerate(_numbers):
        if known is hardware or known == hardware:
            if k:
                _numbers.insert(0, _numbers.pop(k))
            return number
    _numbers.insert(0, (hardware, next(_next)))
    del _numbers[16:]
    return _numbers[0][1]
