"""Run a script in a process as if another program than fluidx had started it."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..comm.process_spawner import Channel
from ..launch.rank_main import run_script

_open: list[Channel] = []  # keeps channels open until the process ends


def started(channel: Channel, fds: Sequence[int], given: Mapping[str, Any]) -> None:
    """The main function of the process: run a script. `environ` is added to the environment; `fds` become stdout and stderr."""
    _open.append(channel)
    os.environ.update(given["environ"])
    for number, fd in zip((1, 2), fds, strict=True):
        os.dup2(fd, number)
    try:
        run_script(given["script"], given["args"])
    except Exception:
        sys.excepthook(*sys.exc_info())  # before the exit functions, as an interpreter does
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()  # as at the end of an interpreter
