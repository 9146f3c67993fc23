"""Figures of machines: devices, the links inside a host and between hosts, each number with its source."""

from .files import as_json, from_json, load, names, save
from .records import Device, Figure, Hardware, LinkFigures, SwitchFigures
from .text import describe, figures, overview, quantity

__all__ = [
    "Device", "Figure", "Hardware", "LinkFigures", "SwitchFigures", "as_json", "describe", "figures", "from_json", "load", "names",
    "overview", "quantity", "save",
]  # fmt: skip
