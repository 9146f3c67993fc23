"""Questions that the command asks: a program, a strategy, ranks on a cluster, and what would change with other options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..ir.errors import TranspileError, nearest
from ..transpiler import strategies
from ..transpiler.cluster import Cluster, Mesh
from ..transpiler.strategies import Strategy
from ..transpiler.transpiler import DistributeTranspiler
from .machine_prices import Factors
from .simulate import simulate
from .simulation import Simulation


@dataclass(frozen=True)
class Question:
    """What a step takes: `transpile(strategy, ranks)` makes the rank programs, the rest are arguments of `simulate`."""

    transpile: Callable[[Any, Any], DistributeTranspiler]
    strategy: Any
    ranks: Any  # a number, a Mesh, or None: all devices of the cluster
    cluster: str
    hosts: int | None = None
    batch: int | None = None
    feed: Any = None
    slow: Any = None
    iterations: int | None = None
    micro_batches: int | None = None
    runtime: str = "static"
    factors: Factors = Factors()

    def answer(self) -> Simulation:
        """The predicted step."""
        t = self.transpile(self.strategy, self.laid_out())
        found = simulate(
            t, self.cluster_of(), self.batch, feed=self.feed, slow=self.slow, iterations=self.iterations,
            micro_batches=self.micro_batches, runtime=self.runtime,
        )  # fmt: skip
        return found if self.factors == Factors() else found.what_if(**self.factors._asdict())

    def cluster_of(self) -> Cluster:
        return Cluster.load(self.cluster, self.hosts)

    def laid_out(self) -> Cluster | Mesh:
        """The ranks on the hosts of the cluster. A number of ranks fills its hosts one after the other."""
        cluster = self.cluster_of()
        if self.ranks is None:
            return cluster
        if isinstance(self.ranks, Mesh):
            return self.ranks.on(cluster)
        per_host = cluster.devices_per_host
        if self.ranks <= per_host:
            return replace(cluster, hosts=1, devices_per_host=self.ranks)
        if self.ranks % per_host:
            raise TranspileError(f"{self.ranks} ranks do not fill hosts of {per_host} devices; take a multiple of {per_host}")
        hosts = self.ranks // per_host
        if self.hosts is not None and hosts > self.hosts:
            raise TranspileError(f"{self.ranks} ranks need {hosts} hosts of {per_host} devices, and hosts is {self.hosts}")
        return replace(cluster, hosts=hosts)

    @staticmethod
    def needs_transpile(changes: Mapping[str, float]) -> bool:
        """Do changes make other programs than the given one?"""
        return any(name not in Factors._fields for name in changes)

    def changed(self, changes: Mapping[str, float]) -> Question:
        """The question with other factors on the machine, another number of hosts, or other options of the strategy. Raises
        TranspileError for a name that is none of these."""
        made = strategies.get(self.strategy)
        asked, options = self, dict[str, Any]()
        for name, value in changes.items():
            if name in Factors._fields:
                asked = replace(asked, factors=asked.factors._replace(**{name: value}))
            elif name == "hosts":
                asked = replace(asked, hosts=_whole(name, value), ranks=None if not isinstance(self.ranks, Mesh) else self.ranks)
            else:
                options[name] = int(value) if value == int(value) else value
        return replace(asked, strategy=with_options(made, options)) if options else asked


def with_options(strategy: Strategy, options: Mapping[str, Any]) -> Strategy:
    """A strategy of the catalogue with other options. Raises TranspileError, which names the nearest, for one that it does not have.

    >>> with_options(strategies.get("zero1"), {"bucket_mb": 4})
    zero1(bucket_mb=4)
    """
    has = [*dict(strategy.options), *strategies.options_of(strategy.name)]
    for name in options:
        if name not in has:
            known = [*Factors._fields, "hosts", *dict.fromkeys(has)]
            raise TranspileError(f"what-if has no {name!r} for {strategy.name}; {nearest(name, known, 'there are')}")
    return strategies.get(strategy.name, **{**dict(strategy.options), **options}).with_rewrites(*strategy.rewrites)


def _whole(name: str, value: float) -> int:
    if value != int(value) or value < 1:
        raise TranspileError(f"{name} must be a whole number of at least 1, got {value:g}")
    return int(value)
