"""Read the option `algorithm=` of a strategy: a name, an Algorithm, "module:name" of one, or a table by collective, group and size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from ...ir.errors import TranspileError, nearest
from ...ir.opdef import OPS
from ..imported import imported
from . import ALGORITHMS, SEQUENCES, register
from .schedule import Algorithm
from .sequence import CollectiveSequence

_RECIPES = (Algorithm, CollectiveSequence)


class TableRow(NamedTuple):
    """The algorithm for collectives of a type over a group, for values up to a size. An empty type or group matches all."""

    collective: str
    group: str
    most: float  # bytes
    algorithm: str


@dataclass(frozen=True)
class AlgorithmTable:
    """Algorithms by collective, group and size. The first matching row counts; without one, the collective is left to the communicator."""

    rows: tuple[TableRow, ...]

    def choose(self, collective: str, group: str, nbytes: int) -> str:
        """The name of the algorithm: "auto" for the cheapest, "" for the communicator's own.

        >>> table = AlgorithmTable((TableRow("all_reduce", "", 1e6, "recursive_doubling"), TableRow("all_reduce", "", inf, "ring")))
        >>> table.choose("all_reduce", "dp", 100), table.choose("all_reduce", "dp", 10**7), table.choose("broadcast", "dp", 100)
        ('recursive_doubling', 'ring', '')
        """
        for row in self.rows:
            if row.collective in ("", collective) and row.group in ("", group) and nbytes <= row.most:
                return row.algorithm
        return ""

    def __repr__(self) -> str:
        found: dict[Any, list[tuple[float, str]]] = {}
        for row in self.rows:
            found.setdefault((row.collective, row.group) if row.group else row.collective, []).append((row.most, row.algorithm))
        return repr({key: sizes[0][1] if sizes[0][0] == inf else sizes for key, sizes in found.items()})


def selected(given: Any, label: str) -> str | AlgorithmTable:
    """The value of `algorithm=` as a name, "auto", "" or a table; an Algorithm is registered if it was not.

    A table is a dict from the type of a collective, or (type, group), "" for all, to an algorithm or to pairs of (most bytes, algorithm).
    Raises TranspileError, which begins with `label`, for anything else.

    >>> selected({"all_reduce": [(65536, "recursive_doubling"), (float("inf"), "ring")], ("", "rail"): "tree"}, "data_parallel")
    {'all_reduce': [(65536, 'recursive_doubling'), (inf, 'ring')], ('', 'rail'): 'tree'}
    """
    return _table(given, label) if isinstance(given, Mapping) else _named(given, label)


def _named(given: Any, label: str) -> str:
    if isinstance(given, str) and ":" in given:
        given = _imported(given, label)
    if isinstance(given, type) and issubclass(given, _RECIPES):
        raise TranspileError(f"{label}: algorithm is the class {given.__name__}; give an instance: {given.__name__}()")
    if isinstance(given, _RECIPES):
        return given.name if {**ALGORITHMS, **SEQUENCES}.get(given.name) is given else register(given).name
    if not isinstance(given, str):
        raise TranspileError(f"{label}: algorithm is a name, an Algorithm or a table, got {type(given).__name__}: {given!r}")
    if given not in ("", "auto", *ALGORITHMS, *SEQUENCES):
        raise TranspileError(f"{label}: unknown algorithm {given!r}; {nearest(given, ('auto', *ALGORITHMS, *SEQUENCES), 'there are')}")
    return given


def _imported(path: str, label: str) -> Any:
    """The object that "package.module:name" names; for a class of algorithms, an instance."""
    found = imported(path, f"{label}: algorithm {path!r}")
    made = found() if isinstance(found, type) and issubclass(found, _RECIPES) else found
    if not isinstance(made, _RECIPES):
        raise TranspileError(f"{label}: algorithm {path!r} is {found!r}, which is not an Algorithm; write package.module:name")
    return made


def _table(given: Mapping[Any, Any], label: str) -> AlgorithmTable:
    known = ["", *(name for name, definition in OPS.items() if definition.comm.algorithm_method)]
    rows = []
    for key, value in given.items():
        collective, group = key if isinstance(key, tuple) and len(key) == 2 else (key, "")
        if collective not in known or not isinstance(group, str):
            wanted = "a key is the type of a collective, or (type, group)"
            raise TranspileError(f"{label}: algorithm={{{key!r}: ...}}: {wanted}; {nearest(str(collective), known[1:], 'types are')}")
        for most, name in _sizes(value, key, label):
            rows.append(TableRow(collective, group, most, _named(name, label)))
    return AlgorithmTable(tuple(rows))


def _sizes(value: Any, key: Any, label: str) -> Iterable[tuple[float, Any]]:
    """(most bytes, algorithm), in rising order."""
    if not isinstance(value, (list, tuple)):
        return [(inf, value)]
    for pair in value:
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], (int, float)) and pair[0] > 0):
            raise TranspileError(f"{label}: algorithm={{{key!r}: [{pair!r}]}}: give pairs of (most bytes, algorithm)")
    if [most for most, _ in value] != sorted(most for most, _ in value):
        raise TranspileError(f"{label}: algorithm={{{key!r}: ...}}: sizes must rise, got {[most for most, _ in value]}")
    return value
