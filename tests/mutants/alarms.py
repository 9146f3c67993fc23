"""Right programs that the proof must accept: random ones under every strategy, and rank programs rewritten by hand."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import connection, get_context
from random import Random
from typing import Any, NamedTuple

import numpy as np

import fluidx as fx

from . import api, judge, models, programs, rewrites
from .engine import Hang, watchdog

_VERIFY = 10.0
_RUN = 120.0
_EACH = 3  # rewrites of a program's ranks
_CHUNK = 10  # programs that a worker process tries


class Outcome(NamedTuple):
    number: int
    what: str  # a strategy, or a rewrite of data_parallel's programs
    cluster: str
    verdict: str  # "right", "refused", "hang", "differs" (accepted, but not one device's values), "not made", "no answer" (an exception)
    seen: str = ""


def program(number: int, seed: int) -> models.Model:
    """Program `number`: every third one is exact."""
    rng = Random(f"{seed}/{number}")
    write = programs.exact if number % 3 == 2 else programs.net
    model = models.build(f"random{number}", lambda: write(rng))
    if number % 3 == 2:
        model.tolerance = 0.0
    return model


def cluster_of(number: int) -> str:
    return list(api.CLUSTERS)[number % len(api.CLUSTERS)]


def try_program(number: int, seed: int, tell: Callable[[Outcome], None], only: str = "") -> None:
    """One program under every strategy, and data_parallel's ranks rewritten in some ways."""
    cluster = cluster_of(number)

    def said(what: str, verdict: str, seen: str = "") -> None:
        tell(Outcome(number, what, cluster, verdict, seen))

    try:
        model = program(number, seed)
    except fx.ProgramError as e:
        said("program", "not made", judge.shown(e))
        return
    rng = Random(f"{seed}/{number}/rewrites")
    references: list[judge.Reference] = []
    for strategy in api.STRATEGIES:
        if only and only != strategy and (strategy != "data_parallel" or only in api.STRATEGIES):
            continue
        try:
            ranks = api.transpile(model.main, model.startup, strategy, cluster)
        except (fx.TranspileError, fx.ProgramError) as e:
            said(strategy, "not made", judge.shown(e))
            continue
        if not references:
            references = _references(model, len(ranks.mains), number % 3 == 2)
        said(strategy, *_judged(references, ranks))
        if strategy != "data_parallel":
            continue
        ways = [*rewrites.REWRITES, *rewrites.STARTUPS]
        for way in ways if only else rng.sample(ways, _EACH):
            if only and only != way:
                continue
            mains, startups = list(ranks.mains), list(ranks.startups)
            made = rewrites.STARTUPS[way](rng, startups) if way in rewrites.STARTUPS else rewrites.REWRITES[way](rng, mains)
            if made is not None:
                changed = ranks.with_programs(mains, made) if way in rewrites.STARTUPS else ranks.with_programs(made, startups)
                said(way, *_judged(references, changed))


def _references(model: models.Model, n: int, exact: bool) -> list[judge.Reference]:
    if exact:  # only one step is: the next one's numbers have too many digits
        return [judge.reference(model, [(rows, "merged")]) for rows in (2 * n, 2 * n + 1, max(1, n - 1))]
    return [judge.reference(model, judge.plan_for(n))]


def _judged(references: list[judge.Reference], ranks: api.Ranks) -> tuple[str, str]:
    try:
        with watchdog(_VERIFY, cpu=True):
            ranks.verify()
    except fx.VerifyError as e:
        return "refused", judge.shown(e)
    except Hang:
        return "hang", f"the proof gave no answer in {_VERIFY:g} s"
    except Exception as e:
        return "no answer", judge.shown(e)
    for ref in references:
        try:
            with watchdog(_RUN):
                off = judge.right(ref, ranks)
        except Hang:
            off = "still running"
        if off:
            return "differs", off
    return "right", ""


def _work(pipe: Any, numbers: range, seed: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    np.seterr(all="ignore")
    sys.stdout = open(os.devnull, "w")
    for k in numbers:
        try:
            try_program(k, seed, pipe.send)
        except Exception as e:
            pipe.send(Outcome(k, "program", cluster_of(k), "no answer", judge.shown(e)))
    pipe.close()
    os._exit(0)


def run(count: int, seed: int, workers: int, heard: Callable[[list[Outcome], float], None]) -> tuple[list[Outcome], float]:
    """Try `count` programs in `workers` processes at a time; `heard` is told of the outcomes so far."""
    began = time.monotonic()
    context = get_context("fork")
    waiting = [range(k, min(k + _CHUNK, count)) for k in range(0, count, _CHUNK)][::-1]
    running: dict[Any, Any] = {}
    out: list[Outcome] = []
    while waiting or running:
        while waiting and len(running) < workers:
            pipe, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(theirs, waiting.pop(), seed), daemon=True)
            process.start()
            theirs.close()
            running[pipe] = process
        for pipe in connection.wait(list(running), timeout=1.0):
            try:
                out.append(pipe.recv())  # type: ignore[union-attr]
            except EOFError:
                running.pop(pipe).join()
        heard(out, time.monotonic() - began)
    return out, time.monotonic() - began


def report(outcomes: list[Outcome], seed: int, seconds: float, shown: int = 3) -> tuple[str, bool]:
    """The table, and whether all is well."""
    columns = ("right", "refused", "hang", "no answer", "differs", "not made")
    counts = Counter((o.what, o.verdict) for o in outcomes)
    lines = [f"{'strategy or rewrite':32}" + "".join(f"{c:>12}" for c in columns)]
    order = ["program", *api.STRATEGIES, *rewrites.REWRITES, *rewrites.STARTUPS]
    for what in sorted({o.what for o in outcomes}, key=order.index):
        lines.append(f"{what:32}" + "".join(f"{counts[what, c]:>12,}" for c in columns))
    lines.append("")
    of_kind: Counter = Counter()
    for o in sorted(outcomes, key=lambda o: columns.index(o.verdict)):
        if o.verdict == "right":
            continue
        of_kind[o.verdict, o.what] += 1
        if of_kind[o.verdict, o.what] <= shown:
            lines.append(f"{o.verdict.upper()} {o.number} {o.what} on {o.cluster}: {o.seen}")
    bad = [o for o in outcomes if o.verdict in ("refused", "hang", "no answer", "differs")]
    if bad:
        lines.append(f"look at one: python -m tests.mutants --seed {seed} --right {bad[0].number}/{bad[0].what}")
    tried = len({o.number for o in outcomes})
    total = Counter(o.verdict for o in outcomes)
    lines.append(
        f"{tried:,} right programs, {sum(total.values()) - total['not made']:,} transpiled or rewritten, in {seconds:,.0f} s: "
        f"{total['right']:,} accepted and equal, {total['refused'] + total['hang'] + total['no answer']:,} FALSE ALARMS, "
        f"{total['differs']:,} accepted but not one device's, {total['not made']:,} refused by transpile"
    )
    return "\n".join(lines), not bad


def show(name: str, seed: int) -> bool:
    """Print program NUMBER under a strategy or rewritten, "NUMBER/WHAT", and what becomes of it."""
    number, _, what = name.partition("/")
    model = program(int(number), seed)
    print(model.main)
    found: list[Outcome] = []
    try_program(int(number), seed, found.append, what)
    for o in found:
        print(f"{o.what} on {o.cluster}: {o.verdict} {o.seen}")
    return all(o.verdict in ("right", "not made") for o in found)
