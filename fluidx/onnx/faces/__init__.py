"""Faces: what each ONNX operator is in a program. A face is a function of a Node that gives the node's outputs.

`@face("Relu")` writes operators of a program with `n.b` and gives variables; of known operands alone it is computed at once.
`@host("NonZero")` is taken where all operands are known, where a program cannot hold one of them, and where there is no other face. It
computes with NumPy, or decides for itself: control flow writes graphs, sequences hold variables, and what is drawn at random is never
known. With `computes` it does no more than compute with NumPy, of the values of its operands alone, and so a session can call it in each
run. `@computed("NonZero", 0)` is taken where one of these operands is computed and nobody can run the program for its value: it writes
operators whose results have sizes that values decide, or which work on sequences, optionals and strings. An operator without any is
expanded by the function body of its schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

Face = Callable[[Any], Any]
FACES: dict[tuple[str, str], Face] = {}
HOSTS: dict[tuple[str, str], Face] = {}
COMPUTES: set[tuple[str, str]] = set()  # those of HOSTS that only compute
COMPUTED: dict[tuple[str, str], tuple[tuple[int, ...], Face]] = {}
FACTORS: set[tuple[str, str]] = set()  # operators without a weight of their own, to which one number is a constant
STATISTICS: dict[tuple[str, str], Mapping[int, str]] = {}  # operands that are running statistics, which training updates, and what they are


def face(*names: str, domain: str = "", factors: bool = False, statistics: Mapping[int, str] | None = None) -> Callable[[Face], Face]:
    """Enter a function as the face of operators. `factors`: they are arithmetic, and have no weight of their own; `statistics`: operands
    that are running statistics, with a word for each."""
    FACTORS.update((domain, name) for name in names if factors)
    STATISTICS.update(((domain, name), statistics) for name in names if statistics)
    return _enter(FACES, names, domain)


def host(*names: str, domain: str = "", computes: bool = False) -> Callable[[Face], Face]:
    """Enter a function as what operators compute on the host."""
    if computes:
        COMPUTES.update((domain, name) for name in names)
    return _enter(HOSTS, names, domain)


def computed(name: str, *operands: int, domain: str = "") -> Callable[[Face], Face]:
    """Enter a function as the face of an operator of which one of these operands is computed, and its value not to be had."""

    def enter(f: Face) -> Face:
        assert (domain, name) not in COMPUTED, name
        COMPUTED[domain, name] = operands, f
        return f

    return enter


def _enter(table: dict[tuple[str, str], Face], names: tuple[str, ...], domain: str) -> Callable[[Face], Face]:
    def enter(f: Face) -> Face:
        for name in names:
            assert (domain, name) not in table, name
            table[domain, name] = f
        return f

    return enter


def load_all() -> None:
    """Import every file of faces."""
    for file in iter_modules(__path__):
        import_module(f"{__name__}.{file.name}")
