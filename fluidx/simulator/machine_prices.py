"""Prices: what steps, collectives and messages cost on the hosts of a machine, for the ranks of one program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

from ..executor.plan.records import Plan, Step
from ..hardware.records import Figure, Hardware, LinkFigures, SwitchFigures
from ..ir.types import TensorType
from .collective_times import CollectiveTimes
from .costs import NOTHING, CostEstimate, Costs
from .network import Network, PortFigures, hosts_with_ports
from .round_times import RoundTimes
from .work import StepWork


class Factors(NamedTuple):
    """What-if factors on a machine: on the bytes a second of links, on the speed of compute, and on the seconds of a message."""

    network: float = 1.0
    compute: float = 1.0
    latency: float = 1.0


AS_IT_IS = Factors()
RUN_CALLS = 2  # of all ranks, without data: one begins a run, and one ends it


def scaled(hardware: Hardware, factors: Factors) -> Hardware:
    """The machine with links of other speeds.

    >>> from fluidx.hardware import load
    >>> round(scaled(load("dgx-v100"), Factors(network=2.0)).inside.ring_bandwidth(2) / 1e9)
    45
    """
    if factors.network == factors.latency == 1.0:
        return hardware
    between = hardware.between
    return replace(
        hardware, inside=_links(hardware.inside, factors), between=None if between is None else _links(between, factors)
    )  # fmt: skip


def _links(links: LinkFigures, f: Factors) -> LinkFigures:
    def times(figure: Figure | None, factor: float) -> Any:
        return None if figure is None else figure._replace(value=figure.value * factor)

    switch = links.in_switch
    return replace(
        links,
        latency=times(links.latency, f.latency),
        message=times(links.message, f.latency),
        bandwidth=times(links.bandwidth, f.network),
        by_group={n: times(figure, f.network) for n, figure in links.by_group.items()},
        collective_latency=times(links.collective_latency, f.latency),
        in_switch=None if switch is None else SwitchFigures(times(switch.latency, f.latency), times(switch.bandwidth, f.network)),
        shared=times(links.shared, f.network),
    )


class MachinePrices:
    """The prices for `world_size` ranks, of which `ranks_per_host` are on each host."""

    def __init__(self, hardware: Hardware, world_size: int, ranks_per_host: int, factors: Factors = AS_IT_IS):
        self.hardware, self.factors = hardware, factors
        self.host_of = [r // ranks_per_host for r in range(world_size)]
        on_host = min(world_size, ranks_per_host)
        self.costs = Costs(hardware, on_host)
        self._everyone = tuple(range(world_size))
        # measured curves are of this machine: factors are then taken on what is beyond their smallest value
        self._scales = hardware.measured is not None
        self.times = CollectiveTimes(hardware if self._scales else scaled(hardware, factors), ranks_per_host)
        cores = hardware.device.cores
        # ranks that share cores take turns: the lower bound of what the system's scheduler makes of it
        self.turns = max(1.0, on_host / cores) if hardware.device.kind == "cpu" and cores else 1.0
        self._longer = self.turns / factors.compute
        self._sharing: dict[int, tuple[Sequence[Sequence[int]], int]] = {}

    def step(self, plan: Plan, step: Step) -> CostEstimate:
        found = self.costs.step(plan, step)
        return found if self._longer == 1.0 else found._replace(seconds=found.seconds * self._longer)

    def collective(self, method: str, members: Sequence[int], nbytes: int, groups: Sequence[Sequence[int]]) -> CostEstimate:
        if len(members) == 1:
            return NOTHING
        sharing = self._shared_by(groups)
        least = self.times.estimate(method or "all_reduce", members, 0, sharing)  # one without data is as long as the smallest
        found = self.times.estimate(method, members, nbytes, sharing) if method else least
        if not self._scales:
            return found
        f = self.factors
        return found._replace(seconds=least.seconds * f.latency + max(0.0, found.seconds - least.seconds) / f.network)

    def carried(
        self, algorithm: str, method: str, groups: Sequence[Sequence[int]], nbytes: int, hosts: int, rooted: bool
    ) -> CostEstimate:  # fmt: skip
        """The seconds of a collective that the sets of `groups` carry out by the messages of an algorithm; as of the communicator's own
        collective, if these are too many."""
        seconds = self.rounds.seconds(algorithm, method, groups, nbytes, hosts, rooted)
        if seconds == inf:
            return self.collective(method, groups[0], nbytes, groups)
        return CostEstimate(seconds, self.times.spread(tuple(groups[0])), "sheet")

    @cached_property
    def rounds(self) -> RoundTimes:
        """The times of algorithms on the links of the machine."""
        return RoundTimes(self.network, self._adding)

    def _adding(self, nbytes: float) -> float:
        t = TensorType("float32", (max(1, round(nbytes / 4)),))
        return self.costs.of(StepWork("sum", "native", (t, t, t), t.numel, 3 * t.nbytes)).seconds * self._longer

    def _shared_by(self, groups: Sequence[Sequence[int]]) -> int:
        """How many sets of a group use the network cards of one host at the same time."""
        known = self._sharing.get(id(groups))
        if known is None:
            known = self._sharing[id(groups)] = groups, self.times.sharing(groups)
        return known[1]

    @property
    def dispatch(self) -> float:
        """The seconds in which the host issues a step, ahead of the device."""
        found = self.hardware.device.dispatch
        return 0.0 if found is None else found.value / self.factors.compute

    def around(self, plan: Plan) -> CostEstimate:
        """Those of `Costs`, and the calls of all ranks that begin and end a run, on a link that they share."""
        found, f = self.costs.around(plan), self.factors
        calls = RUN_CALLS * self.times.call(self._everyone) / (f.network if self._scales else 1.0)
        return found._replace(seconds=found.seconds * self.turns / f.compute + calls)

    @property
    def network(self) -> Network:
        """The links that messages pass."""
        inside, between, f = self.hardware.inside, self.hardware.between or self.hardware.inside, self.factors
        ports = self._ports(inside)
        if (seconds := self.times.message(self.host_of.count(0))) is not None:
            rate = inside.bandwidth.value
            ports = ports._replace(measured=lambda nbytes: f.latency * max(0.0, seconds(nbytes) - nbytes / rate))
        return hosts_with_ports(self.host_of, ports, self._ports(between), inside.eager, between.count)

    def _ports(self, link: LinkFigures) -> PortFigures:
        f = self.factors
        shared = None if link.shared is None else link.shared.value * f.network
        return PortFigures((link.message or link.latency).value * f.latency, link.bandwidth.value * f.network, shared)

    @property
    def slowdown(self) -> float:
        return self.hardware.device.slowdown.value
