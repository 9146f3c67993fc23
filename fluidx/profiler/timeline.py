"""Profiles in the trace event format of Chrome, which Perfetto opens too.

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; times are in microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..executor.run.call_descriptions import CallDescription
from ..ir.errors import ExecutionError
from ..ir.opdef import opdef
from .rank_run import RankRun, rate

_ROWS = ("", ": communication", ": waits for communication")  # the rows of one rank
APART = 1000  # distance between the numbers of two rows


def events(runs: Sequence[RankRun]) -> Iterator[dict[str, Any]]:
    """The events of several runs; the first one starts at 0."""
    runs = [run for run in runs if run.times]
    zero = min((run.span[0] for run in runs), default=0)
    rows: dict[int, str] = {}
    for run in runs:
        rank = run.rank or 0
        name = "one device" if run.rank is None else f"rank {run.rank}"
        first, last = run.span
        label = f"{run.plan.program.name or 'program'}, run {run.step}"
        rows[rank] = rows.get(rank) or name  # a startup program may have run on one device before
        yield _event(label, "run", rank, first - zero, last - first, {"program": run.plan.program.label(), "calls": len(run.times)})
        for i, start, stop in run.times:
            c = run.calls[i]
            kind = 2 if c.waits else 1 if c.communicates or c.overlapped else 0
            row = rank + APART * kind
            rows.setdefault(row, name + _ROWS[kind])
            yield _event(c.ops, _category(c), row, start - zero, stop - start, _arguments(c, run, 1e-9 * (stop - start)))
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "fluidx"}}
    for row, name in rows.items():
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
        order = len(_ROWS) * (row % APART) + row // APART
        yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": row, "args": {"sort_index": order}}


def _category(call: CallDescription) -> str:
    """The categories by which viewers filter: the kind of event, and its name in Horovod's timeline."""
    kind = "wait" if call.waits else "communication" if call.communicates or call.overlapped else "operator"
    return ",".join(filter(None, (kind, _activity(call))))


def _activity(call: CallDescription) -> str:
    return "" if call.waits else opdef(call.op.type).comm.activity  # the operator of a wait is the waiting one


def _event(name: str, kind: str, row: int, start: int, length: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "pid": 0, "tid": row, "ts": start / 1e3, "dur": length / 1e3, "args": args}


def _arguments(call: CallDescription, run: RankRun, seconds: float) -> dict[str, Any]:
    op, cost = call.op, call.cost
    args: dict[str, Any] = {"op": op.type, "body": call.kernel, "role": op.role.value}
    if activity := _activity(call):
        args["activity"] = activity
    args |= {"reads": _shapes(op.input_arg_names, run), "makes": _shapes(op.output_arg_names, run)}
    args |= {"bytes": cost.nbytes, "flops": cost.flops}
    args |= {"GFLOP/s": round(rate(cost.flops, seconds), 3), "GB/s": round(rate(cost.nbytes, seconds), 3)}
    return args | ({"line": f"{op.site.filename}:{op.site.lineno}"} if op.site else {})


def _shapes(names: Sequence[str], run: RankRun) -> str:
    values = run.plan.values
    return ", ".join(f"%{n} {values[n].type}" if n in values else f"%{n}" for n in names)


def write(runs: Sequence[RankRun], path: str | Path) -> None:
    """Write the file, one event a line. Raises ExecutionError for what is no path, and for one that cannot be written."""
    if not isinstance(path, (str, os.PathLike)):
        raise ExecutionError(f"a timeline is written to the path of a file, such as 'timeline.json', got {path!r}")
    lines = ",\n".join(json.dumps(e) for e in events(runs))
    try:
        Path(path).write_text(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n', encoding="utf-8")
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise ExecutionError(f"cannot write the timeline to {str(path)!r}: {why}; give a file in a folder that exists") from None
