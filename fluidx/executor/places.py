"""Places: where a program runs (CPU, GPU, process, MPI rank), and its array library, NumPy or CuPy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..comm.least_versions import too_old
from ..ir.errors import FluidxError, install
from ..ir.source_location import wrong


@dataclass(frozen=True)
class CPUPlace:
    """The host, with NumPy."""

    def __repr__(self) -> str:
        return "CPUPlace"


@dataclass(frozen=True)
class CUDAPlace:
    """GPU number `device`, with CuPy. Not yet run on a GPU: see docs/executor.md."""

    device: int = 0

    def __repr__(self) -> str:
        return f"CUDAPlace({self.device})"


@dataclass(frozen=True)
class CUDAPinnedPlace(CPUPlace):
    """fluid's place for host memory that a GPU reads directly. Here it is the host."""

    def __repr__(self) -> str:
        return "CUDAPinnedPlace"


@dataclass(frozen=True)
class RankGpu(CUDAPlace):
    """The GPU of a launched rank: number `device` among the GPUs that this process sees. Other ranks see theirs in their own processes."""

    def __repr__(self) -> str:
        return f"RankGpu({self.device})"


@dataclass(frozen=True)
class ProcessPlace(CPUPlace):
    """The CPU, in a process of its own, which imports the modules `imports` first."""

    imports: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "ProcessPlace"


@dataclass(frozen=True)
class MpiPlace(CPUPlace):
    """The CPU of a rank that mpirun started. The rank is this process or another one."""

    def __repr__(self) -> str:
        return "MpiPlace"


Place = CPUPlace | CUDAPlace


def as_place(place: Any) -> Place:
    """Check the place of an Executor. Raises ProgramError if it is not a place."""
    if isinstance(place, CPUPlace | CUDAPlace):
        return place
    found = f"Executor: place must be one place such as fluidx.CPUPlace() or fluidx.CUDAPlace(0), got {_shown(place)}"
    if isinstance(place, (list, tuple)):
        raise wrong(f"{found}; ParallelExecutor(t, places=...) runs on several")
    raise wrong(f"{found}; ParallelExecutor(t) runs what was transpiled" if hasattr(place, "get_trainer_program") else found)


def as_places(places: Any, ranks: int) -> list[Place]:
    """Check the places of `ranks` ranks. Raises ProgramError if they are not a list of places."""
    listed = isinstance(places, Sequence) and not isinstance(places, str)
    if listed and all(isinstance(p, CPUPlace | CUDAPlace) for p in places):
        return list(places)
    some = "cuda_places()" if isinstance(places, CUDAPlace) else f"cpu_places({ranks})"
    raise wrong(f"ParallelExecutor: places must be a list of places, one for each rank, such as fluidx.{some}, got {_shown(places)}")


def _shown(value: Any) -> str:
    return f"{type(value).__name__}: {value!r:.60}"


def cpu_places(device_count: int | None = None) -> list[CPUPlace]:
    """`device_count` CPU places, for ranks that are threads. The default count is the environment variable CPU_NUM, else 1.

    >>> cpu_places(2)
    [CPUPlace, CPUPlace]
    """
    from ..config import cpu_num

    n = cpu_num() if device_count is None else device_count
    if not isinstance(n, (int, np.integer)) or isinstance(n, bool) or n < 1:
        raise wrong(f"places: the number of places must be an integer above 0, got {type(n).__name__}: {n!r}")
    return [CPUPlace()] * int(n)


def default_places(ranks: int) -> list[Any]:
    """The places of `ranks` ranks for a script that names none: GPUs or CPUs, as FLUIDX_DEVICE says."""
    from ..config import device

    return [CUDAPlace(k) for k in range(ranks)] if device() == "cuda" else [CPUPlace()] * ranks


def process_places(device_count: int | None = None, imports: Sequence[str] = ()) -> list[ProcessPlace]:
    """`device_count` CPU places, for ranks that are processes on this host. The default count is that of `cpu_places`.

    A process receives the programs of its rank as text. If the programs use operators that your modules declare, name these modules in
    `imports`: the process imports them first.

    >>> process_places(2)
    [ProcessPlace, ProcessPlace]
    """
    if isinstance(imports, str):
        raise wrong(f"process_places: imports must be a list of modules, got str: {imports!r}; give [{imports!r}]")
    return [ProcessPlace(tuple(imports))] * len(cpu_places(device_count))


def cuda_pinned_places(device_count: int | None = None) -> list[CUDAPinnedPlace]:
    """`device_count` places in host memory. The default count is that of `cpu_places`."""
    return [CUDAPinnedPlace()] * len(cpu_places(device_count))


def cuda_device_count() -> int:
    """The number of GPUs that CuPy sees; 0 without CuPy or a driver."""
    try:
        return int(array_module(CUDAPlace(0)).cuda.runtime.getDeviceCount())
    except FluidxError:
        return 0


def is_compiled_with_cuda() -> bool:
    """Can programs run on a GPU here? In fluid this depends on how it was compiled, in fluidx on CuPy and a GPU."""
    return cuda_device_count() > 0


def using(place: Place) -> AbstractContextManager[Any]:
    """A context in which new arrays are allocated on `place`."""
    return _HERE if isinstance(place, CPUPlace) else array_module(place).cuda.Device(place.device)


_HERE = nullcontext()


def mpi_places() -> list[MpiPlace]:
    """One place for each rank that mpirun started; each rank is a process that runs the script. One place without mpirun.

    Raises ExecutionError, which says what to install, if MPI is missing.
    """
    from ..comm.launched_rank import by_mpi

    rank = by_mpi()
    return [MpiPlace()] * (1 if rank is None else rank.world_size)


@cache
def array_module(place: Place) -> Any:
    """numpy, or cupy for a GPU. Raises FluidxError, which says what to install, if CuPy is missing or too old, or the GPU is missing."""
    if isinstance(place, CPUPlace):
        return np
    try:
        import cupy
    except ImportError:
        raise FluidxError(f"{place} needs CuPy, which is not installed; {install('cuda13', 'cuda12')}") from None
    if reason := too_old("CuPy", cupy.__version__):
        raise FluidxError(f"{place}: {reason}")
    if not cupy.cuda.is_available():
        raise FluidxError(f"{place} needs an NVIDIA GPU and driver; CuPy {cupy.__version__} finds none. Use CPUPlace() instead")
    count = cupy.cuda.runtime.getDeviceCount()
    if place.device >= count:
        raise FluidxError(f"{place}: this machine has {count} GPU{'s' if count != 1 else ''}, numbered from 0")
    return cupy
