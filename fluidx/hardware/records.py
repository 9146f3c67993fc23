"""The records of a machine: a device, its links, and their numbers, each with the place that it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, log
from typing import NamedTuple


class Figure(NamedTuple):
    """A number, the place that it comes from, and its relative spread: 0.1 is 10 %.

    >>> Figure(312e12, "data sheet").value
    312000000000000.0
    """

    value: float
    source: str
    spread: float = 0.0


@dataclass(frozen=True)
class Device:
    """A device. `flops` has the peak of dense products by dtype, in operations a second; a large product reaches `share` of it.
    `bandwidth` is that of its memory, in bytes a second, of which `bandwidth_share` is reached."""

    name: str
    kind: str  # "gpu" or "cpu"
    memory: Figure  # bytes
    flops: Mapping[str, Figure]
    share: Figure
    bandwidth: Figure
    bandwidth_share: Figure
    call: Figure  # seconds that a step costs beside its arithmetic: the launch of a kernel
    slowdown: Figure  # factor on the time of compute while communication runs at the same time, at least 1
    context: Figure  # bytes that a process takes beside its plan: context, buffers of the communicator, interpreter
    cores: int = 0  # of the host, for a CPU
    dispatch: Figure | None = None  # seconds in which the host issues a step, ahead of the device; None: no time beside `call`


class SwitchFigures(NamedTuple):
    """An all_reduce that the switch inside a host adds up: the seconds that it takes beside its bytes, and its bus bandwidth."""

    latency: Figure
    bandwidth: Figure


@dataclass(frozen=True)
class LinkFigures:
    """The links inside a host, or between hosts: seconds of a message, and bytes a second of one link in one direction, as they are
    reached. `count` is the number of such links of a host: network cards between hosts, 1 inside a host. `shared` is a limit that all
    messages have in common, in both directions together: a hub, or a rate that is set for the device that all of them pass.

    `latency` is that of a message inside a collective of the communicator, and `message` that of one between programs, where a library of
    its own carries these. Between hosts, `by_group` has the bytes a second that a ring over all devices of n hosts reaches on all cards."""

    latency: Figure
    bandwidth: Figure
    count: int = 1
    by_group: Mapping[int, Figure] = field(default_factory=dict)  # devices in a group, or hosts -> bytes a second of its ring
    collective_latency: Figure | None = None  # seconds of the smallest collective
    eager: int = 1 << 16  # bytes of the largest message for which a sender does not wait
    in_switch: SwitchFigures | None = None  # None: the switch adds nothing up
    shared: Figure | None = None  # bytes a second of one link that all messages pass; None: there is no such link
    message: Figure | None = None  # seconds of a message from program to program beside its bytes; None: latency
    call_bytes: int = 0  # that each rank of a collective sends each other one on that link beside its data

    def ring_bandwidth(self, n: int) -> float:
        """The bytes a second that a ring of n devices inside a host reaches: `by_group`, with other n interpolated on a log
        scale and the nearest beyond its ends; without `by_group`, the bandwidth of a link.

        >>> nv = LinkFigures(Figure(1e-6, ""), Figure(22e9, ""), by_group={2: Figure(20e9, ""), 8: Figure(80e9, "")})
        >>> [round(nv.ring_bandwidth(n) / 1e9, 3) for n in (2, 4, 8, 16)]
        [20.0, 40.0, 80.0, 80.0]
        """
        known = sorted(self.by_group)
        if not known:
            return self.bandwidth.value
        below = max((k for k in known if k <= n), default=known[0])
        above = min((k for k in known if k >= n), default=known[-1])
        low, high = self.by_group[below].value, self.by_group[above].value
        return low if above == below else exp(log(low) + log(n / below) / log(above / below) * log(high / low))


@dataclass(frozen=True)
class Hardware:
    """A kind of machine: hosts with devices. `hosts` None: as many as the ranks need. `between` None: no network."""

    name: str
    about: str
    devices_per_host: int
    hosts: int | None
    device: Device
    inside: LinkFigures
    between: LinkFigures | None
    host_memory: Figure
    to_host: LinkFigures | None = None
    measured: object | None = None  # the tables of a calibration; None: all numbers are from sheets
