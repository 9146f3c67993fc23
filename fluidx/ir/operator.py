"""One operator of a program: an immutable record of its type, the names it reads and writes, and its attributes."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ProgramError, nearest
from .site import Site


class Role(enum.StrEnum):
    """The section of a program that an operator belongs to; passes key on it, never on a position in a list."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    LR_SCHED = "lr_sched"
    OPTIMIZE = "optimize"
    DIST = "dist"


@dataclass(frozen=True, slots=True)
class BlockRef:
    """An attribute that names a sub-block of the same program by its index."""

    idx: int

    def __repr__(self) -> str:
        return f"block {self.idx}"


def normalize_attr(value: Any) -> Any:
    """An attribute as it is stored: a bool, int, float, str, None, BlockRef, or a tuple of those."""
    if isinstance(value, float) and value != value:
        return math.nan  # the one object, so that equal attributes compare equal
    if isinstance(value, (bool, int, float, str, BlockRef)) or value is None:
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, (list, tuple)):
        return tuple(normalize_attr(v) for v in value)
    if isinstance(value, np.ndarray):
        return normalize_attr(value.tolist())
    if isinstance(value, np.generic):
        return normalize_attr(value.item())
    raise ProgramError(f"an attribute must be a bool, int, float, str, block or a list of those, not {type(value).__name__}: {value!r}")


class Frozen(dict):
    """A dict that is filled once: operators share theirs, so a change would be seen in others. `{**frozen, key: value}` is a changed copy.

    >>> attrs = Frozen(axis=0)
    >>> {**attrs, "axis": 1}, dict(attrs)
    ({'axis': 1}, {'axis': 0})
    """

    __slots__ = ()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("operators are immutable; op.replace(attrs={**op.attrs, name: value}) gives a changed copy")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple:
        return Frozen, (dict(self),)


_EMPTY = Frozen()


class Operator:
    """An immutable operator. `replace` gives a changed copy.

    `inputs` and `outputs` map slot names to tuples of variable names; `role_var` is the flat `[param, grad, ...]`
    list on the operator that finishes a gradient, as in fluid; `device` ("gpu:1") is the hint that `device_guard` wrote.

    >>> op = Operator("relu", {"X": ("x",)}, {"Out": ("y",)})
    >>> op.input("X"), op.output_arg_names, op.replace(role=Role.BACKWARD).role.value
    (('x',), ('y',), 'backward')
    """

    __slots__ = ("type", "inputs", "outputs", "attrs", "role", "role_var", "site", "device", "_reads", "_writes")
    type: str
    inputs: Mapping[str, tuple[str, ...]]
    outputs: Mapping[str, tuple[str, ...]]
    attrs: Mapping[str, Any]
    role: Role
    role_var: tuple[str, ...]
    site: Site | None
    device: str
    _reads: tuple[str, ...]  # input_arg_names and output_arg_names, once they were asked for
    _writes: tuple[str, ...]

    def __init__(
        self,
        type: str,
        inputs: Mapping[str, tuple[str, ...]],
        outputs: Mapping[str, tuple[str, ...]],
        attrs: Mapping[str, Any] | None = None,
        role: Role = Role.FORWARD,
        role_var: tuple[str, ...] = (),
        site: Site | None = None,
        device: str = "",
    ):
        # slots' own setters: operators are made by the ten thousand, and object.__setattr__ looks each name up
        _set_type(self, type)
        _set_inputs(self, inputs if isinstance(inputs, Frozen) else Frozen(inputs))
        _set_outputs(self, outputs if isinstance(outputs, Frozen) else Frozen(outputs))
        _set_attrs(self, attrs if isinstance(attrs, Frozen) else Frozen(attrs) if attrs else _EMPTY)
        _set_role(self, role)
        _set_role_var(self, role_var)
        _set_site(self, site)
        _set_device(self, device)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"operators are immutable; use op.replace({name}=...) in a pass that makes a new program")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("operators are immutable")

    def __reduce__(self) -> tuple:
        return Operator, (self.type, self.inputs, self.outputs, self.attrs, self.role, self.role_var, self.site, self.device)

    def replace(self, **changes: Any) -> Operator:
        """A copy with the given fields changed."""
        fields: dict[str, Any] = {
            "type": self.type, "inputs": self.inputs, "outputs": self.outputs, "attrs": self.attrs,
            "role": self.role, "role_var": self.role_var, "site": self.site, "device": self.device,
        }  # fmt: skip
        fields.update(changes)
        return Operator(**fields)

    def renamed(self, names: Mapping[str, str], outputs: bool = False) -> Operator:
        """A copy whose inputs (and outputs, if asked) are renamed; itself when nothing changes."""
        ins = rename_slots(self.inputs, names)
        outs = rename_slots(self.outputs, names) if outputs else self.outputs
        return self if ins is self.inputs and outs is self.outputs else self.replace(inputs=ins, outputs=outs)

    # -- fluid's accessors ------------------------------------------------------------------------------------------

    def input(self, slot: str) -> tuple[str, ...]:
        return self.inputs.get(slot, ())

    def output(self, slot: str) -> tuple[str, ...]:
        return self.outputs.get(slot, ())

    @property
    def input_names(self) -> list[str]:
        return list(self.inputs)

    @property
    def output_names(self) -> list[str]:
        return list(self.outputs)

    @property
    def input_arg_names(self) -> tuple[str, ...]:
        try:
            return self._reads
        except AttributeError:
            names = _flat(self.inputs)
            object.__setattr__(self, "_reads", names)
            return names

    @property
    def output_arg_names(self) -> tuple[str, ...]:
        try:
            return self._writes
        except AttributeError:
            names = _flat(self.outputs)
            object.__setattr__(self, "_writes", names)
            return names

    @property
    def attr_names(self) -> list[str]:
        return sorted(self.attrs)

    def attr(self, name: str) -> Any:
        if name not in self.attrs:
            raise ProgramError(f"operator {self.type} has no attribute {name!r}; {nearest(name, self.attrs, 'it has')}")
        return self.attrs[name]

    def has_attr(self, name: str) -> bool:
        return name in self.attrs

    def attr_type(self, name: str) -> Any:
        return self.attr(name).__class__

    def all_attrs(self) -> dict[str, Any]:
        return dict(self.attrs)

    def sub_blocks(self) -> list[int]:
        """Indices of the blocks that this operator runs."""
        return [v.idx for v in self.attrs.values() if isinstance(v, BlockRef)]

    # -- equality leaves out the call site: two programs are equal when they say the same --------------------------------

    def key(self) -> tuple:
        return (
            self.type,
            tuple(self.inputs.items()),
            tuple(self.outputs.items()),
            tuple(sorted(self.attrs.items(), key=lambda kv: kv[0])),
            self.role,
            self.role_var,
            self.device,
        )

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Operator) and self.key() == other.key())

    def __hash__(self) -> int:
        return hash(self.key())

    def __repr__(self) -> str:
        return f"<Operator {self.type}: {', '.join(self.input_arg_names)} -> {', '.join(self.output_arg_names)}>"

    def to_string(self, throw_on_error: bool = True) -> str:
        """The operator as one line of program text."""
        from .text import show_op

        return show_op(self)

    __str__ = to_string


_set_type, _set_inputs, _set_outputs, _set_attrs, _set_role, _set_role_var, _set_site, _set_device = (
    Operator.__dict__[name].__set__ for name in Operator.__slots__[:8]
)


def _flat(slots: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    if len(slots) == 1:
        (names,) = slots.values()
        return names
    return tuple(itertools.chain.from_iterable(slots.values()))


def rename_slots(slots: Mapping[str, tuple[str, ...]], names: Mapping[str, str]) -> Mapping[str, tuple[str, ...]]:
    """`slots` with variable names replaced; the same object when none is."""
    for args in slots.values():
        for a in args:
            if a in names:
                return {slot: tuple(names.get(n, n) for n in old) for slot, old in slots.items()}
    return slots
