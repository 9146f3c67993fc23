"""Signatures of operators: operators with equal attributes, whose values are declared, placed and sized alike, have the same result types.

A program for ranks asks the same of a type rule again and again: for every layer, for every rank with the same part, and for every program
that a strategy makes of one source. So answers are cached for the process. A signature is made of numbers: each stands for one declaration,
or for one value with its global and its local type.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count
from typing import Any, NamedTuple

from ...ir.constants import arrays_in
from ...ir.opdef import OpDef
from ...ir.operator import Frozen, Operator
from ...ir.program import Program
from ...ir.types import ANY, TensorType
from .rank_view import LocalOp, RankView

_MOST = 1 << 14  # entries of each cache
_NEXT = count(1)  # numbers are never reused, also after a cache is cleared
_DECLARED: dict[Hashable, tuple[int, Any]] = {}
_VALUES: dict[tuple[int, int, int], tuple[int, Any]] = {}


class _Answer(NamedTuple):
    """The results in the order of the operator's outputs: global type (None without a placement), local type and number. `here`: the
    operator as the rank runs it. `attrs` are kept alive because the signature has their id."""

    results: tuple[tuple[TensorType | None, TensorType, int], ...]
    here: LocalOp | None
    attrs: Frozen


_ANSWERS: dict[Hashable, _Answer] = {}


class _DeclarationNumbers(dict[str, int]):
    """The number of a variable's declaration on a rank: its type, its placement, and the rank's coordinates in the groups of the placement.
    Negative for a declaration with open axes."""

    def __init__(self, program: Program, local: RankView):
        self.program, self.local = program, local
        self._known: dict[tuple[int, int], int] = {}  # by the ids of a type and a placement, which the program keeps alive

    def __missing__(self, name: str) -> int:
        d = self.local.descs.get(name)
        if d is None:
            self[name] = 0
            return 0
        alike = id(d.type), id(d.placement)
        number = self._known.get(alike)
        if number is None:
            t, coords = self.program.shared(d.type), self.local.coords
            at = tuple([(e, coords.get(e.group)) for e in d.placement])
            number = _numbered(_DECLARED, (id(t), at), (t, d.placement))
            self._known[alike] = number = -number if ANY in getattr(t, "shape", ()) else number
        self[name] = number
        return number


class RankSignatures(dict[str, int]):
    """The numbers of the values of one rank, by name, and the cached answers for operators on them."""

    def __init__(self, program: Program, local: RankView, types: dict[str, TensorType], here: dict[int, LocalOp]):
        self.declared, self.wholes = _DeclarationNumbers(program, local), local.wholes
        self.types, self.here = types, here

    def __missing__(self, name: str) -> int:
        t, whole = self.types[name], self.wholes.get(name)
        number = _numbered(_VALUES, (self.declared[name], id(whole), id(t)), (whole, t))
        self[name] = number
        return number

    def of(self, op: Operator, definition: type[OpDef]) -> Hashable:
        """The signature of an operator whose inputs have types; None if its answer is not cached."""
        reads, writes, ins, outs = op.input_arg_names, op.output_arg_names, op.inputs, op.outputs
        if not reads or definition.control.open_axes is not None:
            return None
        values = *ins, *map(self.__getitem__, reads), *outs, *map(self.declared.__getitem__, writes)
        if len(ins) == len(reads) and len(outs) == len(writes):
            return definition, id(op.attrs), *values
        return definition, id(op.attrs), *map(len, ins.values()), *map(len, outs.values()), *values

    def answer(self, op: Operator, signature: Hashable) -> bool:
        """Set the types of the results, and the operator as the rank runs it, if an operator of this signature is known. False if none is,
        or if a result has another type already."""
        known = _ANSWERS.get(signature)
        if known is None:
            return False
        types = self.types
        for n, (whole, t, number) in zip(op.output_arg_names, known.results, strict=True):
            if n in types:
                if self[n] != number:
                    return False
                continue
            types[n], self[n] = t, number
            if whole is not None:
                self.wholes[n] = whole
        if known.here is not None:
            self.here[id(op)] = known.here
        return True

    def keep(self, op: Operator, definition: type[OpDef], signature: Hashable) -> None:
        """Cache the answer for an operator whose results have types now."""
        for n in op.output_arg_names:
            self.pop(n, None)
        # a cache of the process would keep the memory of a constant; several axes that are open may be checked for each operator
        if signature is None or next(arrays_in(op.attrs.values()), None) is not None or self._open(op.input_arg_names):
            return
        if [*op.outputs] != [slot.name for slot in definition.out_slots if slot.name in op.outputs]:
            return  # types are in the order of the declared slots, on which the key of a plan depends
        results = tuple([(self.wholes.get(n), self.types[n], self[n]) for n in op.output_arg_names])
        if len(_ANSWERS) >= _MOST:
            _ANSWERS.clear()
        _ANSWERS[signature] = _Answer(results, self.here.get(id(op)), op.attrs)

    def _open(self, names: Sequence[str]) -> bool:
        """Have several operands open axes, and one of them size 1 somewhere?"""
        return sum(self.declared[n] < 0 for n in names) > 1 and any(1 in getattr(self.types[n], "shape", ()) for n in names)


def _numbered(known: dict[Any, tuple[int, Any]], key: Hashable, keeps: Any) -> int:
    """The number of a key. `keeps` are kept alive, because the key has their ids."""
    found = known.get(key)
    if found is None:
        if len(known) >= _MOST:
            known.clear()
        found = known.setdefault(key, (next(_NEXT), keeps))
    return found[0]
