"""What the losses share: the type and the placement of operands that are alike, and the base of their gradients."""

from __future__ import annotations

from ...ir import OpDef, ProgramError, TensorType
from ..shared.types import meet, need_float, same_dtype


def alike(op: str, **types: TensorType) -> TensorType:
    """The common type of operands of one shape and dtype; an open size takes the other's."""
    same_dtype(op, **types)
    (first, x), *rest = types.items()
    need_float(op, first, x)
    for slot, t in rest:
        if t.ndim != x.ndim or not all(map(meet, t.shape, x.shape)):
            raise ProgramError(f"op {op}: {slot} must have the shape of {first} {x}, got {t}")
        x = x.with_shape(max(a, b) for a, b in zip(x.shape, t.shape))
    return x


class EachGrad(OpDef):
    """Base of the gradients by the first of some operands that are alike, element by element."""

    groups = ""  # linear ones beside the incoming gradient, which comes last

    @classmethod
    def pattern(cls, ins, outs, attrs):
        return f"{', '.join('*' for _ in ins)} -> * | L({len(ins) - 1}) {cls.groups}"

    @staticmethod
    def infer(x, *rest, **attrs):
        return x
