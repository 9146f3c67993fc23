"""Profile: the runs that a profiler observed, with step times, and tables of them by operator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..executor.plan.cost import Cost
from ..executor.plan.records import Plan
from ..executor.run.call_descriptions import CallDescription, RemotePlan, RemotePlanValues, calls_of
from ..executor.run.observers import After
from ..ir.errors import ExecutionError, nearest
from ..ir.program import Program
from . import timeline
from .ceilings import Ceilings, ceilings
from .rank_run import RankRun, rate

if TYPE_CHECKING:
    from ..executor.run.bound_plan import BoundPlan

SORTED_BY = ("total", "calls", "ave", "max", "min", "default")
_NEAR = 0.2  # fraction of a ceiling: an operator below it for both ceilings is bound by neither
_MOSTLY = 0.5  # fraction of the time: with more overhead than this, an operator is bound by overhead


class Row(NamedTuple):
    """The calls of one operator together. Times are seconds; `share` is the fraction of all rows' time, `near` that of the closer
    ceiling."""

    name: str
    kernel: str
    calls: int
    total: float
    least: float
    most: float
    share: float
    flops: int
    nbytes: int
    near: float
    bound: str  # "compute", "memory", "overhead" or "communication"
    site: str  # the user's line, if it is one line

    @property
    def mean(self) -> float:
        """The mean seconds of a call."""
        return self.total / self.calls

    @property
    def gflops(self) -> float:
        """10⁹ floating-point operations in a second."""
        return rate(self.flops, self.total)

    @property
    def gbs(self) -> float:
        """10⁹ bytes in a second."""
        return rate(self.nbytes, self.total)


class Exposed(NamedTuple):
    """The communication of one rank in the observed runs, in seconds: `communicating` in total, `exposed` without compute at the same time,
    and `total`, the runs from their first step to their last."""

    rank: int
    runs: int
    communicating: float
    exposed: float
    total: float

    def __str__(self) -> str:
        each, share = 1e3 / self.runs, self.exposed / self.total if self.total else 0.0
        return (
            f"rank {self.rank}: {each * self.communicating:.3f} ms of communication a run, {each * self.exposed:.3f} ms exposed "
            f"({share:.1%} of the run)"
        )


class Profile:
    """The runs that a profiler observed; with `limit`, at most so many of each program and rank.

    `rows()` and `table()` sum them by operator, `exposed()` gives the communication that compute did not hide, and `save(path)` writes the
    runs as a timeline.
    """

    def __init__(self, limit: int | None = None):
        self.runs: list[RankRun] = []
        self.limit = limit
        self._lock = threading.Lock()
        self._calls: dict[
            int, tuple[Plan | RemotePlanValues, list[CallDescription]]
        ] = {}  # by the id of a plan; plans are kept alive so that ids are not reused
        self._seen: dict[tuple[int, int | None], int] = {}

    def wants(self, program: Program, rank: int | None) -> bool:
        """Would a run of this program be observed? Executors call it."""
        return self.limit is None or self._seen.get((id(program), rank), 0) < self.limit

    def observe(self, bound: BoundPlan | RemotePlan, rank: int | None) -> After | None:
        """The callback that records the steps of a run. Executors call it."""
        program = bound.plan.program
        with self._lock:
            if not self.wants(program, rank):
                return None
            self._seen[id(program), rank] = self._seen.get((id(program), rank), 0) + 1
            if id(bound.plan) not in self._calls:
                self._calls[id(bound.plan)] = bound.plan, calls_of(bound)
            calls = self._calls[id(bound.plan)][1]
            run = RankRun(bound.plan, calls, rank, bound.ctx.world_size, bound.ctx.step, own_threads=bound.threads)
            self.runs.append(run)
        note = run.times.append
        return lambda i, op, start, stop: note((i, start, stop))

    def reset(self) -> None:
        """Drop all runs."""
        with self._lock:
            self.runs, self._seen = [], {}

    def exposed(self) -> list[Exposed]:
        """The communication of every rank, and how much of it compute did not hide: communication on the compute thread, and waits for
        overlapped steps. Ranks without communication are left out."""
        sums: dict[int, list[float]] = {}
        for run in self.runs:
            if run.rank is None or not any(run.calls[i].communicates for i, _, _ in run.times):
                continue
            found = sums.setdefault(run.rank, [0, 0.0, 0.0, 0.0])
            for i, start, stop in run.times:
                c, seconds = run.calls[i], 1e-9 * (stop - start)
                found[1] += seconds * ((c.communicates or c.overlapped) and not c.waits)
                found[2] += seconds * (c.waits or c.communicates and not c.overlapped)
            first, last = run.span
            found[0] += 1
            found[3] += 1e-9 * (last - first)
        return [Exposed(rank, int(sums[rank][0]), *sums[rank][1:]) for rank in sorted(sums)]

    # -- rows ---------------------------------------------------------------------------------------------------------------

    def rows(self, by: str = "op", sort: str = "total", at_best: Callable[[int], Ceilings] = ceilings) -> list[Row]:
        """One row for each op and kernel (`by="op"`), or for each operator of a program (`by="operator"`), sorted as `profiler` says.

        `at_best(threads)` gives the ceilings; it is called only where time was spent.
        """
        if by not in ("op", "operator"):
            raise ExecutionError(f"profiler: rows are by 'op' or by 'operator', got {by!r}")
        if sort not in SORTED_BY:
            raise ExecutionError(f"profiler: unknown sort={sort!r}; {nearest(sort, SORTED_BY, 'there are')}")
        sums: dict[Any, _Sum] = {}
        for run in self.runs:
            best = at_best(run.threads)
            for i, start, stop in run.times:
                c = run.calls[i]
                name = c.ops if by == "op" else _named(c, run.plan)
                key = (name, c.kernel) if by == "op" else (name, c.kernel, c.op.site)
                sums.setdefault(key, _Sum(name, c)).add(c, 1e-9 * (stop - start), best)
        whole = sum(s.total for s in sums.values()) or 1.0
        found = [s.row(whole, by) for s in sums.values()]
        column: Mapping[str, Callable[[Row], float]] = {
            "total": lambda r: r.total, "calls": lambda r: r.calls, "ave": lambda r: r.mean, "max": lambda r: r.most,
            "min": lambda r: r.least,
        }  # fmt: skip
        return found if sort == "default" else sorted(found, key=column[sort], reverse=True)

    def table(self, by: str = "op", sort: str = "total", limit: int = 20, at_best: Callable[[int], Ceilings] = ceilings) -> str:
        """The first `limit` rows as text, with totals and the ceilings of this machine."""
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise ExecutionError(f"profiler: limit must be a number of rows, at least 1, got {limit!r}")
        if not any(run.times for run in self.runs):
            return "nothing ran while the profiler was on"
        rows = self.rows(by, sort, at_best)
        lines = [self._heading(), *dict.fromkeys(str(at_best(run.threads)) for run in self.runs), *map(str, self.exposed()), ""]
        cells = [("operator", "body", "calls", "total ms", "mean us", "best us", "share", "GFLOP/s", "GB/s", "of best", "bound by")]
        for r in rows[:limit]:
            near = ">100%" if r.near > 1 else f"{r.near:.0%}" if r.near else "-"
            cells.append((
                r.name, r.kernel, str(r.calls), f"{1e3 * r.total:.3f}", f"{1e6 * r.mean:.1f}", f"{1e6 * r.least:.1f}", f"{r.share:.1%}",
                _short(r.gflops), _short(r.gbs), near, f"{r.bound:13}  {r.site}" if r.site else r.bound,
            ))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            parts = [c.ljust(w) if k in (0, 1, 10) else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(parts).rstrip())
        if len(rows) > limit:
            rest = sum(r.total for r in rows[limit:])
            lines.append(f"... and {len(rows) - limit} more, {1e3 * rest:.3f} ms")
        return "\n".join(lines)

    def _heading(self) -> str:
        ran: dict[tuple[str, int], int] = {}
        for run in self.runs:
            if run.rank in (None, 0):
                key = run.plan.program.name or "a program", run.ranks if run.rank is not None else 0
                ran[key] = ran.get(key, 0) + 1
        some = [
            f"{n} run{'s' if n > 1 else ''} of {name} on " + (f"{ranks} rank{'s' if ranks > 1 else ''}" if ranks else "one device")
            for (name, ranks), n in ran.items()
        ]
        spent = sum(stop - start for run in self.runs for i, start, stop in run.times if not run.calls[i].overlapped)
        apart = sum(last - first for first, last in (run.span for run in self.runs if run.times)) - spent
        return f"{', '.join(some)}: {spent / 1e6:.3f} ms in steps, {apart / 1e6:.3f} ms between them"

    def save(self, path: str | Path) -> None:
        """Write the timeline as JSON that https://ui.perfetto.dev and chrome://tracing open: a row for each rank, one more for what it
        communicates, and one for where it waits for that."""
        timeline.write(self.runs, path)


class _Sum:
    def __init__(self, name: str, call: CallDescription):
        self.name, self.call = name, call
        self.times: list[float] = []
        self.cost = Cost()
        self.least = [0.0, 0.0]  # seconds that operations and bytes take at best
        self.overhead = 0.0

    @property
    def total(self) -> float:
        return sum(self.times)

    def add(self, call: CallDescription, seconds: float, best: Ceilings) -> None:
        self.times.append(seconds)
        self.cost += call.cost
        for k, s in enumerate(best.seconds(call.cost.flops, call.cost.nbytes)):
            self.least[k] += s
        self.overhead += 1e-6 * best.call

    def row(self, whole: float, by: str) -> Row:
        total = self.total
        near = max(self.least) / total if total and not self.call.communicates else 0.0
        bound = "compute" if self.least[0] >= self.least[1] else "memory"
        bound = "communication" if self.call.communicates else bound if near >= _NEAR and self.overhead < _MOSTLY * total else "overhead"
        op = self.call.op
        site = f"{op.site.filename}:{op.site.lineno}" if op.site and by == "operator" else ""
        return Row(self.name, self.call.kernel, len(self.times), total, min(self.times), max(self.times), total / whole,
                   self.cost.flops, self.cost.nbytes, near, bound, site)  # fmt: skip


def _named(call: CallDescription, plan: Plan | RemotePlanValues) -> str:
    made = call.op.output_arg_names or call.op.input_arg_names
    shown = f" %{made[0]}" + (f" {plan.values[made[0]].type}" if made[0] in plan.values else "") if made else ""
    return call.ops + shown


def _short(value: float) -> str:
    return "-" if not value else f"{value:.3f}" if value < 0.1 else f"{value:.1f}"
