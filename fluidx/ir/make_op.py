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
    definition, reads, writes = opdef(op_type), tuple(xs), tuple(outs)
    ins, made = _by_slot(definition.in_slots, reads), _by_slot(definition.out_slots, writes)
    # not through the constructor, which would work out once more what is read and written
    return tuple.__new__(Operator, (op_type, ins, made, attrs, role, role_var, site, "", reads, writes))


def op_by_slots(op_type: str, ins: Mapping[str, tuple[str, ...]], outs: Mapping[str, tuple[str, ...]], attrs: Frozen) -> Operator:
    """An operator with these names by slot.

    >>> print(op_by_slots("layer_norm", {"X": ("x",), "Bias": ("b",)}, {"Y": ("y",)}, filled("layer_norm", {})))
    %y, _, _ = layer_norm(%x, _, %b)
    """
    return Operator(op_type, ins, outs, attrs)


def _by_slot(slots: Sequence[Slot], names: tuple[str, ...]) -> Frozen:
    if not names:
        return _NONE
    name, _, many = slots[0]
    if many or len(names) == 1:
        return Frozen({name: names})
    found: dict[str, tuple[str, ...]] = {}
    for name, _, many in slots:
        if names:
            found[name], names = (names, ()) if many else (names[:1], names[1:])
    return Frozen(found)
