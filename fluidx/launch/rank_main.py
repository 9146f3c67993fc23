"""The main function of a rank's process under `fluidx run`: it runs the script and reports to the launcher how it ended."""

from __future__ import annotations

import atexit
import logging
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from .. import executor, native, transpiler  # noqa: F401  (loaded once, for all ranks)
from ..comm.base import CommAborted, CommTimeout
from ..comm.launch_environment import JOB, RANK, RESTART, WORLD_SIZE, Launched
from ..comm.launched_rank import LaunchedRank, enter
from ..comm.process_spawner import Channel
from ..comm.processes import ProcessWorld
from ..executor.error_text import describe_error, where
from ..executor.ranks.thread_workers import root_cause
from ..executor.run import observers
from ..ir.errors import RankError
from ..native.shared import Memory
from ..native.world import log
from .metrics import Told


def serve(channel: Channel, fds: Sequence[int], given: Mapping[str, Any]) -> None:
    """Run a script as a rank. `fds` are the shared memory and the two output files."""
    signal.signal(given["interrupt"], _interrupt)  # sent by the launcher; a terminal's Ctrl-C is handled by the launcher only
    for number, fd in zip((1, 2), fds[1:], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    rank, ranks = given["rank"], given["ranks"]
    said = {RANK: rank, WORLD_SIZE: ranks, JOB: given["job"], RESTART: given["restart"]}
    os.environ.update({name: str(value) for name, value in said.items()})
    memory = Memory(fds[0], given["start"], ranks)
    memory.close()
    world = ProcessWorld(memory, rank, given["timeout"])
    native.set_num_threads(given["threads"])
    guard = threading.Lock()

    def tell(message: Any) -> None:
        with guard:
            try:
                channel.send(message)
            except OSError:  # the launcher has ended
                os._exit(1)

    enter(LaunchedRank(Launched("fluidx run", rank, ranks, ranks, given["job"]), world, tell))
    log.addHandler(_Teller(tell))
    if rank == 0 and given["heard"]:
        observers.listeners.append(Told(lambda record: tell({"fetched": record})))
    atexit._clear()  # drop the exit functions of the process that started this one
    status = _run(given, world, tell)
    threading._shutdown()  # type: ignore[attr-defined]  # as at the end of an interpreter: wait for the script's threads,
    atexit._run_exitfuncs()  # then run its exit functions
    tell({"ended": status})
    raise SystemExit(status)


class _Teller(logging.Handler):
    """Sends a waiting rank's warnings to the launcher, because a rank's own output may not be shown."""

    def __init__(self, tell: Callable[[Any], None]):
        super().__init__(logging.WARNING)
        self.tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self.tell({"warns": record.getMessage()})


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def _run(given: Mapping[str, Any], world: ProcessWorld, tell: Any) -> int:
    try:
        run_script(given["script"], given["args"], given["module"])
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except BaseException as e:
        world.abort(e)
        tell(failure_of(e))
        return 1
    return 0


def failure_of(error: BaseException) -> dict[str, Any]:
    """The fields of a `Failure` for an error that a script does not catch."""
    how, first = "failed", root_cause(error)
    if isinstance(error, KeyboardInterrupt):
        how = "interrupted"
    elif isinstance(first, (CommAborted, CommTimeout)):
        how = "stopped" if isinstance(first, CommAborted) else "waited"
    return {
        "how": how,
        "text": describe_error(error),
        "at": error.process if isinstance(error, RankError) and error.process is not None else getattr(error, "rank", None),
        "trace": "".join(_trace(error)),
        "op": _waits(error),
    }


def _waits(error: BaseException | None) -> str:
    """Lines that show the failed collective operator; "" if there is none."""
    while error is not None:
        op = getattr(error, "operator", None)
        if op is not None and op.attrs.get("group") is not None:
            return where(op)
        error = error.__cause__
    return ""


def _trace(error: BaseException) -> list[str]:
    """The traceback from the script on, without the message, which is reported separately."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).resolve().parents[1])
    return traceback.format_list([f for f in frames if not f.filename.startswith((own, "<frozen"))])


def run_script(script: str, args: Sequence[str], module: bool = False) -> None:
    """Run a script, or a module by its name, in this process, as Python would. The traceback of an uncaught error begins in the script."""
    sys.argv = [script, *args]
    sys.path.insert(0, os.getcwd() if module else str(Path(script).resolve().parent))
    before = sys.excepthook
    sys.excepthook = lambda kind, error, trace: before(kind, error.with_traceback(_own(trace)), error.__traceback__)
    if module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(script), run_name="__main__")


def _own(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback from the script on; all of it if the script is not in it."""
    found = trace
    while found is not None and found.tb_frame.f_code is not run_script.__code__:
        found = found.tb_next
    if found is None:
        return trace
    found = found.tb_next
    while found is not None and found.tb_frame.f_code.co_filename == runpy.run_path.__code__.co_filename:
        found = found.tb_next
    return found
