"""Choose a strategy for a program and a machine before anything runs: what cannot fit is refused, the rest is simulated by lower bound."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from ..ir.attributes import attrs_key
from ..ir.dtypes import HALVES
from ..ir.errors import FluidxError, TranspileError, VerifyError, nearest
from ..ir.pass_base import Pass
from ..ir.program import Program
from ..transpiler.cluster import Cluster, Mesh
from ..transpiler.transpiler import DistributeTranspiler
from ..verify import Report
from .candidates import Candidate, candidates
from .closed_forms import Collective, closed_form
from .memory_limit import MemoryLimit, show_size
from .one_device import OneDevice, one_device
from .planned import Considered, Planned, Prediction

TIE = 0.01  # of a step: less is no difference, whatever the spread of the figures
SAME = "it is the same program as"  # so begins the reason of a candidate that is refused as another one is there


class MachineFigures(Protocol):
    """What a search asks of a machine (see machine.Machine)."""

    limit: MemoryLimit
    batch: int

    def step(self, plan: Any, step: Any) -> float: ...
    def collective(self, trainers: Cluster | Mesh) -> Collective: ...
    def simulate(self, t: DistributeTranspiler) -> Prediction: ...
    @property
    def to_host(self) -> float: ...
    @property
    def device(self) -> str: ...
    @property
    def slowdown(self) -> float: ...


def plan(
    program: Program,
    startup: Program,
    cluster: Any = None,
    batch: int | None = None,
    memory: int | float | str | None = None,
    *,
    ranks: int | None = None,
    strategies: Sequence[str] | None = None,
    wire: Sequence[str] | str = (),
    rewrites: Sequence[Pass] = (),
) -> Planned:
    """Choose the strategy with which a step of `program` takes least time on a cluster and fits into the memory of its devices.

    `cluster`: a Cluster with figures, the name of a cluster file (`fluidx clusters` lists them), or the file that `fluidx calibrate` wrote;
    a Mesh on a cluster fixes the mesh, otherwise all meshes are tried that the annotations of the program allow. `batch`: the rows of a
    step, of all ranks together. `memory`: of a device, such as "40GB"; by default what its file says, of which 5 % and the context of a
    process stay free. `ranks`: how many devices to use, by default all of the cluster. `strategies`: names of the strategies to try.
    `wire`: dtypes in which gradients may travel beside their own, "bfloat16"; they are rounded, so that nothing is tried by default.
    `rewrites`: passes that save memory, each of which is tried.

    Candidates that cannot fit are refused by closed forms, without transpiling them. The others are transpiled and simulated in the order
    of a lower bound of their time, until no bound is better than the best time found. The chosen one is verified. The answer depends on
    the arguments alone, so that all ranks of a job find the same.

    Raises TranspileError if nothing fits: it names the nearest candidate, by how much it misses, and what would help.

    >>> import fluidx as fx
    >>> main, startup = fx.Program("line"), fx.Program("line_startup")
    >>> with fx.program_guard(main, startup):
    ...     loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 1024], "float32"), size=1024))
    ...     _ = fx.optimizer.SGD(0.1).minimize(loss)
    >>> planned = fx.plan(main, startup, cluster="dgx-a100", batch=4096, memory="40GB", strategies=["data_parallel", "zero1"])
    >>> planned.strategy.name, planned.transpile().world_size
    ('data_parallel', 8)
    """
    from .machine import Machine, chosen_ranks

    _check(program, startup, batch)
    given, hardware = chosen_ranks(cluster, ranks)
    found = candidates(program, given, _names(strategies), _wires(wire), rewrites)
    assert batch is not None
    return search(program, startup, found, Machine(given, hardware, batch, memory), hardware.name)


def search(program: Program, startup: Program, found: Sequence[Candidate], prices: MachineFigures, machine: str) -> Planned:
    """Simulate the candidates that can win, and choose. See `plan`."""
    return _PlanSearch(program, startup, prices).run(found, machine)


class _PlanSearch:
    def __init__(self, program: Program, startup: Program, prices: MachineFigures):
        self.program, self.startup, self.prices = program, startup, prices
        self.programs: dict[tuple[Pass, ...], Program] = {}
        self.alone: dict[tuple, OneDevice] = {}
        self.known: dict[int, Candidate] = {}  # by the program that was simulated

    def run(self, found: Sequence[Candidate], machine: str) -> Planned:
        considered = [self._sized(c) for c in found]
        done = self._searched([c for c in considered if not c.refused])
        refused = [c for c in considered if c.refused]
        while True:
            ranked = self._ranked(done)
            if not ranked:
                raise self._nothing([*refused, *(c for c in done if c.refused)])
            chosen, report = ranked[0], self._verified(ranked[0])
            if isinstance(report, Report):
                break
            done[done.index(chosen)] = chosen.without_time(f"it does not verify: {report}")
        rest = sorted((c for c in done if c.predicted is None and not c.refused), key=lambda c: (c.bound, c.candidate.order))
        everything = [*ranked, *rest, *(c for c in done if c.refused), *refused]
        baseline = next((c for c in sorted(everything, key=lambda c: c.candidate.order) if c.strategy.name == "data_parallel"), None)
        return Planned(
            self.program, self.startup, self.prices.batch, machine, self.prices.limit, tuple(everything), report, baseline
        )  # fmt: skip

    def _searched(self, left: list[Considered]) -> list[Considered]:
        """The candidates, those that can be chosen simulated: first those that can be faster than the best by more than a tie, by their
        bounds, then simpler ones that can be as fast, until one is."""
        left.sort(key=lambda c: (c.bound, c.candidate.order))
        simplest = min(left, key=lambda c: c.candidate.order, default=None)
        if simplest is not None and simplest.strategy.name == "data_parallel":  # the baseline is always simulated
            left.remove(simplest)
            left.insert(0, simplest)
        done: list[Considered] = []
        later: list[Considered] = []
        for one in left:
            best = self._best(done)
            if best is not None and one.bound >= (1 - TIE) * _seconds(best):
                later.append(one)
            else:
                done.append(self._simulated(one))
        later.sort(key=lambda c: c.candidate.order)
        for k, one in enumerate(later):
            chosen, best = self._ranked(done)[0], self._best(done)
            assert best is not None
            if one.candidate.order < chosen.candidate.order and one.bound < (1 + TIE) * _seconds(best):
                later[k] = self._simulated(one)
                done.append(later[k])
        return [*done, *(c for c in later if c.predicted is None and not c.refused)]

    # -- closed forms -------------------------------------------------------------------------------------------------------------

    def _sized(self, c: Candidate) -> Considered:
        """A candidate with its closed form; refused if it cannot fit."""
        ranks, turns, _ = c.key
        rows = -(-self.prices.batch // ranks)
        if turns > rows:
            return Considered(c, refused=f"a rank has {rows} rows, and {turns} micro-batches need as many")
        try:
            one = self._one(c, -(-rows // turns))
            ways = self.prices.collective(c.trainers)
            form = closed_form(c.strategy, one, c.trainers, ways, self.prices.to_host, self.prices.slowdown)
        except TranspileError as e:
            return Considered(c, refused=_first_line(e))
        limit = self.prices.limit.usable
        over = form.memory - limit
        return Considered(c, form, refused=self._too_much(form.memory, over) if over > 0 else "")

    def _too_much(self, memory: int, over: int) -> str:
        return f"it needs {show_size(memory)} a device, {show_size(over)} more than there are for a plan"

    def _one(self, c: Candidate, rows: int) -> OneDevice:
        """The program on one device, for the rows of a rank; shared by all candidates with as many."""
        key = c.strategy.rewrites, rows
        if key not in self.alone:
            if c.strategy.rewrites not in self.programs:
                program = self.program
                for one in c.strategy.rewrites:
                    program = one.run(program)
                self.programs[c.strategy.rewrites] = program
            self.alone[key] = one_device(self.programs[c.strategy.rewrites], rows, self.prices.step, self.prices.device)
        return self.alone[key]

    # -- simulations --------------------------------------------------------------------------------------------------------------

    def _transpiled(self, c: Candidate) -> DistributeTranspiler:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # options that do nothing here: the simpler candidate does as much
            return DistributeTranspiler(c.strategy).transpile(program=self.program, startup_program=self.startup, trainers=c.trainers)

    def _simulated(self, one: Considered) -> Considered:
        """A candidate with its prediction; refused if it cannot be transpiled, does not fit, or gives the program of another one."""
        try:
            t = self._transpiled(one.candidate)
            same = self.known.setdefault(_key(t), one.candidate)
            if same is not one.candidate:
                return one.without_time(f"{SAME} {same}")
            predicted = self.prices.simulate(t)
        except FluidxError as e:
            return one.without_time(_first_line(e))
        over = predicted.memory - self.prices.limit.usable
        found = replace(one, predicted=predicted)
        return found.without_time(self._too_much(predicted.memory, over)) if over > 0 else found

    @staticmethod
    def _best(done: Sequence[Considered]) -> Considered | None:
        fits = [c for c in done if c.predicted is not None and not c.refused]
        return min(fits, key=lambda c: (c.predicted.seconds, c.candidate.order), default=None)  # type: ignore[union-attr]

    def _ranked(self, done: Sequence[Considered]) -> list[Considered]:
        """The candidates that fit: the chosen one, then the others by their time."""
        fits = [c for c in done if c.predicted is not None and not c.refused]
        fits.sort(key=lambda c: (c.predicted.seconds, c.candidate.order))  # type: ignore[union-attr]
        if not fits:
            return []
        alike = [c for c in fits if tie(fits[0].predicted, c.predicted)]  # type: ignore[arg-type]
        chosen = min(alike, key=lambda c: c.candidate.order)
        return [chosen, *(c for c in fits if c is not chosen)]

    def _verified(self, one: Considered) -> Report | str:
        try:
            return self._transpiled(one.candidate).verify()
        except VerifyError as e:
            return _first_line(e)

    # -- nothing fits -------------------------------------------------------------------------------------------------------------

    def _nothing(self, refused: Sequence[Considered]) -> TranspileError:
        limit = self.prices.limit
        large = [c for c in refused if c.form is not None and not c.refused.startswith(SAME)]
        if not refused:
            return TranspileError(
                "plan: these strategies give no candidate: rails needs several hosts, and pipeline a program with stages, "
                'with fx.device_guard("stage:1"): ...; name others, or leave strategies out'
            )
        if not large:
            listed = "".join(f"\n  {c.candidate}: {c.refused}" for c in refused[:10])
            return TranspileError(f"plan: none of {len(refused)} candidates can be taken:{listed}")
        near = min(large, key=lambda c: (_memory(c), c.candidate.order))
        form, needs = near.form, _memory(near)
        assert form is not None
        if needs <= limit.usable:
            return TranspileError(f"plan: nothing can be taken; the nearest, {near.candidate}: {near.refused}")
        values = needs - form.state
        return TranspileError(
            f"plan: none of {len(refused)} candidates fits into {limit}\n"
            f"  nearest: {near.candidate} needs {show_size(needs)}, {show_size(needs - limit.usable)} too much: "
            f"{show_size(form.state)} of parameters and optimizer state, {show_size(values)} of gradients, gathered parameters and "
            f"activations\n  {self._advice(near, values)}"
        )

    def _advice(self, near: Considered, values: int) -> str:
        assert near.form is not None
        if near.form.state > values:
            found = ["more ranks, which divide parameters and optimizer state"]
            if not near.form.host_memory:
                found.insert(1, "cpu_offload=True, which has optimizer state in host memory")
        else:
            found = ["a smaller batch", "recomputation in backward (fx.optimizer.RecomputeOptimizer)", "more ranks with the same batch"]
        return f"what would help: {'; '.join(found)}"


def tie(best: Prediction, other: Prediction) -> bool:
    """Can the prediction not tell two candidates apart? What they have in common is as wrong for both; what differs, compute and exposed
    communication, has the spread of the figures.

    >>> one = Prediction(1.0, 0.9, 1.1, 0.8, 0.2, 0, 0, True)
    >>> tie(one, one._replace(seconds=1.005)), tie(one, one._replace(seconds=1.05, exposed=0.25))
    (True, False)
    """
    spread = (best.high - best.low) / (2 * best.seconds) if best.seconds else 0.0
    differs = abs(best.compute - other.compute) + abs(best.exposed - other.exposed)
    return other.seconds - best.seconds <= max(TIE * best.seconds, spread * differs)


def _seconds(one: Considered) -> float:
    assert one.predicted is not None
    return one.predicted.seconds


def _memory(c: Considered) -> int:
    assert c.form is not None
    return c.predicted.memory if c.predicted is not None else c.form.memory


def _key(t: DistributeTranspiler) -> int:
    """A number that equal programs for all ranks have in common."""
    attrs: dict[int, str] = {}
    found = [
        (op.type, op.input_arg_names, op.output_arg_names, attrs.get(id(op.attrs)) or attrs.setdefault(id(op.attrs), attrs_key(op.attrs)))
        for block in t.main.blocks for op in block.oplist
    ]  # fmt: skip
    return hash((repr(t.cluster), tuple(found)))


def _first_line(e: Exception) -> str:
    return str(e).partition("\n")[0]


def _check(program: Any, startup: Any, batch: Any) -> None:
    for name, p in (("program", program), ("startup", startup)):
        if not isinstance(p, Program):
            raise TranspileError(f"plan: {name} is a Program, got {type(p).__name__}: {p!r}")
    if program.strategy:
        raise TranspileError(f"plan: {program.label()} is already the result of {program.strategy}; give the program for one device")
    if batch is None:
        raise TranspileError("plan needs the batch: the rows of a step, of all ranks together, such as batch=512")
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise TranspileError(f"plan: batch is a number of rows, at least 1, got {batch!r}")


def _names(strategies: Any) -> Sequence[str] | None:
    if strategies is not None and not isinstance(strategies, (str, Sequence)):
        raise TranspileError(f"plan: strategies is a list of names, such as ['zero1', 'fsdp'], got {strategies!r}")
    return [strategies] if isinstance(strategies, str) else strategies


def _wires(wire: Any) -> list[str]:
    if not isinstance(wire, (str, Sequence)):
        raise TranspileError(f"plan: wire is a dtype or a list of them, such as 'bfloat16', got {wire!r}")
    found = [wire] if isinstance(wire, str) else list(wire)
    for one in found:
        if one not in HALVES:
            raise TranspileError(f"plan: unknown wire={one!r}; {nearest(str(one), HALVES, 'there are')}")
    return found
