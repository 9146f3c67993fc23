"""The records of a machine: a device, its links, and their numbers, each with the place that it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class LinkFigures:
    """The links inside a host, or between hosts: seconds of a message, and bytes a second of one link in one direction, as they are
    reached. `count` is the number of such links of a host: network cards between hosts, 1 inside a host."""

    latency: Figure
    bandwidth: Figure
    count: int = 1
    by_group: Mapping[int, Figure] = field(default_factory=dict)  # devices in a group -> bytes a second of its ring inside the host
    collective_latency: Figure | None = None  # seconds of the smallest collective
    eager: int = 1 << 16  # bytes of the largest message for which a sender does not wait


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
