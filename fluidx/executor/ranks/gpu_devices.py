"""GPUs of launched ranks: which GPU this rank uses, and its NCCL set-up."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...comm.launched_rank import LaunchedRank
from ...comm.nccl import LaunchedNcclWorld, library
from ...ir.errors import ExecutionError
from ..error_text import describe_error
from ..places import CUDAPlace, RankGpu, array_module

# NCCL variables that allow ranks to share a GPU: by permission, or because the ranks seem to be on different hosts
_SHARING = ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID")


class Gpu(NamedTuple):
    """The GPU of this rank."""

    place: RankGpu
    comm: Any


class DeviceReport(NamedTuple):
    """A rank's GPUs: the name and the id of its host, the PCI bus ids of its GPUs, and why it can use none ("" if it can)."""

    name: str
    host: str
    gpus: Sequence[str]
    why_not: str


_mine: dict[LaunchedRank, Gpu] = {}


def gpu_of(member: LaunchedRank) -> Gpu:
    """The GPU of this rank. All ranks must call it: one collective call assigns a GPU to each.

    Raises ExecutionError on all ranks if one of them has no GPU.
    """
    if member not in _mine:
        seen = [DeviceReport(*said) for said in member.gather(_seen())]
        place = RankGpu(chosen(seen)[member.rank])
        world = LaunchedNcclWorld([member.comm], [place.device])
        atexit.register(world.close)  # CuPy's own clean-up of communicators is a call that can wait for other ranks
        _mine[member] = Gpu(place, world.communicator(member.rank))
    return _mine[member]


def several_of(member: LaunchedRank, hosts: Sequence[Any], devices: Sequence[int]) -> LaunchedNcclWorld:
    """The world of this process's ranks on these GPUs, until `release`. `hosts` are their communicators on the CPU side. All processes must
    call it.

    Raises ExecutionError in all of them if two ranks would share a GPU.
    """
    said = member.gather([_seen(), *devices])
    chosen([DeviceReport(*seen) for seen, *asked in said for _ in asked], asked=[number for _, *asked in said for number in asked])
    world = LaunchedNcclWorld(hosts, devices)
    atexit.register(world.close)
    return world


def release(world: LaunchedNcclWorld) -> None:
    """Close a world before the end of the script."""
    atexit.unregister(world.close)
    world.close()


def why_not(ranks: int, environ: Mapping[str, str] = os.environ) -> str:
    """The reason why so many ranks of this host cannot have a GPU each; "" if they can."""
    seen = _seen()
    if seen.why_not:
        return seen.why_not
    try:
        chosen([seen] * ranks, environ)
    except ExecutionError as e:
        return str(e)
    return ""


def chosen(seen: Sequence[DeviceReport], environ: Mapping[str, str] = os.environ, asked: Sequence[int] = ()) -> list[int]:
    """For each rank, the number of its GPU among those that it sees: that which it `asked` for, or those of a host in order.

    If a launcher gave each rank one GPU (CUDA_VISIBLE_DEVICES), every rank sees it as number 0. Raises ExecutionError if two ranks would
    share a GPU, or one asks for a GPU that it does not see.

    >>> node = DeviceReport("a", "a", ("0000:65:00.0", "0000:b3:00.0"), "")
    >>> chosen([node, node, node._replace(host="b"), node._replace(host="b")])
    [0, 1, 0, 1]
    """
    for rank, one in enumerate(seen):
        if one.why_not:
            raise ExecutionError(f"rank {rank}, on host {one.name}, cannot use a GPU: {one.why_not}")
    found: list[int] = []
    taken: dict[tuple[str, str], int] = {}
    for rank, one in enumerate(seen):
        before = sum(other.host == one.host for other in seen[:rank])
        found.append(asked[rank] if asked else before % len(one.gpus))
        if found[rank] >= len(one.gpus):
            raise ExecutionError(
                f"rank {rank}, on host {one.name}, asks for GPU {found[rank]}, and its process sees {len(one.gpus)}, numbered from 0; name "
                "another one, or check which GPUs CUDA_VISIBLE_DEVICES hides"
            )
        first = taken.setdefault((one.host, one.gpus[found[rank]]), rank)
        if first != rank and not any(environ.get(name) for name in _SHARING):
            there = [other for other in seen if other.host == one.host]
            gpus = len({gpu for other in there for gpu in other.gpus})
            raise ExecutionError(
                f"host {one.name} has {len(there)} ranks and {gpus} GPU{'s' * (gpus > 1)}, so ranks {first} and {rank} would share one; "
                f"start {gpus} rank{'s' * (gpus > 1)} there, or check which GPUs CUDA_VISIBLE_DEVICES hides"
            )
    return found


def _seen() -> DeviceReport:
    name, host = socket.gethostname(), _host()
    try:
        cuda = array_module(CUDAPlace(0)).cuda
        library()
        gpus = [cuda.runtime.deviceGetPCIBusId(k) for k in range(cuda.runtime.getDeviceCount())]
    except Exception as e:  # any error, also the driver's: the other ranks wait for an answer
        return DeviceReport(name, host, (), describe_error(e))
    return DeviceReport(name, host, gpus, "")


def _host() -> str:
    """An id of this host. Host names may be equal on several hosts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
