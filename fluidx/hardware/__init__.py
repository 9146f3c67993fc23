"""Figures of machines: devices, the links inside a host and between hosts, each number with its source."""

from .files import as_json, from_json, load, names, save
from .records import Device, Figure, Hardware, LinkFigures, SwitchFigures

__all__ = ["Device", "Figure", "Hardware", "LinkFigures", "SwitchFigures", "as_json", "from_json", "load", "names", "save"]
