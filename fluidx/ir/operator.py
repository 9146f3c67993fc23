"""One operator of a program: an immutable record of its type, the names it reads and writes, and its attributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from .attributes import EMPTY, BlockRef, Frozen, attrs_key, frozen
from .errors import ProgramError, nearest
from .roles import Role
from .source_location import Site
from .text import show_op


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
        ins, outs = frozen(inputs), frozen(outputs)
        reads, writes = sum(ins.values(), ()), sum(outs.values(), ())
        return tuple.__new__(cls, (type, ins, outs, frozen(attrs), role, role_var, site, device, reads, writes))

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
        # not through the constructor, which would compute the names that are read and written again
        old_type, ins, outs, old_attrs, old_role, old_role_var, old_site, old_device, reads, writes = self
        if inputs is not None and inputs is not ins:
            ins = frozen(inputs)
            reads = sum(ins.values(), ())
        if outputs is not None and outputs is not outs:
            outs = frozen(outputs)
            writes = sum(outs.values(), ())
        fields = (
            old_type if type is None else type,
            ins,
            outs,
            old_attrs if attrs is None else frozen(attrs),
            old_role if role is None else role,
            old_role_var if role_var is None else role_var,
            old_site if site is None else site,
            old_device if device is None else device,
            reads,
            writes,
        )
        return tuple.__new__(Operator, fields)

    def _replace(self, **changes: Any) -> Operator:  # the method of tuples would not update the names that are read and written
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

    def __ne__(self, other: object) -> bool:  # tuples define it, so __eq__ is not enough
        return not self == other

    def __hash__(self) -> int:
        return hash(self.key())

    def __repr__(self) -> str:
        return f"<Operator {self.type}: {', '.join(self.input_arg_names)} -> {', '.join(self.output_arg_names)}>"

    def to_string(self, throw_on_error: bool = True) -> str:
        """The operator as one line of program text."""
        return show_op(self)

    __str__ = to_string


def unary(type: str, x: str, out: str, attrs: Frozen = EMPTY, site: Site | None = None) -> Operator:
    """A communication operator that computes `out` from `x`, made without a look at the declared slots.

    >>> str(unary("assign", "x", "y")) == str(Operator("assign", {"X": ("x",)}, {"Out": ("y",)}, role=Role.DIST))
    True
    """
    reads, writes = (x,), (out,)
    fields = (type, Frozen(X=reads), Frozen(Out=writes), attrs or EMPTY, Role.DIST, (), site, "", reads, writes)
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
