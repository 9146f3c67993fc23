"""What the losses share: the type and the placement of operands that are alike, and the base of their gradients."""

from __future__ import annotations

from typing import Any

from ...ir import OpDef, ProgramError, Shard, TensorType
from ...ir.placement import PlaceError, by_group
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


@by_group
def place_alike(group, *items):
    """Inputs of one shape, all split alike."""
    entries = {a.on(group) for a in items}
    if len(entries) == 1 and isinstance(entry := entries.pop(), Shard):
        return entry
    listed = ", ".join(f"%{a.name} is {a.on(group) or 'replicate'}" for a in items)
    raise PlaceError(f"the loss works element by element and needs its inputs split alike over {group}: {listed}")


def place_each(x: Any, y: Any, **attrs: Any) -> Any:
    return place_alike(x, y)


class EachGrad(OpDef):
    """Base of the gradients by the first of some operands that are alike, element by element."""

    elementwise = True
    place = staticmethod(lambda *args, **attrs: place_alike(*args))

    @staticmethod
    def infer(x, *rest, **attrs):
        return x
