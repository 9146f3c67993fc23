"""How far `fx.simulate` is from what ranks on this machine take, beside the trivial predictor of each part.

processes   a step of 2 process ranks: four models, three strategies. Trivial: the time of one device, measured
threads     the same with ranks that are threads
links       steps of 2 and of 4 MPI ranks that share nothing, over 1 and 5 Gb/s (a private loopback with a token bucket, which takes root).
            Predicted from collectives measured without a limit, and the limit; and as the measured step without a limit and the predicted
            difference, which is about communication alone. Trivial: the measured step without a limit
memory      the resident size of a process rank at most, in steps of training; what it was with the startup program is in parentheses.
            Trivial: the state, feeds and arena of its plan

Costs come from a calibration, alone and with a profile of the model on one device beside it. Ranks have one kernel thread each, so the
calibration must be made with FLUIDX_THREADS=1: `FLUIDX_THREADS=1 OPENBLAS_NUM_THREADS=1 fluidx calibrate -n 2 -o machine.json`. Rounds are
interleaved, A B A B; a time is the median over rounds of the medians of turns. The probe of the calibration is timed between turns, and
errors are given raw and with the figures at its speed; the links part, whose figures are measured beside it, has raw ones only. Run it on a
machine that does nothing else.

    --machine FILE (default: calibrate first)   --parts processes,threads,links,memory   --models mlp,lenet,resnet,gpt   --save
    --rounds 5   --seconds 0.3 (of a turn)   --rates 1,5 (Gb/s)   --link-ranks 2,4   --link-models mlp,lenet   --link-strategies ...
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("FLUIDX_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))
import _limited_links
import _models
import numpy as np
from _common import Log, Watch, option, options
from predict import Case, table

import fluidx as fx
from fluidx.comm.hosts.handshake import HEAD
from fluidx.hardware.records import Figure, Hardware
from fluidx.profiler.profile import Profile
from fluidx.simulator.calibration import links
from fluidx.simulator.calibration.calibrate import calibrate, merge, with_ranks
from fluidx.simulator.calibration.context import process_ids, resident_bytes
from fluidx.simulator.calibration.probe import Probe, Speed, at_speed, check_speed, middle
from fluidx.simulator.calibration.records import CurvePoint
from fluidx.simulator.calibration.steps import observe

MODELS = "mlp,lenet,resnet,gpt"
STRATEGIES = ("data_parallel", "ring_optimizer", "zero1")
LINK_STRATEGIES = "data_parallel,reduce_broadcast,ring_optimizer,zero1,zero3,fsdp"
APART = 0.1  # strategies whose measured times differ by so much must be predicted in the right order
HEADERS = 120  # bytes of a packet and of its acknowledgement beside what they carry
CALIBRATED, DIFFERENCE = "calibration", "the measured step without a limit and the predicted difference"
Places = Callable[[int], Sequence[Any]]


class Ranks(NamedTuple):
    """A model transpiled for ranks, and what a prediction of its step needs. `feed` is that of all ranks."""

    t: Any
    feed: dict[str, np.ndarray]
    fetch: str

    def predicted(self, machine: Hardware) -> Any:
        shapes = {name: value.shape for name, value in self.feed.items()}
        return fx.simulate(self.t, machine, feed=shapes, fetch=[self.fetch], verify=False)


def ranks_of(case: Any, strategy: str, n: int) -> Ranks:
    m = _models.fluidx_model(case)
    t = fx.DistributeTranspiler(strategy).transpile(program=m.main, startup_program=m.startup, trainers=n)
    return Ranks(t, {name: np.concatenate([value] * n) for name, value in m.feed.items()}, m.result.name)


def started(ranks: Ranks, case: Any, places: Sequence[Any], stack: ExitStack) -> Any:
    """An executor with the starting values of the model."""
    exe = stack.enter_context(fx.ParallelExecutor(ranks.t, places=places, verify=False))
    exe.run_startup()
    for name, value in {**case.parameters, **case.moving}.items():
        exe.set_state(name, value)
    return exe


def turn(step: Callable[[], Any], seconds: float) -> float:
    """The median time of the steps of a turn, of at least three; one more warms up."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 4 or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def spread(times: Sequence[float]) -> float:
    """Half of the distance between the quartiles, of the median."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / (2 * middle)


def cpu_seconds(pids: Sequence[int]) -> float:
    """What processes have used."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def show(log: Log, cases: Sequence[Case]) -> None:
    for line in table(cases):
        log(line)
    for given in dict.fromkeys(c.given for c in cases):
        some = [c for c in cases if c.given == given]
        closer = sum(abs(c.error(c.predicted)) < abs(c.error(c.trivial)) for c in some)
        log(f"  {given}: closer than the trivial predictor in {closer} of {len(some)}")


# -- ranks that share memory --------------------------------------------------------------------------------------------------------------


def local(log: Log, part: str, places: Places, machine: Hardware) -> None:
    """Two ranks on this machine."""
    rounds, seconds = int(option("rounds", "5")), float(option("seconds", "0.3"))
    cases: list[Case] = []
    for name in options("models", MODELS):
        case = _models.case(name)
        one, profile = _models.fluidx_step(case), Profile()
        with ExitStack() as stack:
            steps: dict[str, Callable[[], Any]] = {"one": one, "profiled": partial(observe, profile, one, 0.0, time.perf_counter, 1)}
            made = {s: ranks_of(case, s, 2) for s in STRATEGIES}
            pids: list[int] = []
            for s, ranks in made.items():
                exe = started(ranks, case, places(2), stack)
                steps[s] = lambda exe=exe, ranks=ranks: exe.run([ranks.fetch], ranks.feed)  # type: ignore[misc]
                pids += process_ids(exe) if part == "processes" else ()
            times, watch, speed = interleaved_turns(steps, rounds, seconds, pids)
        log(f"{part} {name}: {watch}; {check_speed(machine, speed)}")
        now = at_speed(machine, speed)
        for s, ranks in made.items():
            measured, trivial = statistics.median(times[s]), statistics.median(times["one"])
            for given, beside in (("calibration", None), ("calibration and a one-device profile", profile)):
                raw, at = (ranks.predicted(with_profile(m, beside)).seconds for m in (machine, now))
                cases.append(Case(part, given, f"{name} {s}", measured, raw, trivial, spread(times[s]), at, trivial))
    show(log, cases)


def interleaved_turns(
    steps: dict[str, Callable[[], Any]], rounds: int, seconds: float, pids: Sequence[int]
) -> tuple[dict[str, list[float]], Watch, Speed]:
    """A turn of each in every round, how busy the machine was by others than this process and `pids`, and its speed by the probe."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    probe = Probe()
    for step in steps.values():
        turn(step, 0.0)
    watch, speeds = Watch(), [probe()]
    for _ in range(rounds):
        before = cpu_seconds(pids)
        for name, step in steps.items():
            times[name].append(turn(step, seconds))
            speeds.append(probe())
        watch.look(cpu_seconds(pids) - before)
    return times, watch, middle(speeds)


def with_profile(machine: Hardware, profile: Profile | None) -> Hardware:
    """The machine with the profile of a model on one device beside its calibration."""
    if profile is None:
        return machine
    with tempfile.TemporaryDirectory() as folder:
        profile.save(Path(folder, "one.json"))
        return merge(machine, [Path(folder, "one.json")])


def processes(log: Log, machine: Hardware) -> None:
    local(log, "processes", fx.process_places, machine)


def threads(log: Log, machine: Hardware) -> None:
    found = links.curves(fx.cpu_places(2), 1.0)
    local(log, "threads", fx.cpu_places, with_ranks(machine, "threads", {2: found}))


# -- ranks over a limited link ------------------------------------------------------------------------------------------------------------


def limited(log: Log, machine: Hardware) -> None:
    """MPI ranks that share nothing, over a link that all messages share."""
    if reason := _limited_links.why_not():
        log(f"links: not measured: {reason}")
        return
    models, strategies = (tuple(options(k, v)) for k, v in (("link-models", "mlp,lenet"), ("link-strategies", LINK_STRATEGIES)))
    rates = tuple(map(float, options("rates", "1,5")))
    rounds, seconds = int(option("rounds", "5")), float(option("seconds", "0.3"))
    for n in map(int, options("link-ranks", "2,4")):
        found = _limited_links.measure(_limited_links.LinkPlan(n, models, strategies, (_limited_links.NO_LIMIT, *rates), rounds, seconds))
        log(f"links {n} ranks: {found['watch']}")
        log("  large messages reach " + ", ".join(f"{got:.2f} of {set_or(rate)}" for rate, got in found["reached"].items()))
        curves = {op: tuple(CurvePoint(*p) for p in points) for op, points in found["curves"].items()}
        free = with_ranks(machine, "mpi", {n: (curves, CurvePoint(*found["run"]))})
        cases = [c for m in models for c in link_cases(log, m, strategies, n, rates, free, found["times"])]
        show(log, cases)
        for given in (CALIBRATED, DIFFERENCE):
            log(f"  {given}: {order([c for c in cases if c.given.endswith(given)])}")


def set_or(rate: str) -> str:
    return "no limit (Gb/s)" if rate == "0" else rate


def link_cases(
    log: Log, model: str, strategies: Sequence[str], n: int, rates: Sequence[float], free: Hardware, times: dict[str, list[float]]
) -> Iterator[Case]:
    """The cases of a model at every rate; steps without a limit are printed only, to show how well the rest is predicted."""
    for s in strategies:
        ranks = ranks_of(_models.case(model), s, n)
        without, unlimited = statistics.median(times[f"{model} {s} 0"]), ranks.predicted(free).seconds
        log(f"  no limit: {model + ' ' + s:24} measured {1e3 * without:9.3f} ms (spread {spread(times[f'{model} {s} 0']):.1%})  "
            f"predicted {1e3 * unlimited:9.3f} {unlimited / without - 1:+6.1%}")  # fmt: skip
        for rate in rates:
            limit = Figure(rate * 1e9 / 8, f"a token bucket of {rate:g} Gb/s")
            machine = replace(free, inside=replace(free.inside, shared=limit, call_bytes=HEAD + HEADERS))
            seen, predicted = times[f"{model} {s} {rate:g}"], ranks.predicted(machine).seconds
            at = f"{n} ranks, {rate:g} Gb/s, "
            for given, seconds in ((CALIBRATED, predicted), (DIFFERENCE, without + predicted - unlimited)):
                measured = statistics.median(seen)
                yield Case("links", at + given, f"{model} {s}", measured, seconds, without, spread(seen), seconds, without)


def order(cases: Sequence[Case]) -> str:
    """How many pairs of strategies are predicted in the right order, of those that differ."""
    right = pairs = 0
    for a, b in combinations(cases, 2):
        if (a.given, a.name.split()[0]) != (b.given, b.name.split()[0]) or max(a.measured, b.measured) < (1 + APART) * min(
            a.measured, b.measured
        ):
            continue
        pairs += 1
        right += (a.predicted < b.predicted) == (a.measured < b.measured)
    return f"{right} of {pairs} pairs of strategies that differ by {APART:.0%} or more are in the right order"


# -- memory -------------------------------------------------------------------------------------------------------------------------------


def memory(log: Log, machine: Hardware) -> None:
    """What the system shows for each rank, and what the simulation says."""
    errors, trivial = [], []
    log("memory, the rank of two with most, in MB")
    for name in options("models", MODELS):
        case = _models.case(name)
        for s in STRATEGIES:
            ranks = ranks_of(case, s, 2)
            with ExitStack() as stack:
                first, seen = resident(started(ranks, case, fx.process_places(2), stack), ranks)
            found = ranks.predicted(machine)
            most = max((found.memory(r) for r in range(2)), key=lambda m: m.system)
            errors.append(most.system / seen - 1)
            trivial.append(most.device / seen - 1)
            parts = ", ".join(f"{key} {value / 1e6:.1f}" for key, value in most._asdict().items() if value)
            log(f"  {name + ' ' + s:24} measured {seen / 1e6:7.1f} ({first / 1e6:.1f})  "
                f"predicted {most.system / 1e6:7.1f} {errors[-1]:+6.1%}  ({parts})")  # fmt: skip
    for what, some in (("predicted", errors), ("trivial", trivial)):
        log(f"  {what}: median {statistics.median(map(abs, some)):.1%}, worst {max(map(abs, some)):.1%}")


def resident(exe: Any, ranks: Ranks) -> tuple[int, int]:
    """The peak of the rank's resident size that has most: with the startup program and the first steps, and of three steps after these."""
    status = [Path(f"/proc/{pid}/status") for pid in process_ids(exe)]

    def peak(steps: int) -> int:
        for _ in range(steps):
            exe.run([ranks.fetch], ranks.feed)
        return max(resident_bytes(path, ("VmHWM",)) for path in status)

    first = peak(2)
    for path in status:
        path.with_name("clear_refs").write_text("5")  # the peak begins anew
    return first, peak(3)


PARTS: dict[str, Callable[[Log, Hardware], None]] = {"processes": processes, "threads": threads, "links": limited, "memory": memory}


def main() -> None:
    log = Log("predict_ranks")
    file = option("machine", "")
    machine = fx.hardware.load(file) if file else calibrate((2,), anyway="--anyway" in sys.argv)
    log(f"{machine.name}, {machine.about}")
    for part in options("parts", ",".join(PARTS)):
        PARTS[part](log, machine)
    log.close()


if __name__ == "__main__":
    main()
