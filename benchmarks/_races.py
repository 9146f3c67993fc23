"""Races between the peers of `_peers.py`: interleaved turns, and tables of their times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from _peers import HALF, LEGEND, REST, Entrant, Peer, has, mkl_fast_path, mkl_line, versions


def differs(values: list[list[float]], expected: list[list[float]], tolerance: float) -> bool:
    """Whether results differ by more than the tolerance, relative to the largest of a step."""
    return any(
        max(abs(a - b) for a, b in zip(some, others, strict=True)) > tolerance * max(map(abs, others))
        for some, others in zip(values, expected, strict=True)
    )


def race(log: Any, entrants: list[Entrant], rounds: int, seconds: float, tolerance: float) -> tuple[list[Entrant], Any]:
    """Interleaved turns of about `seconds` of all entrants that answer and compute what the first one does. Names the others.

    Returns those that ran, the first one in front (an empty list if it could not), and the watch.
    """
    from _common import Watch

    running = []
    expected: list[list[float]] = []
    for e in entrants:
        if why := e.first_answers():
            log(f"  {e.name}: not measured: {why}")
            if e is entrants[0]:
                return [], None
            continue
        values = e.values(3)
        expected = expected or values
        if differs(values, expected, tolerance):
            log(f"  {e.name}: not compared: it computes something else: {values}, {entrants[0].name} {expected}, tolerance {tolerance:g}")
            continue
        running.append(e)
    for e in running:  # how many steps make a turn
        e.steps = 2
        e.turn()
        e.steps = max(1, min(100, round(seconds / min(e.times()))))
        for figures in (e.seconds, e.slowest, e.cores, e.cpu):
            figures.clear()
    watch = Watch()
    for _ in range(rounds):
        own = 0.0
        for e in running:
            time.sleep(REST)
            own += e.turn()
        time.sleep(REST)
        watch.look(own)
    return running, watch


def best_line(ours: list[float], peers: dict[str, list[float]]) -> str:
    """Our time over the best peer's, on medians and on minima; each may have another best."""
    parts = []
    for what, of in (("medians", statistics.median), ("minima", min)):
        best = min(peers, key=lambda p: of(peers[p]))
        parts.append(f"{of(ours) / of(peers[best]):.2f} of {best} on {what}")
    return ", ".join(parts)


def table(log: Any, running: list[Entrant], watch: Any, threads: int) -> None:
    """Every entrant with its spread; then those of fluidx against the best peer: on all rounds, on the undisturbed ones, and at 1 thread on
    processor time, which waiting for a core that others use does not lengthen (at more threads it counts spinning)."""
    from _common import ratio, show

    rated = {e.name: e for e in running if not e.name.startswith("fluidx") and not (e.name.startswith("torch") and mkl_fast_path()[1])}
    ours = [e for e in running if e.name.startswith("fluidx")]
    for e in running:
        extra = f"; fluidx takes {ratio(ours[0].times(), e.times())} of it" if e.name in rated else ""
        cores = statistics.median(e.cores)
        wrong = f" - MORE THAN THE {threads} IT WAS GIVEN" if cores > threads + 0.15 else ""
        log(f"  {e.name:14} {show(e.times(), 1e3, 'ms')}, {cores:.1f} cores{wrong}{extra}")
    quiet = watch.quiet()
    doubt = "" if watch.is_quiet() else " (busy machine, not to be quoted)"
    for e in ours if rated else []:
        line = best_line(e.times(), {n: r.times() for n, r in rated.items()})
        if 3 <= len(quiet) < len(watch.others):
            line += f"; undisturbed rounds: {best_line(e.times(quiet), {n: r.times(quiet) for n, r in rated.items()})}"
        if threads == 1:
            best = min(rated.values(), key=lambda r: statistics.median(r.cpu))
            line += f"; processor time {ratio(e.cpu, best.cpu)} of {best.name}"
        log(f"  -> {e.name}{doubt}: {line}")
    log(f"  {watch}")


def report(log: Any, what: str, models: str, peers: str) -> None:
    """Compare on the models, by the peers, with the threads and rounds that the command line says; these are the defaults."""
    from _common import option, options

    wanted = options("peers", peers)
    log(versions())
    log(mkl_line())
    for name in wanted:
        if name in LEGEND:
            log(f"{name}: {LEGEND[name]}")
    threads = [int(n) for n in options("threads", "1,2")]
    compare(log, what, options("models", models), threads, wanted, int(option("rounds", "20")), float(option("seconds", "0.3")))


def compare(log: Any, mode: str, models: list[str], threads: list[int], peers: Iterable[str], rounds: int, seconds: float) -> None:
    """Race the peers on every model at every thread count, and print the tables."""
    from _common import option
    from _models import HALF_TOLERANCE, TOLERANCE

    for model in models:
        for n in threads:
            log(f"\n{model}, {'one training step' if mode == 'train' else 'inference of one batch'}, {n} thread{'s' if n > 1 else ''}")
            with ExitStack() as stack:
                entrants = []
                for name in peers:
                    if has(name, model):
                        entrants.append(Entrant(name, [stack.enter_context(Peer(name, model, mode, n))]))
                tolerance = HALF_TOLERANCE if any(name.endswith(HALF) for name in peers) else TOLERANCE[model]
                running, watch = race(log, entrants, rounds, seconds, float(option("tolerance", str(tolerance))))
                if running:
                    table(log, running, watch, n)
