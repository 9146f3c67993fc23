"""The machine of a planner: what its closed forms and simulations ask of the figures of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

from ..executor.plan.records import Plan, Step
from ..hardware.records import Hardware
from ..ir.errors import TranspileError
from ..transpiler.algorithms import able
from ..transpiler.algorithms.cost import CANDIDATES
from ..transpiler.cluster import DATA, NODE, RAIL, Cluster, Mesh
from ..transpiler.transpiler import DistributeTranspiler
from .closed_forms import Collective
from .machine_prices import MachinePrices
from .memory_limit import MemoryLimit, memory_limit
from .planned import Prediction
from .simulate import simulate

_MOST_RANKS = 1_000_000  # the search lists the ranks of each group


class Machine:
    """The figures of a cluster, for programs with `batch` rows."""

    def __init__(self, cluster: Cluster | Mesh, hardware: Hardware, batch: int, memory: Any = None):
        self.cluster, self.hardware, self.batch = cluster, hardware, batch
        self.limit: MemoryLimit = memory_limit(hardware, memory)
        hosts = cluster.hosts
        per_host = -(-cluster.world_size // hosts) if hosts > 1 else hardware.devices_per_host
        self._prices = MachinePrices(hardware, cluster.world_size, per_host)

    @property
    def name(self) -> str:
        return self.hardware.name

    @property
    def device(self) -> str:
        return "cuda" if self.hardware.device.kind == "gpu" else "cpu"

    @property
    def to_host(self) -> float:
        """Bytes a second between a device and its host's memory."""
        link = self.hardware.to_host
        return inf if link is None or self.device == "cpu" else link.bandwidth.value

    @property
    def slowdown(self) -> float:
        """The factor on the time of compute while communication runs beside it."""
        return self.hardware.device.slowdown.value

    def step(self, plan: Plan, step: Step) -> float:
        """The seconds of a step that computes."""
        return self._prices.step(plan, step).seconds

    def collective(self, trainers: Cluster | Mesh) -> Collective:
        """The seconds of a collective among the ranks that train on different data, by the fastest of the ways over hosts."""
        groups = trainers.groups()
        sets = groups.get(DATA, ((0,),))

        def seconds(method: str, nbytes: float) -> float:
            flat = self._seconds(method, sets, nbytes)
            if NODE not in groups:
                return flat
            inside, across = groups[NODE], groups[RAIL]
            part = nbytes / len(inside[0])
            ways = {"all_reduce": ("reduce", "spread"), "reduce": ("reduce",), "spread": ("spread",)}.get(method)
            if ways is None:
                return flat
            within = sum(self._seconds(way, inside, nbytes) for way in ways)
            rails = [self._seconds(method, across, part), *self._by_messages(method, across, part, CANDIDATES)]
            two_levels = self._by_messages(method, sets, nbytes, [f"direct/{name}" for name in CANDIDATES], len(inside))
            return min(flat, max(within, min(rails)), *two_levels)

        return seconds

    def _by_messages(
        self, method: str, sets: Sequence[Sequence[int]], nbytes: float, names: Sequence[str], hosts: int = 1
    ) -> list[float]:  # fmt: skip
        """The times of the algorithms that can carry out a collective."""
        n = len(sets[0])
        return [self._prices.rounds.seconds(a, method, sets, nbytes, hosts) for a in names if able(a, method, n, hosts)]

    def _seconds(self, method: str, sets: Sequence[Sequence[int]], nbytes: float) -> float:
        return self._prices.collective(method, sets[0], round(nbytes), sets).seconds

    def simulate(self, t: DistributeTranspiler, exact: bool = False) -> Prediction:
        """Predict a step of a transpiled program, with one plan for all ranks where that is possible; with `exact`, rank by rank where they
        differ, and message by message. The chosen one alone is proved, at the end."""
        found = simulate(t, self.hardware, self.batch, verify=False, exact=int(exact))
        slowest = max(found.ranks, key=lambda r: r.compute + r.exposed)
        most = max(found.memory_of, key=lambda m: m.system)
        return Prediction(
            found.seconds, found.low, found.high, slowest.compute, found.exposed, most.system - most.context, most.host, found.calibrated
        )  # fmt: skip


def chosen_ranks(given: Any, ranks: int | None) -> tuple[Cluster | Mesh, Hardware]:
    """The ranks and the figures that `cluster=` and `ranks=` of a plan mean. Raises TranspileError if the cluster has no figures, or fewer
    devices than ranks."""
    if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1):
        raise TranspileError(f"plan: ranks is a number of ranks, at least 1, got {ranks!r}")
    if ranks is not None and ranks > _MOST_RANKS:
        raise TranspileError(f"plan: at most {_MOST_RANKS:,} ranks are planned for, got ranks={ranks:,}")
    cluster = given if isinstance(given, (Cluster, Mesh)) else _loaded(given, ranks)
    machines = cluster.cluster if isinstance(cluster, Mesh) else cluster
    hardware = None if machines is None else machines.hardware
    if hardware is None:
        raise TranspileError(
            f"plan needs the figures of a machine, and {cluster!r} has none: give cluster='dgx-a100' (fluidx clusters lists them), "
            "fx.Cluster.load(...), or the file that fluidx calibrate wrote for this machine"
        )
    if ranks is not None and ranks != cluster.world_size:
        cluster = _with(cluster, ranks)
    has = None if hardware.hosts is None else hardware.hosts * hardware.devices_per_host
    if has is not None and cluster.world_size > has:
        raise TranspileError(f"plan: {cluster.world_size} ranks, and {hardware.name} has {has} devices; give ranks={has}, or more hosts")
    return cluster, hardware


def _loaded(given: Any, ranks: int | None) -> Cluster:
    if given is None:
        raise TranspileError(
            "plan needs a cluster: cluster='dgx-a100' (fluidx clusters lists them), fx.Cluster.load(...), or the file that fluidx "
            "calibrate wrote for this machine"
        )
    one = Cluster.load(given)
    return one if ranks is None or ranks <= one.world_size else Cluster.load(given, hosts=-(-ranks // one.devices_per_host))


def _with(cluster: Cluster | Mesh, ranks: int) -> Cluster:
    """The same machines with another number of ranks: the first devices of one host, or all devices of some hosts."""
    if isinstance(cluster, Mesh):
        raise TranspileError(f"plan: {cluster!r} has {cluster.world_size} ranks, and ranks={ranks}; give one of the two")
    each = cluster.devices_per_host
    if ranks <= each:
        return replace(cluster, hosts=1, devices_per_host=ranks)
    if ranks > cluster.world_size:
        raise TranspileError(f"plan: {ranks} ranks, and {cluster!r} has {cluster.world_size} devices; give fewer, or more hosts")
    if ranks % each:
        fewer = ranks - ranks % each
        raise TranspileError(f"plan: {ranks} ranks do not fill hosts of {each} devices; give {fewer} or {fewer + each}")
    return replace(cluster, hosts=ranks // each)
