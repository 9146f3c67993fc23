"""How much of a device's memory a plan may have: the limit that is given, without a reserve and what a process takes beside its plan."""

from __future__ import annotations

import re
from math import isfinite, nan
from typing import Any, NamedTuple

from ..hardware.records import Hardware
from ..ir.errors import FluidxError

RESERVE = 0.05  # share of the memory that stays free
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


class MemoryLimit(NamedTuple):
    """The bytes of a device, and those that a plan may have: `usable`. `why` says what was taken off."""

    nbytes: int
    usable: int
    why: str

    def __str__(self) -> str:
        return f"{show_size(self.nbytes)} a device, {show_size(self.usable)} for a plan ({self.why})"


def parse_size(given: Any) -> int:
    """Bytes, from a number of them or a text. Raises FluidxError for anything else.

    >>> parse_size("40GB"), parse_size("40 GiB"), parse_size(1000)
    (40000000000, 42949672960, 1000)
    """
    found = _SIZE.fullmatch(given) if isinstance(given, str) else None
    if found is not None:
        wanted = float(found[1]) * _UNITS[(found[2] or "").lower()]
    else:
        wanted = nan if isinstance(given, bool) or not isinstance(given, (int, float)) else float(given)
    if not isfinite(wanted):
        raise FluidxError(f'memory is a number of bytes, or a text such as "40GB" (40e9 bytes) or "40GiB" (40 * 2**30), got {given!r}')
    size = round(wanted)
    if size <= 0:
        raise FluidxError(f"memory must be above 0 bytes, got {given!r}")
    return size


def show_size(nbytes: float) -> str:
    """Bytes in decimal units.

    >>> show_size(2.1e9), show_size(999), show_size(12_340_000)
    ('2.1 GB', '999 B', '12.3 MB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


def memory_limit(hardware: Hardware, given: Any = None) -> MemoryLimit:
    """The limit for plans on devices of a hardware. `given` replaces the memory that its file has. The processes on a CPU share its memory,
    each has an equal part."""
    device = hardware.device
    nbytes = parse_size(device.memory.value if given is None else given)
    context = round(device.context.value)
    usable = round(nbytes * (1 - RESERVE)) - context
    why = f"{RESERVE:.0%} stay free, {show_size(context)} are for the context of the process"
    if usable <= 0:
        raise FluidxError(f"memory={given!r} leaves nothing for a plan: {why}; give more")
    return MemoryLimit(nbytes, usable, why)
