"""GPUs of ranks that are processes: which one is this rank's, and by what it meets those of the others."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...comm.launched_rank import Member
from ...comm.nccl import MemberNcclWorld, library
from ...ir.errors import ExecutionError
from ..error_text import describe_error
from ..places import CUDAPlace, RankGpu, array_module

# by which NCCL is told that ranks may share a GPU, or that they are on different hosts, which comes to the same
_SHARING = ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID")


class Gpu(NamedTuple):
    """The GPU of this rank."""

    place: RankGpu
    module: Any  # for its arrays
    comm: Any


class DeviceReport(NamedTuple):
    """What a rank finds: its host, which has a name and is known by another, its GPUs, known by theirs, and why it can use none."""

    name: str
    host: str
    gpus: Sequence[str]
    why_not: str


_mine: dict[Member, Gpu] = {}


def gpu_of(member: Member) -> Gpu:
    """The GPU that this rank computes on: all ranks call it, and one meeting of them finds each its own.

    Raises ExecutionError, on all of them, where one has none.
    """
    if member not in _mine:
        seen = [DeviceReport(*said) for said in member.gather(_seen())]
        place = RankGpu(chosen(seen)[member.rank])
        world = MemberNcclWorld(member.comm, place.device)
        atexit.register(world.close)  # CuPy would give its communicators back by a call that can wait for other ranks
        _mine[member] = Gpu(place, array_module(place), world.communicator(member.rank))
    return _mine[member]


def why_not(ranks: int, environ: Mapping[str, str] = os.environ) -> str:
    """Why so many ranks of this host cannot each have a GPU, or an empty text."""
    seen = _seen()
    if seen.why_not:
        return seen.why_not
    try:
        chosen([seen] * ranks, environ)
    except ExecutionError as e:
        return str(e)
    return ""


def chosen(seen: Sequence[DeviceReport], environ: Mapping[str, str] = os.environ) -> list[int]:
    """For each rank the number of its GPU among those that it sees: of as many as it has ranks, a host gives each the next.

    A launcher may have given each rank its own, which all of them see as number 0 (CUDA_VISIBLE_DEVICES). Raises ExecutionError where
    ranks would have the same one.

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
        found.append(before % len(one.gpus))
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
    except Exception as e:  # also a driver's own: the other ranks wait for an answer
        return DeviceReport(name, host, (), describe_error(e))
    return DeviceReport(name, host, gpus, "")


def _host() -> str:
    """What tells this host from others, whose names may be the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
