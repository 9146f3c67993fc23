"""Sizes as sums: `SizeForm` is a sum of multiples of open sizes and of rounded quotients of other sums, and a number.

The form of a computed size says how to make a value with an axis of that size, for every feed, also where a quotient is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import OnnxError


@dataclass(frozen=True)
class Quotient:
    """A sum divided by a number, rounded down; a sum below 0 counts as 0."""

    whole: SizeForm
    by: int


@dataclass(frozen=True)
class SizeForm:
    """`number` plus each term times its factor. A term is the stand-in number of an open size, or a quotient.

    >>> n = SizeForm.axis(1 << 40)
    >>> n + 3 - n, (n * 2 + 4) // 2 == n + 2, n // 2 == n // 2 + 1 - 1
    (SizeForm(number=3, terms=()), True, True)
    """

    number: int
    terms: tuple[tuple[int | Quotient, int], ...] = ()

    @staticmethod
    def axis(number: int) -> SizeForm:
        return SizeForm(0, ((number, 1),))

    def __add__(self, other: Any) -> SizeForm:
        other = form_of(other)
        factors = dict(self.terms)
        for term, times in other.terms:
            factors[term] = factors.get(term, 0) + times
        return SizeForm(self.number + other.number, tuple((t, k) for t, k in factors.items() if k))

    def __sub__(self, other: Any) -> SizeForm:
        return self + form_of(other) * -1

    def __mul__(self, other: Any) -> SizeForm:
        other = form_of(other)
        if self.terms and other.terms:
            raise OnnxError("it multiplies open sizes")
        whole, by = (self, other.number) if self.terms else (other, self.number)
        return SizeForm(whole.number * by, tuple((t, k * by) for t, k in whole.terms) if by else ())

    def __floordiv__(self, other: Any) -> SizeForm:
        by = form_of(other)
        if by.terms or by.number < 1:
            raise OnnxError("it divides by an open size")
        k = by.number
        if self.number % k == 0 and all(times % k == 0 for _, times in self.terms):
            return SizeForm(self.number // k, tuple((t, times // k) for t, times in self.terms))
        return SizeForm(0, ((Quotient(self, k), 1),)) if self.terms else SizeForm(self.number // k)


def form_of(value: Any) -> SizeForm:
    """The form of a known number; a form itself."""
    return value if isinstance(value, SizeForm) else SizeForm(int(value))
