"""Adaptive sums (Adasum) as messages: ranks exchange parts of two values, add up the dot products of these among all ranks that hold parts,
and each rank combines its part.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2021), algorithm 1: vector halving, distance doubling.
"""

from __future__ import annotations

from typing import NamedTuple

from ...ir.operator import Operator
from ...ir.parts import Coords
from ...ir.program import Block
from ...ir.types import TensorType
from ...ops.comm.adasum import products_type
from .rank_buffers import CollectiveOnRank, CollectivePlan, Received


class _ValuePair(NamedTuple):
    """Elements [start, stop) of two values, in variables: first that of the ranks with the lower indices."""

    start: int
    stop: int
    x: str
    y: str


class AdasumOnRank(CollectiveOnRank):
    """The buffers of one rank during an adaptive sum. The dot products of all layers are one more block of the schedule, after the value.
    In step k a rank receives its part of the value of a rank at distance 2^(k-1); if a rank has only a part of the value, k rounds add up
    the products.
    """

    def __init__(self, block: Block, op: Operator, plan: CollectivePlan, me: int, coords: Coords):
        super().__init__(block, op, plan, me, coords)
        self.layers = op.attrs["layers"] or (0, plan.size)
        self.pairs: list[_ValuePair] = []
        self.meetings = self.rounds_left = 0

    def settle(self, now: Received) -> None:
        first = now.arrived[0]
        if first.start < self.plan.size and first.add:
            self._meet(now)
        else:
            super().settle(now)
            self.rounds_left -= first.add
        if first.add and not self.rounds_left:
            self._combine(now.final)

    def _meet(self, now: Received) -> None:
        """Write the dot products of the elements that this rank has."""
        whole = (now.arrived[0].start, now.arrived[-1].stop) == (0, self.plan.size)
        self.meetings += 1
        self.rounds_left = 0 if whole else self.meetings
        self.pairs, made = [], []
        for m in now.arrived:
            (_, x), (_, y) = sorted([(m.source, m.name), (self.me, self.take(m.start, m.stop, "term"))])
            self.pairs.append(_ValuePair(m.start, m.stop, x, y))
            made.append(self._new(*self._behind, "part", self._type(*self._behind)))
            self._op("adasum_products", {"X": [x], "Y": [y]}, made[-1], layers=self.layers, start=m.start)
        if len(made) > 1:
            made.append(self._new(*self._behind, "part", self._type(*self._behind)))
            self._op("sum", {"X": made[:-1]}, made[-1])
        self._keep(*self._behind, made[-1])

    def _combine(self, final: bool) -> None:
        """Write the combination of the elements that this rank has, after all products have arrived."""
        products = self.take(*self._behind, "term")
        for start, stop, x, y in self.pairs:
            done = final and self._is_result(start, stop)
            name = self.out if done else self._new(start, stop, "pair", self._type(start, stop))
            self._op("adasum_pair", {"X": [x], "Y": [y], "Products": [products]}, name, layers=self.layers, start=start)
            self._keep(start, stop, name)

    @property
    def _behind(self) -> tuple[int, int]:
        """The range of the products in the schedule."""
        return self.plan.size, self.plan.marks[-1]

    def _type(self, a: int, b: int) -> TensorType:
        return super()._type(a, b) if a < self.plan.size else products_type(self.plan.type, self.layers)

    def _base(self, a: int, b: int) -> str:
        return super()._base(a, b) if a < self.plan.size else f"{self.out}.products"
