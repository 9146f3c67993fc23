"""The planner against the machine: every candidate is run on two ranks as processes, and the choice is compared with the best of them.

Ten cases: five models, each without a limit of memory and with one that data_parallel does not meet. Of each case: the regret of the
planner's choice (its measured step over the best measured one that fits), that of data_parallel, which is the trivial choice, and of
candidates whose measured steps differ by more than 5 % the share of pairs that the prediction has in the right order, beside that of the
bounds of the closed forms.

The machine is a calibration (fluidx calibrate -n 2 -o machine.json). Times are medians of steps; those of a busy machine say nothing.

    --machine machine.json   --models mlp,lenet,resnet,gpt,heads   --steps 20   --save
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from _common import Log, Watch, option, options
from _models import TRAINED, case, fluidx_model

import fluidx as fx
from fluidx.simulator.candidates import Candidate, candidates
from fluidx.simulator.machine import Machine, chosen_ranks
from fluidx.simulator.planned import Considered, Prediction
from fluidx.simulator.planner import search

RANKS = 2
APART = 0.05


class Measured(NamedTuple):
    """A candidate with its closed form's bound, its prediction, and the median of its steps in seconds."""

    candidate: Candidate
    bound: float
    predicted: Prediction
    seconds: float


def measured(model: Any, feed: Any, found: Sequence[Considered], machine: Machine, steps: int) -> list[Measured]:
    """Run every candidate whose closed form exists, and that has a program of its own."""
    out: list[Measured] = []
    seen: set[str] = set()
    for one in found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                t = fx.DistributeTranspiler(one.strategy)
                t.transpile(program=model.main, startup_program=model.startup, trainers=one.trainers)
                text = str(t.main)
                if one.form is None or text in seen:
                    continue
                seen.add(text)
                ran = fx.tune([one.strategy], None, model.main, model.startup, feed, fx.process_places(RANKS), steps=steps, warm_up=5)
                out.append(Measured(one.candidate, one.bound, machine.simulate(t), ran.tried[0].median))
            except fx.FluidxError:  # the planner refuses it, too
                continue
    return out


def pairs(found: Sequence[Measured], by: Any) -> tuple[int, int]:
    """Pairs that differ by more than 5 % when run, and how many of them `by` orders as they were."""
    apart = [(a, b) for a, b in combinations(found, 2) if abs(a.seconds - b.seconds) > APART * min(a.seconds, b.seconds)]
    return len(apart), sum((by(a) < by(b)) == (a.seconds < b.seconds) for a, b in apart)


def limits(found: Sequence[Measured]) -> list[int]:
    """No limit, and one that is 3 % below what data_parallel needs."""
    whole = max(m.predicted.memory for m in found if m.candidate.strategy.name == "data_parallel")
    return [10**12, round(0.97 * whole)]


def show(log: Log, name: str, limit: int, fits: Sequence[Measured], chosen: str) -> tuple[float, float | None]:
    """Log a case; the regrets of the choice and of data_parallel, None if that does not fit."""
    best = min(fits, key=lambda m: m.seconds)
    took = next(m for m in fits if m.candidate.strategy.call == chosen)
    plain = next((m for m in fits if m.candidate.strategy.call == "data_parallel()"), None)
    regret, trivial = took.seconds / best.seconds - 1, None if plain is None else plain.seconds / best.seconds - 1
    said = "does not fit" if trivial is None else f"{trivial:.1%}"
    (apart, right), (_, bounds) = pairs(fits, lambda m: m.predicted.seconds), pairs(fits, lambda m: m.bound)
    order = f"{right / apart:.0%} by the prediction, {bounds / apart:.0%} by the bounds" if apart else "none apart"
    log(
        f"  {name}, {'no limit' if limit >= 10**12 else f'{limit / 1e6:.1f} MB'}: {len(fits)} programs run; chosen {chosen}, "
        f"{took.seconds * 1e3:.2f} ms (predicted {took.predicted.seconds * 1e3:.2f}); best {best.candidate.strategy.call}, "
        f"{best.seconds * 1e3:.2f} ms; regret {regret:.1%}, data_parallel {said}; {apart} pairs ordered right: {order}"
    )
    return regret, trivial


def main() -> None:
    log, watch, regrets, plain = Log("plan_search"), Watch(), [], []
    cluster, hardware = chosen_ranks(option("machine", "machine.json"), RANKS)
    for name in options("models", ",".join(TRAINED)):
        c = case(name)
        model = fluidx_model(c)
        feed = {key: np.concatenate([value] * RANKS) for key, value in model.feed.items()}
        batch = len(next(iter(feed.values())))
        machine = Machine(cluster, hardware, batch, 10**15)
        some = candidates(model.main, cluster)
        whole = search(model.main, model.startup, some, machine, hardware.name)
        found = measured(model, feed, sorted(whole.considered, key=lambda one: one.candidate.order), machine, int(option("steps", "20")))
        watch.look(0.0)
        for limit in limits(found):
            machine.limit = machine.limit._replace(usable=limit)
            planned = search(model.main, model.startup, some, machine, hardware.name)
            fits = [m for m in found if m.predicted.memory <= limit]
            regret, trivial = show(log, name, limit, fits, planned.strategy.call)
            regrets.append(regret)
            plain += [] if trivial is None else [trivial]
    within = sum(r <= APART for r in regrets)
    log(
        f"\n{within} of {len(regrets)} choices within 5 % of the best, regret {statistics.median(regrets):.1%}, worst {max(regrets):.1%}; "
        f"data_parallel where it fits: {sum(r <= APART for r in plain)} of {len(plain)}, worst {max(plain):.1%}"
    )
    log(str(watch))
    log.close()


if __name__ == "__main__":
    main()
