"""The links that a message passes: their bytes a second, the seconds of a message, and how many flows of a class of ranks share each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class MessagePath(NamedTuple):
    """The way of a message: seconds until its first byte arrives, the names of its links, and up to how many bytes its sender goes on at
    once."""

    latency: float
    links: tuple[str, ...]
    eager: int = 0


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


def hosts_with_ports(
    host_of: Sequence[int], inside: tuple[float, float], between: tuple[float, float], eager: int = 0, ports: int = 1
) -> Network:
    """Hosts of devices. Inside a host each device has a port in each direction; between hosts all devices of a host share its `ports`
    network cards. `inside` and `between` are (seconds of a message, bytes a second of a port).

    >>> n = hosts_with_ports([0, 0, 1], (1e-6, 100.0), (5e-6, 10.0))
    >>> n.path(0, 1).links, n.path(1, 2).links
    (('rank 0 out', 'rank 1 in'), ('host 0 out', 'host 1 in'))
    """

    def path(source: int, target: int) -> MessagePath:
        a, b = host_of[source], host_of[target]
        if a == b:
            return MessagePath(inside[0], (f"rank {source} out", f"rank {target} in"), eager)
        return MessagePath(between[0], (f"host {a} out", f"host {b} in"), eager)

    capacity = {f"rank {r} {way}": inside[1] for r in range(len(host_of)) for way in ("out", "in")}
    capacity |= {f"host {h} {way}": ports * between[1] for h in sorted(set(host_of)) for way in ("out", "in")}
    return Network(path, capacity)
