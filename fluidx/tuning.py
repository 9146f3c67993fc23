"""Choose the options of a strategy by trying them: transpile anew for each, take the time of some steps, keep the fastest."""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import IO, Any, NamedTuple

from .executor.parallel import ParallelExecutor
from .executor.place import Place
from .ir.errors import TranspileError
from .ir.program import Program
from .transpiler import strategies
from .transpiler.strategies import Strategy
from .transpiler.transpiler import DistributeTranspiler

Options = Mapping[str, Any]


class Tried(NamedTuple):
    """A choice of options, and the seconds that each step took; none where the strategy refused them, and `why`."""

    options: Options
    seconds: tuple[float, ...]
    why: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Tuned(NamedTuple):
    """The options that were fastest, the strategy with them, and all that were tried, in their order."""

    options: Options
    strategy: Strategy
    tried: Sequence[Tried]


def tune(
    strategy: str | Callable[..., Strategy],
    candidates: Mapping[str, Iterable[Any]] | Iterable[Options],
    program: Program,
    startup: Program,
    feed: Any,
    places: Sequence[Place],
    *,
    fetch_list: Any = None,
    trainers: Any = None,
    steps: int = 5,
    warm_up: int = 2,
    log: str | Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuned:
    """Run some steps of `program` under every choice of options and give the one whose median step is the shortest.

    `strategy` is the name of one, or a function of the options that makes one. `candidates` are lists of values by option, of which all
    combinations are tried, or the choices themselves. `feed` is what a step is fed, or a function of the step's number that gives it;
    `trainers` what `transpile` takes, the number of places by default. The first `warm_up` steps of each choice are not counted.

    Every choice has an executor and scopes of its own, initialised by `startup` and dropped afterwards: no parameter that exists is read or
    written. A choice that the strategy refuses is passed over; `log` is a CSV file with a line for each, written as they are tried.
    Raises TranspileError when all are refused.

    >>> import numpy as np, fluidx as fx
    >>> main, startup = fx.Program(), fx.Program()
    >>> with fx.program_guard(main, startup):
    ...     loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 4], "float32"), 2))
    ...     _ = fx.optimizer.SGD(0.1).minimize(loss)
    >>> found = fx.tune("ring_optimizer", {"chunk_mb": [1, 4]}, main, startup, {"x": np.ones((8, 4), "float32")}, fx.cpu_places(2))
    >>> sorted(choice.options["chunk_mb"] for choice in found.tried), found.options in ({"chunk_mb": 1}, {"chunk_mb": 4})
    ([1, 4], True)
    """
    if steps < 1 or warm_up < 0:
        raise TranspileError(f"tune takes steps of at least 1 and warm_up of at least 0, got steps={steps}, warm_up={warm_up}")
    choices = list(_choices(candidates))
    if not choices:
        raise TranspileError("tune has no candidates; give lists of values by option, such as {'chunk_mb': [1, 4]}")
    make = strategy if callable(strategy) else lambda **options: strategies.get(strategy, **options)
    given = feed if callable(feed) else lambda k: feed
    names = list(dict.fromkeys(name for options in choices for name in options))
    tried: list[Tried] = []
    with open(log, "w", newline="", encoding="utf-8") if log is not None else nullcontext() as file:
        _write(file, [*names, "median ms", "least ms", "steps", "refused because"])
        for options in choices:
            try:
                t = DistributeTranspiler(make(**options))
                t.transpile(program=program, startup_program=startup, trainers=len(places) if trainers is None else trainers)
                tried.append(Tried(options, _times(t, places, given, fetch_list, steps, warm_up, clock)))
            except TranspileError as e:
                tried.append(Tried(options, (), str(e)))
            _write(file, [*(options.get(n, "") for n in names), *_figures(tried[-1])])
    ran = [one for one in tried if one.seconds]
    if not ran:
        raise TranspileError(f"tune: none of {len(tried)} choices can be; of {dict(tried[0].options)}: {tried[0].why}")
    best = min(ran, key=lambda one: one.median)
    return Tuned(best.options, make(**best.options), tuple(tried))


def _choices(candidates: Mapping[str, Iterable[Any]] | Iterable[Options]) -> Iterable[Options]:
    if not isinstance(candidates, Mapping):
        return [dict(options) for options in candidates]
    names, values = candidates.keys(), [list(some) for some in candidates.values()]
    return [dict(zip(names, some, strict=True)) for some in product(*values)] if names else []


def _times(
    t: DistributeTranspiler, places: Sequence[Place], feed: Callable[[int], Any], fetch: Any, steps: int, warm_up: int,
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
    return tuple(found[warm_up:])


def _figures(one: Tried) -> list[Any]:
    if not one.seconds:
        return ["", "", 0, one.why]
    return [f"{1e3 * one.median:.3f}", f"{1e3 * min(one.seconds):.3f}", len(one.seconds), ""]


def _write(file: IO[str] | None, row: Sequence[Any]) -> None:
    if file is not None:
        csv.writer(file).writerow(row)
        file.flush()
