"""Import of GridSample."""

from __future__ import annotations

from ..import_tables import imports
from ..node import Node


@imports("GridSample")
def grid_sample(n: Node) -> object:
    work = "float64" if n.dtype(0) == "float64" else "float32"
    attrs = {"mode": n.attr("mode", "linear"), "padding_mode": n.attr("padding_mode", "zeros")}
    y = n.b.grid_sample(n.cast(n.x(0), work), n.cast(n.x(1), work), align_corners=bool(n.attr("align_corners", 0)), **attrs)
    return n.cast(y, n.dtype(0))
