"""Descriptions of the ranks: a Cluster of hosts with devices, or a Mesh with named axes, and the groups of ranks that each declares."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..ir.errors import TranspileError

if TYPE_CHECKING:
    from ..hardware import Hardware, LinkFigures

Groups = dict[str, tuple[tuple[int, ...], ...]]

# names of groups
DATA = "dp"  # ranks that train on different data
NODE = "node"  # the ranks of a host
RAIL = "rail"  # the ranks with the same position on every host
SERVERS = "ps"  # all ranks where some of them are servers


class Link(NamedTuple):
    """The cost of a link in seconds: `message` for each message, however small, and `byte` for each byte."""

    message: float
    byte: float


class Links(NamedTuple):
    """The costs that algorithm="auto" compares: a message between hosts, a message inside a host, and a collective of the communicator
    inside a host; `by_group` has the cost of that collective among n ranks where it depends on n. The two costs inside a host were
    measured between two threads: 1 MiB in 20 and in 14 us."""

    between: Link = Link(15e-6, 1 / 10e9)
    inside: Link = Link(1.5e-6, 1 / 50e9)
    shared: Link = Link(1e-6, 1 / 70e9)
    by_group: tuple[tuple[int, Link], ...] = ()

    def collective(self, n: int) -> Link:
        """The cost of a collective of the communicator among n ranks inside a host."""
        return dict(self.by_group).get(n, self.shared)

    @staticmethod
    def of(hardware: Hardware) -> Links:
        """The costs by the figures of a machine. Between hosts a rank has its part of the network cards, if it has less than one. On GPUs
        each message is a call of the communicator, which costs what the smallest collective does.

        >>> from fluidx.hardware import load
        >>> links = Links.of(load("p4d"))
        >>> round(1 / links.between.byte / 1e9, 2), round(1 / links.collective(2).byte / 1e9)
        (5.22, 189)
        """
        d, inside, between = hardware.devices_per_host, hardware.inside, hardware.between or hardware.inside
        base = (inside.collective_latency or inside.latency).value
        own = {n: Link(base + 2 * (n - 1) * inside.latency.value, 1 / inside.ring_bandwidth(n)) for n in range(2, d + 1)}
        call = base if hardware.device.kind == "gpu" else 0.0
        return Links(
            Link(call + between.latency.value, 1 / (between.bandwidth.value * min(1.0, between.count / d))),
            Link(call + inside.latency.value, 1 / inside.bandwidth.value),
            own[d] if d > 1 else Link(base, 1 / inside.bandwidth.value),
            tuple(own.items()),
        )


def axes_with_ranks(axes: Mapping[str, int]) -> dict[str, int]:
    """The axes over which a value can have a placement other than replicated: those with several ranks, and all axes if there are servers.

    >>> axes_with_ranks({"tp": 2, "dp": 1})
    {'tp': 2}
    """
    return {g: n for g, n in axes.items() if n > 1 or SERVERS in axes}


def need_hosts(what: str, mesh: Cluster | Mesh | Served, instead: str) -> None:
    """Raise TranspileError if the ranks are on one host; `instead` is the advice in the message."""
    if isinstance(mesh, Mesh):
        raise TranspileError(f"{what} goes over the hosts of a Cluster, whose one axis is dp; with {mesh!r}, {instead}")
    if mesh.hosts == 1:
        several = "transpile(trainers=fx.Cluster(hosts=2, devices_per_host=4))"
        raise TranspileError(f"{what} needs several hosts: {several}; on one host, {instead}")


def endpoints(given: Any, wanted: str, number: str) -> list[str]:
    """Endpoints "host:port" from a list, or from a text with commas. Raises TranspileError for anything else: `wanted` begins the sentence
    that says what may be given, and `number` shows how to give a number of ranks.

    >>> endpoints("a:1, b:1", "", "")
    ['a:1', 'b:1']
    """
    listed = given.split(",") if isinstance(given, str) else given
    if not isinstance(listed, (list, tuple)) or not listed or not all(isinstance(e, str) and e.strip() for e in listed):
        raise TranspileError(f"{wanted} endpoints 'host:port' in a list, got {given!r}")
    found = [e.strip() for e in listed]
    for e in found:
        host, _, port = e.rpartition(":")
        if not host or not port.isdigit():
            raise TranspileError(f"endpoint {e!r} is not 'host:port'; a number of ranks is given as an integer: {number}")
    if len(set(found)) != len(found):
        twice = next(e for e in found if found.count(e) > 1)
        raise TranspileError(f"endpoint {twice!r} is listed twice; every rank needs its own")
    return found


@dataclass(frozen=True)
class Cluster:
    """`hosts` machines with `devices_per_host` devices each. `links` are the costs that algorithm="auto" compares; they come from
    `hardware`, the figures of the machine, if that is given. `Cluster.load` makes one from the name of a usual machine.

    >>> c = Cluster(hosts=2, devices_per_host=2)
    >>> c.world_size, c.groups()["node"], c.groups()["rail"]
    (4, ((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """

    hosts: int = 1
    devices_per_host: int = 1
    links: Links = field(default=Links(), repr=False)
    hardware: Hardware | None = field(default=None, repr=False, hash=False)

    def __post_init__(self) -> None:
        for name in ("hosts", "devices_per_host"):
            n = getattr(self, name)
            if not isinstance(n, int) or isinstance(n, bool) or n < 1:
                raise TranspileError(f"Cluster: {name} must be an integer of at least 1, got {n!r}")
        if not isinstance(self.links, Links):
            raise TranspileError(f"Cluster: links are Links(between=, inside=, shared=), each a Link(message, byte), got {self.links!r}")
        if self.hardware is not None:
            self._check_hardware(self.hardware)
            if self.links == Links():
                object.__setattr__(self, "links", Links.of(self.hardware))

    def _check_hardware(self, hardware: Any) -> None:
        from ..hardware import Hardware

        if not isinstance(hardware, Hardware):
            raise TranspileError(
                f"Cluster: hardware must be the figures of a machine, got {hardware!r}; fx.Cluster.load takes a name or a file"
            )
        name, most, per_host = hardware.name, hardware.hosts, hardware.devices_per_host
        if self.devices_per_host > per_host:
            raise TranspileError(
                f"Cluster: {name} has {per_host} devices on a host, got devices_per_host={self.devices_per_host}; take more hosts"
            )
        if most is not None and self.hosts > most:
            raise TranspileError(f"Cluster: {name} has {most} hosts, got hosts={self.hosts}; change hosts in its file")
        if self.hosts > 1 and hardware.between is None:
            raise TranspileError(
                f"Cluster: {name} has no network, got hosts={self.hosts}; take one host, or give the network's figures in its file: between"
            )

    @staticmethod
    def load(name_or_file: str | os.PathLike[str], hosts: int | None = None) -> Cluster:
        """A cluster of usual machines by name, or of those that a JSON file describes (`fluidx clusters` lists names and figures).

        `hosts`: how many there are. Without it, as many as the file says; if it leaves that open, a Mesh takes as many hosts as its ranks
        need, and a Cluster alone is one host.

        >>> c = Cluster.load("dgx-a100", hosts=2)
        >>> c, c.world_size, c.hardware.device.name
        (Cluster.load('dgx-a100', hosts=2), 16, 'A100 SXM4 80 GB')
        """
        from ..hardware import load

        hardware = load(name_or_file)
        if hosts is None:
            return Cluster(hardware.hosts or 1, hardware.devices_per_host, hardware=hardware)
        Cluster(hosts, hardware.devices_per_host, hardware=hardware)  # checks the number
        return Cluster(hosts, hardware.devices_per_host, hardware=replace(hardware, hosts=hosts))

    @property
    def two_levels(self) -> bool:
        """Are there groups of the ranks of a host, over which collectives are split?"""
        return self.hosts > 1

    @property
    def most_hosts(self) -> int | None:
        """How many hosts there are at most; None: as many as the ranks need."""
        return self.hosts if self.hardware is None or self.hosts > 1 else self.hardware.hosts

    def __repr__(self) -> str:
        if self.hardware is None or self.devices_per_host != self.hardware.devices_per_host:
            return f"Cluster(hosts={self.hosts}, devices_per_host={self.devices_per_host})"
        hosts = "" if self.hardware.hosts is None and self.hosts == 1 else f", hosts={self.hosts}"
        return f"Cluster.load({self.hardware.name!r}{hosts})"

    @property
    def world_size(self) -> int:
        return self.hosts * self.devices_per_host

    def groups(self) -> Groups:
        """`dp`, all ranks; with several hosts also `node`, the ranks of a host, and `rail`, the ranks with the same position on every
        host."""
        n, d = self.world_size, self.devices_per_host
        groups: Groups = {DATA: (tuple(range(n)),)}
        if self.hosts > 1:
            groups[NODE] = tuple(tuple(range(h * d, (h + 1) * d)) for h in range(self.hosts))
            groups[RAIL] = tuple(tuple(range(k, n, d)) for k in range(d))
        return groups

    @property
    def axes(self) -> dict[str, int]:
        """The groups that values are cut over, with their sizes."""
        return {DATA: self.world_size}

    def hosts_of(self, ranks: Sequence[int]) -> int:
        """How many hosts these ranks are on."""
        return len({r // self.devices_per_host for r in ranks}) if self.hosts > 1 else 1

    def topology(self) -> Any:
        """The machines as a networkx.Graph: nodes of hosts, devices and the network, with `kind`; edges with `kind` "device" or "network"
        and, where the cluster has figures, `latency`, `bandwidth` of one link, `count` of links, and `source`."""
        import networkx as nx

        inside = between = None
        if self.hardware is not None:
            inside, between = self.hardware.inside, self.hardware.between
        g = nx.Graph()
        for h in range(self.hosts):
            g.add_node(f"host{h}", kind="host")
            for r in range(h * self.devices_per_host, (h + 1) * self.devices_per_host):
                g.add_node(f"rank{r}", kind="device")
                g.add_edge(f"host{h}", f"rank{r}", kind="device", **_on_edge(inside))
            if self.hosts > 1:
                g.add_node("network", kind="switch")
                g.add_edge(f"host{h}", "network", kind="network", **_on_edge(between))
        return g

    @staticmethod
    def of(trainers: Any) -> Cluster | Mesh:
        """Ranks from `transpile(trainers=...)`: a Cluster or Mesh, a rank count, or endpoints "host:port" grouped by host."""
        if isinstance(trainers, (Cluster, Mesh)):
            return trainers
        if isinstance(trainers, int) and not isinstance(trainers, bool):
            if trainers < 1:
                raise TranspileError(f"trainers must be at least 1, got {trainers}")
            return Cluster(1, trainers)
        per_host: dict[str, int] = {}
        last = None
        for e in endpoints(trainers, "trainers must be a rank count, a Cluster, a Mesh, or", "trainers=4"):
            host = e.rsplit(":", 1)[0]
            if host in per_host and host != last:
                raise TranspileError(f"endpoints of host {host!r} are not next to each other; list them host by host")
            per_host[host], last = per_host.get(host, 0) + 1, host
        if len(set(per_host.values())) != 1:
            listed = ", ".join(f"{h} has {k}" for h, k in per_host.items())
            raise TranspileError(f"every host must have the same number of ranks: {listed}; list as many endpoints for each")
        return Cluster(len(per_host), next(iter(per_host.values())))


def _on_edge(links: LinkFigures | None) -> dict[str, Any]:
    """The attributes of an edge of the topology."""
    if links is None:
        return {}
    sources = dict.fromkeys((links.bandwidth.source, links.latency.source))
    found = {"latency": links.latency.value, "bandwidth": links.bandwidth.value, "count": links.count, "source": "; ".join(sources)}
    by_group = {n: figure.value for n, figure in links.by_group.items()}
    return {**found, "by_group": by_group} if by_group else found


class Mesh:
    """A grid of ranks with named axes; the last axis varies fastest: in `Mesh(dp=2, tp=4)`, ranks 0 to 3 of the 8 are one group of `tp`.
    `on` lays it on the hosts of a Cluster.

    >>> m = Mesh(dp=2, tp=2)
    >>> m.world_size, m.groups()
    (4, {'dp': ((0, 2), (1, 3)), 'tp': ((0, 1), (2, 3))})
    """

    hosts = 1
    links = Links()
    cluster: Cluster | None = None
    two_levels = False  # no groups of the ranks of a host

    def __init__(self, *unnamed: int, **axes: int):
        if unnamed:
            raise TranspileError(f"Mesh: name the axes, Mesh(dp=2, tp=2), instead of {', '.join(map(repr, unnamed))}")
        for name, n in axes.items():
            if not isinstance(n, int) or isinstance(n, bool) or n < 1:
                raise TranspileError(f"Mesh: axis {name} must be an integer of at least 1, got {n!r}")
            if not name.isidentifier():
                raise TranspileError(f"Mesh: {name!r} is not a name for an axis; names are letters, digits and underscores: dp, tp")
        if not axes:
            raise TranspileError("Mesh: name at least one axis: Mesh(dp=4)")
        self.sizes = dict(axes)

    def on(self, cluster: Cluster) -> Mesh:
        """This mesh on the hosts of a cluster, which its ranks fill one after the other. The rank programs are those of the mesh alone, but
        algorithm="auto" compares the costs of the cluster. Raises TranspileError if there are too few devices, or no network for a group
        that lies on several hosts.

        >>> m = Mesh(dp=4, tp=8).on(Cluster.load("dgx-a100"))
        >>> m, m.hosts, m.hosts_of(m.groups()["tp"][0]), m.hosts_of(m.groups()["dp"][0])
        (Mesh(dp=4, tp=8).on(Cluster.load('dgx-a100')), 4, 1, 4)
        """
        if not isinstance(cluster, Cluster):
            raise TranspileError(f"Mesh.on takes a Cluster, got {cluster!r}; fx.Cluster.load('dgx-a100') makes one from a name")
        per_host, most = cluster.devices_per_host, cluster.most_hosts
        found = Mesh(**self.sizes)
        found.cluster, found.hosts, found.links = cluster, -(-self.world_size // per_host), cluster.links
        if most is not None and found.hosts > most:
            devices = f"{most * per_host} devices, {per_host} on each of {most} host{'s' if most > 1 else ''}"
            raise TranspileError(
                f"{Mesh(**self.sizes)!r} has {self.world_size} ranks, and {cluster!r} has {devices}; "
                f"make an axis smaller, or take hosts={found.hosts}"
            )
        if found.hosts > 1 and cluster.hardware is not None and cluster.hardware.between is None:
            axis, group = next((a, g) for a, groups in self.groups().items() for g in groups if found.hosts_of(g) > 1)
            raise TranspileError(
                f"axis {axis} of {Mesh(**self.sizes)!r} crosses hosts: ranks {', '.join(map(str, group[:4]))}{', ...' * (len(group) > 4)} "
                f"are on {found.hosts_of(group)} hosts, and {cluster.hardware.name} has no network; take at most {per_host} ranks, or give "
                f"the network's figures in its file: between"
            )
        return found

    def hosts_of(self, ranks: Sequence[int]) -> int:
        """How many hosts these ranks are on; 1 for a mesh that lies on no cluster."""
        return 1 if self.cluster is None else len({r // self.cluster.devices_per_host for r in ranks})

    @property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    @property
    def axes(self) -> dict[str, int]:
        """The groups that values are cut over, with their sizes. `dp` is the innermost: it cuts the parts that the other axes leave."""
        return {**{a: n for a, n in self.sizes.items() if a != DATA}, **{a: n for a, n in self.sizes.items() if a == DATA}}

    def groups(self) -> Groups:
        """For each axis, the sets of ranks that differ only in this axis."""
        out: Groups = {}
        after = self.world_size
        for name, n in self.sizes.items():
            after //= n
            before = self.world_size // (n * after)
            out[name] = tuple(tuple(b * n * after + k * after + a for k in range(n)) for b in range(before) for a in range(after))
        return out

    def __repr__(self) -> str:
        shown = f"Mesh({', '.join(f'{a}={n}' for a, n in self.sizes.items())})"
        return shown if self.cluster is None else f"{shown}.on({self.cluster!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and list(self.sizes.items()) == list(other.sizes.items()) and self.cluster == other.cluster

    def __hash__(self) -> int:
        return hash(tuple(self.sizes.items()))


@dataclass(frozen=True)
class Served:
    """Trainers, and servers with the numbers after them. The groups are those of the trainers, and `ps`, which has all ranks.

    With `keep`, servers store parameters and state. Without it they store nothing between steps and only add up the values that they
    receive.

    >>> Served(Cluster(1, 2), servers=1).groups()
    {'dp': ((0, 1),), 'ps': ((0, 1, 2),)}
    """

    trainers: Cluster | Mesh
    servers: int
    keep: bool = True

    @staticmethod
    def of(trainers: Cluster | Mesh, servers: int, keep: bool = True) -> Served:
        if list(trainers.axes) != [DATA]:
            raise TranspileError(f"servers need trainers with one axis, dp; {trainers!r} has {', '.join(trainers.axes)}")
        return Served(trainers, servers, keep)

    @property
    def hosts(self) -> int:
        return self.trainers.hosts

    @property
    def two_levels(self) -> bool:
        return self.trainers.two_levels

    @property
    def links(self) -> Links:
        return self.trainers.links

    def hosts_of(self, ranks: Sequence[int]) -> int:
        """How many hosts these ranks are on; servers count as being on the hosts of the trainers."""
        return self.trainers.hosts_of([r for r in ranks if r < self.trainers.world_size])

    @property
    def world_size(self) -> int:
        return self.trainers.world_size + self.servers

    @property
    def axes(self) -> dict[str, int]:
        """The groups that values are cut over, with their sizes."""
        return {SERVERS: self.world_size, **self.trainers.axes} if self.keep else self.trainers.axes

    def groups(self) -> Groups:
        return {**self.trainers.groups(), SERVERS: (tuple(range(self.world_size)),)}
