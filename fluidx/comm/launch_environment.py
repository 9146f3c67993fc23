"""The launch of this process, from its environment: its rank, the number of ranks, the launcher, and the job's seed."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

from .. import config
from ..config import ConfigError

SEEDS = 1 << 31  # seeds are drawn from 0 to SEEDS - 1
RANK, WORLD_SIZE, JOB, RESTART = "FLUIDX_RANK", "FLUIDX_WORLD_SIZE", "FLUIDX_JOB", "FLUIDX_RESTART"
JOB_SEED, JOB_KEY = "FLUIDX_JOB_SEED", "FLUIDX_JOB_KEY"
LOCAL_WORLD_SIZE, ADDRESS = "FLUIDX_LOCAL_WORLD_SIZE", "FLUIDX_ADDRESS"


_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Launched(NamedTuple):
    """A launched rank. `by` is the launcher, `here` the number of ranks on this host, and `job` an id of the job. `address` is where rank 0
    listens for ranks on other hosts; "" if it is not known."""

    by: str
    rank: int
    world_size: int
    here: int
    job: str
    address: str = ""


class _Launcher(NamedTuple):
    """The environment variables of a launcher: `marks` must be set; the others name the variables of rank, number of ranks and job."""

    name: str
    marks: tuple[str, ...]
    rank: str
    world_size: tuple[str, ...]  # the first one that is set counts
    here: Callable[[Mapping[str, str], int], int]
    job: tuple[str, ...]  # all that are set count


def _all(environ: Mapping[str, str], ranks: int) -> int:
    return ranks


def _said(name: str, otherwise: Callable[[Mapping[str, str], int], int] = _all) -> Callable[[Mapping[str, str], int], int]:
    def here(environ: Mapping[str, str], ranks: int) -> int:
        return _number(environ, name) if name in environ else otherwise(environ, ranks)

    return here


def _if_loopback(environ: Mapping[str, str], ranks: int) -> int:
    return ranks if environ["MASTER_ADDR"] in _LOOPBACK else 1


def _if_near(environ: Mapping[str, str], ranks: int) -> int:
    return ranks if config.address(environ).rpartition(":")[0].strip("[]") in ("", *_LOOPBACK) else 1


def _if_one_node(environ: Mapping[str, str], ranks: int) -> int:
    nodes = _number(environ, "SLURM_STEP_NUM_NODES") if "SLURM_STEP_NUM_NODES" in environ else 1
    return ranks if nodes == 1 else ranks // nodes


_LAUNCHERS = (
    _Launcher(
        "torchrun", ("RANK", "WORLD_SIZE", "MASTER_ADDR"), "RANK", ("WORLD_SIZE",), _said("LOCAL_WORLD_SIZE", _if_loopback),
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    ),
    _Launcher(
        "Open MPI", ("OMPI_COMM_WORLD_RANK",), "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), _said("OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher("MPICH (Hydra)", ("PMI_RANK", "PMI_SIZE"), "PMI_RANK", ("PMI_SIZE",), _said("MPI_LOCALNRANKS"), ("PMI_JOBID",)),
    _Launcher(
        "SLURM", ("SLURM_PROCID", "SLURM_STEP_ID"), "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), _if_one_node,
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    _Launcher("PMIx", ("PMIX_RANK", "PMIX_NAMESPACE"), "PMIX_RANK", ("PMIX_SIZE", WORLD_SIZE), _all, ("PMIX_NAMESPACE",)),
    _Launcher(
        "Kubernetes", ("PET_NODE_RANK", "PET_NNODES"), "PET_NODE_RANK", ("PET_NNODES",), lambda environ, ranks: 1,
        ("PET_MASTER_ADDR", "PET_MASTER_PORT"),
    ),
)  # fmt: skip
_BY_HAND = _Launcher(RANK, (RANK,), RANK, (WORLD_SIZE,), _if_near, (JOB, RESTART, ADDRESS))


OF_MPI = ("Open MPI", "MPICH (Hydra)", "SLURM", "PMIx")  # launchers under which ranks can connect by MPI


def found(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """The launch, by the first launcher whose variables are set; None if the process was not launched.

    FLUIDX_RANK and FLUIDX_WORLD_SIZE take precedence. Raises ConfigError for invalid numbers.

    >>> found({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "a"})[:4]
    ('Open MPI', 1, 4, 2)
    >>> found({"RANK": "3"})
    """
    rows = (_BY_HAND,) if environ.get(RANK) else _LAUNCHERS
    by = next((row for row in rows if all(environ.get(mark) for mark in row.marks)), None)
    if by is None:
        return None
    size_in = next((name for name in by.world_size if name in environ), None)
    if size_in is None:
        raise ConfigError(f"environment variable {by.rank} is set, but not the number of ranks; set {WORLD_SIZE}")
    rank, ranks = _number(environ, by.rank), _number(environ, size_in)
    if rank >= ranks:
        raise ConfigError(f"environment variable {by.rank}: expected a rank below {ranks} ({size_in}), found {rank}")
    # without a job id: ranks of one job on one host have the same parent process
    told = [environ[name] for name in by.job if name in environ] or [str(os.getppid())]
    job = hashlib.sha256("\0".join([by.name, *told]).encode()).hexdigest()[:16]
    here = config.local_world_size(environ) or by.here(environ, ranks)
    return Launched(by.name, rank, ranks, here, job, _address(by.name, environ))


def _address(by: str, environ: Mapping[str, str]) -> str:
    """Where rank 0 listens for ranks on other hosts: FLUIDX_ADDRESS, or what torchrun or Kubernetes says; "" if it is not known."""
    if said := config.address(environ):
        return said
    host, port = {"torchrun": ("MASTER_ADDR", "MASTER_PORT"), "Kubernetes": ("PET_MASTER_ADDR", "PET_MASTER_PORT")}.get(by, ("", ""))
    if not environ.get(host) or not environ.get(port, "").isdigit():
        return ""
    taken = by == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun itself listens there
    name = environ[host]
    return f"{f'[{name}]' if ':' in name else name}:{int(environ[port]) + taken}"


def rank() -> int:
    """The rank of this process in a launched script; 0 if it was not launched, or if its ranks are threads.

    >>> rank()
    0
    """
    there = found()
    return 0 if there is None else there.rank


def world_size() -> int:
    """The number of ranks for which this script was launched, by `fluidx run` or another launcher; 1 if it was not launched.

    >>> world_size()
    1
    """
    there = found() if (said := config.world_size()) is None else None  # for ranks that are threads only their number is set
    return said or (1 if there is None else there.world_size)


def seed() -> int:
    """The seed of programs whose `random_seed` is 0: FLUIDX_SEED, or one that is drawn for all ranks of the job and printed."""
    said = config.seed()
    return _drawn(os.getpid()) if said is None else said


@cache
def _drawn(process: int) -> int:
    there, drawn = found(), config.job_seed()
    if drawn is None:  # with other launchers, the ranks of a job share the job id
        drawn = draw() if there is None else int(there.job, 16) % SEEDS
    if there is None or there.rank == 0:
        print(f"fluidx: no seed: drew {drawn}; set random_seed of the programs, or FLUIDX_SEED={drawn} to repeat this run", file=sys.stderr)
    return drawn


def draw() -> int:
    """A random seed."""
    return secrets.randbelow(SEEDS)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not text.isdigit():
        raise ConfigError(f"environment variable {name}: expected a whole number, 0 or more, found {text!r}")
    return int(text)
