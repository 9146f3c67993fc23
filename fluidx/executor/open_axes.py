"""Checks on open axes: two operands whose open axes have one size by the program must have one size in a run.

A gradient is summed over an axis that was broadcast. If two open axes have one size by the program, backward has no such sum. A run in
which one of them is 1 would broadcast forward and not sum backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from ..ir.errors import FeedError, ProgramError
from ..ir.opdef import OpDef
from ..ir.operator import Operator
from ..ir.program import Block
from ..ir.sizes import StandInShapes as OpenSizes
from ..ir.types import ANY, TensorType
from .error_text import where

if TYPE_CHECKING:
    from .plan.selection import Outline


class _OperandAxis(NamedTuple):
    """An axis of an operand."""

    name: str
    axis: int


class _AxisPair(NamedTuple):
    """Open axes of two operands over which an operator loops together. `alike`: they have one size by the program."""

    a: _OperandAxis
    b: _OperandAxis
    alike: bool


class OpenAxes:
    """The pairs of open axes in the operators of an outline, found when an operator is first checked."""

    def __init__(self, outline: Outline):
        self._sizes = OpenSizes(outline.program.global_block())
        self._met: dict[int, tuple[Operator, list[_AxisPair]]] = {}

    def check(
        self, block: Block, op: Operator, definition: type[OpDef], whole: Callable[[str], Any], is_cut: Callable[[str, int], bool]
    ) -> None:
        """Raise FeedError if an operator of `block` would broadcast along an open axis that must not be broadcast.

        `whole(name)` is the global type of a value in this run. `is_cut(name, axis)`: do ranks hold slices along the axis?"""
        known = self._met.get(id(op))
        if known is None or known[0] is not op:
            known = self._met[id(op)] = op, list(_met(self._sizes.inside(block), op, definition))
        for a, b, alike in known[1]:
            one, other = whole(a.name).shape[a.axis], whole(b.name).shape[b.axis]
            if one == other or not (alike or 1 in (one, other) and (is_cut(*a) or is_cut(*b))):
                continue
            if alike:
                why, instead = "the program gives these open axes one size", 'two names, as in fx.data(name, ["rows", ...])'
            else:
                why, instead = "ranks hold slices of them", "size 1 where it is 1, so that every rank has it"
            raise FeedError(
                f"op {op.type}: axis {a.axis} of {a.name!r} is {one} and axis {b.axis} of {b.name!r} is {other}; {why}\n"
                f"  feed one size, or declare the axes of the data with {instead}{where(op)}"
            )


def _met(sizes: OpenSizes, op: Operator, definition: type[OpDef]) -> Iterator[_AxisPair]:
    desc = sizes.block.desc
    ins, outs = definition.flat_slots(op.inputs, definition.in_slots), definition.flat_slots(op.outputs, definition.out_slots)
    in_types, out_types = ([None if n is None else desc(n).type for n in names] for names in (ins, outs))
    if any(t is not None and t.__class__ is not TensorType for t in (*in_types, *out_types)):
        return
    if len({n for n, t in zip(ins, in_types, strict=True) if n is not None and t is not None and ANY in t.shape}) < 2:
        return
    try:
        pattern = definition.pattern_of(in_types, out_types, op.attrs)
    except ProgramError:
        return
    loops: dict[str, list[_OperandAxis]] = {}
    for k, (n, t, axes) in enumerate(zip(ins, in_types, pattern.ins, strict=True)):
        if n is None or t is None or axes is None or k in pattern.shape_only:
            continue
        for axis, (d, factors) in enumerate(zip(t.shape, axes, strict=True)):
            if d == ANY and len(factors) == 1:
                loops.setdefault(factors[0], []).append(_OperandAxis(n, axis))
    for met in loops.values():
        for a, b in combinations(met, 2):
            if a.name != b.name:
                yield _AxisPair(a, b, sizes.shape(a.name)[a.axis] == sizes.shape(b.name)[b.axis])
