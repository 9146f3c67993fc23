"""`fluidx run`: check its options and run the script on ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..comm.mpi import mpirun
from ..comm.process_spawner import open_closed
from ..executor import launched_alone
from ..executor.ranks import gpu_devices
from ..ir.errors import ExecutionError
from . import process_job
from .metrics import Log, heard
from .mpi_job import HostsJob, MpiJob
from .rank_main import run_script


class OptionError(ExecutionError):
    """An option that is not possible here, or not together with another one."""


def ranks_here(environ: Mapping[str, str] = os.environ) -> int | None:
    """The number of ranks that a Kubernetes job asks for on each node; None if this is not such a job.

    >>> ranks_here({"PET_NPROC_PER_NODE": "4"})
    4
    """
    said = environ.get("PET_NPROC_PER_NODE", "")
    return int(said) if said.isdigit() and int(said) else None


def run(
    script: str, args: Sequence[str], ranks: int, backend: str, hosts: Path | None, restarts: int, timeout: float | None, everything: bool,
    metrics: Path | None, say: Callable[[str], None], least: int | None = None, steps: int | None = None, tensorboard: Path | None = None,
    module: bool = False,
) -> int:  # fmt: skip
    """Run the script on ranks, and return the exit status. Raises OptionError for options that do not fit together."""
    open_closed()
    if backend == "threads" and (restarts or everything):
        raise OptionError("--restarts and --output all need --backend processes, mpi or nccl: threads are one process")
    backend = _checked_backend(backend, hosts, ranks)
    if module and not _is_there(script):
        raise OptionError(f"-m: no module {script.partition('.')[0]!r} here or on Python's path; leave out -m to run a script")
    if least is not None:
        _check_elastic(ranks, backend, restarts, least)
    if timeout is not None:
        os.environ["FLUIDX_TIMEOUT"] = f"{timeout:g}"
    with open_log(metrics, tensorboard, steps) as log:
        hear = log.take if log.wanted else None
        how: dict[str, Any] = {"timeout": timeout, "everything": everything, "hear": hear, "again": log.again, "module": module}
        if backend == "mpi":
            if reason := mpirun.why_not():
                raise OptionError(f"--backend mpi: {reason}; on one host, --backend processes needs no MPI")
            how |= {"job": MpiJob, "hosts": hosts, "logs": [metrics, tensorboard]}
        elif hosts is not None:
            how |= {"job": HostsJob, "hosts": hosts, "logs": [metrics, tensorboard]}
        if backend != "threads":
            try:
                return process_job.run(script, args, ranks, restarts, say, least, **how)
            except ExecutionError as e:  # this host cannot run them
                raise OptionError(str(e)) from e
        use_threads(ranks)
        with heard(hear):
            run_script(script, args, module)
        if ranks is not None and (why := launched_alone.unused_ranks(ranks)):
            say(f"fluidx run: {why}")
    return 0


def _checked_backend(backend: str, hosts: Path | None, ranks: int) -> str:
    """The backend that starts the ranks: nccl starts them as processes, or on several hosts by mpirun if there is one, and sets
    FLUIDX_DEVICE."""
    if hosts is not None and backend == "threads":
        raise OptionError("--hosts needs --backend processes, mpi or nccl: threads run on this host")
    if backend == "nccl":
        if hosts is None and (reason := gpu_devices.why_not(ranks)):  # ranks on other hosts check it themselves
            raise OptionError(f"--backend nccl: {reason}; --backend processes needs no GPU")
        os.environ["FLUIDX_DEVICE"] = "cuda"
        backend = "processes" if hosts is None or mpirun.why_not() else "mpi"
    if hosts is not None and not mpirun.hosts_of(hosts):
        raise OptionError(f"--hosts: {hosts} names no host; write one on each line, and slots=2 after it for two ranks")
    return backend


def _is_there(module: str) -> bool:
    """Does the module, or its top-level package, exist? Nothing is imported."""
    name = module.partition(".")[0]
    return bool(name) and (find_spec(name) or PathFinder.find_spec(name, [os.getcwd()])) is not None


def use_threads(ranks: int | None) -> None:
    """Set the number of ranks, as threads, for a script in this process, if it is given."""
    if ranks is not None:
        os.environ.update(CPU_NUM=str(ranks), FLUIDX_WORLD_SIZE=str(ranks))


def _check_elastic(ranks: int, backend: str, restarts: int, least: int) -> None:
    if backend == "threads":
        raise OptionError("--elastic and --min-ranks need --backend processes, mpi or nccl: threads are one process")
    if not restarts:
        raise OptionError("--elastic and --min-ranks change the number of ranks at a restart: give --restarts too")
    if least > ranks:
        raise OptionError(f"--min-ranks {least} is more than the {ranks} ranks of -n")


def open_log(metrics: Path | None, tensorboard: Path | None, steps: int | None = None, restart: int = 0, line: bool = True) -> Log:
    """A log of fetched numbers. Raises OptionError that names the option whose file cannot be written."""
    try:
        return Log(metrics, tensorboard, steps=steps, restart=restart, line=line)
    except OSError as e:
        option = f"--metrics: {metrics}" if e.filename == str(metrics) else f"--tensorboard: {tensorboard}"
        raise OptionError(f"{option} cannot be written: {e.strerror}") from None
    except ExecutionError as e:
        raise OptionError(f"--tensorboard: {e}") from None
