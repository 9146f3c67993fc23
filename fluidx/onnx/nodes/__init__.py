"""Nodes: what each operator of a program is in ONNX, the other way round than faces.

`@nodes("relu")` enters a function of an `Op` that emits nodes with `op.emit` and gives the names of the values that its output slots have:
one name for the first slot, or a dict of slot to name or names. Elementwise operators without an entry of their own are written out from
their scalar expression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..export import Op

Writer = Callable[["Op"], "str | Mapping[str, Any]"]
NODES: dict[str, Writer] = {}

_FILES: tuple[str, ...] = (
    "elementwise", "layout", "loss", "loss_each", "product", "attention", "norm", "window", "image", "selection", "scatter", "control",
    "stash", "grad", "norm_grad", "window_grad", "update", "values",
)  # fmt: skip


def nodes(*names: str) -> Callable[[Writer], Writer]:
    """Enter a function as what operators of these types are in ONNX."""

    def enter(f: Writer) -> Writer:
        for name in names:
            assert name not in NODES, name
            NODES[name] = f
        return f

    return enter


def load_all() -> None:
    """Import every file of nodes."""
    for name in _FILES:
        import_module(f"{__name__}.{name}")
