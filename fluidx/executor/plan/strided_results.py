"""Which values may lie in strides: those whose readers all take them so. A result may then be made where a later operator would copy it.

An operator that only lays its operands out anew, such as concat, has nothing to do where they lie inside its result from the start, and a
reshape of a transpose is a view where what is transposed lies in the order that the reshape needs. Only results of one operator are put
together so: what they are parts of takes memory no earlier than they would. Where an op allows it
(`OpDef.assembled_by_many`, for buckets that are sent), results of any operators are, and the rest is copied there. What is joined may
be a variable of the scope: what its parts are made over has been read by then.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...ir import flow
from ...ir.opdef import opdef
from ...ir.operator import Operator, op_types
from ..context import RunContext
from .in_place_assembly import written_once
from .liveness import nested
from .records import StridedView
from .selection import Outline
from .shadows import Shadows
from .sizes import RankSizes


class Destination(NamedTuple):
    """Where a result lies: in a value that `join` makes of it and others, of which it is operand `number`, or in storage of its own, in
    another order of the axes."""

    shadow: np.ndarray
    strided: StridedView
    join: Operator | None = None
    number: int = 0


class Readers:
    """What reads the values of a program, and how they may lie for it. `fresh` says of a name whether one operator makes it, once, and
    `settles` whether results of a unit may be made over part of a variable: (number and operators of the unit, the variable, the result,
    where it would lie)."""

    def __init__(
        self, sizes: RankSizes, shadows: Shadows, ctx: RunContext, outline: Outline, fresh: Callable[[str], bool],
        may_assemble: Callable[[float, Sequence[Operator], str, str, StridedView], bool],
    ):  # fmt: skip
        self.sizes, self.shadows, self.ctx, self.outline, self.fresh, self.may_assemble = sizes, shadows, ctx, outline, fresh, may_assemble
        self.begun: set[int] = set()  # operators, by id, that join what some operator has made in their result already
        self._joined_parts: dict[int, tuple[np.ndarray, dict[str, tuple[int, Any]]]] = {}  # by the id of the operator that joins them
        self.early = outline.fact(_early)

    @cached_property
    def of(self) -> Mapping[str, Sequence[Operator]]:
        """The operators that read each value."""
        return _readers(self.outline, self.sizes.reads) if self.sizes.here else self.outline.fact(_readers)

    def accept(self, name: str, a: np.ndarray, join: Operator | None = None) -> bool:
        """Do all that read the value, and views of it, take such an array as well as one in one piece? `join` is not asked."""
        if a.flags.c_contiguous:
            return True
        return self.fresh(name) and all(op is join or self._accepts(op, name, a, join) for op in self.of.get(name, ()))

    def _accepts(self, op: Operator, name: str, a: np.ndarray, join: Operator | None) -> bool:
        definition = opdef(op.type)
        if definition.view is not None:
            views = definition.views_of(a, self.ctx, self._attrs(op))
            return views is not None and all(self.accept(n, v, join) for n, v in zip(op.output_arg_names, views, strict=True))
        slots = [slot for slot, names in op.inputs.items() if name in names]
        said = definition.strided
        return bool(slots) and said is not None and all(said(slot, a) for slot in slots)

    def _attrs(self, op: Operator) -> Mapping[str, Any]:
        here = self.sizes.here.get(id(op))
        return op.attrs if here is None else here.attrs

    # -- results inside others ----------------------------------------------------------------------------------------------

    def destinations(self, op: Operator) -> dict[str, Destination]:
        """Of the results of an operator, those that are better made elsewhere than in one piece."""
        paths = {slot.name: self._path(n) for slot in opdef(op.type).out_slots for n in op.outputs.get(slot.name, ()) if self.fresh(n)}
        found: dict[str, Destination] = {}
        for slot, path in paths.items():
            name = op.outputs[slot][0]
            if name in found or not path:
                continue
            if _joins(path[-1]) and not opdef(path[-1].type).assembled_by_many:
                found.update(self._joined(op, paths, path[-1]))
            if name not in found and (home := self._reordered(op, slot, path)) is not None:
                found[name] = home
        return found

    def early_destinations(self, i: float, unit: Sequence[Operator], names: Iterable[str]) -> dict[str, Destination]:
        """Of these results of a unit, those that are made where a later operator joins them with results of others."""
        found: dict[str, Destination] = {}
        for name in names if self.early else ():
            path = self._path(name) if self.fresh(name) else []
            if not path or not _joins(join := path[-1]) or not opdef(join.type).assembled_by_many:
                continue
            whole, parts = self._parts(join)
            number, part = parts[path[-2].output_arg_names[0] if len(path) > 1 else name]
            a = self._back(part, path[:-1])
            if a is None or not a.size or not a.flags.c_contiguous or not self.accept(name, a, join):
                continue
            strided = StridedView(start_of(a) - start_of(whole), a.strides)
            if not self._kept(join) or self.may_assemble(i, unit, join.output_arg_names[0], name, strided):
                found[name] = Destination(self.shadows.like(a), strided, join, number)
                self.begun.add(id(join))
        return found

    def _parts(self, join: Operator) -> tuple[np.ndarray, Mapping[str, tuple[int, Any]]]:
        """What an operator joins, and for each operand its number and its place there."""
        known = self._joined_parts.get(id(join))
        if known is None:
            whole = self.shadows.of(self.sizes.types[join.output_arg_names[0]])
            parts: dict[str, tuple[int, Any]] = {}
            for k, (name, part) in enumerate(zip(join.input_arg_names, _inside(join, whole, self.sizes), strict=False)):
                parts.setdefault(name, (k, part))
            known = self._joined_parts[id(join)] = whole, parts
        return known

    def _path(self, name: str) -> list[Operator]:
        """The operators that lay a value out anew, one behind the other; one that joins it with others is the last."""
        path: list[Operator] = []
        while not path or not _joins(path[-1]):
            movers = [op for op in self.of.get(name, ()) if opdef(op.type).operand_views is not None]
            if len(movers) != 1 or id(movers[0]) in self.sizes.here or len(movers[0].output_arg_names) != 1:
                break
            name = movers[0].output_arg_names[0]
            if id(movers[0]) not in self.begun and not self.fresh(name) and not self._kept(movers[0]):
                break
            path += movers
        return path

    def _kept(self, op: Operator) -> bool:
        """Does an operator join what it gives to a variable of the scope, to which nothing else gives a value?"""
        return opdef(op.type).assembled_by_many and op.output_arg_names[0] in self.outline.fact(written_once)

    def _back(self, a: np.ndarray | None, path: Sequence[Operator]) -> np.ndarray | None:
        """Where the first operand of a path lies, if the result of the path is this array."""
        for op in reversed(path):
            if a is not None:
                a = _inside(op, a, self.sizes)[0]
        return a

    def _reordered(self, op: Operator, slot: str, path: Sequence[Operator]) -> Destination | None:
        """A home for a result that would be copied along the path: as that copy has it."""
        a = self.shadows.of(self.sizes.types[op.outputs[slot][0]])
        for k, mover in enumerate(path):
            if _joins(mover):
                return None
            views = opdef(mover.type).views_of(a, self.ctx, mover.attrs)
            if views is None:
                whole = self.shadows.of(self.sizes.types[mover.output_arg_names[0]])
                return self._destination_of(op, slot, self._back(whole, path[: k + 1]), whole, None)
            a = views[0]
        return None

    def _joined(self, op: Operator, paths: Mapping[str, Sequence[Operator]], join: Operator) -> dict[str, Destination]:
        """Homes for the results that an operator joins, if there is one for each of its operands."""
        whole = self.shadows.of(self.sizes.types[join.output_arg_names[0]])
        lying = dict(zip(join.input_arg_names, _inside(join, whole, self.sizes), strict=False))
        found: dict[str, Destination] = {}
        for slot, path in paths.items():
            if not path or path[-1] is not join:
                continue
            name, before = op.outputs[slot][0], path[:-1]
            end = before[-1].output_arg_names[0] if before else name
            home = self._destination_of(op, slot, self._back(lying.pop(end, None), before), whole, join)
            if home is None:
                return {}
            found[name] = home._replace(number=join.input_arg_names.index(end))
        return found if not lying and len(found) == len(join.input_arg_names) else {}

    def _destination_of(
        self, op: Operator, slot: str, a: np.ndarray | None, whole: np.ndarray, join: Operator | None
    ) -> Destination | None:
        """The home of a result that lies as this array does, if the operator and all readers take it there."""
        name, said = op.outputs[slot][0], opdef(op.type).strided
        if a is None or not a.size or said is None or not said(slot, a) or not self.accept(name, a, join):
            return None
        return Destination(self.shadows.like(a), StridedView(start_of(a) - start_of(whole), a.strides), join)


def _readers(outline: Outline, reads: Callable[[Operator], Iterable[str]] | None = None) -> dict[str, list[Operator]]:
    """The operators that read each value in its own block. `reads`: what an operator reads, if not all that it names."""
    found: dict[str, list[Operator]] = {}

    def note(op: Operator, own: Container[str] | None = None) -> None:
        for n in dict.fromkeys(flow.reads(outline.program, op) if reads is None else reads(op)):
            if own is None or n in own:
                found.setdefault(n, []).append(op)

    for op in outline.ops:
        note(op)
        for block, inner in nested(outline.program, op) if op.sub_blocks() else ():
            note(inner, block.descs)
    return found


def _early(outline: Outline) -> bool:
    """Does an operator join what several may have made in its result?"""
    return any(opdef(type_).assembled_by_many for type_ in op_types(outline.ops))


def _joins(op: Operator) -> bool:
    return opdef(op.type).in_slots[0].many


def _inside(op: Operator, a: np.ndarray, sizes: RankSizes) -> list[Any]:
    inside: Any = opdef(op.type).operand_views
    return inside(a, [sizes.types[n].shape for n in op.input_arg_names], **op.attrs)


def start_of(a: np.ndarray) -> int:
    return a.__array_interface__["data"][0]
