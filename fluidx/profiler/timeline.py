"""Profiles in the trace event format of Chrome, which Perfetto opens too.

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .profile import Call, Run, rate

_BEHIND = 1000  # what a rank communicates has this row more than the rank


def events(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """The events of some runs; the first begins at 0."""
    runs = [run for run in runs if run.times]
    zero = min((run.times[0][1] for run in runs), default=0)
    rows: dict[int, str] = {}
    for run in runs:
        rank = run.rank or 0
        name = "one device" if run.rank is None else f"rank {rank}"
        rows[rank] = rows.get(rank) or name  # a startup program may have run on one device before
        if any(run.calls[i].talks for i, _, _ in run.times):
            rows[rank + _BEHIND] = f"{name}: communication"
        first, last = run.times[0][1], run.times[-1][2]
        label = f"{run.plan.program.name or 'program'}, run {run.step}"
        yield _event(label, "run", rank, first - zero, last - first, {"program": run.plan.program.label(), "calls": len(run.times)})
        for i, start, stop in run.times:
            c = run.calls[i]
            row, kind = (rank + _BEHIND, "communication") if c.talks else (rank, "operator")
            yield _event(c.ops, kind, row, start - zero, stop - start, _arguments(c, run, 1e-9 * (stop - start)))
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "fluidx"}}
    for row, name in rows.items():
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": row, "args": {"sort_index": 2 * (row % _BEHIND) + row // _BEHIND}}


def _event(name: str, kind: str, row: int, start: int, length: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "pid": 0, "tid": row, "ts": start / 1e3, "dur": length / 1e3, "args": args}


def _arguments(call: Call, run: Run, seconds: float) -> dict[str, Any]:
    op, cost = call.op, call.cost
    args: dict[str, Any] = {"op": op.type, "body": call.kernel, "role": op.role.value}
    args |= {"reads": _shapes(op.input_arg_names, run), "makes": _shapes(op.output_arg_names, run)}
    args |= {"bytes": cost.nbytes, "flops": cost.flops}
    args |= {"GFLOP/s": round(rate(cost.flops, seconds), 3), "GB/s": round(rate(cost.nbytes, seconds), 3)}
    return args | ({"line": f"{op.site.filename}:{op.site.lineno}"} if op.site else {})


def _shapes(names: Sequence[str], run: Run) -> str:
    values = run.plan.values
    return ", ".join(f"%{n} {values[n].type}" if n in values else f"%{n}" for n in names)


def write(runs: Sequence[Run], path: str | Path) -> None:
    """Write the file, one event a line."""
    lines = ",\n".join(json.dumps(e) for e in events(runs))
    Path(path).write_text(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n', encoding="utf-8")
