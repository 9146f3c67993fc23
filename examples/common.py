"""What the examples share: train one program on one device and on N ranks under every strategy, and print the results side by side."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fluidx as fx

STRATEGIES = {  # those that run any program on any number of ranks of one host, with the results of one device
    name: fx.strategies.CATALOGUE[name]
    for name in ("data_parallel", "zero1", "zero2", "zero3", "fsdp", "ring_optimizer", "reduce_broadcast", "micro_batches")
}
Feed = dict[str, np.ndarray]


@dataclass
class Model:
    """A program to train: `batches(epoch)` gives its feeds, `test` one feed to judge it by, `metrics` what is fetched then."""

    main: fx.Program
    startup: fx.Program
    loss: Any
    metrics: dict[str, Any]
    batches: Callable[[int], Iterator[Feed]]
    test: Feed


def minibatches(feed: Feed, size: int, seed: int) -> Iterator[Feed]:
    """The rows in a shuffled order, `size` at a time; the last batch may be smaller."""
    rows = len(next(iter(feed.values())))
    order = np.random.default_rng(seed).permutation(rows)
    for k in range(0, rows, size):
        yield {name: a[order[k : k + size]] for name, a in feed.items()}


def train_single(model: Model, epochs: int, say: str = "") -> tuple[list[float], list[float], float]:
    """Train on one device; return the losses, the test metrics and the seconds taken."""
    test_program = model.main.clone(for_test=True)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.executor.Scope()
    with fx.scope_guard(scope):
        exe.run(model.startup)
        start, losses = time.perf_counter(), []
        for epoch in track(range(epochs), say or "1 device", transient=True):
            for feed in model.batches(epoch):
                losses.append(exe.run(model.main, feed=feed, fetch_list=[model.loss])[0].item())
        seconds = time.perf_counter() - start
        metrics = exe.run(test_program, feed=model.test, fetch_list=list(model.metrics.values()))
    return losses, [m.item() for m in metrics], seconds


def train_ranks(model: Model, strategy: Any, ranks: int, epochs: int) -> tuple[list[float], list[float], float]:
    """Train on `ranks` CPU ranks; the metrics are those that one device computes with the parameters of the ranks."""
    t = fx.DistributeTranspiler(strategy)
    t.transpile(program=model.main, startup_program=model.startup, trainers=ranks)
    t.verify()
    test, scope = model.main.clone(for_test=True), fx.Scope()
    with fx.ParallelExecutor(t, places=fx.cpu_places(ranks)) as exe:
        exe.run_startup()
        start, losses = time.perf_counter(), []
        for epoch in track(range(epochs), f"{ranks} rank{'s' * (ranks > 1)}, {strategy.name}", transient=True):
            for feed in model.batches(epoch):
                losses.append(exe.run(feed=feed, fetch_list=[model.loss])[0].item())
        seconds = time.perf_counter() - start
        for parameter in model.main.all_parameters():  # joined from what the ranks hold
            scope.set(parameter.name, exe.state(parameter.name))
    metrics = fx.Executor(fx.CPUPlace()).run(test, feed=model.test, fetch_list=list(model.metrics.values()), scope=scope)
    return losses, [m.item() for m in metrics], seconds


def compare(title: str, build: Callable[[], Model], epochs: int) -> None:
    """The main program of an example: parse --ranks and --epochs, train every way, print a table."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4], help="numbers of ranks to train on")
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--strategy", choices=list(STRATEGIES), nargs="+", default=list(STRATEGIES))
    args = parser.parse_args()
    with fx.unique_name.guard():
        model = build()
    table = Table(title=title)
    for column in ("run", "first loss", "last loss", *model.metrics, "largest loss difference", "seconds"):
        table.add_column(column, justify="left" if column == "run" else "right")
    losses, metrics, seconds = train_single(model, args.epochs)
    table.add_row("1 device", f"{losses[0]:.6f}", f"{losses[-1]:.6f}", *[f"{m:.4f}" for m in metrics], "", f"{seconds:.1f}")
    for ranks in args.ranks:
        for name in args.strategy:
            got, metrics, seconds = train_ranks(model, STRATEGIES[name](), ranks, args.epochs)
            apart = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(losses, got, strict=True))
            run = f"{ranks} rank{'s' * (ranks > 1)}, {name}"
            table.add_row(run, f"{got[0]:.6f}", f"{got[-1]:.6f}", *[f"{m:.4f}" for m in metrics], f"{apart:.1e}", f"{seconds:.1f}")
    Console().print(table)
