"""A process between `fluidx run` and mpirun: when either ends, however that ends, it ends the other's work and clears away what is left.

mpirun ends its ranks when it is told to, and leaves them, and files, when it is killed.
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

_GRACE = 4.0  # seconds that mpirun has to end its ranks in
_SHARED = "/dev/shm"


def serve(channel: Channel, fds: Sequence[int], given: Mapping[str, Any]) -> None:
    """Run a command, which prints to the files, and say how it ended."""
    os.setsid()  # what a terminal's Ctrl-C ends is decided by whoever asked for this
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
    with suppress(OSError):  # who asked has ended
        channel.send({"ended": status})


def _end_orphans() -> None:
    """End what mpirun has left behind, such as an ssh that still waits for its host: it has become this process's."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)


def _with_places_of_its_own(environ: Mapping[str, str], folders: list[str]) -> dict[str, str]:
    """The environment, and in it where Open MPI puts its files: folders that are this job's alone, so that all in them is."""
    prefix = f"fluidx-{os.getpid()}-"  # so that somebody else sees whether they are in use
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
    with suppress(OSError, EOFError):  # nobody is there any more who could tell
        channel.receive()
    command.terminate()
    try:
        command.wait(_GRACE)
    except subprocess.TimeoutExpired:
        command.kill()
