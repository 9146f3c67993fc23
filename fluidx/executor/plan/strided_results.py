"""Results with strides: a result is written directly where a later operator would copy it, if all its readers accept the strides.

An operator that only moves its operands, such as concat, needs no call if they are written inside its result. A reshape of a transpose is a
view if the operand of the transpose is written in the order that the reshape needs. Normally only results of one operator are joined this
way, so that the joined value takes memory no earlier than its parts. Where an op allows it (`Storage.assembled_by_many`, for buckets that
are sent), results of several operators are joined, and other operands are copied. The joined value may be a state variable, if all readers
of its old value run before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...ir import flow
from ...ir.opdef import opdef
from ...ir.operator import Operator, op_types
from ..context import RunContext
from .in_place_assembly import written_once
from .liveness import nested, op_reads
from .records import StridedView
from .selection import Outline
from .shadows import Shadows
from .sizes import RankSizes


class Destination(NamedTuple):
    """The place where a result is written: inside the result of `join`, as its operand `number`; or, without `join`, in its own storage
    with another order of the axes."""

    shadow: np.ndarray
    strided: StridedView
    join: Operator | None = None
    number: int = 0


class Readers:
    """The readers of a program's values, and the layouts that they accept. `fresh(name)`: is the value written exactly once?
    `may_assemble(number of a unit, its operators, variable, result, place)`: may a result be written over part of a variable?"""

    def __init__(
        self, sizes: RankSizes, shadows: Shadows, ctx: RunContext, outline: Outline, fresh: Callable[[str], bool],
        may_assemble: Callable[[float, Sequence[Operator], str, str, StridedView], bool],
    ):  # fmt: skip
        self.sizes, self.shadows, self.ctx, self.outline, self.fresh, self.may_assemble = sizes, shadows, ctx, outline, fresh, may_assemble
        self.begun: set[int] = set()  # ids of joining operators that have a part in their result already
        self._joined_parts: dict[int, tuple[np.ndarray, dict[str, tuple[int, Any]]]] = {}  # by the id of the operator that joins them
        self.early = outline.fact(_early)

    @cached_property
    def of(self) -> Mapping[str, Sequence[Operator]]:
        """The readers of each value."""
        return _readers(self.outline, self.sizes) if self.sizes.here else self.outline.fact(_readers)

    @cached_property
    def mover(self) -> Mapping[str, Operator]:
        """The operator that moves a value, for values that a single operator moves."""
        moving = frozenset(t for t in op_types(self.outline.ops) if opdef(t).storage.operand_views is not None)
        readers = _readers(self.outline, self.sizes, moving) if self.sizes.here else self.outline.fact(_readers, None, moving)
        return {n: ops[0] for n, ops in readers.items() if len(ops) == 1}

    @cached_property
    def _assembled(self) -> Collection[str]:
        """The values that may be written inside a value which several operators assemble."""
        found: set[str] = set()
        for name, op in reversed([*self.mover.items()]) if self.early else ():  # what moves a result comes after what moves its operand
            if opdef(op.type).storage.assembled_by_many or not found.isdisjoint(op.output_arg_names):
                found.add(name)
        return found

    def accept(self, name: str, a: np.ndarray, join: Operator | None = None) -> bool:
        """Do all readers of the value, and of its views, accept this layout instead of a contiguous one? `join` is not asked."""
        if a.flags.c_contiguous:
            return True
        return self.fresh(name) and all(op is join or self._accepts(op, name, a, join) for op in self.of.get(name, ()))

    def _accepts(self, op: Operator, name: str, a: np.ndarray, join: Operator | None) -> bool:
        definition = opdef(op.type)
        if definition.storage.view is not None:
            views = definition.views_of(a, self.ctx, self._attrs(op))
            return views is not None and all(self.accept(n, v, join) for n, v in zip(op.output_arg_names, views, strict=True))
        slots = [slot for slot, names in op.inputs.items() if name in names]
        said = definition.storage.strided
        return bool(slots) and said is not None and all(said(slot, a) for slot in slots)

    def _attrs(self, op: Operator) -> Mapping[str, Any]:
        here = self.sizes.here.get(id(op))
        return op.attrs if here is None else here.attrs

    # -- results inside others ----------------------------------------------------------------------------------------------

    def destinations(self, op: Operator) -> dict[str, Destination]:
        """The results of an operator that should be written at a destination instead of contiguously."""
        if self.mover.keys().isdisjoint(op.output_arg_names):
            return {}
        paths = {slot.name: self._path(n) for slot in opdef(op.type).out_slots for n in op.outputs.get(slot.name, ()) if self.fresh(n)}
        found: dict[str, Destination] = {}
        for slot, path in paths.items():
            name = op.outputs[slot][0]
            if name in found or not path:
                continue
            if _joins(path[-1]) and not opdef(path[-1].type).storage.assembled_by_many:
                found.update(self._joined(op, paths, path[-1]))
            if name not in found and (home := self._reordered(op, slot, path)) is not None:
                found[name] = home
        return found

    def early_destinations(self, i: float, unit: Sequence[Operator], names: Iterable[str]) -> dict[str, Destination]:
        """The results of a unit that are written inside a value which a later operator joins from results of several operators."""
        found: dict[str, Destination] = {}
        for name in names:
            if name not in self._assembled:
                continue
            path = self._path(name) if self.fresh(name) else []
            if not path or not _joins(join := path[-1]) or not opdef(join.type).storage.assembled_by_many:
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
        """The shadow of a join's result, and for each operand its number and its place in the result."""
        known = self._joined_parts.get(id(join))
        if known is None:
            whole = self.shadows.of(self.sizes.types[join.output_arg_names[0]])
            parts: dict[str, tuple[int, Any]] = {}
            for k, (name, part) in enumerate(zip(join.input_arg_names, _inside(join, whole, self.sizes), strict=False)):
                parts.setdefault(name, (k, part))
            known = self._joined_parts[id(join)] = whole, parts
        return known

    def _path(self, name: str) -> list[Operator]:
        """The chain of operators that only move a value. An operator that joins it with others is the last."""
        path: list[Operator] = []
        while not path or not _joins(path[-1]):
            op = self.mover.get(name)
            if op is None or id(op) in self.sizes.here or len(op.output_arg_names) != 1:
                break
            name = op.output_arg_names[0]
            if id(op) not in self.begun and not self.fresh(name) and not self._kept(op):
                break
            path.append(op)
        return path

    def _kept(self, op: Operator) -> bool:
        """Does an operator join parts to a state variable that nothing else writes?"""
        return opdef(op.type).storage.assembled_by_many and op.output_arg_names[0] in self.outline.fact(written_once)

    def _back(self, a: np.ndarray | None, path: Sequence[Operator]) -> np.ndarray | None:
        """The place of a path's first operand if the path's result is this array."""
        for op in reversed(path):
            if a is not None:
                a = _inside(op, a, self.sizes)[0]
        return a

    def _reordered(self, op: Operator, slot: str, path: Sequence[Operator]) -> Destination | None:
        """A destination for a result that would be copied along the path: the layout of that copy."""
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
        """Destinations for the results that `join` joins, if each of its operands has one."""
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
        """The destination of a result with the layout of `a`, if the operator and all readers accept it."""
        name, said = op.outputs[slot][0], opdef(op.type).storage.strided
        if a is None or not a.size or said is None or not said(slot, a) or not self.accept(name, a, join):
            return None
        return Destination(self.shadows.like(a), StridedView(start_of(a) - start_of(whole), a.strides), join)


def _readers(outline: Outline, sizes: RankSizes | None = None, types: Container[str] | None = None) -> dict[str, list[Operator]]:
    """The readers of each value in its own block; of operators of these `types` only, if types are given. `sizes` say what operators read
    (default: all inputs)."""
    found: dict[str, list[Operator]] = {}

    def note(op: Operator, reads: Sequence[str], own: Container[str] | None = None) -> None:
        for n in dict.fromkeys(reads) if len(reads) > 1 else reads:
            if own is None or n in own:
                if n in found:
                    found[n].append(op)
                else:
                    found[n] = [op]

    for op, reads in zip(outline.ops, outline.fact(op_reads) if sizes is None else sizes.all_reads(outline), strict=True):
        if types is None or op.type in types:
            note(op, reads)
        for block, inner in nested(outline.program, op) if outline.runs_blocks else ():
            if types is None or inner.type in types:
                note(inner, [*(flow.reads(outline.program, inner) if sizes is None else sizes.reads(inner))], block.descs)
    return found


def _early(outline: Outline) -> bool:
    """Is there an operator whose result several operators may assemble?"""
    return any(opdef(type_).storage.assembled_by_many for type_ in op_types(outline.ops))


def _joins(op: Operator) -> bool:
    return opdef(op.type).in_slots[0].many


def _inside(op: Operator, a: np.ndarray, sizes: RankSizes) -> list[Any]:
    inside: Any = opdef(op.type).storage.operand_views
    return inside(a, [sizes.types[n].shape for n in op.input_arg_names], **op.attrs)


def start_of(a: np.ndarray) -> int:
    return a.__array_interface__["data"][0]
