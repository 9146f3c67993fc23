"""Type rules for operands with an unknown number of axes: the common result for all numbers that the rule takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from .errors import ProgramError
from .types import ANY, TensorType
from .valuetypes import AnyRankType, common_type

MOST = 8  # ranks up to this are tried


def at_any_rank(what: str, infer: Callable[..., Any], types: Sequence[Any], unranked: Sequence[AnyRankType]) -> Any:
    """The common result of `infer` for all ranks that the types in `unranked` may have. A rule that takes a single rank (a convolution: 4)
    fixes the rank, and one with the same result for all ranks (a mean) keeps its shape. ProgramError if the rule takes no rank.

    >>> def swap(t):
    ...     if len(t.shape) != 2:
    ...         raise ProgramError("expected a matrix")
    ...     return t.with_shape(t.shape[::-1])
    >>> x = AnyRankType("float32")
    >>> at_any_rank("swap", swap, [x], [x]), at_any_rank("negate", lambda t: t, [x], [x])
    (f32[-1,-1], f32[*])
    """
    found, refused = None, None
    for ranks in _ranks(len(unranked)):
        left = iter(ranks)
        try:
            made = infer(*(_ranked(t, left) for t in types))
        except ProgramError as e:
            refused = e
        else:
            found = made if found is None else _common(found, made)
    if found is None:
        raise ProgramError(f"{what} takes no {unranked[0]} ({refused}); {unranked[0].next_step}")
    return found


def _ranks(operands: int) -> Iterator[tuple[int, ...]]:
    """Combinations of ranks for several operands; for many operands, one rank for all."""
    if operands <= 3:
        yield from product(range(MOST + 1), repeat=operands)
        return
    for rank in range(MOST + 1):
        yield (rank,) * operands


def _ranked(t: Any, ranks: Iterator[int]) -> Any:
    if t.__class__ is list:
        return [_ranked(one, ranks) for one in t]
    return TensorType(t.dtype, (ANY,) * next(ranks)) if t.__class__ is AnyRankType else t


def _common(a: Any, b: Any) -> Any:
    if isinstance(a, (list, tuple)):
        return type(a)(_common(x, y) for x, y in zip(a, b, strict=True))
    return a if a is None else common_type(a, b)
