"""One operator of a program: an immutable record of its type, the names it reads and writes, and its attributes."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from .constants import Array
from .errors import ProgramError, nearest
from .source_location import Site


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
    """An attribute as it is stored: a bool, int, float, str, None, BlockRef, Array, or a tuple of those.

    >>> normalize_attr([np.float64(0.5), np.int32(2)])
    (0.5, 2)
    """
    if isinstance(value, (np.ndarray, np.generic)):  # before the builtins: NumPy's float64 is a float and writes itself otherwise
        return normalize_attr(value.tolist())
    if isinstance(value, enum.Enum):
        return normalize_attr(value.value)
    if isinstance(value, float) and value != value:
        return math.nan  # the one object, so that equal attributes compare equal
    if value is None or isinstance(value, (BlockRef, Array)):
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (list, tuple)):
        return tuple(normalize_attr(v) for v in value)
    raise ProgramError(f"an attribute must be a bool, number, str, block, Array or a list of those, not {type(value).__name__}: {value!r}")


def attrs_key(attrs: Mapping[str, Any]) -> str:
    """Attributes as a key: what they write. As values, Python takes 1, 1.0 and True for one key, and 0.0 and -0.0 too.

    >>> attrs_key({"axis": 1}) == attrs_key({"axis": True})
    False
    """
    return repr(attrs)


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


def _frozen(given: Mapping[str, Any] | None) -> Frozen:
    return given if given.__class__ is Frozen else Frozen(given) if given else _EMPTY


class _Fields(NamedTuple):
    type: str
    inputs: Frozen
    outputs: Frozen
    attrs: Frozen
    role: Role
    role_var: tuple[str, ...]
    site: Site | None
    device: str
    input_arg_names: tuple[str, ...]
    output_arg_names: tuple[str, ...]


class Operator(_Fields):
    """An immutable operator. `replace` gives a changed copy.

    `inputs` and `outputs` map slot names to tuples of variable names; `role_var` is the flat `[param, grad, ...]`
    list on the operator that finishes a gradient, as in fluid; `device` ("gpu:1") is the hint that `device_guard` wrote.

    >>> op = Operator("relu", {"X": ("x",)}, {"Out": ("y",)})
    >>> op.input("X"), op.output_arg_names, op.replace(role=Role.BACKWARD).role.value
    (('x',), ('y',), 'backward')
    """

    __slots__ = ()

    def __new__(
        cls,
        type: str,
        inputs: Mapping[str, tuple[str, ...]],
        outputs: Mapping[str, tuple[str, ...]],
        attrs: Mapping[str, Any] | None = None,
        role: Role = Role.FORWARD,
        role_var: tuple[str, ...] = (),
        site: Site | None = None,
        device: str = "",
    ) -> Operator:
        ins, outs = _frozen(inputs), _frozen(outputs)
        reads, writes = sum(ins.values(), ()), sum(outs.values(), ())
        return tuple.__new__(cls, (type, ins, outs, _frozen(attrs), role, role_var, site, device, reads, writes))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"operators are immutable; use op.replace({name}=...) in a pass that makes a new program")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("operators are immutable")

    def __reduce__(self) -> tuple:
        return Operator, tuple(self)[:8]

    def replace(
        self,
        *,
        type: str | None = None,
        inputs: Mapping[str, tuple[str, ...]] | None = None,
        outputs: Mapping[str, tuple[str, ...]] | None = None,
        attrs: Mapping[str, Any] | None = None,
        role: Role | None = None,
        role_var: tuple[str, ...] | None = None,
        site: Site | None = None,
        device: str | None = None,
    ) -> Operator:
        """A copy with the given fields changed; None keeps one."""
        # not through the constructor, which would work out once more what is read and written
        old_type, ins, outs, old_attrs, old_role, old_role_var, old_site, old_device, reads, writes = self
        if inputs is not None and inputs is not ins:
            ins = _frozen(inputs)
            reads = sum(ins.values(), ())
        if outputs is not None and outputs is not outs:
            outs = _frozen(outputs)
            writes = sum(outs.values(), ())
        fields = (
            old_type if type is None else type,
            ins,
            outs,
            old_attrs if attrs is None else _frozen(attrs),
            old_role if role is None else role,
            old_role_var if role_var is None else role_var,
            old_site if site is None else site,
            old_device if device is None else device,
            reads,
            writes,
        )
        return tuple.__new__(Operator, fields)

    def _replace(self, **changes: Any) -> Operator:  # a tuple's own would leave the names that are read and written as they were
        return self.replace(**changes)

    def with_slots(self, inputs: Mapping[str, tuple[str, ...]], outputs: Mapping[str, tuple[str, ...]]) -> Operator:
        """A copy that reads and writes other variables."""
        type, _, _, attrs, role, role_var, site, device, _, _ = self
        return Operator(type, inputs, outputs, attrs, role, role_var, site, device)

    def renamed(self, names: Mapping[str, str], outputs: bool = False) -> Operator:
        """A copy whose inputs (and outputs, if asked) are renamed; itself when nothing changes."""
        ins = rename_slots(self.inputs, names)
        outs = rename_slots(self.outputs, names) if outputs else self.outputs
        return self if ins is self.inputs and outs is self.outputs else self.with_slots(ins, outs)

    # -- fluid's accessors ------------------------------------------------------------------------------------------

    def input(self, slot: str) -> tuple[str, ...]:
        """The names in an input slot."""
        return self.inputs.get(slot, ())

    def output(self, slot: str) -> tuple[str, ...]:
        """The names in an output slot."""
        return self.outputs.get(slot, ())

    @property
    def input_names(self) -> list[str]:
        """The input slots in use."""
        return list(self.inputs)

    @property
    def output_names(self) -> list[str]:
        """The output slots in use."""
        return list(self.outputs)

    @property
    def attr_names(self) -> list[str]:
        """The names of the attributes, sorted."""
        return sorted(self.attrs)

    def attr(self, name: str) -> Any:
        """The value of an attribute."""
        if name not in self.attrs:
            raise ProgramError(f"operator {self.type} has no attribute {name!r}; {nearest(name, self.attrs, 'it has')}")
        return self.attrs[name]

    def has_attr(self, name: str) -> bool:
        """Does it have an attribute of that name?"""
        return name in self.attrs

    def attr_type(self, name: str) -> Any:
        """The Python type of an attribute."""
        return self.attr(name).__class__

    def all_attrs(self) -> dict[str, Any]:
        """The attributes by name."""
        return dict(self.attrs)

    def sub_blocks(self) -> list[int]:
        """Indices of the blocks that this operator runs."""
        return [v.idx for v in self.attrs.values() if v.__class__ is BlockRef]

    # -- equality leaves out the call site: two programs are equal when they say the same --------------------------------

    def key(self) -> tuple:
        return (
            self.type,
            tuple(self.inputs.items()),
            tuple(self.outputs.items()),
            attrs_key(dict(sorted(self.attrs.items()))),
            self.role,
            self.role_var,
            self.device,
        )

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Operator) and self.key() == other.key())

    def __ne__(self, other: object) -> bool:  # a tuple has one of its own
        return not self == other

    def __hash__(self) -> int:
        return hash(self.key())

    def __repr__(self) -> str:
        return f"<Operator {self.type}: {', '.join(self.input_arg_names)} -> {', '.join(self.output_arg_names)}>"

    def to_string(self, throw_on_error: bool = True) -> str:
        """The operator as one line of program text."""
        from .text import show_op

        return show_op(self)

    __str__ = to_string


def unary(type: str, x: str, out: str, attrs: Frozen = _EMPTY, site: Site | None = None) -> Operator:
    """An operator of a transpiler that makes `out` of `x`: the shape of nearly all communication, made without looking at slots.

    >>> str(unary("assign", "x", "y")) == str(Operator("assign", {"X": ("x",)}, {"Out": ("y",)}, role=Role.DIST))
    True
    """
    reads, writes = (x,), (out,)
    fields = (type, Frozen(X=reads), Frozen(Out=writes), attrs or _EMPTY, Role.DIST, (), site, "", reads, writes)
    return tuple.__new__(Operator, fields)


_TYPE = itemgetter(0)


def op_types(ops: Iterable[Operator]) -> set[str]:
    """The types of the operators among `ops`.

    >>> op_types([unary("relu", "x", "y"), unary("relu", "y", "z")])
    {'relu'}
    """
    return set(map(_TYPE, ops))


def rename_slots(slots: Mapping[str, tuple[str, ...]], names: Mapping[str, str]) -> Mapping[str, tuple[str, ...]]:
    """`slots` with variable names replaced; the same object when none is."""
    for args in slots.values():
        for a in args:
            if a in names:
                return {slot: tuple([names.get(n, n) for n in old]) for slot, old in slots.items()}
    return slots
