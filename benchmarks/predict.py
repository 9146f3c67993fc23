"""How far predictions are from what is measured, beside the trivial predictor of each part.

    python benchmarks/predict.py                 measure, and print tables
    python benchmarks/predict.py --json FILE     also write the figures
    python benchmarks/predict.py --parts one_device --models mlp,lenet

A part is a function in PARTS: it takes `Settings` and yields a `Case` for each prediction. Run it on a machine that does nothing else.

one_device   a step of one device: from a calibration alone, and from profiles of half and of double the batch. Trivial: the larger of
             operations and bytes over the speed of a large product and of a large copy.

A machine's speed may change between calibration and measurement. The probe of the calibration is timed beside each measured step, and every
error is given twice: raw, and with the figures at the speed of the probe, for the trivial predictor too.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _models

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.hardware.records import Hardware
from fluidx.profiler.profile import Profile
from fluidx.simulator.calibration.calibrate import calibrate, merge
from fluidx.simulator.calibration.machine import CalibratedMachine, others
from fluidx.simulator.calibration.probe import Probe, at_speed, check_speed, middle
from fluidx.simulator.calibration.steps import observe
from fluidx.simulator.calibration.traces import relative_spread
from fluidx.simulator.costs import Costs
from fluidx.simulator.sheet import Sheet
from fluidx.simulator.work import FREE, work_of

MODELS = ("mlp", "lenet", "resnet", "gpt")


class Settings(NamedTuple):
    """What all parts share. `statistic` is that of the calibration and of the measured steps: like is compared with like."""

    machine: Hardware
    models: Sequence[str]
    rounds: int
    seconds: float  # of a turn
    statistic: Callable[[Sequence[float]], float]
    anyway: bool


class Case(NamedTuple):
    """A prediction and what was measured, in seconds; `spread` is that of the measured steps, `trivial` the trivial predictor's. `now` and
    `trivial_now` are the same at the speed that the probe had beside the measured steps, of a machine whose speed changes."""

    part: str
    given: str
    name: str
    measured: float
    predicted: float
    trivial: float
    spread: float
    now: float
    trivial_now: float

    def error(self, seconds: float) -> float:
        return seconds / self.measured - 1


# -- one device ---------------------------------------------------------------------------------------------------------------------------


def one_device(s: Settings) -> Iterator[Case]:
    """Each model's step, in rounds with the steps of half and of double its batch, which are profiled, and the probe before and after."""
    probe = Probe()
    for name in s.models:
        case = _models.case(name)
        model = _models.fluidx_model(case)
        plan = dry_plan(model.main, {k: v.shape for k, v in model.feed.items()}, fetch=[model.result.name])
        step, others_ = _models.fluidx_step(case), [_models.fluidx_step(_of_rows(case, f)) for f in (0.5, 2.0)]
        profiles = [Profile(), Profile()]
        times: list[float] = []
        speeds = [probe()]
        for _ in range(s.rounds):
            times.append(s.statistic(_turn(step, s.seconds)))
            speeds.append(probe())
            for other, profile in zip(others_, profiles, strict=True):
                other()
                observe(profile, other, s.seconds / 2, time.perf_counter)
        measured, spread = s.statistic(times), relative_spread(times)
        now = at_speed(s.machine, middle(speeds))
        trivial, trivial_now = _roofline(s.machine, plan), _roofline(now, plan)
        for given, with_ in (("calibration", ()), ("profiles of half and double the batch", profiles)):
            raw, at = (Costs(_merged(m, with_, s.statistic)).program(plan).seconds for m in (s.machine, now))
            yield Case("one_device", given, name, measured, raw, trivial, spread, at, trivial_now)


def _of_rows(case: Any, factor: float) -> Any:
    """A case with so many times the rows."""
    take = np.arange(int(factor * len(case.x))) % len(case.x)
    return case._replace(x=case.x[take], label=case.label[take])


def _merged(machine: Hardware, profiles: Sequence[Profile], statistic: Any) -> Hardware:
    """The calibrated machine with the steps of profiles."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{k}.json") for k, _ in enumerate(profiles)]
        for profile, file in zip(profiles, files, strict=True):
            profile.save(file)
        return merge(machine, files, statistic) if files else machine


def _roofline(machine: Hardware, plan: Any) -> float:
    sheet = Sheet(machine)
    return sum(sheet.estimate(work_of(step, plan.values)).seconds for step in plan.steps if step.kernel not in FREE)


def _turn(step: Callable[[], Any], seconds: float) -> list[float]:
    """Seconds of the steps of a turn, at least two; one more warms up."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times[1:]


# -- all parts ----------------------------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Settings], Iterator[Case]]] = {"one_device": one_device}


def table(cases: Sequence[Case]) -> Iterator[str]:
    """The cases of each part, and the median and the worst of the errors: raw, and at the speed of the probe."""
    for part, given in dict.fromkeys((c.part, c.given) for c in cases):
        some = [c for c in cases if (c.part, c.given) == (part, given)]
        yield f"{part}, from {given}; errors raw / at the speed of the probe"
        for c in some:
            yield (f"  {c.name:24} measured {1e3 * c.measured:10.3f} ms (spread {c.spread:.1%})  predicted {1e3 * c.predicted:10.3f} "
                   f"{c.error(c.predicted):+7.1%} / {c.error(c.now):+7.1%}  trivial {c.error(c.trivial):+7.1%} / "
                   f"{c.error(c.trivial_now):+7.1%}")  # fmt: skip
        for how, predicted, trivial in (
            ("raw", [c.predicted for c in some], [c.trivial for c in some]),
            ("at the speed of the probe", [c.now for c in some], [c.trivial_now for c in some]),
        ):
            mine, its = ([abs(c.error(x)) for c, x in zip(some, xs, strict=True)] for xs in (predicted, trivial))
            skill = 1 - sum(mine) / sum(its) if sum(its) else math.nan
            yield (f"  {how}: median {statistics.median(mine):.1%}, worst {max(mine):.1%}; trivial median {statistics.median(its):.1%}, "
                   f"worst {max(its):.1%}; skill {skill:.2f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a model's turn in a round")
    parser.add_argument("--least", action="store_true", help="compare the fastest of the times, on a machine that others use")
    parser.add_argument("--machine", help="a calibration that is there")
    parser.add_argument("--anyway", action="store_true", help="calibrate also while others use this machine")
    parser.add_argument("--json")
    args = parser.parse_args()
    statistic: Callable[[Sequence[float]], float] = min if args.least else statistics.median
    machine = fx.hardware.load(args.machine) if args.machine else calibrate((), anyway=args.least or args.anyway, statistic=statistic)
    settings = Settings(machine, args.models.split(","), args.rounds, args.seconds, statistic, args.least)
    cases = [case for part in args.parts.split(",") for case in PARTS[part](settings)]
    here, load = CalibratedMachine.here(), others()
    print(f"{here.cpu}, {here.cores} cores, {here.threads} threads, level {here.level}; others use {load.cores:.1f} cores")
    print(f"{check_speed(machine)}")
    print(*table(cases), sep="\n")
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": here._asdict(), "cases": [c._asdict() for c in cases]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
