"""What a rewrite that converts values promises: which operators are converters, and how operators read what was converted.

The proof (verify/conversions.py) takes the converters away on both sides and compares what is left, operator by operator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .operator import Operator
from .program import Block

Order = tuple[int, ...]  # of the axes of a value, by those of the value that it was made of; () for as they were


class Conversions(ABC):
    """The promise of one rewrite."""

    @abstractmethod
    def converts(self, op: Operator, block: Block) -> Order | None:
        """The order of axes in which a converter leaves the value that it reads; None for an operator that is no converter."""

    def results(self, before: Operator, after: Operator, block: Block, orders: Sequence[Order]) -> list[Order] | str:
        """In which order of axes the results of an operator come out that stands for `before` of `block` and whose operands have these
        orders; a text says why it may not stand for it."""
        if any(orders):
            return "reads a value with its axes in another order"
        if before.attrs != after.attrs:
            return "has other attributes"
        return [()] * len(before.output_arg_names)

    def misfit(self, before: Operator, after: Operator, block: Block, made: Block) -> str:
        """Why an operator of the block `made`, which stands for `before` of `block`, has an operand in another form than it wants; "" if
        none."""
        return ""


def composed(first: Order, then: Order) -> Order:
    """The order of axes in which a value is left by two converters, one behind the other.

    >>> composed((0, 2, 3, 1), (0, 3, 1, 2)), composed((), (1, 0))
    ((), (1, 0))
    """
    made = tuple([first[k] for k in then]) if first and then else first or then
    return () if made == tuple(range(len(made))) else made


def between(order: Order, other: Order) -> Order:
    """The order of axes that a converter has which takes a value from one order to another.

    >>> between((), (0, 2, 3, 1)), between((0, 3, 1, 2), ()), between((1, 0), (1, 0))
    ((0, 2, 3, 1), (0, 2, 3, 1), ())
    """
    count = len(order or other)
    first = order or tuple(range(count))
    made = tuple([first.index(k) for k in other or range(count)])
    return () if made == tuple(range(count)) else made
