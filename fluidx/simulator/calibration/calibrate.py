"""`calibrate`: measure this machine, alone and with all ranks at work, and write its figures to a file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ...executor.places import Place, cpu_places, process_places
from ...hardware import files
from ...hardware.records import Device, Figure, Hardware, LinkFigures
from ...ir.errors import FluidxError, nearest
from ...profiler.ceilings import Ceilings, ceilings, threads_of
from . import links
from .context import context_bytes
from .links import LinkTurns
from .machine import CalibratedMachine, Others, check_idle, check_steady, others
from .mpi_rank import curves_of_mpi
from .probe import UNSTEADY, Clock, Probe, Speed, middle, summed_up
from .programs import CalibrationProgram, copies, networks
from .records import CurvePoint, Curves, Measured, TracedProfile
from .samples import sample_programs, sampled_ops
from .steps import EmptyTurns, StepTurns, steps_in_turns
from .traces import Statistic, read_trace

BACKENDS: dict[str, Callable[[int], Sequence[Place]]] = {
    "processes": process_places,
    "threads": cpu_places,
    "mpi": process_places,  # for steps; what they send is measured under mpirun
}
_SOURCE = "fluidx calibrate"
_ADVICE = (
    ", which is much: times are those at its median speed, and intervals of predictions are wider by that; `fluidx calibrate --check` "
    "tells how fast it is at another time"
)
_TOGETHER = 40  # samples that share a turn
_CONTEXT = 48e6  # bytes of an interpreter with fluidx and NumPy, where they cannot be measured


class CalibrationScope(NamedTuple):
    """How much a calibration measures: seconds for each program in all rounds together, the programs, the ops whose samples run, and the
    sizes of messages; the share of the time of steps that may have a spread above 10 %; what tells the bytes of a process, or gives a guess
    back; the probe; the rounds, and the seconds after which no further round begins."""

    seconds: float = 0.5
    programs: Sequence[Callable[[], CalibrationProgram]] = ()
    ops: Sequence[str] = ()
    sizes: Sequence[int] = links.SIZES
    ceilings: Callable[[int], Ceilings] = ceilings
    unsteady: float = 0.5
    context: Callable[[float], float] = context_bytes
    probe: Callable[[Clock], Callable[[], Speed]] = Probe
    rounds: int = 6
    limit: float = 65.0

    @staticmethod
    def full() -> CalibrationScope:
        return CalibrationScope(programs=[copies, *networks()], ops=sampled_ops())


def calibrate(
    ranks: Sequence[int] = (2, 4),
    backend: str = "processes",
    output: str | Path | None = None,
    profiles: Sequence[str | Path] = (),
    anyway: bool = False,
    *,
    statistic: Statistic = statistics.median,
    scope: CalibrationScope | None = None,
    clock: Clock = time.perf_counter,
    busy: Callable[[], Others] = others,
) -> Hardware:
    """Measure this machine in about a minute: steps, copies, collectives and messages, with one rank and with so many `ranks` at once.

    The figures go to the file `output`, which `fx.Cluster.load`, `fx.simulate` and `fx.plan` read. `backend` is "processes", "threads", or
    "mpi", for which mpirun starts ranks. `profiles` are timelines of `fluidx trace`, whose steps are kept beside the measured ones. Steps
    of ranks are taken while all of them compute, on no more ranks than there are cores.

    Raises FluidxError if the machine is busy, or if times vary much, unless `anyway`.
    """
    if backend not in BACKENDS:
        raise FluidxError(f"calibrate: unknown backend {backend!r}; {nearest(backend, BACKENDS, 'there are')}")
    if wrong := next((n for n in ranks if not isinstance(n, int) or isinstance(n, bool) or n < 2), None):
        raise FluidxError(f"calibrate: ranks are numbers of 2 or more, as in ranks=(2, 4), got {wrong!r}")
    traced = [TracedProfile(str(path), found.ranks, found.steps) for path in profiles for found in (read_trace(path, statistic),)]
    machine, scope = CalibratedMachine.here(), scope or CalibrationScope.full()
    if not anyway:
        check_idle(busy(), machine.cores)
    run = _Calibration(scope, statistic, clock)
    try:
        run.one_device()
        for n in ranks:
            run.ranks(BACKENDS[backend](n), n, backend, min(n, machine.cores))
        run.measure()
    finally:
        run.close()
    measured = run.measured(machine, traced)
    if not anyway:
        check_steady(measured.steps[1], scope.unsteady)
    found = _hardware(machine, scope.ceilings(threads_of(1)), measured, backend, scope.context(_CONTEXT))
    if output is not None:
        files.save(found, output)
    return found


def merge(hardware: Hardware, profiles: Iterable[str | Path], statistic: Statistic = statistics.median) -> Hardware:
    """The figures of a calibrated machine with the steps of profiles beside them; a profile replaces an older one of the same file."""
    if hardware.measured is None:
        raise FluidxError(f"{hardware.name} is not calibrated, a profile holds for one machine only; run `fluidx calibrate`")
    measured = Measured.from_json(hardware.measured, hardware.name)
    kept = {p.file: p for p in measured.profiles}
    for path in profiles:
        found = read_trace(path, statistic)
        kept[str(path)] = TracedProfile(str(path), found.ranks, found.steps)
    return replace(hardware, measured=replace(measured, profiles=tuple(kept.values())).as_json())


def with_ranks(hardware: Hardware, backend: str, found: Mapping[int, tuple[Curves, CurvePoint]]) -> Hardware:
    """The figures of a calibrated machine with ranks of another kind: `found` has their collectives and messages, and a run, by their
    number. `calibration.links.curves` measures these. The steps stay."""
    measured = Measured.from_json(hardware.measured, hardware.name)
    curves, runs = {n: ops for n, (ops, _) in found.items()}, {n: run for n, (_, run) in found.items()}
    measured = replace(measured, runs={"one": measured.runs["one"], backend: runs}, curves={backend: curves})
    return replace(hardware, inside=_links(curves, hardware.inside), measured=measured.as_json())


class _Calibration:
    """What is measured in turns, round by round with a look of the probe between two turns, and the tables that come of it."""

    def __init__(self, scope: CalibrationScope, statistic: Statistic, clock: Clock):
        self.scope, self.statistic, self.clock = scope, statistic, clock
        self.started = clock()
        self.all: list[Any] = []  # what takes turns
        self.steps: dict[int, list[StepTurns]] = {}
        self.samples: list[StepTurns] = []
        self.runs: dict[tuple[str, int], EmptyTurns] = {}
        self.links: dict[tuple[str, int], LinkTurns] = {}
        self.fixed: dict[tuple[str, int], tuple[Curves, CurvePoint]] = {}  # of ranks under mpirun, which are measured at one time
        self.speeds: dict[int, list[Speed]] = {}  # of each turn, by the id of what has it

    def one_device(self) -> None:
        self.steps[1] = [self._added(StepTurns([make], None, self._seconds)) for make in self.scope.programs]
        samples = sample_programs(self.scope.ops)
        while some := list(islice(samples, _TOGETHER)):
            self.samples.append(self._added(StepTurns(some, None, 0.0)))
        self.runs["one", 1] = self._added(EmptyTurns())

    def ranks(self, places: Sequence[Place], n: int, backend: str, at_once: int) -> None:
        """What n ranks take: their steps where all compute at once, collectives, and a run."""
        if at_once not in self.steps:
            self.steps[at_once] = [self._added(StepTurns([make], places[:at_once], self._seconds)) for make in self.scope.programs]
        if backend == "mpi":
            self.fixed[backend, n] = curves_of_mpi(n, 2 * self.scope.seconds)
        else:
            self.links[backend, n] = self._added(LinkTurns(places, 2 * self._seconds, self.scope.sizes))
            self.runs[backend, n] = self._added(EmptyTurns(places))

    @property
    def _seconds(self) -> float:
        return self.scope.seconds / self.scope.rounds

    def _added(self, one: Any) -> Any:
        self.all.append(one)
        return one

    def measure(self) -> None:
        """Give each a turn in every round: at least two rounds, then more, up to those asked for, as long as they end within the limit."""
        probe = self.scope.probe(self.clock)
        before = probe()
        for k in range(self.scope.rounds):
            began = self.clock()
            for one in self.all:
                one.turn(self.clock)
                after = probe()
                self.speeds.setdefault(id(one), []).append(middle([before, after]))
                before = after
            now = self.clock()
            if k and now - self.started + now - began > self.scope.limit:
                break

    def close(self) -> None:
        for one in self.all:
            one.close()

    def measured(self, machine: CalibratedMachine, traced: Sequence[TracedProfile]) -> Measured:
        """The tables, at the median speed of the machine."""
        looks = [speed for some in self.speeds.values() for speed in some]
        usual = middle(looks)
        with_speeds = [[(s, self.speeds[id(s)]) for s in some] for some in (*self.steps.values(), self.samples)]
        *networks, samples = [steps_in_turns(some, usual, self.statistic) for some in with_speeds]
        steps = dict(zip(self.steps, networks, strict=True))
        known = {s.work.key for s in steps[1]}  # among the other steps of a network a step runs as it does in a program
        steps[1] += tuple([s for s in samples if s.work.key not in known])
        runs: dict[str, dict[int, CurvePoint]] = {}
        curves: dict[str, dict[int, Curves]] = {}
        for (kind, n), empty in self.runs.items():
            runs.setdefault(kind, {})[n] = empty.point(self.speeds[id(empty)], usual, self.statistic)
        for (kind, n), links_ in self.links.items():
            curves.setdefault(kind, {})[n] = links_.curves(self.speeds[id(links_)], usual, self.statistic)
        for (kind, n), (found, run) in self.fixed.items():
            curves.setdefault(kind, {})[n], runs.setdefault(kind, {})[n] = found, run
        return Measured(machine, steps, runs, curves, tuple(traced), summed_up(looks))


def _hardware(machine: CalibratedMachine, best: Ceilings, measured: Measured, backend: str, context: float) -> Hardware:
    """The figures of the machine as a device, and those of its ranks as links."""
    memory = _figure(float(_memory()))
    device = Device(
        machine.cpu, "cpu", memory, {"float32": _figure(1e9 * best.gflops)}, _figure(1.0), _figure(1e9 * best.gbs), _figure(1.0),
        _figure(1e-6 * best.call), Figure(1.0, f"{_SOURCE}: in the steps of ranks at once"), _figure(context), machine.cores,
    )  # fmt: skip
    return Hardware(
        f"{machine.cpu}, {machine.cores} cores", f"calibrated {machine.date} with {backend}, load {machine.load}", max(machine.cores, 1), 1,
        device, _links(measured.curves.get(backend, {}), LinkFigures(device.call, device.bandwidth)), None, memory, None,
        measured.as_json(),
    )  # fmt: skip


def _figure(value: float, spread: float = 0.0) -> Figure:
    return Figure(value, _SOURCE, round(spread, 4))


def _links(curves: Mapping[int, Curves], otherwise: LinkFigures) -> LinkFigures:
    """The figures of the links between ranks, from messages and from the rings that would take as long as all_reduce does."""
    points = [p for ops in curves.values() for p in ops.get(links.MESSAGE, ())]
    if not points:
        return otherwise
    least, most = min(points, key=lambda p: p.seconds), max(points, key=lambda p: p.nbytes)
    rings = {n: ops["all_reduce"][-1] for n, ops in curves.items() if ops.get("all_reduce")}
    small = min((ops["all_reduce"][0] for ops in curves.values() if ops.get("all_reduce")), key=lambda p: p.seconds, default=None)
    return LinkFigures(
        _figure(least.seconds, least.spread),
        _figure(most.nbytes / most.seconds, most.spread),
        by_group={n: _figure(2 * (n - 1) / n * p.nbytes / p.seconds, p.spread) for n, p in sorted(rings.items())},
        collective_latency=small and _figure(small.seconds, small.spread),
    )


def _memory() -> int:
    """The bytes of memory of this machine; 1 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemTotal")).split()[1])
    except (OSError, StopIteration, ValueError):
        return 1


def summary(hardware: Hardware) -> Iterator[str]:
    """Lines that say what a calibration found."""
    assert hardware.measured is not None
    found = Measured.from_json(hardware.measured, hardware.name)
    yield f"{hardware.name}: {found.machine.threads} threads, kernel level {found.machine.level}, load {found.machine.load}"
    if found.probe is not None:
        yield f"  the speed of this machine varied by {found.spread:.0%}" + (_ADVICE if found.spread > UNSTEADY else "")
    for n, steps in sorted(found.steps.items()):
        unsure = sum(s.spread > 0.1 for s in steps)
        yield f"  steps of {n} rank{'s' if n > 1 else ''} at once: {len(steps)}, of {unsure} the spread is above 10 %"
    for kind, runs in found.runs.items():
        for n, p in sorted(runs.items()):
            yield f"  an empty run, {kind if kind == 'one' else f'{n} {kind}'}: {1e6 * p.seconds:.1f} us"
    for kind, some in found.curves.items():
        for n, ops in sorted(some.items()):
            large = {op: points[-1] for op, points in ops.items() if points}
            rates = ", ".join(f"{op} {p.nbytes / p.seconds / 1e9:.2f} GB/s" for op, p in large.items())
            yield f"  {n} {kind}, {max((p.nbytes for p in large.values()), default=0) >> 20} MiB: {rates}"
    for traced in found.profiles:
        yield f"  profile {traced.file}: {len(traced.steps)} steps of {traced.ranks} rank{'s' if traced.ranks > 1 else ''}"


__all__ = ["BACKENDS", "CalibrationScope", "calibrate", "merge", "summary", "with_ranks"]
