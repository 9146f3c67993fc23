"""`fluidx doctor`: a report of this machine, one line each for Python, NumPy, kernels, GPUs and MPI: why is it slow, why is it missing?"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from . import __version__, config, native
from .comm import nccl
from .comm.base import CommError
from .comm.least_versions import nccl_version
from .comm.mpi import mpirun
from .comm.mpi import start as mpi
from .executor.places import CUDAPlace, array_module
from .ir.errors import FluidxError

# the variables that set the number of a BLAS's threads
_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


def report(environ: Mapping[str, str] = os.environ, measure: bool = False) -> list[str]:
    """The lines of the report; with `measure`, also the ceilings of the machine.

    >>> [line.split(":")[0] for line in report({})]
    ['fluidx', 'python', 'numpy', 'kernels', 'variables', 'blas threads', 'cupy', 'mpi']
    """
    lines = {
        "fluidx": __version__,
        "python": f"{platform.python_version()} {platform.python_implementation()}, {platform.system()} {platform.machine()}",
        "numpy": f"{np.__version__}, {_blas()}",
        "kernels": _kernels(),
        "variables": _variables(environ),
        "blas threads": _threads(environ),
        "cupy": _cupy(),
        "mpi": _mpi(),
    }
    if measure:
        from .profiler.ceilings import ceilings, threads_of

        best = ceilings(threads_of(1))
        lines["ceilings"] = str(best).removeprefix("ceilings, ")
    return [f"{name}: {said}" for name, said in lines.items()]


def _kernels() -> str:
    try:
        return native.describe()
    except config.ConfigError as e:
        return f"unknown: {e}"


def _blas() -> str:
    try:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return f"BLAS {blas['name']} {blas.get('version', '')}".rstrip()
    except (KeyError, TypeError):
        return "BLAS unknown"


def _variables(environ: Mapping[str, str]) -> str:
    known = [row.name for row in config.describe()]
    found = [f"{n}={'...' if n == 'FLUIDX_JOB_KEY' else environ[n]}" for n in known if environ.get(n)]
    found += [f"{n}={environ[n]} ({why})" for n, why in config.unknown(environ).items()]
    return ", ".join(found) or "none is set; fluidx env lists all"


def _threads(environ: Mapping[str, str]) -> str:
    found = [f"{n}={environ[n]}" for n in _BLAS_THREADS if environ.get(n)]
    try:
        if not native.why_not() and native.holds_blas():
            found.append("limited to 1 by the C kernels, which have their own threads")
    except config.ConfigError:  # the line about kernels reports it
        pass
    return ", ".join(found) or "not limited: ranks of one process compete for the cores; set OPENBLAS_NUM_THREADS=1"


def _cupy() -> str:
    try:
        cupy = array_module(CUDAPlace(0))
    except FluidxError as e:
        return str(e).removeprefix(f"{CUDAPlace(0)} needs ").removeprefix("CuPy, which is ")
    except Exception as e:  # a driver that does not fit raises errors of its own
        return f"installed, but does not load: {type(e).__name__}: {e}"
    count = cupy.cuda.runtime.getDeviceCount()
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return f"{cupy.__version__}, {count} GPU{'s' if count > 1 else ''}: {name}; {_nccl()}"


def _nccl() -> str:
    try:
        number = nccl.library().get_version()
    except CommError as e:
        return str(e)
    return f"NCCL {'.'.join(map(str, nccl_version(number)))}"


def _mpi() -> str:
    try:
        found = version("mpi4py")
    except PackageNotFoundError:
        return "mpi4py is not installed"
    return f"mpi4py {found}; {mpi.why_not() or mpirun.why_not() or mpirun.program()}"
