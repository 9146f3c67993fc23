"""Operators made from the declaration of their op: slots by position, and defaults for the attributes that are not given.

Passes use it for large numbers of operators whose results are declared already. A Builder also infers types and declares results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .opdef import Slot, opdef
from .operator import Frozen, Operator, Role
from .source_location import Site

_NONE = Frozen()


def filled(op_type: str, attrs: Mapping[str, Any]) -> Frozen:
    """The attributes of an operator: the given ones, which must have the declared types, and the defaults of the others."""
    return Frozen({**opdef(op_type).defaults, **attrs})


def make_op(
    op_type: str,
    xs: Sequence[str] = (),
    outs: Sequence[str] = (),
    attrs: Frozen = _NONE,
    site: Site | None = None,
    role: Role = Role.DIST,
    role_var: tuple[str, ...] = (),
) -> Operator:
    """An operator that reads `xs` and writes `outs`, in the order of the slots; a "X*" slot takes all names that are left.

    `attrs` are complete, as `filled` gives them. Nothing is checked.

    >>> print(make_op("unpack", ["x"], ["a", "b"], filled("unpack", {"shapes": ((2,), (3,))})))
    [%a, %b] = unpack([%x]) {shapes=[[2], [3]]}
    """
    definition = opdef(op_type)
    ins, made = _by_slot(definition.in_slots, xs), _by_slot(definition.out_slots, outs)
    return Operator(op_type, ins, made, attrs, role, role_var, site)


def _by_slot(slots: Sequence[Slot], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    left = tuple(names)
    for slot in slots:
        if left:
            found[slot.name], left = (left, ()) if slot.many else (left[:1], left[1:])
    return found
