"""Choose a strategy for a program and a machine before anything runs: what cannot fit is refused, the rest is simulated by lower bound."""

from __future__ import annotations

import warnings
from bisect import insort
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from ..ir.attributes import attrs_key
from ..ir.dtypes import HALVES
from ..ir.errors import FluidxError, TranspileError, VerifyError, nearest
from ..ir.pass_base import Pass
from ..ir.program import Program
from ..rewrite import Recompute
from ..transpiler.cluster import Cluster, Mesh
from ..transpiler.transpiler import DistributeTranspiler
from ..verify import Report
from .candidates import Candidate, candidates
from .closed_forms import Collective, closed_form
from .memory_limit import MemoryLimit
from .one_device import OneDevice, one_device
from .planned import Considered, Planned, Prediction
from .refusals import SAME, nothing_fits, too_much

BEST = 3  # so many are simulated exactly at least, the best by the predictions of one rank for all
_MOST_EXACT = 8  # and so many at most, if an exact time is above what others were predicted to take
_MOST_MESSAGES = 200_000  # of an exact simulation: more take minutes
_MOST_OPERATORS, _MOST_OWN_MESSAGES = 50_000, 4_000  # of all ranks, where each is planned by itself


class MachineFigures(Protocol):
    """What a search asks of a machine (see machine.Machine)."""

    limit: MemoryLimit
    batch: int

    def step(self, plan: Any, step: Any) -> float: ...
    def collective(self, trainers: Cluster | Mesh) -> Collective: ...
    def simulate(self, t: DistributeTranspiler, exact: bool = False) -> Prediction: ...
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
    recompute: bool = True,
) -> Planned:
    """Choose the strategy with which a step of `program` takes least time on a cluster and fits into the memory of its devices.

    `cluster`: a Cluster with figures, the name of a cluster file (`fluidx clusters` lists them), or the file that `fluidx calibrate` wrote;
    a Mesh on a cluster fixes the mesh, otherwise all meshes are tried that the annotations of the program allow. `batch`: the rows of a
    step, of all ranks together. `memory`: of a device, such as "40GB"; by default what its file says, of which 5 % and the context of a
    process stay free. `ranks`: how many devices to use, by default all of the cluster. `strategies`: names of the strategies to try.
    `wire`: dtypes in which gradients may travel beside their own, "bfloat16"; they are rounded, so that nothing is tried by default.
    `rewrites`: passes that save memory, each of which is tried. `recompute`: what does not fit is tried again with `rewrite.Recompute()`.

    Candidates that cannot fit are refused by closed forms, without transpiling them. The others are transpiled and simulated, one rank for
    all, in the order of a lower bound of their time, until no bound is among the best three times found. The best three and data_parallel
    are then simulated rank by rank and message by message, and the fastest of them is chosen and verified. The answer depends on the
    arguments alone, so that all ranks of a job find the same.

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
    return search(program, startup, found, Machine(given, hardware, batch, memory), hardware.name, recompute)


def search(
    program: Program, startup: Program, found: Sequence[Candidate], prices: MachineFigures, machine: str, recompute: bool = False
) -> Planned:  # fmt: skip
    """Simulate the candidates that can win, and choose. See `plan`."""
    return _PlanSearch(program, startup, prices, recompute).run(found, machine)


class _PlanSearch:
    def __init__(self, program: Program, startup: Program, prices: MachineFigures, recompute: bool):
        self.program, self.startup, self.prices, self.recompute = program, startup, prices, recompute
        self.programs: dict[tuple[Pass, ...], Program] = {}
        self.alone: dict[tuple, OneDevice] = {}
        self.known: dict[int, Candidate] = {}  # by the program that was simulated

    def run(self, found: Sequence[Candidate], machine: str) -> Planned:
        done = self._searched([self._sized(c) for c in found])
        while True:
            done = self._exactly(done)
            fits = _fitting(done)
            if not fits:
                raise nothing_fits([c for c in done if c.refused or c.note], self.prices.limit, self.recompute)
            chosen = fits[0]
            report = self._verified(chosen)
            if isinstance(report, Report):
                break
            done[done.index(chosen)] = chosen.without_time(f"it does not verify: {report}")
        rest = sorted((c for c in done if c.predicted is None and not c.refused), key=lambda c: (c.bound, c.candidate.order))
        everything = [*fits, *rest, *(c for c in done if c.refused)]
        baseline = next((c for c in sorted(everything, key=lambda c: c.candidate.order) if c.strategy.name == "data_parallel"), None)
        return Planned(
            self.program, self.startup, self.prices.batch, machine, self.prices.limit, tuple(everything), report, baseline
        )  # fmt: skip

    def _searched(self, found: Sequence[Considered]) -> list[Considered]:
        """All candidates, simulated those that can be among the best by their bounds. Those that do not fit are tried with recompute."""
        left = sorted([*found, *(again for c in found for again in self._recomputed(c))], key=_by_bound)
        simplest = min((c for c in left if not c.refused), key=lambda c: c.candidate.order, default=None)
        if simplest is not None and simplest.strategy.name == "data_parallel":  # the baseline is always simulated
            left.remove(simplest)
            left.insert(0, simplest)
        done: list[Considered] = []
        best: list[float] = []
        while left:
            one = left.pop(0)
            if not one.refused and (len(best) < BEST or one.bound < best[BEST - 1]):
                one = self._simulated(one)
                for again in self._recomputed(one):
                    insort(left, again, key=_by_bound)
                if one.predicted is not None and not one.refused:
                    insort(best, one.predicted.seconds)
            done.append(one)
        return done

    def _recomputed(self, one: Considered) -> list[Considered]:
        """A candidate that does not fit, with recompute; none if recompute changes nothing."""
        c = one.candidate
        if not (self.recompute and one.over) or c.recomputes:
            return []
        again = Candidate(c.strategy.with_rewrites(Recompute()), c.trainers, (c.order[0] + 100, *c.order[1:]))
        if len(self._rewritten(again.strategy.rewrites).ops) == len(self._rewritten(c.strategy.rewrites).ops):
            return []
        return [self._sized(again)]

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
        return self._within_limit(Considered(c, form), form.memory)

    def _within_limit(self, one: Considered, memory: int) -> Considered:
        over = memory - self.prices.limit.usable
        return replace(one, refused=too_much(memory, over), over=over) if over > 0 else one

    def _one(self, c: Candidate, rows: int) -> OneDevice:
        """The program on one device, for the rows of a rank; shared by all candidates with as many."""
        key = c.strategy.rewrites, rows
        if key not in self.alone:
            self.alone[key] = one_device(self._rewritten(c.strategy.rewrites), rows, self.prices.step, self.prices.device)
        return self.alone[key]

    def _rewritten(self, rewrites: tuple[Pass, ...]) -> Program:
        """The program after the rewrites of a strategy."""
        if not rewrites:
            return self.program
        if rewrites not in self.programs:
            self.programs[rewrites] = rewrites[-1].run(self._rewritten(rewrites[:-1]))
        return self.programs[rewrites]

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
            if why := _too_many(t):
                return replace(one, note=f"not simulated: {why}")
            predicted = self.prices.simulate(t)
        except FluidxError as e:
            return one.without_time(_first_line(e))
        return self._within_limit(replace(one, predicted=predicted), predicted.memory)

    def _exactly(self, done: list[Considered]) -> list[Considered]:
        """The candidates, the best of them and data_parallel simulated exactly, until no other one was predicted to be as fast."""
        found = list(done)
        simplest = min(found, key=lambda c: c.candidate.order, default=None)
        if simplest is not None and simplest.strategy.name == "data_parallel":
            self._make_exact(found, simplest)
        while True:
            fits = sorted((c for c in found if c.predicted is not None and not c.refused), key=_by_time)
            one = next((c for c in fits[:BEST] if not c.exact), None)
            if one is None or sum(c.exact for c in found) >= _MOST_EXACT:
                return found
            self._make_exact(found, one)

    def _make_exact(self, found: list[Considered], one: Considered) -> None:
        if one.predicted is None or one.refused or one.exact:
            return
        t = self._transpiled(one.candidate)
        many = t.messages
        if many > _MOST_MESSAGES:
            made = replace(one, exact=True, note=f"collectives in closed form: {many:,} messages, more than {_MOST_MESSAGES:,}")
        else:
            predicted = self.prices.simulate(t, exact=True)
            made = self._within_limit(replace(one, predicted=predicted, exact=True), predicted.memory)
        found[found.index(one)] = made
        found += [self._simulated(again) for again in self._recomputed(made) if not again.refused]

    def _verified(self, one: Considered) -> Report | str:
        try:
            return self._transpiled(one.candidate).verify()
        except VerifyError as e:
            return _first_line(e)


def _fitting(done: Sequence[Considered]) -> list[Considered]:
    """The candidates that fit: the exact ones by their time, then the others."""
    fits = [c for c in done if c.predicted is not None and not c.refused]
    return sorted(fits, key=lambda c: (not c.exact, *_by_time(c)))


def _by_time(one: Considered) -> tuple[float, tuple[int, ...]]:
    assert one.predicted is not None
    return one.predicted.seconds, one.candidate.order


def _by_bound(one: Considered) -> tuple[float, tuple[int, ...]]:
    return one.bound, one.candidate.order


def _too_many(t: DistributeTranspiler) -> str:
    """Why ranks that are planned one by one are not simulated; "" if they are."""
    if t.ranks_differ_in_rounds_only:
        return ""
    operators = len(t.main.ops) * t.world_size
    if operators > _MOST_OPERATORS:
        return f"each rank has a program of its own, {operators:,} operators together, more than {_MOST_OPERATORS:,}"
    if t.messages > _MOST_OWN_MESSAGES:
        return f"ranks with programs of their own send {t.messages:,} messages, more than {_MOST_OWN_MESSAGES:,}"
    return ""


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
