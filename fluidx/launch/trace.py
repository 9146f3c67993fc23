"""`fluidx trace`: run a script with a profiler, in this process or on ranks that are processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..comm.launch_environment import rank
from ..executor.run import observers
from ..ir.errors import ExecutionError
from ..profiler import Profile
from . import command
from .rank_main import run_script

_ON_RANKS = str(Path(__file__).with_name("trace_rank_main.py"))


class TraceError(ExecutionError):
    """There is no profile to show, or it cannot be written."""


def trace(
    script: str, args: Sequence[str], ranks: int | None, backend: str, say: Callable[[str], None],
    output: str, steps: int | None, by: str, limit: int,
) -> int:  # fmt: skip
    """Run the script on ranks with a profiler, and return the exit status. Raises TraceError, and OptionError for options that do not fit
    together."""
    how: dict[str, Any] = {"output": output, "steps": steps, "by": by, "limit": limit}
    if backend == "threads":
        command.use_threads(ranks)
        run_traced(script, args, **how)
        return 0
    if ranks is None:
        raise command.OptionError(f"give the number of ranks with -n: --backend {backend} starts a process for each")
    return command.run(_ON_RANKS, [json.dumps(how), script, *args], ranks, backend, None, 0, None, False, None, say)


def run_traced(script: str, args: Sequence[str], output: str, steps: int | None, by: str, limit: int) -> None:
    """Run the script in this process; rank 0 then shows and saves the profile. Raises TraceError."""
    profile, left = Profile(steps), None
    observers.watchers.append(profile)
    try:
        run_script(script, args)
    except SystemExit as e:  # a successful script may end with it too
        left = e
    finally:
        observers.watchers.remove(profile)
    if profile.runs and not rank():
        print(profile.table(by, limit=limit))
        try:
            profile.save(output)
        except OSError as e:
            raise TraceError(f"cannot write {output}: {e.strerror}") from None
        print(f"wrote {output}; open it at https://ui.perfetto.dev")
    if left is not None:
        raise left
    if not profile.runs:
        raise TraceError(
            f"{script} ran no program, so there is nothing to show: the profiler measures Executor.run and ParallelExecutor.run"
        )
