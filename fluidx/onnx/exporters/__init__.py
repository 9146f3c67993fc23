"""Functions that export operators of a program as ONNX nodes, by operator type. `fluidx.onnx.import_tables` has the other direction.

`@exports("relu")` registers a function of an `Op`. It emits nodes with `op.emit` and returns the names of the values of the output slots:
one name for the first slot, or a dict of slot to name or names. Elementwise operators without a function of their own are exported from
their scalar expression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..export_graph import Op

ExportFunction = Callable[["Op"], "str | Mapping[str, Any]"]
EXPORTERS: dict[str, ExportFunction] = {}


def exports(*types: str) -> Callable[[ExportFunction], ExportFunction]:
    """Register a function that exports operators of these types."""

    def register(f: ExportFunction) -> ExportFunction:
        for name in types:
            assert name not in EXPORTERS, name
            EXPORTERS[name] = f
        return f

    return register


def load_all() -> None:
    """Import every module of export functions."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
