"""Conversions: what a rewrite that only converts values declares for its proof: which operators convert, and what others read.

The proof (verify/conversions.py) removes the converters from both programs and compares the other operators one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .operator import Operator
from .program import Block

Order = tuple[int, ...]  # for each axis of a value, its number in the original value; () if the order is unchanged


class Conversions(ABC):
    """The declaration of one rewrite."""

    @abstractmethod
    def converts(self, op: Operator, block: Block) -> Order | None:
        """The order of axes that a converter gives its operand; None for an operator that is not a converter."""

    def results(self, before: Operator, after: Operator, block: Block, orders: Sequence[Order]) -> list[Order] | str:
        """The orders of axes of the results of `after`, which replaces `before` of `block` and has operands in these orders; or a text with
        the reason why it cannot replace it."""
        if any(orders):
            return "reads a value with its axes in another order"
        if before.attrs != after.attrs:
            return "has other attributes"
        return [()] * len(before.output_arg_names)

    def misfit(self, before: Operator, after: Operator, block: Block, made: Block) -> str:
        """The reason if `after` of the block `made`, which replaces `before` of `block`, has an operand in a wrong form; else ""."""
        return ""


def composed(first: Order, then: Order) -> Order:
    """The order of axes after two converters, one after the other.

    >>> composed((0, 2, 3, 1), (0, 3, 1, 2)), composed((), (1, 0))
    ((), (1, 0))
    """
    made = tuple([first[k] for k in then]) if first and then else first or then
    return () if made == tuple(range(len(made))) else made


def between(order: Order, other: Order) -> Order:
    """The order of the converter that changes one order of axes into another.

    >>> between((), (0, 2, 3, 1)), between((0, 3, 1, 2), ()), between((1, 0), (1, 0))
    ((0, 2, 3, 1), (0, 2, 3, 1), ())
    """
    count = len(order or other)
    first = order or tuple(range(count))
    made = tuple([first.index(k) for k in other or range(count)])
    return () if made == tuple(range(count)) else made
