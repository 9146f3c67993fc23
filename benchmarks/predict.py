"""How far predictions are from what is measured, beside the trivial predictor of each part.

    python benchmarks/predict.py                 measure, and print tables
    python benchmarks/predict.py --json FILE     also write the figures
    python benchmarks/predict.py --parts one_device --models mlp,lenet

A part is a function in PARTS: it takes `Settings` and yields a `Case` for each prediction. Run it on a machine that does nothing else.

one_device   a step of one device: from a calibration alone, and from profiles of half and of double the batch. Trivial: the larger of
             operations and bytes over the speed of a large product and of a large copy.
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
from fluidx.simulator.calibration.calibrate import calibrate, merge
from fluidx.simulator.calibration.machine import CalibratedMachine, others
from fluidx.simulator.costs import Costs
from fluidx.simulator.sheet import Sheet
from fluidx.simulator.work import FREE, work_of

MODELS = ("mlp", "lenet", "resnet", "gpt")


class Settings(NamedTuple):
    """What all parts share. `statistic` is that of the calibration and of the measured steps: like is compared with like."""

    machine: Hardware
    models: Sequence[str]
    rounds: int
    statistic: Callable[[Sequence[float]], float]
    anyway: bool


class Case(NamedTuple):
    """A prediction and what was measured, in seconds; `spread` is that of the measured steps. `trivial` is the trivial predictor's."""

    part: str
    given: str
    name: str
    measured: float
    predicted: float
    trivial: float
    spread: float

    def error(self, seconds: float) -> float:
        return seconds / self.measured - 1


# -- one device ---------------------------------------------------------------------------------------------------------------------------


def one_device(s: Settings) -> Iterator[Case]:
    """Each model's step, measured and predicted in turn."""
    for name in s.models:
        case = _models.case(name)
        model = _models.fluidx_model(case)
        plan = dry_plan(model.main, {k: v.shape for k, v in model.feed.items()}, fetch=[model.result.name])
        profiled = _with_profiles(s, case)
        times = _times(_models.fluidx_step(case), s.rounds)
        measured, spread = s.statistic(times), _spread(times)
        trivial = _roofline(s.machine, plan)
        for given, machine in (("calibration", s.machine), ("profiles of half and double the batch", profiled)):
            yield Case("one_device", given, name, measured, Costs(machine).program(plan).seconds, trivial, spread)


def _with_profiles(s: Settings, case: Any) -> Hardware:
    """The calibrated machine with the steps of the model at half and at double the batch."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for label, rows in (("half", len(case.x) // 2), ("double", 2 * len(case.x))):
            take = np.arange(rows) % len(case.x)
            other = case._replace(x=case.x[take], label=case.label[take])
            step = _models.fluidx_step(other)
            _times(step, 2)
            with fx.profiler.profiler() as profile:
                _times(step, s.rounds)
            files.append(Path(folder, f"{label}.json"))
            profile.save(files[-1])
        return merge(s.machine, files, s.statistic)


def _roofline(machine: Hardware, plan: Any) -> float:
    sheet = Sheet(machine)
    return sum(sheet.estimate(work_of(step, plan.values)).seconds for step in plan.steps if step.kernel not in FREE)


def _times(step: Callable[[], Any], rounds: int) -> list[float]:
    """Seconds of steps: at least `rounds`, and for a second if they are short."""
    times: list[float] = []
    end = time.perf_counter() + (1.0 if rounds > 2 else 0.0)
    while len(times) < rounds + 2 or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times[2:]


def _spread(times: Sequence[float]) -> float:
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / (2 * middle)


# -- all parts ----------------------------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Settings], Iterator[Case]]] = {"one_device": one_device}


def table(cases: Sequence[Case]) -> Iterator[str]:
    """The cases of each part, and the median and the worst of the errors."""
    for part, given in dict.fromkeys((c.part, c.given) for c in cases):
        some = [c for c in cases if (c.part, c.given) == (part, given)]
        yield f"{part}, from {given}"
        for c in some:
            yield (f"  {c.name:24} measured {1e3 * c.measured:10.3f} ms (spread {c.spread:.1%})  predicted {1e3 * c.predicted:10.3f} "
                   f"{c.error(c.predicted):+7.1%}  trivial {c.error(c.trivial):+7.1%}")  # fmt: skip
        errors, trivial = ([abs(c.error(x)) for c, x in zip(some, xs)] for xs in ([c.predicted for c in some], [c.trivial for c in some]))
        skill = 1 - sum(errors) / sum(trivial) if sum(trivial) else math.nan
        yield (f"  median {statistics.median(errors):.1%}, worst {max(errors):.1%}; trivial median {statistics.median(trivial):.1%}, "
               f"worst {max(trivial):.1%}; skill {skill:.2f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--least", action="store_true", help="compare the fastest of the times, on a machine that others use")
    parser.add_argument("--machine", help="a calibration that is there")
    parser.add_argument("--json")
    args = parser.parse_args()
    statistic: Callable[[Sequence[float]], float] = min if args.least else statistics.median
    machine = fx.hardware.load(args.machine) if args.machine else calibrate((2,), anyway=args.least, statistic=statistic)
    settings = Settings(machine, args.models.split(","), args.rounds, statistic, args.least)
    cases = [case for part in args.parts.split(",") for case in PARTS[part](settings)]
    here, load = CalibratedMachine.here(), others()
    print(f"{here.cpu}, {here.cores} cores, {here.threads} threads, level {here.level}; others use {load.cores:.1f} cores")
    print(*table(cases), sep="\n")
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": here._asdict(), "cases": [c._asdict() for c in cases]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
