"""The main program of a rank that mpirun starts for `fluidx run`: `python -m fluidx.launch.mpi_rank_main`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ..comm.launch_environment import RESTART, Launched, found
from ..comm.process_spawner import Channel, die_with
from . import remote_hosts
from .metrics import Log, heard
from .rank_main import run_script, serve


def main() -> None:
    given, script, *args = sys.argv[1:]
    said = json.loads(given)
    die_with(os.getppid())  # end with mpirun, or with its daemon on this host
    there = found()
    if there is not None and there.here == there.world_size and said["door"]:
        _serve_here(there, said["door"])
    else:
        _serve_far(there, said, script, args)


def _serve_here(there: Launched, door: str) -> None:
    """Run the script with all ranks on one host: `fluidx run` shares memory with them and receives their reports."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # mpirun sends it when another rank has ended: this rank must report its operator first
    channel = Channel(socket.socket(socket.AF_UNIX))
    channel.sock.connect("\0" + door)
    channel.send({"rank": there.rank, "pid": os.getpid()})
    given, fds = channel.receive(files=3)
    status = 1
    try:
        serve(channel, fds, given)
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if status:  # wait until `fluidx run` has read all reports: mpirun reports the rank that ends first, which must be the cause
            with suppress(OSError, EOFError):
                channel.receive()
        os._exit(status)  # the exit functions have run already


def _serve_far(there: Launched | None, said: Mapping[str, Any], script: str, args: Sequence[str]) -> None:
    """Run the script with ranks on several hosts: mpirun forwards its output."""
    os.environ[RESTART] = str(said["restart"])
    if there is None:
        run_script(script, args, said["module"])
    else:
        remote_hosts.run(said["job"], there.rank, lambda: _logged(there.rank, said, script, args))


def _logged(rank: int, said: Mapping[str, Any], script: str, args: Sequence[str]) -> None:
    with ExitStack() as stack:
        if rank == 0 and any(said["logs"]):
            metrics, tensorboard = (None if path is None else Path(path) for path in said["logs"])
            log = stack.enter_context(Log(metrics, tensorboard, restart=said["restart"]))
            stack.enter_context(heard(log.take))
        run_script(script, args, said["module"])


if __name__ == "__main__":
    main()
