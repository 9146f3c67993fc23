"""What this process was launched as: which rank of how many, and by whom, as its environment says."""

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

SEEDS = 1 << 31  # how many there are to draw from
RANK, WORLD_SIZE, JOB, RESTART = "FLUIDX_RANK", "FLUIDX_WORLD_SIZE", "FLUIDX_JOB", "FLUIDX_RESTART"
JOB_SEED, JOB_KEY = "FLUIDX_JOB_SEED", "FLUIDX_JOB_KEY"


class Launched(NamedTuple):
    """A process that is a rank. `here` is how many of the ranks are on its host, `job` what tells them from those of other jobs."""

    by: str
    rank: int
    world_size: int
    here: int
    job: str


class _Launcher(NamedTuple):
    """What a launcher puts into the environment of each rank: what must be there, and where the numbers are."""

    name: str
    marks: tuple[str, ...]
    rank: str
    world_size: tuple[str, ...]  # the first that is there
    here: Callable[[Mapping[str, str], int], int]
    job: tuple[str, ...]  # all that are there


def _all(environ: Mapping[str, str], ranks: int) -> int:
    return ranks


def _said(name: str, otherwise: Callable[[Mapping[str, str], int], int] = _all) -> Callable[[Mapping[str, str], int], int]:
    def here(environ: Mapping[str, str], ranks: int) -> int:
        return _number(environ, name) if name in environ else otherwise(environ, ranks)

    return here


def _if_loopback(environ: Mapping[str, str], ranks: int) -> int:
    return ranks if environ["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1") else 1


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
_BY_HAND = _Launcher(RANK, (RANK,), RANK, (WORLD_SIZE,), _all, (JOB, RESTART))


OF_MPI = ("Open MPI", "MPICH (Hydra)", "SLURM", "PMIx")  # where MPI can be what ranks meet by


def found(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """What the environment says, by the first launcher that it speaks of; None where the process is on its own.

    FLUIDX_RANK and FLUIDX_WORLD_SIZE go before all launchers. Raises ConfigError for numbers that make no sense.

    >>> found({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "a"})[:4]
    ('Open MPI', 1, 4, 2)
    >>> found({"RANK": "3"})
    """
    rows = (_BY_HAND,) if RANK in environ else _LAUNCHERS
    by = next((row for row in rows if all(environ.get(mark) for mark in row.marks)), None)
    if by is None:
        return None
    size_in = next((name for name in by.world_size if name in environ), None)
    if size_in is None:
        raise ConfigError(f"environment variable {by.rank} is set, but not the number of ranks; set {WORLD_SIZE}")
    rank, ranks = _number(environ, by.rank), _number(environ, size_in)
    if rank >= ranks:
        raise ConfigError(f"environment variable {by.rank}: expected a rank below {ranks} ({size_in}), found {rank}")
    # ranks of one job on one host have one parent, where nothing else tells them from others
    told = [environ[name] for name in by.job if name in environ] or [str(os.getppid())]
    job = hashlib.sha256("\0".join([by.name, *told]).encode()).hexdigest()[:16]
    return Launched(by.name, rank, ranks, by.here(environ, ranks), job)


def rank() -> int:
    """The number of this process among those of a launched script; 0 where it was not launched, or runs its ranks as threads.

    >>> rank()
    0
    """
    there = found()
    return 0 if there is None else there.rank


def world_size() -> int:
    """How many ranks this script was launched for, by `fluidx run` or another launcher; 1 where it was not launched.

    >>> world_size()
    1
    """
    there = found() if (said := config.world_size()) is None else None  # ranks that are threads are told their number, and no rank
    return said or (1 if there is None else there.world_size)


def seed() -> int:
    """The seed of programs whose `random_seed` is 0: FLUIDX_SEED, or one that is drawn for the job, for all its ranks, and said."""
    said = config.seed()
    return _drawn(os.getpid()) if said is None else said


@cache
def _drawn(process: int) -> int:
    there, drawn = found(), config.job_seed()
    if drawn is None:  # ranks of other launchers have in common what tells their job from others
        drawn = draw() if there is None else int(there.job, 16) % SEEDS
    if there is None or there.rank == 0:
        print(f"fluidx: no seed: drew {drawn}; set random_seed of the programs, or FLUIDX_SEED={drawn} to repeat this run", file=sys.stderr)
    return drawn


def draw() -> int:
    """A seed that nobody can foresee."""
    return secrets.randbelow(SEEDS)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not text.isdigit():
        raise ConfigError(f"environment variable {name}: expected a whole number, 0 or more, found {text!r}")
    return int(text)
