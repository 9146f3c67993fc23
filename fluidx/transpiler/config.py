"""DistributeTranspilerConfig: fluid's fields, mapped onto a strategy."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from ..ir.errors import TranspileError, nearest
from .cluster import Cluster, Mesh
from .strategies import CATALOGUE, Strategy, data_parallel, parameter_server, reduce_broadcast, ring_optimizer
from .strategies.base import Common

MODES = ("collective", "nccl2", "pserver")
COLLECTIVE_MODES = ("grad_allreduce", "reduce", "ring_optimizer")
SPLIT_METHODS = ("RoundRobin", "HashName")
_WHOLE = 2**62  # elements: parameters are not sliced


@dataclass
class DistributeTranspilerConfig:
    """fluid's configuration object. `mode` "nccl2" or "collective" trains with collectives; `collective_mode` chooses how.

    `split_method="HashName"` chooses roots by hash, "RoundRobin" and None by size; `chunk_mb` is the size of chunks. `mode="pserver"`
    trains with parameter servers, as many as `transpile(pservers=...)` lists; `min_block_size`, `slice_var_up` and `split_method` say how
    parameters are divided among them. `nccl_comm_num` is the number of NCCL's communicators for each group, over which buckets go in turns;
    `use_hierarchical_allreduce` reduces inside hosts first. `wait_port` and `print_log` are accepted and ignored: in fluid they only say
    how processes connect.

    >>> DistributeTranspilerConfig(mode="collective", collective_mode="ring_optimizer").strategy()
    ring_optimizer(chunk_mb=4, roots='greedy')
    """

    mode: str = "collective"
    collective_mode: str | None = None
    split_method: Any = None
    chunk_mb: float = 4
    nccl_comm_num: int = 1
    use_hierarchical_allreduce: bool = False
    hierarchical_allreduce_inter_nranks: int = 0
    slice_var_up: bool = True
    min_block_size: int = 8192
    wait_port: bool = True
    print_log: bool = False
    sync_mode: bool = True

    def __setattr__(self, name: str, value: Any) -> None:
        known = [f.name for f in fields(self)]
        if name not in known:
            raise TranspileError(f"DistributeTranspilerConfig has no field {name!r}; {nearest(name, known, 'it has')}")
        object.__setattr__(self, name, value)

    def strategy(self) -> Strategy:
        """The strategy that these fields ask for."""
        if self.mode not in MODES:
            known = getattr(self.mode, "name", str(self.mode)).partition("{")[0].split(",")[0] in CATALOGUE
            way = f"DistributeTranspiler({self.mode!r}) takes strategies" if known else nearest(str(self.mode), MODES, "there are")
            raise TranspileError(f"unknown mode={self.mode!r}; {way}")
        if self.mode == "pserver" or not self.sync_mode:
            split = "hash" if getattr(self.split_method, "__name__", self.split_method) == "HashName" else "round_robin"
            return parameter_server(1, self.sync_mode, self.min_block_size if self.slice_var_up else _WHOLE, split)
        rings = self.nccl_comm_num
        if isinstance(rings, bool) or not isinstance(rings, int) or rings < 1:
            raise TranspileError(f"nccl_comm_num is a number of communicators for each group, 1 or more, got {rings!r}")
        common: Common = {"rings": rings, **({"hierarchical": True} if self.use_hierarchical_allreduce else {})}
        how = self.collective_mode or "grad_allreduce"
        if how not in COLLECTIVE_MODES:
            raise TranspileError(f"unknown collective_mode={how!r}; {nearest(str(how), COLLECTIVE_MODES, 'there are')}")
        named = getattr(self.split_method, "__name__", self.split_method)
        if named is not None and named not in SPLIT_METHODS:
            raise TranspileError(f"unknown split_method={named!r}; {nearest(str(named), SPLIT_METHODS, 'there are')}")
        roots = "hash" if named == "HashName" else "greedy"
        if how == "reduce":
            return reduce_broadcast(roots, **common)
        if how == "ring_optimizer":
            return ring_optimizer(self.chunk_mb, roots, **common)
        return data_parallel(**common)

    def ranks(self, trainers: Any) -> Cluster | Mesh:
        """The ranks of `transpile(trainers=...)`. With `use_hierarchical_allreduce`, `hierarchical_allreduce_inter_nranks` of them count
        as a host; with 0 and 1, hosts are those of the endpoints or of a Cluster.

        >>> DistributeTranspilerConfig(use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=2).ranks(6)
        Cluster(hosts=3, devices_per_host=2)
        """
        found, each = Cluster.of(trainers), self.hierarchical_allreduce_inter_nranks
        if not self.use_hierarchical_allreduce:
            if each:
                raise TranspileError(f"hierarchical_allreduce_inter_nranks={each!r} needs use_hierarchical_allreduce=True")
            return found
        if isinstance(each, bool) or not isinstance(each, int) or each < 0:
            raise TranspileError(f"hierarchical_allreduce_inter_nranks is a number of ranks, 0 or more, got {each!r}")
        if each <= 1 or isinstance(found, Mesh):
            return found
        if found.world_size <= each or found.world_size % each:
            raise TranspileError(
                f"hierarchical_allreduce_inter_nranks={each} does not divide {found.world_size} trainers into several hosts; "
                "give a divisor below their number"
            )
        if found.hosts > 1 and found.devices_per_host != each:
            raise TranspileError(
                f"hierarchical_allreduce_inter_nranks={each}, but the hosts of the trainers have {found.devices_per_host} each; "
                "leave it at 0"
            )
        return replace(found, hosts=found.world_size // each, devices_per_host=each)
