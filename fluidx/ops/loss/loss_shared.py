"""The type rule of losses whose operands have one shape."""

from __future__ import annotations

from ...ir import ProgramError, TensorType
from ..shared.types import meet, need_float, same_dtype


def elementwise_infer(op: str, **types: TensorType) -> TensorType:
    """The common type of operands of one shape and dtype; an open size takes the size of the other operand."""
    same_dtype(op, **types)
    (first, x), *rest = types.items()
    need_float(op, first, x)
    for slot, t in rest:
        if t.ndim != x.ndim or not all(map(meet, t.shape, x.shape)):
            raise ProgramError(f"op {op}: {slot} must have the shape of {first} {x}, got {t}")
        x = x.with_shape(max(a, b) for a, b in zip(x.shape, t.shape))
    return x

