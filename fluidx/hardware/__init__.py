"""Figures of machines: devices, the links inside a host and between hosts, each number with its source."""

from .records import Device, Figure, Hardware, LinkFigures

__all__ = ["Device", "Figure", "Hardware", "LinkFigures"]
