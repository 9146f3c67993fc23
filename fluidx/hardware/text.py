"""Figures of machines as text: one line a machine, or one line a number with its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from .files import load, names
from .records import Device, Figure, Hardware, LinkFigures, SwitchFigures

_UNITS = {
    "memory": "B", "flops": "op/s", "bandwidth": "B/s", "by_group": "B/s", "call": "s", "context": "B", "latency": "s",
    "collective_latency": "s", "host_memory": "B", "shared": "B/s",
}  # fmt: skip
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))


def quantity(value: float, unit: str) -> str:
    """A number with its unit.

    >>> quantity(22.75e9, "B/s"), quantity(2.75e-6, "s"), quantity(0.87, "")
    ('22.75 GB/s', '2.75 us', '0.87')
    """
    if not unit:
        return f"{value:g}"
    scale, prefix = next((p for p in _PREFIXES if value >= p[0]), (1e-9, "n"))
    return f"{value / scale:.4g} {prefix}{unit}"


def overview() -> list[str]:
    """A line for each sheet: devices of a host, memory of a device, and the bandwidths of a device: its memory, a ring inside the host, and
    the cards of the host.

    >>> print(*overview()[:2], sep="\\n")
    name       devices of a host     memory  its bandwidth  ring inside  out of a host
    dgx-a100   8 x A100 SXM4 80 GB    80 GB     2.039 TB/s     229 GB/s  8 x 22.75 GB/s
    """
    rows = [("name", "devices of a host", "memory", "its bandwidth", "ring inside", "out of a host"), *map(_row, map(load, names()))]
    width = [max(len(row[k]) for row in rows) for k in range(6)]
    return [_line(row, width) for row in rows]


def _line(row: tuple[str, ...], width: list[int]) -> str:
    left = [row[0].ljust(width[0]), row[1].ljust(width[1])]
    return "  ".join([*left, *(row[k].rjust(width[k]) for k in (2, 3, 4)), row[5]])


def _row(h: Hardware) -> tuple[str, ...]:
    n, out = h.devices_per_host, h.between
    return (
        h.name,
        f"{n} x {h.device.name}",
        quantity(h.device.memory.value, "B"),
        quantity(h.device.bandwidth.value, "B/s"),
        quantity(h.inside.ring_bandwidth(n), "B/s"),
        "no network" if out is None else f"{out.count} x {quantity(out.bandwidth.value, 'B/s')}",
    )


def describe(h: Hardware) -> list[str]:
    """All figures of a machine, a line each: the key in its file, the number, its spread if that is known, and its source.

    >>> print(*describe(load("dgx-v100"))[3:5], sep="\\n")
    device.memory                   32 GB            NVIDIA V100 data sheet: 32 GB
    device.flops.float32            15.7 Top/s       NVIDIA V100 data sheet: 15.7 TFLOPS
    """
    hosts = "as many as the ranks need" if h.hosts is None else str(h.hosts)
    lines = [f"{h.name}: {h.about}", f"hosts: {hosts}, devices of a host: {h.devices_per_host}"]
    lines += [f"device: {h.device.name}, {h.device.kind}" + (f", {h.device.cores} cores" if h.device.cores else "")]
    for key, figure in figures(h):
        unit = next((_UNITS[part] for part in reversed(key.split(".")) if part in _UNITS), "")
        spread = f" +- {figure.spread:.0%}" if figure.spread else ""
        lines.append(f"{key:30}  {quantity(figure.value, unit) + spread:15}  {figure.source}")
    for key, links in (("inside", h.inside), ("between", h.between), ("to_host", h.to_host)):
        if links is not None:
            lines.append(f"{key + '.count, eager':30}  {links.count}, {links.eager} bytes")
    lines.append("measured by fluidx calibrate" if h.measured is not None else "not calibrated: every number is published or derived")
    return lines


def figures(of: Hardware | Device | LinkFigures | SwitchFigures | Mapping, path: str = "") -> Iterator[tuple[str, Figure]]:
    """(key, figure) of every figure in a record, keys as in its file.

    >>> next(figures(load("p5")))[0]
    'device.memory'
    """
    if isinstance(of, Mapping):
        parts = [(str(key), value) for key, value in of.items()]
    elif isinstance(of, SwitchFigures):
        parts = list(of._asdict().items())
    else:
        parts = [(f.name, getattr(of, f.name)) for f in fields(of)]
    for key, value in parts:
        where = f"{path}.{key}" if path else key
        if isinstance(value, Figure):
            yield where, value
        elif isinstance(value, (Device, LinkFigures, SwitchFigures)) or key in ("flops", "by_group"):
            yield from figures(value, where)
