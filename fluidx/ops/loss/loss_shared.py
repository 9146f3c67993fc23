"""Helpers for losses: the type rule for operands of equal shape, and the base class of their gradients."""

from __future__ import annotations

from typing import ClassVar

from ...ir import OpDef, ProgramError, TensorType
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


class EachGrad(OpDef):
    """Base of elementwise gradients with respect to the first of several operands of equal shape."""

    # groups of operands in which the gradient is linear, besides the incoming gradient, which is the last operand
    groups: ClassVar[str] = ""

    @classmethod
    def pattern(cls, ins, outs, attrs):
        return f"{', '.join('*' for _ in ins)} -> * | L({len(ins) - 1}) {cls.groups}"

    @staticmethod
    def infer(x, *rest, **attrs):
        return x
