"""Runs mutants in worker processes: a case is a model under a strategy on a cluster, a mutant is a number in it."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from random import Random
from typing import Any, NamedTuple

import numpy as np

import fluidx as fx

from . import api, judge, models, mutators

HOLES = ("wrong", "deadlock", "loud", "fetch", "unproved")
_VERIFY = 5.0  # seconds of work that the proof of a tiny program may take
_RUN = 25.0
_SILENCE = 60.0  # a worker that says nothing for so long is stuck where no signal reaches it
_BYTES = 6 << 30


class Case(NamedTuple):
    model: str
    strategy: str
    cluster: str

    def __str__(self) -> str:
        return "/".join(self)


class Result(NamedTuple):
    """Of one mutant, or with number -1 of the case as it is."""

    case: Case
    number: int
    verdict: str
    kind: str = ""
    text: str = ""
    seen: str = ""


class Hang(BaseException):
    """The watchdog; no `except Exception` stops it."""


@contextmanager
def watchdog(seconds: float, cpu: bool = False) -> Iterator[None]:
    """Raise Hang after so many seconds; with `cpu`, after so many that this process has worked: others on the machine do not count."""

    def bark(*_: Any) -> None:
        raise Hang

    number, timer = (signal.SIGPROF, signal.ITIMER_PROF) if cpu else (signal.SIGALRM, signal.ITIMER_REAL)
    old = signal.signal(number, bark)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, old)


def cases(only: str = "") -> list[Case]:
    """Every model under every strategy on every cluster; annotated models on meshes too."""
    every = [Case(m, s, c) for m in models.MODELS for s in api.strategies_of(m) for c in api.clusters(m, s)]
    return [c for c in every if all(word in str(c).split("/") for word in only.split("/") if word)]


def spread(every: Sequence[Case], count: int, most: int = 0) -> list[tuple[Case, range]]:
    """`count` mutants over the cases (an even sample of `most` of them), evenly."""
    if 0 < most < len(every):
        every = [every[k * len(every) // most] for k in range(most)]
    each, more = divmod(count, len(every))
    plan = [(c, range(each + (k * more // len(every) != (k + 1) * more // len(every)))) for k, c in enumerate(every)]
    return [(c, numbers) for c, numbers in plan if numbers]


def mutant(case: Case, number: int, seed: int, ranks: api.Ranks) -> mutators.Mutant:
    """Mutant `number`: every third one changes the programs for all ranks, if the strategy has a proof of these."""
    rng = Random(f"{seed}/{case}/{number}")
    if _is_of_common(number, ranks):
        assert ranks.common is not None
        return mutators.draw(rng, (ranks.common.main,), (ranks.common.startup,))
    return mutators.draw(rng, ranks.mains, ranks.startups)


def _is_of_common(number: int, ranks: api.Ranks) -> bool:
    return ranks.common is not None and number % 3 == 2


def accepted(m: mutators.Mutant, number: int, ranks: api.Ranks) -> api.Ranks:
    """The mutant's rank programs. VerifyError if the proof refuses it."""
    if _is_of_common(number, ranks):
        return ranks.proved_in_common(*m.mains, *m.startups)
    broken = ranks.with_programs(m.mains, m.startups)
    broken.verify()
    return broken


# -- in a worker ------------------------------------------------------------------------------------------------------------------


def prepare(case: Case) -> tuple[judge.Reference, api.Ranks] | Result:
    """The case's reference and rank programs, or what is wrong with it before anything was broken."""
    try:
        model = models.build(case.model)
        ranks = api.transpile(model.main, model.startup, case.strategy, case.cluster)
    except (fx.ProgramError, fx.TranspileError, TypeError) as e:
        return Result(case, -1, "not made", seen=judge.shown(e))
    try:
        with watchdog(_VERIFY, cpu=True):
            ranks.verify()
    except (fx.FluidxError, Hang) as e:
        return Result(case, -1, "unbroken refused", seen=judge.shown(e))
    ref = judge.reference(model, judge.plan_for(len(ranks.mains)))
    try:
        judge.baseline(ref, ranks)
    except judge.ERRORS as e:
        return Result(case, -1, "unbroken fails", seen=judge.shown(e))
    return ref, ranks


def try_one(case: Case, number: int, seed: int, ref: judge.Reference, ranks: api.Ranks) -> Result:
    m = mutant(case, number, seed, ranks)
    try:
        with watchdog(_VERIFY, cpu=True):
            broken = accepted(m, number, ranks)
    except fx.VerifyError:
        return Result(case, number, "refused", m.kind)
    except Hang:
        return Result(case, number, "hang", m.kind, m.text, f"the proof gave no answer in {_VERIFY:g} s")
    except Exception as e:
        return Result(case, number, "other", m.kind, m.text, f"{judge.shown(e)} at {_raised_at(e)}")
    try:
        with watchdog(_RUN):
            verdict, seen = judge.verdict(ref, broken)
    except Hang:
        return Result(case, number, "deadlock", m.kind, m.text, f"still running after {_RUN:g} s")
    if verdict == "equal" and _is_of_common(number, ranks):
        seen = _of_each(broken)
        verdict = "unproved" if seen else verdict
    elif verdict == "equal" and number % 4 == 0:
        seen = _by_text(broken, ranks)
        verdict = "text" if seen else verdict
    return Result(case, number, verdict, m.kind, m.text, seen)


def _of_each(broken: api.Ranks) -> str:
    """Why the proof of all rank programs refuses what the proof of the program for all ranks accepts; "" if it does not."""
    try:
        with watchdog(_VERIFY, cpu=True):
            broken.verify()
    except (Exception, Hang) as e:
        return judge.shown(e)
    return ""


def _by_text(broken: api.Ranks, ranks: api.Ranks) -> str:
    """Printed and read back, is it still accepted? "" when it is."""
    pairs = zip((*broken.mains, *broken.startups), (*ranks.mains, *ranks.startups), strict=True)
    try:
        read = [p if p is old else fx.Program.parse_from_string(str(p)) for p, old in pairs]
        n = len(broken.mains)
        with watchdog(_VERIFY, cpu=True):
            ranks.with_programs(read[:n], read[n:]).verify()
    except (Exception, Hang) as e:
        return judge.shown(e)
    return ""


def _raised_at(e: BaseException) -> str:
    at = traceback.extract_tb(e.__traceback__)[-1]
    return f"{os.path.basename(at.filename)}:{at.lineno}"


def _work(pipe: Any, case: Case, numbers: Sequence[int], seed: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    np.seterr(all="ignore")
    sys.stdout = open(os.devnull, "w")
    made = prepare(case)
    if isinstance(made, Result):
        pipe.send(made)
        os._exit(0)
    ref, ranks = made
    pipe.send(Result(case, -1, "unbroken differs" if ref.wrong else "ready", seen=", ".join(ref.wrong[:4])))
    for k in numbers:
        r = try_one(case, k, seed, ref, ranks)
        pipe.send(r)
        if r.seen.startswith("still running"):
            break  # its threads do not end
    pipe.close()
    os._exit(0)


# -- in the parent ----------------------------------------------------------------------------------------------------------------


@dataclass
class _Job:
    case: Case
    numbers: list[int]
    process: Any = None
    pipe: Any = None
    ready: bool = False
    heard: float = 0.0


@dataclass
class Tally:
    seconds: float = 0.0
    results: Counter = field(default_factory=Counter)  # (strategy, cluster, verdict)
    kinds: Counter = field(default_factory=Counter)  # (kind, verdict)
    models: set[str] = field(default_factory=set)
    notable: list[Result] = field(default_factory=list)
    cases: list[Result] = field(default_factory=list)
    log: str | None = None

    def add(self, r: Result) -> None:
        if r.number < 0:
            if r.verdict != "ready" and all(r.case != c.case for c in self.cases):
                self.cases.append(r)
            return
        self.models.add(r.case.model)
        self.results[r.case.strategy, r.case.cluster, r.verdict] += 1
        for kind in r.kind.split("+"):
            self.kinds[kind, r.verdict] += 1
        if r.verdict not in ("refused", "equal"):
            self.notable.append(r)
            if self.log:
                with open(self.log, "a") as f:
                    f.write(_line(r) + "\n")

    def count(self, *verdicts: str) -> int:
        return sum(n for (_, _, v), n in self.results.items() if v in verdicts)

    @property
    def mutants(self) -> int:
        return sum(self.results.values())

    @property
    def failed(self) -> bool:
        bad = ("unbroken refused", "unbroken fails", "unbroken differs")
        return self.count(*HOLES, "hang", "other") > 0 or any(r.verdict in bad for r in self.cases)


Progress = Callable[[Tally], None]


def more(plan: Sequence[tuple[Case, range]], tally: Tally, count: int) -> list[tuple[Case, range]]:
    """Further mutants of the cases that could be made, for those that could not."""
    lost = {r.case for r in tally.cases if r.verdict != "unbroken differs"}
    made = [(c, numbers) for c, numbers in plan if c not in lost]
    if not made or tally.mutants >= count or not lost:
        return []
    extra = spread([c for c, _ in made], count - tally.mutants)
    begun = {c: numbers.stop for c, numbers in made}
    return [(c, range(begun[c], begun[c] + len(numbers))) for c, numbers in extra]


def run(
    plan: Sequence[tuple[Case, Sequence[int]]], seed: int, workers: int, seen: Progress = lambda t: None, tally: Tally | None = None
) -> Tally:
    """Try the numbered mutants of each case, in `workers` processes at a time."""
    tally = tally or Tally()
    began = time.monotonic() - tally.seconds
    context = get_context("fork")
    waiting = [_Job(case, list(numbers)) for case, numbers in plan]
    waiting.reverse()
    running: list[_Job] = []
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop()
            job.pipe, theirs = context.Pipe(duplex=False)
            job.process = context.Process(target=_work, args=(theirs, job.case, tuple(job.numbers), seed), daemon=True)
            job.process.start()
            theirs.close()
            job.ready, job.heard = False, time.monotonic()
            running.append(job)
        connection.wait([j.pipe for j in running], timeout=1.0)
        for job in list(running):
            ended = _listen(job, tally)
            if not ended and time.monotonic() - job.heard > _SILENCE:
                job.process.kill()
                _lost(job, tally, "the worker was stuck and had to be killed")
                ended = True
            if ended:
                job.process.join()
                running.remove(job)
                if job.numbers:
                    waiting.append(_Job(job.case, job.numbers))
        tally.seconds = time.monotonic() - began
        seen(tally)
    return tally


def _listen(job: _Job, tally: Tally) -> bool:
    """Take what the worker has to say; True when it has ended."""
    try:
        while job.pipe.poll():
            r = job.pipe.recv()
            job.heard = time.monotonic()
            if r.number < 0:
                job.ready = r.verdict in ("ready", "unbroken differs")
                if not job.ready:
                    job.numbers = []
                tally.add(r)
            else:
                job.numbers.remove(r.number)
                tally.add(r)
    except EOFError:
        job.process.join(5)
        if job.numbers and job.process.exitcode:
            _lost(job, tally, f"the worker died with code {job.process.exitcode}")
        return True
    return False


def _lost(job: _Job, tally: Tally, why: str) -> None:
    if not job.ready:
        tally.add(Result(job.case, -1, "unbroken fails", seen=why))
        job.numbers = []
    elif job.numbers:
        tally.add(Result(job.case, job.numbers.pop(0), "hang", seen=why))


# -- what is printed --------------------------------------------------------------------------------------------------------------


def table(tally: Tally) -> str:
    columns = ("mutants", "refused", "equal", "text", "wrong", "deadlock", "loud", "fetch", "unproved", "hang", "other")
    lines = [f"{'strategy':18}{'ranks':>8}" + "".join(f"{c:>10}" for c in columns)]
    rows = sorted({(s, c) for s, c, _ in tally.results}, key=lambda sc: ([*api.STRATEGIES, *api.PIPELINES].index(sc[0]), sc[1]))
    for s, c in rows:
        n = {v: tally.results[s, c, v] for v in columns}
        n["mutants"] = sum(k for (a, b, _), k in tally.results.items() if (a, b) == (s, c))
        lines.append(f"{s:18}{c:>8}" + "".join(f"{n[v]:>10,}" for v in columns))
    total = {v: tally.count(v) for v in columns} | {"mutants": tally.mutants}
    lines.append(f"{'all':18}{'':>8}" + "".join(f"{total[v]:>10,}" for v in columns))
    lines.append("")
    lines.append(f"{'mutator':18}{'':>8}" + "".join(f"{c:>10}" for c in columns))
    for kind in sorted({k for k, _ in tally.kinds}):
        n = {v: tally.kinds[kind, v] for v in columns}
        n["mutants"] = sum(k for (a, _), k in tally.kinds.items() if a == kind)
        lines.append(f"{kind:18}{'':>8}" + "".join(f"{n[v]:>10,}" for v in columns))
    return "\n".join(lines)


def _line(r: Result) -> str:
    return f"{r.verdict.upper()} {r.case}/{r.number}: {r.text}\n    {r.seen}"


def report(tally: Tally, seed: int, shown: int = 3) -> str:
    """The table, `shown` holes of each kind, and how to look at one."""
    out = [table(tally), ""]
    made: dict[tuple[str, str], list[str]] = {}
    for r in tally.cases:
        first = r.seen.split(". ")[0][:160]
        made.setdefault((r.verdict, f"{r.case.model}: {first}"), []).append(f"{r.case.strategy}/{r.case.cluster}")
    for (verdict, what), where in sorted(made.items()):
        out.append(f"{verdict}: {what} ({len(where)} cases, first {where[0]})")
    holes = tally.count(*HOLES)
    kinds = dict.fromkeys((*HOLES, "hang", "other", "text"))
    bad = [r for v in kinds for r in tally.notable if r.verdict == v]
    of_kind: Counter = Counter()
    for r in bad:
        of_kind[r.verdict, r.kind] += 1
        if of_kind[r.verdict, r.kind] <= shown:
            out.append(_line(r))
    out += [f"... and {n - shown} more: {v.upper()} by {kind}" for (v, kind), n in of_kind.items() if n > shown]
    if bad:
        out.append(f"look at one: python -m tests.mutants --seed {seed} --show {bad[0].case}/{bad[0].number}")
    said = {
        "refused": tally.count("refused"),
        "accepted and equal": tally.count("equal", "text"),
        "of them not when read back from text": tally.count("text"),
        "HOLES": holes,
        "hangs of the proof": tally.count("hang"),
        "other exceptions": tally.count("other"),
    }
    counts = ", ".join(f"{n:,} {what}" for what, n in said.items())
    out.append(f"{tally.mutants:,} mutants of {len(tally.models)} models in {tally.seconds:,.0f} s: {counts}")
    return "\n".join(out)


def show(name: str, seed: int) -> bool:
    """Print one mutant, "model/strategy/ranks/number": what was changed, as a diff, and both verdicts. True when it is no hole."""
    *parts, number = name.split("/")
    case = Case(*parts)
    made = prepare(case)
    if isinstance(made, Result):
        print(made)
        return False
    ref, ranks = made
    m = mutant(case, int(number), seed, ranks)
    print(m.text)
    of_common = _is_of_common(int(number), ranks)
    before = ranks.common if of_common else None
    mains, startups = ((before.main,), (before.startup,)) if before is not None else (ranks.mains, ranks.startups)
    for what, old, new in (("main", mains, m.mains), ("startup", startups, m.startups)):
        for r, (a, b) in enumerate(zip(old, new, strict=True)):
            if a is not b:
                print(f"-- {what} of {'all ranks' if of_common else f'rank {r}'}")
                print("\n".join(_changes(str(a).splitlines(), _text(b))))
    result = try_one(case, int(number), seed, ref, ranks)
    try:
        with watchdog(_VERIFY, cpu=True):
            accepted(m, int(number), ranks)
    except Exception as e:
        print(f"{type(e).__name__}: {e}")
    print(f"{result.verdict}: {result.seen}")
    return result.verdict in ("refused", "equal", "text")


def _text(program: Any) -> list[str]:
    try:
        return str(program).splitlines()
    except Exception as e:
        return [f"(does not print: {judge.shown(e)})"]


def _changes(a: list[str], b: list[str]) -> Iterator[str]:
    import difflib

    yield from (line.rstrip("\n") for line in difflib.unified_diff(a, b, lineterm="", n=1) if not line.startswith(("---", "+++")))
