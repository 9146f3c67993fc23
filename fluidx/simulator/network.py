"""The links that a message passes: their bytes a second, the seconds of a message, and how many flows of a class of ranks share each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class MessagePath(NamedTuple):
    """The way of a message: seconds until its first byte arrives, the names of its links, and up to how many bytes its sender goes on at
    once. `measured`: the seconds beside the time of its bytes, by their number."""

    latency: float
    links: tuple[str, ...]
    eager: int = 0
    measured: Callable[[int], float] | None = None

    def delay(self, nbytes: int) -> float:
        """The seconds of a message beside the time of its bytes on the links."""
        return self.latency if self.measured is None else self.measured(nbytes)


class Network(NamedTuple):
    """`path(source, target)` is the way between two ranks, `capacity` the bytes a second of each link.

    >>> n = shared_link(1e-6, 1e9)
    >>> n.path(0, 1).links, n.capacity["link"]
    (('link',), 1000000000.0)
    """

    path: Callable[[int, int], MessagePath]
    capacity: Mapping[str, float]


def shared_link(latency: float, bandwidth: float, eager: int = 0) -> Network:
    """A network of one link that all messages share."""
    return Network(lambda source, target: MessagePath(latency, ("link",), eager), {"link": bandwidth})


class PortFigures(NamedTuple):
    """The seconds of a message, the bytes a second of a port in one direction, and those of a link that all messages pass, if there is
    one. `measured`: the seconds of a message by its bytes, without the time of these on a port."""

    latency: float
    bandwidth: float
    shared: float | None = None
    measured: Callable[[int], float] | None = None


def hosts_with_ports(
    host_of: Sequence[int], inside: PortFigures, between: PortFigures, eager: int = 0, cards: int = 1
) -> Network:
    """Hosts of devices. Inside a host each device has a port in each direction; between hosts all devices of a host share its `cards`
    network cards.

    >>> n = hosts_with_ports([0, 0, 1], PortFigures(1e-6, 100.0), PortFigures(5e-6, 10.0, shared=15.0))
    >>> n.path(0, 1).links, n.path(1, 2).links
    (('rank 0 out', 'rank 1 in'), ('host 0 out', 'host 1 in', 'between hosts'))
    """
    hosts = sorted(set(host_of))

    def path(source: int, target: int) -> MessagePath:
        a, b = host_of[source], host_of[target]
        if a == b:
            links, all_of = (f"rank {source} out", f"rank {target} in"), f"inside host {a}"
        else:
            links, all_of = (f"host {a} out", f"host {b} in"), "between hosts"
        ports = inside if a == b else between
        return MessagePath(ports.latency, (*links, all_of) if all_of in capacity else links, eager, ports.measured)

    capacity = {f"rank {r} {way}": inside.bandwidth for r in range(len(host_of)) for way in ("out", "in")}
    capacity |= {f"host {h} {way}": cards * between.bandwidth for h in hosts for way in ("out", "in")}
    if inside.shared is not None:
        capacity |= {f"inside host {h}": inside.shared for h in hosts}
    if between.shared is not None:
        capacity["between hosts"] = between.shared
    return Network(path, capacity)
