"""The measurement of a benchmark: steps of a program on different numbers of ranks, and what was predicted for them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .. import native
from ..executor import ParallelExecutor
from ..executor.places import cpu_places, process_places
from ..ir import ProgramPair
from ..ir.flow import leaves
from ..simulator.simulate import simulate
from ..transpiler.transpiler import DistributeTranspiler
from .feeds import open_feeds, synthetic_feed


@dataclass(frozen=True)
class RankResult:
    """The steps on one number of ranks. `examples` are those of a step, of all ranks together. `predicted`: seconds of a step, if asked."""

    ranks: int
    examples: int
    seconds: Sequence[float]
    predicted: float | None = None

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Examples a second.

        >>> RankResult(2, 8, (0.5, 0.25, 1.0)).rate
        16.0
        """
        return self.examples / self.step

    @property
    def error(self) -> float | None:
        """The relative error of the prediction."""
        return None if self.predicted is None else self.predicted / self.step - 1

    def efficiency(self, first: RankResult) -> float:
        """The examples a second of a rank, relative to those of another result."""
        return self.rate / self.ranks / (first.rate / first.ranks)


@dataclass(frozen=True)
class SyntheticBenchmark:
    """Steps on random feeds. `rows` are those of each rank; a program with a fixed batch has all of its rows on every number of ranks.
    `transpile(ranks)` makes the rank programs. `cluster` is the machine of the prediction."""

    pair: ProgramPair
    transpile: Callable[[int], DistributeTranspiler]
    ranks: Sequence[int]
    rows: int | None
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    backend: str = "threads"
    steps: int = 10
    warm_up: int = 3
    cluster: Any = None

    @property
    def fixed(self) -> bool:
        """Does the program fix its batch?"""
        return not open_feeds(self.pair.main)

    def feed(self, ranks: int) -> dict[str, np.ndarray]:
        """The feed of a step of all ranks."""
        return synthetic_feed(self.pair.main, self.rows, ranks, self.shapes)

    def run(self, progress: Callable[[int, int], None] = lambda ranks, step: None) -> Iterator[RankResult]:
        """Measure, after predicting all: what cannot be predicted is known before anything runs. `progress(ranks, step)` is called after
        each step."""
        made = [(n, self.transpile(n), self.feed(n)) for n in self.ranks]
        expected = [self._predicted(t, feed) for _, t, feed in made]
        for (n, t, feed), predicted in zip(made, expected, strict=True):
            examples = next((len(a) for a in feed.values() if a.ndim), 1)
            yield RankResult(n, examples, self._seconds(t, feed, partial(progress, n)), predicted)

    @property
    def fetch(self) -> list[str]:
        """The results of one element that no operator reads, such as the loss."""
        main = self.pair.main
        return [n for n in leaves(main) if main.global_block().descs[n].type.numel == 1]

    def _predicted(self, t: DistributeTranspiler, feed: Mapping[str, np.ndarray]) -> float | None:
        if self.cluster is None:
            return None
        return simulate(t, self.cluster, feed={n: a.shape for n, a in feed.items()}, fetch=self.fetch).seconds

    def _seconds(self, t: DistributeTranspiler, feed: Mapping[str, np.ndarray], progress: Callable[[int], None]) -> tuple[float, ...]:
        places = (process_places if self.backend == "processes" else cpu_places)(t.world_size)
        found = []
        with ParallelExecutor(t, places=places) as exe:
            exe.run_startup()
            for k in range(self.warm_up + self.steps):
                start = time.perf_counter()
                exe.run(feed=feed, fetch_list=self.fetch)
                found.append(time.perf_counter() - start)
                progress(k + 1)
        return tuple(found[self.warm_up :])


HEAD = "ranks  examples      step ms  (best .. p75)      examples/s   a rank  efficiency"
PREDICTED = "  predicted ms   error"


def row(result: RankResult, first: RankResult) -> str:
    """A line of the table, below HEAD."""
    best, high = min(result.seconds), sorted(result.seconds)[len(result.seconds) * 3 // 4]
    spread = f"({1e3 * best:.2f} .. {1e3 * high:.2f})"
    line = (
        f"{result.ranks:5}  {result.examples:8}  {1e3 * result.step:11.2f}  {spread:18} {result.rate:10.1f}  "
        f"{result.rate / result.ranks:7.1f}  {result.efficiency(first):10.1%}"
    )
    return line if result.predicted is None else f"{line}  {1e3 * result.predicted:12.2f}  {result.error:+6.1%}"


def notes(bench: SyntheticBenchmark) -> list[str]:
    """What the table does not say of itself."""
    found = []
    if (most := max(bench.ranks)) > native.cores():
        found.append(
            f"{most} ranks take turns on {native.cores()} cores: what more ranks bring is not seen here"
            + ("" if bench.cluster is None else ", and predictions for them are lower bounds")
        )
    if bench.fixed:
        found.append("the program fixes its batch: all numbers of ranks share the same examples")
    return found
