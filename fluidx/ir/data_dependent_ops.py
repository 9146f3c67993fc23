"""Operators that a plan cannot contain, so that they run between plans: their result sizes depend on values, or they use values that exist
on the host only, or they run sub-blocks with such operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .opdef import opdef
from .operator import Operator, op_types
from .program import Block, Program
from .valuetypes import ValueType, on_host


class Why(NamedTuple):
    """Why a plan cannot contain an operator, and a hint what to use instead."""

    does: str
    instead: str


_SIZED = Why("makes values whose sizes depend on values", "keep the sizes, with a mask that multiplies or layers.where(condition, x, y)")


class Cuts:
    """Finds the operators of a block that run between plans; false if the block certainly has none."""

    def __init__(self, block: Block, ops: Sequence[Operator]):
        types = op_types(ops)
        self._program = block.program
        self._sized = {name for name in types if opdef(name).control.sized_by_values}
        self._runs = any(opdef(name).control.bodies for name in types)
        self._kinds: dict[str, ValueType] = {}
        around: Block | None = block
        while around is not None:
            self._kinds = {n: d.type for n, d in around.descs.items() if on_host(d.type)} | self._kinds
            around = around.parent

    def __bool__(self) -> bool:
        return bool(self._sized or self._kinds or self._runs)

    def why(self, op: Operator) -> Why | None:
        """Why an operator runs between plans; None if a plan can contain it."""
        if op.type in self._sized:
            return _SIZED
        for idx in op.sub_blocks() if self._runs else ():
            body = self._program.blocks[idx]
            cuts = Cuts(body, body.oplist)
            for inner in body.oplist if cuts else ():
                if (why := cuts.why(inner)) is not None:
                    return why if inner.sub_blocks() else Why(f"runs op {inner.type}, which {why.does}", why.instead)
        for n in (*op.input_arg_names, *op.output_arg_names) if self._kinds else ():
            if n in self._kinds:
                return Why(f"works on {n!r}, which is {self._kinds[n]} and for the host alone", "give it tensors of numbers")
        return None


def cutting(program: Program) -> Iterator[tuple[Operator, Why]]:
    """The operators of all blocks that run between plans, without those that only run sub-blocks with such operators."""
    for block in program.blocks:
        if cuts := Cuts(block, block.oplist):
            yield from ((op, why) for op in block.oplist if not op.sub_blocks() and (why := cuts.why(op)) is not None)
