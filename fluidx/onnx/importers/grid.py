"""Import of GridSample."""

from __future__ import annotations

from ...ir import Builder, Variable
from ..import_tables import imports
from ..node import Node


@imports("GridSample")
def grid_sample(n: Node) -> object:
    work = "float64" if n.dtype(0) == "float64" else "float32"
    attrs = {"mode": n.attr("mode", "linear"), "padding_mode": n.attr("padding_mode", "zeros")}
    y = n.b.grid_sample(_as(n.b, n.x(0), work), _as(n.b, n.x(1), work), align_corners=bool(n.attr("align_corners", 0)), **attrs)
    return _as(n.b, y, n.dtype(0))


def _as(b: Builder, x: Variable, dtype: str) -> Variable:
    return x if x.dtype == dtype else b.cast(x, dtype=dtype)
