"""The watchdog: a process between `fluidx run` and mpirun. When one of them ends, in any way, it ends the other and removes left files.

mpirun ends its ranks when it is asked to, but leaves them and its files behind when it is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..comm.process_spawner import Channel, adopt, outlive

_GRACE = 4.0  # seconds for mpirun to end its ranks
_SHARED = "/dev/shm"


def serve(channel: Channel, fds: Sequence[int], given: Mapping[str, Any]) -> None:
    """Run a command with these output files, and send its exit status over the channel."""
    os.setsid()  # a terminal's Ctrl-C does not reach it: `fluidx run` decides what ends
    for number, fd in zip((1, 2), fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    outlive()
    adopt()
    folders: list[str] = []
    try:
        environ = _with_places_of_its_own(given["environ"], folders) if given["alone"] else given["environ"]
        status = _run(channel, given["words"], environ)
    finally:
        _end_orphans()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # `fluidx run` has ended
        channel.send({"ended": status})


def _end_orphans() -> None:
    """Kill processes that mpirun has left behind, such as an ssh that waits for its host. They are children of this process now."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)


def _with_places_of_its_own(environ: Mapping[str, str], folders: list[str]) -> dict[str, str]:
    """The environment with folders for Open MPI's files that belong to this job only, so that they can be removed with it."""
    prefix = f"fluidx-{os.getpid()}-"  # the pid shows whether a folder is in use
    folders.append(tempfile.mkdtemp(prefix=prefix))
    found = {"PRTE_MCA_prte_tmpdir_base": folders[0]}
    if os.access(_SHARED, os.W_OK):
        folders.append(tempfile.mkdtemp(prefix=prefix, dir=_SHARED))
        found["OMPI_MCA_btl_sm_backing_directory"] = folders[1]
    return {**found, **environ}


def _run(channel: Channel, words: Sequence[str], environ: Mapping[str, str]) -> int:
    with subprocess.Popen(words, env=dict(environ), stdin=subprocess.DEVNULL) as command:
        threading.Thread(target=_end_when_told, args=(channel, command), daemon=True).start()
        return command.wait()


def _end_when_told(channel: Channel, command: subprocess.Popen[bytes]) -> None:
    with suppress(OSError, EOFError):  # `fluidx run` has ended
        channel.receive()
    command.terminate()
    try:
        command.wait(_GRACE)
    except subprocess.TimeoutExpired:
        command.kill()
