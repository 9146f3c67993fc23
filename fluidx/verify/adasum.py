"""The meaning of adaptive sums (Adasum) in the proof, for ops that compute them by slices and by pairs of ranks.

Two laws are used: products over the slices of two arrays add up to the products of the arrays; and sums of neighbouring ranks, in pairs of
pairs, end with the adaptive sum of all ranks. A replica-local value is the rank's part of one expression, which is the value on one device.
The adaptive sum over ranks lo to hi-1 is a *met* value; over all ranks it is the result of one device's `replica_adasum`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ..ir.types import TensorType
from .refusal import Refusal

if TYPE_CHECKING:
    from .normal_form import ExpressionTable

Span = tuple[int, int, float]  # elements [start, stop), with a weight


class AdasumMeaning:
    """The expressions of the ops of adaptive sums. `ranks`: the number of ranks of each group."""

    def __init__(self, table: ExpressionTable):
        self.table = table
        self.ranks: Mapping[str, int] = {}

    def whole(self, x: int) -> int:
        """The adaptive sum of the values of all ranks. It does not depend on their shape."""
        flat = self.table.flat(x)
        made = self.table.intern(("adaptive", flat), self.table.types[flat], (flat,))
        return self.table.shaped(made, self.table.types[x].shape)

    def products(self, x: int, y: int, layers: Sequence[int], start: int, type_: TensorType) -> int:
        """x.y, x.x and y.y for each layer, over slices x and y of two arrays; the slices begin at `start`."""
        a, b = (self._array(v, layers, start) for v in (x, y))
        return self._products((a, b, tuple(layers)), start, start + self.table.types[x].numel, type_)

    def _products(self, of: tuple, start: int, stop: int, type_: TensorType) -> int:
        return self.table.intern(("products", *of, start, stop), type_, ranked=True)

    def together(self, of: tuple, found: Iterable[Span], type_: TensorType) -> list[tuple[int, float]]:
        """Join products over adjacent spans with equal weights."""
        spans: list[Span] = []
        for start, stop, w in sorted(found, key=lambda s: (s[2], s[0])):
            if spans and spans[-1][1:] == (start, w):
                spans[-1] = spans[-1][0], stop, w
            else:
                spans.append((start, stop, w))
        return [(self._products(of, start, stop, type_), w) for start, stop, w in spans]

    def pair(self, x: int, y: int, products: int, layers: Sequence[int], start: int) -> int:
        """Combine slices of two arrays, which begin at `start`, by the products over all elements of the arrays."""
        table = self.table
        a, b = (self._array(v, layers, start) for v in (x, y))
        if table.keys[products] != ("products", a, b, tuple(layers), 0, layers[-1]):
            raise Refusal(f"{table.show(products)} are not the products of all elements of {table.show(a)} and {table.show(b)}")
        t = table.types[x]
        return table.shaped(table.cut(self._met(a, b, tuple(layers)), start, start + t.numel), t.shape)

    def _array(self, x: int, layers: Sequence[int], start: int) -> int:
        """The array whose slice from `start` on is x."""
        table = self.table
        slices = [*table.slices(x).items()]
        if len(slices) == 1 and slices[0][0][1] == start and slices[0][1] == 1.0 and table.types[slices[0][0][0]].numel == layers[-1]:
            return slices[0][0][0]
        raise Refusal(f"it is {table.show(x)}, not a slice from element {start} of a value of {layers[-1]} elements")

    def _met(self, a: int, b: int, layers: tuple[int, ...]) -> int:
        own, lo, mid = self._ranks_of(a, layers)
        other, begin, hi = self._ranks_of(b, layers)
        if own != other or mid != begin or mid - lo != hi - mid or lo % (hi - lo):
            raise Refusal(f"{self.table.show(a)} and {self.table.show(b)} are not sums of neighbouring ranks, in pairs of pairs")
        e, group = own
        if hi - lo < self.ranks[group]:
            return self.table.intern(("met", own, layers, lo, hi), self.table.types[e].with_shape((layers[-1],)), ranked=True)
        return self.table.join([self.whole(self.table.cut(e, start, stop)) for start, stop in pairwise(layers)])

    def _ranks_of(self, x: int, layers: tuple[int, ...]) -> tuple[tuple[int, str], int, int]:
        """((the expression, the group over which it is replica-local), first rank, last rank + 1) of a replica-local or met value."""
        key = self.table.keys[x]
        if key[0] == "met" and key[2] == layers:
            return key[1], key[3], key[4]
        if key[0] == "part":
            (e, placement, derivation), coords = key[1:]
            if derivation is None and len(placement) == 1 and placement[0].is_own:
                ((group, k),) = coords
                return (e, group), k, k + 1
        raise Refusal(f"it is {self.table.show(x)}, which is not a replica-local value")
