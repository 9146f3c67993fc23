"""How to start ranks with mpirun: the command and the environment, for the implementations that there are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

_AS_ROOT = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")


def program() -> str | None:
    """The mpirun of the environment that this Python is of, or else the one on the path."""
    beside = Path(sys.executable).with_name("mpirun")  # where wheels put theirs
    return str(beside) if beside.exists() else shutil.which("mpirun")


def why_not() -> str:
    """Why nothing can be started with mpirun, or an empty text."""
    return "" if program() else "there is no mpirun; in a checkout of fluidx: pip install -e '.[mpi]'"


def command(
    ranks: int, args: Sequence[str], hosts: str | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str]]:
    """What runs `args` on so many ranks, and in which environment. `hosts` is a file with a host a line, as mpirun reads it.

    There may be more ranks than cores, and they choose their cores themselves. Raises FileNotFoundError where there is no mpirun.
    """
    found = program()
    if found is None:
        raise FileNotFoundError(why_not())
    if not _is_open_mpi(found):
        return [found, "-n", str(ranks), *(["-f", hosts] if hosts else []), *args], dict(environ)
    own = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    if hosts:  # to which it takes no variables along
        own += ["--hostfile", hosts, *(word for name in sorted(environ) if name.startswith("FLUIDX_") for word in ("-x", name))]
    return [found, "-n", str(ranks), *own, *args], {**environ, **(_AS_ROOT if os.geteuid() == 0 else {})}


def version() -> str:
    """The mpirun at hand, and its version, or that there is none."""
    return (_said(found).strip().splitlines() or [found])[0] if (found := program()) else "no mpirun"


def _is_open_mpi(found: str) -> bool:
    return "Open MPI" in _said(found)


@cache
def _said(found: str) -> str:
    said = subprocess.run([found, "--version"], capture_output=True, text=True, env={**os.environ, **_AS_ROOT}, check=False)
    return said.stdout + said.stderr
