"""How to start ranks with mpirun: the command and the environment, for the implementations that there are."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from ...ir.errors import install

Hosts = Sequence[tuple[str, int | None]]  # names, and how many ranks each takes, if that is said

_DEADLY = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
_AS_ROOT = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")


def program() -> str | None:
    """The mpirun of the environment that this Python is of, or else the one on the path."""
    beside = Path(sys.executable).with_name("mpirun")  # where wheels put theirs
    return str(beside) if beside.exists() else shutil.which("mpirun")


def why_not() -> str:
    """Why nothing can be started with mpirun, or an empty text."""
    return "" if program() else f"there is no mpirun; {install('mpi')}"


def command(
    ranks: int, args: Sequence[str], hosts: Path | str | Hosts | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str]]:
    """What runs `args` on so many ranks, and in which environment. `hosts` are in a file with one a line, as mpirun reads it, or are names.

    There may be more ranks than cores, and they choose their cores themselves. Raises FileNotFoundError where there is no mpirun.
    """
    found = program()
    if found is None:
        raise FileNotFoundError(why_not())
    open_mpi = _is_open_mpi(found)
    if hosts is None:
        where = []
    elif isinstance(hosts, (str, Path)):
        where = ["--hostfile" if open_mpi else "-f", str(hosts)]
    else:
        where = ["--host" if open_mpi else "-hosts", ",".join(name if n is None else f"{name}:{n}" for name, n in hosts)]
    if not open_mpi:
        return [found, "-n", str(ranks), *where, *args], dict(environ)
    own = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", *where]
    if where:  # to which it takes no variables along
        own += [word for name in sorted(environ) if name.startswith("FLUIDX_") for word in ("-x", name)]
    return [found, "-n", str(ranks), *own, *args], {**environ, **(_AS_ROOT if os.geteuid() == 0 else {})}


def hosts_of(file: Path | Hosts) -> Hosts:
    """The hosts that a file names, and how many ranks each takes, if it says so: in the words of Open MPI, or in those of MPICH."""
    if not isinstance(file, Path):
        return file
    found: dict[str, int | None] = {}
    for line in file.read_text().splitlines():
        if words := line.partition("#")[0].replace("=", " ").split():
            name, _, slots = words[0].partition(":")
            slots = words[words.index("slots") + 1] if "slots" in words[:-1] else slots
            found[name] = (found.get(name) or 0) + int(slots) if slots.isdigit() else found.get(name)
    return list(found.items())


def ended(status: int) -> int:
    """What mpirun ends with because of a rank, as that rank's own status, which is negative for a signal: Open MPI adds 128 to its number,
    and Hydra leaves it as it is."""
    if status > 128:
        return 128 - status
    found = program()
    return -status if status in _DEADLY and found is not None and not _is_open_mpi(found) else status


def version() -> str:
    """The mpirun at hand, and its version, or that there is none."""
    return (_said(found).strip().splitlines() or [found])[0] if (found := program()) else "no mpirun"


def _is_open_mpi(found: str) -> bool:
    return "Open MPI" in _said(found)


@cache
def _said(found: str) -> str:
    said = subprocess.run([found, "--version"], capture_output=True, text=True, env={**os.environ, **_AS_ROOT}, check=False)
    return said.stdout + said.stderr
