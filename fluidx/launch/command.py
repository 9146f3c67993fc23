"""What `fluidx run` does with its options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..comm import mpirun
from ..ir.errors import ExecutionError
from . import launcher
from .metrics import Log, heard
from .over_mpi import MpiJob
from .script import run_script


class OptionError(ExecutionError):
    """An option that cannot be had, or not with another one."""


def ranks_here(environ: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks a Kubernetes job asks for on each of its nodes, if it is one.

    >>> ranks_here({"PET_NPROC_PER_NODE": "4"})
    4
    """
    said = environ.get("PET_NPROC_PER_NODE", "")
    return int(said) if said.isdigit() and int(said) else None


def run(
    script: str, args: Sequence[str], ranks: int, backend: str, hosts: Path | None, restarts: int, timeout: float | None, everything: bool,
    metrics: Path | None, say: Callable[[str], None], least: int | None = None, steps: int | None = None,
) -> int:  # fmt: skip
    """Run the script on ranks, and return the status to exit with. Raises OptionError for options that do not go together."""
    if backend == "nccl":
        raise OptionError(
            "--backend nccl: GPUs are ranks of one process, places=fx.cuda_places() in the script; start it without fluidx run"
        )
    if hosts is not None and backend != "mpi":
        raise OptionError(f"--hosts: ranks that are {backend} are on this host; --backend mpi has several")
    if backend == "threads" and (restarts or everything):
        raise OptionError("--restarts and --output all are of --backend processes and mpi; threads end, and print, as one process does")
    if least is not None:
        _check_elastic(ranks, backend, restarts, least)
    if timeout is not None:
        os.environ["FLUIDX_TIMEOUT"] = f"{timeout:g}"
    with _log(metrics, steps) as log:
        hear = log.take if log.shown or log.file is not None else None
        how: dict[str, Any] = {"timeout": timeout, "everything": everything, "hear": hear}
        if backend == "processes":
            return launcher.run(script, args, ranks, restarts, say, least, **how)
        if backend == "mpi":
            if reason := mpirun.why_not():
                raise OptionError(f"--backend mpi: {reason}; on one host --backend processes needs none")
            return launcher.run(script, args, ranks, restarts, say, job=MpiJob, hosts=hosts, metrics=metrics, **how)
        os.environ.update(CPU_NUM=str(ranks), FLUIDX_WORLD_SIZE=str(ranks))
        with heard(hear):
            run_script(script, args)
    return 0


def _check_elastic(ranks: int, backend: str, restarts: int, least: int) -> None:
    if backend != "processes":
        raise OptionError(
            f"--elastic and --min-ranks are of --backend processes; start a job of {backend} anew on fewer ranks: it goes on from a "
            "checkpoint of any number of ranks"
        )
    if not restarts:
        raise OptionError("--elastic and --min-ranks say on how many ranks a script is started again: give --restarts, how often it may be")
    if least > ranks:
        raise OptionError(f"--min-ranks {least} is more than the {ranks} ranks of -n")


def _log(path: Path | None, steps: int | None) -> Log:
    try:
        return Log(path, steps=steps)
    except OSError as e:
        raise OptionError(f"--metrics: {path} cannot be written: {e.strerror}") from None
