"""Collectives on values that are cut along another axis than the first, or along two axes, so that parts are not ranges of the flat value.
The value travels in boxes, which are the blocks of the schedule: a rank cuts its value into boxes, and joins the boxes of its result.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.opdef import opdef
from ...ir.operator import Operator
from ...ir.parts import Coords
from ...ir.program import Block
from ...ir.types import TensorType
from .rank_buffers import CollectiveOnRank, CollectivePlan, Piece


class Boxed(CollectiveOnRank):
    """The buffers of one rank for such a collective."""

    def __init__(self, block: Block, op: Operator, plan: CollectivePlan, me: int, coords: Coords):
        super().__init__(block, op, plan, me, coords)
        self.algorithm_method, n = opdef(op.type).comm.algorithm_method, plan.ranks
        had, self.joined = {
            "reduce": (range(n), [me]),
            "spread": ([me], range(n)),
            "exchange": (range(me * n, (me + 1) * n), range(me, n * n, n)),
        }[self.algorithm_method]
        self.held = self._cut([k for k in had if self._size(k)])
        if self.algorithm_method == "exchange":
            self.wanted = 0, 0  # not a range: the boxes are not contiguous

    def _size(self, k: int) -> int:
        return self.plan.marks[k + 1] - self.plan.marks[k]

    def _cut(self, blocks: Sequence[int]) -> list[Piece]:
        """Cut the operand into boxes that are not empty."""
        if self.algorithm_method == "spread":
            return [piece._replace(start=self.plan.marks[k], at=self.plan.marks[k]) for k in blocks for piece in self.held]
        axis, start, held = self.op.attrs.get("to_axis", self.op.attrs["axis"]), 0, []
        for k in blocks:
            a, b = self.plan.marks[k], self.plan.marks[k + 1]
            what = self._type(a, b)
            name = self._new(a, b, "box", what)
            self._op("slice", {"Input": [self.x]}, name, axes=(axis,), starts=(start,), ends=(start + what.shape[axis],))
            held.append(Piece(a, b, name, a, what))
            start += what.shape[axis]
        return held

    def _type(self, a: int, b: int) -> TensorType:
        """The type in which elements travel: blocks as boxes, other ranges flat."""
        box = self.plan.boxes.get((a, b))
        return TensorType(self.plan.type.dtype, (b - a,) if box is None else box)

    def finish(self) -> None:
        boxes = [self.take(self.plan.marks[k], self.plan.marks[k + 1], "end") for k in self.joined if self._size(k)]
        if boxes == [self.out]:
            return
        if not boxes or self.algorithm_method == "reduce":
            super().finish()
        else:
            self._op("concat", {"X": boxes}, self.out, axis=self.op.attrs["axis"])
