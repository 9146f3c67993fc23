"""`cuda_places`: the GPUs of this host as places, or the GPU of each launched rank."""

from __future__ import annotations

from ...comm.launched_rank import member
from ..places import CUDAPlace, array_module


def cuda_places(device_ids: list[int] | None = None) -> list[CUDAPlace]:
    """The given GPUs, or all that CuPy sees. In a launched script, without `device_ids`: the GPU of each rank; all ranks must call it.

    Raises FluidxError if CuPy or a GPU is missing, and ExecutionError if ranks would have to share a GPU.
    """
    if device_ids is None and (rank := member()) is not None:
        from .gpu_devices import gpu_of  # loads NCCL

        return [gpu_of(rank).place] * rank.world_size
    xp = array_module(CUDAPlace(0))
    ids = range(xp.cuda.runtime.getDeviceCount()) if device_ids is None else device_ids
    return [CUDAPlace(int(i)) for i in ids]
