"""Executors: they run programs on one device or on many ranks, by plans over preallocated buffers."""

from .executor import Executor
from .places import CPUPlace, CUDAPinnedPlace, CUDAPlace, cpu_places, cuda_pinned_places, mpi_places, process_places
from .ranks.gpu_places import cuda_places
from .ranks.parallel_executor import ParallelExecutor
from .scope import Scope, global_scope, scope_guard

__all__ = [
    "CPUPlace", "CUDAPinnedPlace", "CUDAPlace", "Executor", "ParallelExecutor", "Scope", "cpu_places", "cuda_pinned_places", "cuda_places",
    "global_scope", "mpi_places", "process_places", "scope_guard",
]  # fmt: skip
