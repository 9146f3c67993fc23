"""The mpirun command: arguments and environment for Open MPI and MPICH."""

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

Hosts = Sequence[tuple[str, int | None]]  # names, and the number of ranks on each, if it is given

NAME = "mpirun"
_SOMETHING = ("sleep", "1")  # Open MPI 5.0 sometimes waits for ever for a command that ends at once
_DEADLY = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
_AS_ROOT = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")


def program() -> str | None:
    """The mpirun in this Python's environment, else the one on the path."""
    beside = Path(sys.executable).with_name("mpirun")  # wheels install it there
    return str(beside) if beside.exists() else shutil.which("mpirun")


def why_not() -> str:
    """The reason why mpirun is not available; "" if it is."""
    return "" if program() else f"there is no mpirun; {install('mpi')}"


def command(
    ranks: int, args: Sequence[str], hosts: Path | str | Hosts | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str]]:
    """The command that runs `args` on so many ranks, and its environment. `hosts` is a host file for mpirun, or a list of names.

    There may be more ranks than cores; ranks choose their cores themselves. Raises FileNotFoundError if mpirun is missing.
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
    if where:  # mpirun does not pass variables to other hosts by itself
        own += [word for name in sorted(environ) if name.startswith("FLUIDX_") for word in ("-x", name)]
    return [found, "-n", str(ranks), *own, *args], {**environ, **(_AS_ROOT if os.geteuid() == 0 else {})}


def trial(name: str) -> tuple[list[str], dict[str, str]]:
    """The command that tries to run something on a host, and its environment."""
    return command(1, _SOMETHING, [(name, 1)])


def hosts_of(file: Path | Hosts) -> Hosts:
    """The hosts in a host file of Open MPI or MPICH, with the number of ranks on each if it is given."""
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
    """The exit status of a rank (negative for a signal), from mpirun's status: Open MPI adds 128 to a signal's number, Hydra does not."""
    if status > 128:
        return 128 - status
    found = program()
    return -status if status in _DEADLY and found is not None and not _is_open_mpi(found) else status


def version() -> str:
    """The version line of mpirun; "no mpirun" if there is none."""
    return (_said(found).strip().splitlines() or [found])[0] if (found := program()) else "no mpirun"


def _is_open_mpi(found: str) -> bool:
    return "Open MPI" in _said(found)


@cache
def _said(found: str) -> str:
    said = subprocess.run([found, "--version"], capture_output=True, text=True, env={**os.environ, **_AS_ROOT}, check=False)
    return said.stdout + said.stderr
