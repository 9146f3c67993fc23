"""Tables from an ONNX operator to the function that imports it. The modules of `fluidx.onnx.importers` fill them with decorators.

An import function takes a `Node` and returns the outputs of the node. A table has one of three kinds:

- `@imports("Relu")`: the function writes operators of a program with `n.b` and returns variables. If all operands are known, its program
  runs at once, and the outputs are known too.
- `@on_numpy("NonZero")`: the function runs on the host. The importer calls it if all operands are known, if a program cannot hold one of
  them, or if the operator has no function of the first kind. It computes with NumPy; control flow writes sub-graphs instead, sequences may
  hold variables, and random draws are never known. A `pure` function only computes with NumPy from the values of its operands, so a
  session can call it in each run.
- `@dynamic("NonZero", 0)`: the importer calls the function if one of these operands is computed by the program and nothing can run the
  program for its value. It writes operators whose result sizes depend on values, or that take sequences, optionals or strings.

An operator that is in no table is expanded by the function body of its schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

ImportFunction = Callable[[Any], Any]
Decorator = Callable[[ImportFunction], ImportFunction]
IMPORTERS: dict[tuple[str, str], ImportFunction] = {}
NUMPY_IMPORTERS: dict[tuple[str, str], ImportFunction] = {}
PURE: set[tuple[str, str]] = set()  # the pure ones of NUMPY_IMPORTERS
DYNAMIC_IMPORTERS: dict[tuple[str, str], tuple[tuple[int, ...], ImportFunction]] = {}
FACTORS: set[tuple[str, str]] = set()  # arithmetic operators without weights: a single number that they read is a constant
STATISTICS: dict[tuple[str, str], Mapping[int, str]] = {}  # operator -> {operand that training updates: what it is, such as "mean"}

FUNCTIONS = f"{__package__}.importers"  # the package of the import functions


def imports(*names: str, domain: str = "", factors: bool = False, statistics: Mapping[int, str] | None = None) -> Decorator:
    """Register a function that writes operators of a program.

    `factors`: the operators are arithmetic and have no weights. `statistics`: operands that are running statistics, with a word for each.
    """
    FACTORS.update((domain, name) for name in names if factors)
    STATISTICS.update(((domain, name), statistics) for name in names if statistics)
    return _register(IMPORTERS, names, domain)


def on_numpy(*names: str, domain: str = "", pure: bool = False) -> Decorator:
    """Register a function that runs on the host."""
    if pure:
        PURE.update((domain, name) for name in names)
    return _register(NUMPY_IMPORTERS, names, domain)


def dynamic(name: str, *operands: int, domain: str = "") -> Decorator:
    """Register a function that is called if one of these operands is computed and nothing can run the program for its value."""

    def register(f: ImportFunction) -> ImportFunction:
        assert (domain, name) not in DYNAMIC_IMPORTERS, name
        DYNAMIC_IMPORTERS[domain, name] = operands, f
        return f

    return register


def _register(table: dict[tuple[str, str], ImportFunction], names: tuple[str, ...], domain: str) -> Decorator:
    def register(f: ImportFunction) -> ImportFunction:
        for name in names:
            assert (domain, name) not in table, name
            table[domain, name] = f
        return f

    return register


def load_all() -> None:
    """Import every module of import functions."""
    for module in iter_modules(import_module(FUNCTIONS).__path__):
        import_module(f"{FUNCTIONS}.{module.name}")
