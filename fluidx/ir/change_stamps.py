"""Detects changes of programs since a certain time, and groups rank programs with equal contents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from .operator import Operator
from .program import Program
from .var import Var

_FEW = 16
_STRETCH = 256  # neighbours that are compared directly

T = TypeVar("T")
Twins = Sequence[tuple[Program, Sequence[int]]]  # one of several equal programs, and the ranks that run them


def together(things: Iterable[T]) -> list[tuple[T, list[int]]]:
    """Groups equal items, with their indices. Each item is compared with the first few groups and the last one only, so that with many
    different items some equal ones may be in separate groups.

    >>> together("aaba")
    [('a', [0, 1, 3]), ('b', [2])]
    """
    found: list[tuple[T, list[int]]] = []
    for k, thing in enumerate(things):
        for known, places in found[:_FEW] + found[-1:]:
            if known == thing:
                places.append(k)
                break
        else:
            found.append((thing, [k]))
    return found


def regrouped(twins: Twins, said: Callable[[Program], Any]) -> Twins:
    """Merges groups for which `said` gives the same result."""
    again = together(said(p) for p, _ in twins)
    return [(twins[found[0]][0], [r for k in found for r in twins[k][1]]) for _, found in again]


class Variables:
    """A snapshot of the variables of a block, in order.

    Records are immutable, and similar programs share them: comparing two lists is faster than looking names up.
    """

    __slots__ = ("names", "records")

    def __init__(self, descs: Mapping[str, Var]):
        self.names, self.records = [*descs], [*descs.values()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Variables) and self.records == other.records and self.names == other.names

    def items(self) -> zip[tuple[str, Var]]:
        return zip(self.names, self.records, strict=True)

    def unlike(self, other: Variables) -> tuple[dict[str, Var], list[str]]:
        """The declarations of `other` that are missing here or at another position, and the names here at those positions.

        >>> from fluidx.ir.types import TensorType
        >>> a, b = (Variables({n: Var(n, TensorType("float32", (size,))) for n in "xy"}) for size in (1, 2))
        >>> a.unlike(b)[1], a.unlike(a)
        (['x', 'y'], ({}, []))
        """
        theirs: dict[str, Var] = {}
        mine: list[str] = []
        for k in range(0, max(len(self.names), len(other.names)), _STRETCH):
            at = slice(k, k + _STRETCH)
            if self.records[at] != other.records[at] or self.names[at] != other.names[at]:
                theirs.update(zip(other.names[at], other.records[at], strict=True))
                mine += self.names[at]
        return theirs, mine


class _Block(NamedTuple):
    idx: int
    parent_idx: int
    ops: list[Operator]
    vars: Variables


class Stamp:
    """Remembers the contents of programs, once for equal programs. Programs consist of immutable records, so most comparisons are of
    identities.

    >>> p = Program("p")
    >>> stamp = Stamp([p])
    >>> stamp.changed(p)
    ''
    >>> _ = p.global_block().append_op("fill_constant", {}, {"Out": "x"}, {"shape": (2,), "value": 1.0})
    >>> stamp.changed(p)
    'program p has 1 operator, it had 0'
    """

    def __init__(self, programs: Sequence[Program]):
        self._held: dict[int, tuple[Program, Any, list[_Block]]] = {}
        different = [*{id(p): p for p in programs}.values()]
        for now, places in together(map(_blocks, different)):
            blocks = [b._replace(ops=[*b.ops]) for b in now]
            self._held.update((id(different[k]), (different[k], _head(different[k]), blocks)) for k in places)

    def twins(self, programs: Sequence[Program]) -> Twins:
        """Groups of programs whose blocks are equal, whatever their rank and groups."""
        found: dict[int, tuple[Program, list[int]]] = {}
        for k, p in enumerate(programs):
            found.setdefault(id(self._held[id(p)][2]), (p, []))[1].append(k)
        return [*found.values()]

    def add(self, program: Program) -> None:
        """Remember one more program, as it is now.

        >>> stamp, p = Stamp([]), Program("p")
        >>> stamp.add(p)
        >>> stamp.changed(p)
        ''
        """
        now = _blocks(program)
        known = next((blocks for _, _, blocks in islice(self._held.values(), _FEW) if blocks == now), None)
        self._held[id(program)] = program, _head(program), known or [b._replace(ops=[*b.ops]) for b in now]

    def changed(self, program: Program) -> str:
        """How one of the programs differs from what it was; "" if it does not."""
        if id(program) not in self._held:
            return f"{program.label()} is another object"
        _, head, blocks = self._held[id(program)]
        now = _blocks(program)
        if head == _head(program) and blocks == now:
            return ""
        for (_, _, old, _), (_, _, new, _) in zip(blocks, now, strict=False):
            if len(old) != len(new):
                s = "" if len(new) == 1 else "s"
                return f"{program.label()} has {len(new)} operator{s}, it had {len(old)}"
            for a, b in zip(old, new, strict=True):
                if a != b:
                    return f"{program.label()} has\n    {b}\n  where it had\n    {a}"
        return f"{program.label()} declares other variables, groups or blocks than it did"


def _head(program: Program) -> tuple[Any, ...]:
    return dict(program.groups), dict(program.turns), program.rank, program.random_seed


def _blocks(program: Program) -> list[_Block]:
    return [_Block(b.idx, b.parent_idx, b.oplist, Variables(b.descs)) for b in program.blocks]
