"""The probe: a product and a copy, whose times say how fast this machine is at a moment, and figures of a calibration at another speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ...hardware.records import Figure, Hardware, LinkFigures
from ...ir.errors import FluidxError
from ...profiler.ceilings import PRODUCT_FLOPS, product
from ..step_table import TimedStep
from .records import CurvePoint, Measured, ProbedSpeed
from .traces import relative_spread

Clock = Callable[[], float]
_BYTES = 1 << 23  # of the copy, which reads as many as it writes
_TIMES = 4  # of a look, of which the median counts
UNSTEADY = 0.1  # a spread of the probe above this is worth a warning


class Speed(NamedTuple):
    """The seconds that the probe's product and its copy take.

    Work takes as much longer as its operations and bytes do: here a product takes twice as long, and a copy as long as before.

    >>> now, then = Speed(2e-3, 1e-3), Speed(1e-3, 1e-3)
    >>> now.over(then, 1000, 0), now.over(then, 0, 1000), now.over(then)
    (2.0, 1.0, 2.0)
    """

    product: float
    copy: float

    def over(self, other: Speed, flops: float = 0, nbytes: float = 0) -> float:
        """The factor by which some work takes longer at this speed than at the other one. A call without work goes with products."""
        mine, its = ((flops or not nbytes) / PRODUCT_FLOPS * s.product + nbytes / (2 * _BYTES) * s.copy for s in (self, other))
        return mine / its if its else 1.0


class Probe:
    """A product and a copy that are timed whenever it is called."""

    def __init__(self, clock: Clock = time.perf_counter):
        source, target = np.ones(_BYTES, np.uint8), np.zeros(_BYTES, np.uint8)
        self._clock, self._product, self._copy = clock, product(), partial(np.copyto, target, source)

    def __call__(self) -> Speed:
        return Speed(self._timed(self._product), self._timed(self._copy))

    def _timed(self, call: Callable[[], object]) -> float:
        call()
        times = []
        for _ in range(_TIMES):
            start = self._clock()
            call()
            times.append(self._clock() - start)
        return statistics.median(times)


def middle(speeds: Sequence[Speed]) -> Speed:
    """The median of the products and that of the copies."""
    return Speed(*map(statistics.median, zip(*speeds, strict=True)))


def summed_up(speeds: Sequence[Speed]) -> ProbedSpeed:
    """The speed of a machine while it was calibrated, and its spread: that of the product or of the copy, which is larger.

    >>> summed_up([Speed(1e-3, 4e-3)] * 3)
    ProbedSpeed(product=0.001, copy=0.004, spread=0.0)
    """
    return ProbedSpeed(*middle(speeds), max(relative_spread(times) for times in zip(*speeds, strict=True)))


def speed_now(seconds: float = 1.0, clock: Clock = time.perf_counter) -> Speed:
    """The speed of this machine, from looks for about so many seconds."""
    probe, end = Probe(clock), clock() + seconds
    found: list[Speed] = []
    while len(found) < 3 or clock() < end:
        found.append(probe())
    return middle(found)


class SpeedCheck(NamedTuple):
    """The speed of this machine when it was calibrated, and now."""

    then: ProbedSpeed
    now: Speed
    date: str

    def __str__(self) -> str:
        then = Speed(self.then.product, self.then.copy)
        products, copies = self.now.over(then, 1, 0), self.now.over(then, 0, 1)
        return (
            f"this machine is now {_slower(products)} in products and {_slower(copies)} in copies than when it was calibrated on "
            f"{self.date}; then its speed varied by {self.then.spread:.0%}"
        )


def _slower(factor: float) -> str:
    """
    >>> _slower(1.25), _slower(0.8)
    ('1.25 times slower', '1.25 times faster')
    """
    return f"{factor:.2f} times slower" if factor >= 1 else f"{1 / factor:.2f} times faster"


def check_speed(hardware: Hardware, now: Speed | None = None) -> SpeedCheck:
    """How fast this machine is `now`, which is measured in about a second, beside its speed when it was calibrated. Raises FluidxError if
    the machine is not calibrated, or was calibrated without a probe."""
    measured, then = _probed(hardware)
    return SpeedCheck(then, speed_now() if now is None else now, measured.machine.date)


def at_speed(hardware: Hardware, now: Speed) -> Hardware:
    """The figures of a calibrated machine at another speed: those of steps by their operations and bytes, those of collectives as copies.
    Profiles stay as they are: the speed at which they were taken is not known."""
    measured, probed = _probed(hardware)
    then = Speed(probed.product, probed.copy)
    product_factor, copy_factor = now.over(then, 1, 0), now.over(then, 0, 1)

    def step(s: TimedStep) -> TimedStep:
        return s._replace(seconds=s.seconds * now.over(then, s.work.flops, s.work.nbytes))

    def point(p: CurvePoint, factor: float) -> CurvePoint:
        return p._replace(seconds=p.seconds * factor)

    changed = replace(
        measured,
        steps={n: tuple(map(step, some)) for n, some in measured.steps.items()},
        runs={kind: {n: point(p, product_factor) for n, p in some.items()} for kind, some in measured.runs.items()},
        curves={
            kind: {n: {op: tuple([point(p, copy_factor) for p in points]) for op, points in ops.items()} for n, ops in some.items()}
            for kind, some in measured.curves.items()
        },
        probe=probed._replace(product=now.product, copy=now.copy),
    )
    device = replace(
        hardware.device,
        flops={dtype: _scaled(f, 1 / product_factor) for dtype, f in hardware.device.flops.items()},
        bandwidth=_scaled(hardware.device.bandwidth, 1 / copy_factor),
        call=_scaled(hardware.device.call, product_factor),
    )
    return replace(hardware, device=device, inside=_links_at(hardware.inside, copy_factor), measured=changed.as_json())


def _links_at(links: LinkFigures, factor: float) -> LinkFigures:
    small = links.collective_latency
    return replace(
        links,
        latency=_scaled(links.latency, factor),
        bandwidth=_scaled(links.bandwidth, 1 / factor),
        by_group={n: _scaled(f, 1 / factor) for n, f in links.by_group.items()},
        collective_latency=small and _scaled(small, factor),
    )


def _scaled(figure: Figure, factor: float) -> Figure:
    return figure._replace(value=figure.value * factor)


def _probed(hardware: Hardware) -> tuple[Measured, ProbedSpeed]:
    if hardware.measured is None:
        raise FluidxError(f"{hardware.name} is not calibrated, there is no speed to compare with; run `fluidx calibrate -o machine.json`")
    measured = Measured.from_json(hardware.measured, hardware.name)
    if measured.probe is None:
        raise FluidxError(
            f"the calibration of {hardware.name} of {measured.machine.date} does not say how fast the machine was; "
            "run `fluidx calibrate` again"
        )
    return measured, measured.probe
