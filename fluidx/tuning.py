"""Tune the options of a strategy: transpile for each choice, measure the time of several steps, and keep the fastest."""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import IO, Any, NamedTuple

from .comm.launch_environment import rank, world_size
from .executor.places import Place
from .executor.ranks.parallel_executor import ParallelExecutor
from .ir.errors import FluidxError, TranspileError
from .ir.program import Program
from .simulator.planned import Planned
from .transpiler import strategies
from .transpiler.strategies import Strategy
from .transpiler.transpiler import DistributeTranspiler

Options = Mapping[str, Any]


class Tried(NamedTuple):
    """A choice of options, and the seconds of each step. If the choice is not possible, `seconds` is empty and `why` is the reason."""

    options: Options
    seconds: tuple[float, ...]
    why: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Tuned(NamedTuple):
    """The fastest options, the strategy with them, and all choices that were tried, in order."""

    options: Options
    strategy: Strategy
    tried: Sequence[Tried]


def tune(
    strategy: str | Callable[..., Strategy] | Planned | Sequence[Strategy],
    candidates: Mapping[str, Iterable[Any]] | Iterable[Options] | int | None,
    program: Program,
    startup: Program,
    feed: Any,
    places: Sequence[Place] | None,
    *,
    fetch_list: Any = None,
    trainers: Any = None,
    steps: int = 5,
    warm_up: int = 2,
    log: str | Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuned:
    """Run several steps of `program` with every choice of options, and return the choice with the shortest median step.

    `strategy` is the name of a strategy, or a function from options to a strategy. `candidates` are lists of values by option, of which all
    combinations are tried, or a list of choices. `strategy` may also be what `fx.plan` found: then the best `candidates` of it are tried, 3
    for None; or a list of strategies, with None. `feed` is the feed of a step, or a function from the step's number to it. `trainers` is
    the argument of `transpile`; by default all places that are not for servers. A choice with fewer ranks than places uses the first
    places. The first `warm_up` steps of each choice do not count.

    `places` is None if ranks are processes of one script (`fluidx run`), or `fx.mpi_places()`: all ranks must call it; the times of rank 0
    decide, and rank 0 writes the `log`. Every choice then uses all ranks, and one that fails while it runs ends them.

    Every choice has its own executor and scopes, which `startup` initialises and which are dropped afterwards: existing parameters are
    neither read nor written. A choice that is refused, or that fails in the proof or the run, is skipped with the reason. `log` is a CSV
    file with a line for each choice, written while they are tried. Raises TranspileError, which names each choice, if none is left.

    >>> import numpy as np, fluidx as fx
    >>> main, startup = fx.Program(), fx.Program()
    >>> with fx.program_guard(main, startup):
    ...     loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 4], "float32"), 2))
    ...     _ = fx.optimizer.SGD(0.1).minimize(loss)
    >>> found = fx.tune("ring_optimizer", {"chunk_mb": [1, 4]}, main, startup, {"x": np.ones((8, 4), "float32")}, fx.cpu_places(2))
    >>> sorted(choice.options["chunk_mb"] for choice in found.tried), found.options in ({"chunk_mb": 1}, {"chunk_mb": 4})
    ([1, 4], True)
    """
    if not all(isinstance(n, int) and n >= least for n, least in ((steps, 1), (warm_up, 0))):
        raise TranspileError(f"tune needs steps >= 1 and warm_up >= 0, got steps={steps!r}, warm_up={warm_up!r}")
    if places is not None and not isinstance(places, (list, tuple)):
        raise TranspileError(f"tune needs a list of places, such as fx.cpu_places(2), got {places!r}")
    given_ones = chosen_strategies(strategy, candidates)
    make, choices = (_maker(strategy), list(_choices(candidates))) if given_ones is None else (_named, given_ones)
    if not choices:
        raise TranspileError("tune has no candidates; give lists of values by option, such as {'chunk_mb': [1, 4]}")
    given = feed if callable(feed) else lambda k: feed
    names = list(dict.fromkeys(name for options in choices for name in options))
    tried: list[Tried] = []
    ran: list[tuple[Tried, Strategy]] = []
    failed: list[Exception] = []
    with open(log, "w", newline="", encoding="utf-8") if log is not None and not rank() else nullcontext() as file:
        _write(file, [*names, "median ms", "least ms", "steps", "refused because"])
        for options in choices:
            try:
                ranks = trainers if given_ones is None else options.get("trainers", trainers)
                t = transpiled(make(**options), program, startup, places, ranks)
                there = None if places is None else places[: t.world_size]
                tried.append(Tried(options, _times(t, there, given, fetch_list, steps, warm_up, clock)))
                ran.append((tried[-1], t.strategy))
            except Exception as e:  # whatever goes wrong with one choice, others may work
                failed.append(e)
                tried.append(Tried(options, (), str(e) if isinstance(e, FluidxError) else f"{type(e).__name__}: {e}"))
            _write(file, [*(options.get(n, "") for n in names), *_figures(tried[-1])])
    if not ran:
        listed = "".join(f"\n  {dict(one.options)}: {one.why.partition(chr(10))[0]}" for one in tried)
        raise TranspileError(f"tune: none of {len(tried)} combinations worked:{listed}") from failed[0]
    best, made = min(ran, key=lambda one: one[0].median)
    return Tuned(best.options, made, tuple(tried))


def chosen_strategies(strategy: Any, candidates: Any) -> list[Options] | None:
    """The choices if strategies are given: of a plan, or in a list. None if options of a strategy are tried."""
    if isinstance(strategy, Planned):
        best = 3 if candidates is None else candidates
        if not isinstance(best, int) or isinstance(best, bool) or best < 1:
            raise TranspileError(f"tune takes the number of strategies of a plan to try, at least 1, got {candidates!r}")
        return [{"strategy": c.strategy, "trainers": c.trainers} for c in strategy.candidates[:best]]
    if not isinstance(strategy, (list, tuple)):
        return None
    wrong = next((one for one in strategy if not isinstance(one, Strategy)), None)
    if wrong is not None or candidates is not None:
        raise TranspileError(f"tune takes a list of strategies with candidates=None, got {wrong or candidates!r}")
    return [{"strategy": one} for one in strategy]


def _named(strategy: Strategy, trainers: Any = None) -> Strategy:
    return strategy


def _maker(strategy: Any) -> Callable[..., Any]:
    """A function from options to the strategy."""
    if callable(strategy):
        return strategy
    if not isinstance(strategy, str):
        raise TranspileError(f"tune needs the name of a strategy, or a function from options to a strategy, got {strategy!r}")
    return partial(strategies.get, strategy)


def transpiled(
    strategy: Any, program: Program, startup: Program, places: Sequence[Place] | None, trainers: Any
) -> DistributeTranspiler:  # fmt: skip
    """The program for these places, or for the ranks that were launched; `trainers` None: all places that are not for servers."""
    if not isinstance(strategy, Strategy):
        raise TranspileError(f"the function returned no strategy, got {strategy!r}")
    if trainers is None:
        there = world_size() if places is None else len(places)
        trainers = there - strategy.servers
        if trainers < 1:
            raise TranspileError(f"{strategy!r} leaves no trainer among {there} places")
    return DistributeTranspiler(strategy).transpile(program=program, startup_program=startup, trainers=trainers)


def _choices(candidates: Any) -> Iterable[Options]:
    if isinstance(candidates, Mapping):
        for name, values in candidates.items():
            if not isinstance(values, Iterable) or isinstance(values, (str, Mapping)):
                raise TranspileError(f"tune needs a list of values for {name!r}, such as {{{name!r}: [{values!r}]}}, got {values!r}")
        lists = [list(values) for values in candidates.values()]
        return [dict(zip(candidates, some, strict=True)) for some in product(*lists)] if lists else []
    listed = list(candidates) if isinstance(candidates, Iterable) else [candidates]
    wrong = next((one for one in listed if not isinstance(one, Mapping)), None)
    if wrong is not None:
        raise TranspileError(f"tune needs lists of values for options, or a list: [{{'chunk_mb': 1}}, {{'chunk_mb': 4}}], got {wrong!r}")
    return [dict(options) for options in listed]


def _times(
    t: DistributeTranspiler, places: Sequence[Place] | None, feed: Callable[[int], Any], fetch: Any, steps: int, warm_up: int,
    clock: Callable[[], float],
) -> tuple[float, ...]:  # fmt: skip
    found = []
    with ParallelExecutor(t, places=places) as exe:
        exe.run_startup()
        for k in range(warm_up + steps):
            given = feed(k)
            start = clock()
            exe.run(fetch_list=fetch, feed=given)
            found.append(clock() - start)
        return tuple(exe.script.gather_each("measure steps", lambda: found[warm_up:])[0])


def _figures(one: Tried) -> list[Any]:
    if not one.seconds:
        return ["", "", 0, one.why]
    return [f"{1e3 * one.median:.3f}", f"{1e3 * min(one.seconds):.3f}", len(one.seconds), ""]


def _write(file: IO[str] | None, row: Sequence[Any]) -> None:
    if file is not None:
        csv.writer(file).writerow(row)
        file.flush()
