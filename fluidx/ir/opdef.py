"""The single declaration of an operator type: slots, attributes, type rule, access pattern, gradient, kernel, samples, docs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from . import errors
from .attributes import BlockRef, Frozen, coerce, is_exact, stored
from .dtypes import TINY
from .errors import ProgramError, nearest
from .op_facets import FACET_OF, FACETS
from .op_fields import Effect, OpFields, Required, Sample, Slot
from .pattern import Pattern, Types, check_exceptions, parse_pattern
from .types import TensorType
from .unknown_rank import at_any_rank
from .valuetypes import AnyRankType, kind_of

if TYPE_CHECKING:
    from .operator import Operator


OPS: dict[str, type[OpDef]] = {}
_MOST = 1024  # number of sets of attributes that an op caches
_NO_NUMBERS = frozenset({*TINY, "string"})


class OpDef(OpFields):
    """Base of every op declaration. A subclass with a `name` registers itself; OpFields lists what it may declare."""

    in_slots: ClassVar[tuple[Slot, ...]] = ()
    out_slots: ClassVar[tuple[Slot, ...]] = ()
    slot_of: ClassVar[Mapping[str, Slot]] = {}  # by name, inputs before outputs
    defaults: ClassVar[Frozen] = Frozen()  # of the attributes, in order; None for a required one
    required: ClassVar[tuple[str, ...]] = ()
    attr_types: ClassVar[Mapping[str, Any]] = {}
    many_ins: ClassVar[bool] = False  # does a slot take a list?
    optional_ins: ClassVar[bool] = False  # may a slot be absent?
    optional_outs: ClassVar[bool] = False
    takes_out: ClassVar[bool] = False
    takes_ctx: ClassVar[bool] = False
    takes_part: ClassVar[bool] = False  # the kernel has a parameter `part`
    bind_takes_part: ClassVar[bool] = False
    native_takes_part: ClassVar[bool] = False
    native_takes_ctx: ClassVar[bool] = False
    _completed: ClassVar[dict[tuple[Any, ...], Frozen]] = {}  # attributes with their defaults, by the given attributes

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._complete_facets()
        cls.defaults = Frozen({name: None if isinstance(d, Required) else d for name, d in cls.attrs.items()})
        cls.required = tuple(name for name, d in cls.attrs.items() if isinstance(d, Required))
        cls._completed = {}
        cls.attr_types = {name: d.type if isinstance(d, Required) else type(d) for name, d in cls.attrs.items()}
        if "name" not in cls.__dict__ or not cls.name:
            return
        if cls.name in OPS and OPS[cls.name].__qualname__ != cls.__qualname__:
            raise TypeError(f"op {cls.name!r} is declared twice: {OPS[cls.name].__module__} and {cls.__module__}")
        for attr, default in cls.attrs.items():
            if isinstance(default, Required) and default.type is BlockRef and attr not in cls.control.bodies:
                raise TypeError(f"op {cls.name!r}: attribute {attr!r} is a block, so Control(bodies=...) must declare its results")
        if isinstance(cls.pattern, str):
            try:
                check_exceptions(cls.pattern)
            except ProgramError as e:
                raise TypeError(f"op {cls.name!r}: {e}") from None
        cls.in_slots = tuple(Slot.of(s) for s in cls.inputs)
        cls.out_slots = tuple(Slot.of(s) for s in cls.outputs)
        cls.slot_of = {s.name: s for s in (*cls.out_slots, *cls.in_slots)}
        cls.many_ins = any(s.many for s in cls.in_slots)
        cls.optional_ins = any(s.optional for s in cls.in_slots)
        cls.optional_outs = any(s.optional for s in cls.out_slots)
        if cls.kernel is not None:
            params = _parameters(cls.kernel)
            cls.takes_out, cls.takes_ctx, cls.takes_part = "out" in params, "ctx" in params, "part" in params
        bind, calls = cls.native.bind, cls.native.calls
        cls.bind_takes_part = bind is not None and "part" in _parameters(bind)
        told = _parameters(calls) if calls is not None else ()
        cls.native_takes_part, cls.native_takes_ctx = "part" in told, "ctx" in told
        OPS[cls.name] = cls

    @classmethod
    def _complete_facets(cls) -> None:
        """Facets with what they inherit; TypeError for a member that is no field, unless it is private or annotated, here or in a base."""
        label = f"op {cls.__dict__.get('name') or cls.__name__!r}"
        for kind in FACETS:
            inherited, said = getattr(super(cls, cls), kind.word), cls.__dict__.get(kind.word)
            if said is not None and not isinstance(said, kind):
                raise TypeError(f"{label}: {kind.word} must be {kind.__name__}(...), found {said!r}")
            if said is not None or inherited.depends_on_class:
                setattr(cls, kind.word, (said or kind()).over(inherited, cls, label))
        for name in cls.__dict__:
            if name.startswith("_") or hasattr(OpDef, name) or any(name in inspect.get_annotations(base) for base in cls.__mro__):
                continue
            if name in FACET_OF:
                of = FACET_OF[name]
                raise TypeError(f"{label}: {name} is a member of {of.__name__}; write {of.word} = {of.__name__}({name}=...)")
            fields = [n for n in dir(OpFields) if not n.startswith("_")]
            raise TypeError(f"{label} has no field {name!r}; {nearest(name, [*fields, *FACET_OF], 'it has')}")

    @staticmethod
    def infer(*types: Any, **attrs: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def samples() -> Iterator[Sample]:
        return iter(())

    @classmethod
    def typed(cls, *types: Any, **attrs: Any) -> Any:
        """The output types that `infer` returns; ProgramError for types that the op does not take."""
        unranked = []
        for k, t in enumerate(types):
            for one in t if t.__class__ is list else (t,):
                if one is not None and (one.__class__ is not TensorType or one.dtype in _NO_NUMBERS):
                    cls._check_taken(cls.in_slots[k].name, one)
                    if one.__class__ is AnyRankType and one.kind not in cls.control.beyond_tensors:
                        unranked.append(one)
        if not unranked:
            return cls.infer(*types, **attrs)
        return at_any_rank(f"op {cls.name}", lambda *ranked: cls.infer(*ranked, **attrs), types, unranked)

    @classmethod
    def _check_taken(cls, slot: str, t: Any) -> None:
        if t.__class__ is TensorType and t.dtype in TINY:
            if not cls.autocast.takes_low_bit:
                raise ProgramError(f"op {cls.name} does not compute in {t.dtype}, found {t}; cast it to float32 or int32 first")
            return
        kind = kind_of(t)
        if kind in cls.control.beyond_tensors or t.__class__ is AnyRankType and t.dtype not in _NO_NUMBERS:
            return
        if kind == "string":
            raise ProgramError(f"op {cls.name} takes no strings, found {t} as {slot}; make numbers of them, with string_equal")
        raise ProgramError(f"op {cls.name} takes no {kind}, found {t} as {slot}; {t.next_step}")

    # -- helpers over the declaration ------------------------------------------------------------------------------------

    @classmethod
    def arrange(
        cls, slots: Mapping[str, Sequence[Any]], which: Sequence[Slot] | None = None, value: Callable[[Any], Any] = lambda found: found
    ) -> list[Any]:
        """The entries of a slot mapping, converted by `value`, as positional arguments: one value, None, or a list per slot."""
        out: list[Any] = []
        for name, _, many in cls.in_slots if which is None else which:
            found = slots.get(name, ())
            if many:
                out.append([value(one) for one in found])
            else:
                out.append(value(found[0]) if found else None)
        return out

    @classmethod
    def operands(cls, op: Operator, read: Callable[[str], Any], written: Callable[[str], Any]) -> tuple[list[Any], list[Any]]:
        """`read` of the names that an operator reads, arranged as arguments, and `written` of the names of its results."""
        return cls.arrange(op.inputs, cls.in_slots, read), cls.arrange(op.outputs, cls.out_slots, written)

    @classmethod
    def check_slots(cls, op: Operator) -> None:
        """Raise ProgramError unless the operator has the declared slots, with the right number of names."""
        for given, declared, kind in ((op.inputs, cls.in_slots, "input"), (op.outputs, cls.out_slots, "output")):
            absent = len(declared) - len(given)
            for name, optional, many in declared:
                names = given.get(name)
                if not names:
                    absent -= 1
                    if not (optional or many and kind == "input"):
                        absent = -1
                        break
                elif len(names) > 1 and not many:
                    raise ProgramError(f"op {cls.name} takes one variable as {kind} {name!r}, got {len(names)}")
            if absent:
                cls._slots_differ(given, declared, kind)

    @classmethod
    def _slots_differ(cls, given: Mapping[str, Any], declared: Sequence[Slot], kind: str) -> None:
        known = [s.name for s in declared]
        for slot in given:
            if slot not in known:
                raise ProgramError(f"op {cls.name} has no {kind} {slot!r}; {nearest(slot, known, 'it has')}")
        for s in declared:
            if not given.get(s.name) and not s.optional and not (s.many and kind == "input"):
                raise ProgramError(f"op {cls.name} needs {kind} {s.name!r}, which was not given")

    @classmethod
    def complete_attrs(cls, given: Mapping[str, Any]) -> Frozen:
        """Attributes with defaults filled in and checked against the declared types, in a record that operators share."""
        # an op without inputs mostly has a seed or values of its own: a shared record would not be used again
        types, values, exact = cls.attr_types, [], bool(cls.in_slots)
        for name, value in given.items():
            want = types.get(name)
            if want is None:
                raise ProgramError(f"op {cls.name} has no attribute {name!r}; {nearest(name, cls.attrs, 'it has')}")
            if value.__class__ is not want or not is_exact(value):
                value = coerce(cls.name, name, stored(value, want), want)
                exact = exact and is_exact(value)
            values.append(value)
        # one record for equal attributes: Program.infer uses it as a key
        key = (*given, *map(type, values), *values)
        full = cls._completed.get(key) if exact else None
        if full is None:
            for name in cls.required:
                if name not in given:
                    wanted = cls.attr_types[name].__name__
                    raise ProgramError(f"op {cls.name} needs attribute {name!r} ({wanted}), which was not given")
            full = Frozen({**cls.defaults, **dict(zip(given, values, strict=True))})
            if exact:
                if len(cls._completed) >= _MOST:
                    cls._completed.clear()
                cls._completed[key] = full
        return full

    @classmethod
    def infer_outputs(cls, types: Mapping[str, Sequence[TensorType]], attrs: Mapping[str, Any]) -> list[Any]:
        """The inferred output types, one entry (or a list) per declared output slot."""
        result = cls.typed(*cls.arrange(types), **attrs)
        return [result] if len(cls.out_slots) == 1 else list(result)

    @classmethod
    def pattern_of(cls, ins: Types, outs: Types, attrs: Mapping[str, Any]) -> Pattern:
        """The access pattern for flat lists of operand and output types (from `flat_slots`), None for an absent one."""
        said = cls.pattern
        if callable(said):
            said = said(ins, outs, attrs)
        text, sizes = said if isinstance(said, tuple) else (said, {})
        if text is None:
            dots = [", ".join(" ".join("." * t.ndim) if t is not None else "." for t in types) for types in (ins, outs)]
            text = f"{dots[0]} -> {dots[1]}"
        try:
            return parse_pattern(text, ins, outs, sizes)
        except ProgramError as e:
            raise ProgramError(f"op {cls.name}: {e}") from None

    @classmethod
    def control_operands(cls, op: Operator) -> list[str]:
        """The operands in single slots, not in lists. For an operator with sub-blocks they select the sub-block and give the number of the
        iteration.
        """
        return [n for slot in cls.in_slots if not slot.many for n in op.inputs.get(slot.name, ())]

    @classmethod
    def flat_slots(cls, slots: Mapping[str, Sequence[str]], which: Sequence[Slot]) -> list[str | None]:
        """The names of a slot mapping one by one in slot order, None for an absent variable of a single slot."""
        out: list[str | None] = []
        for slot in which:
            names = slots.get(slot.name, ())
            out += names if slot.many or names else (None,)
        return out

    @classmethod
    def widens(cls, device: str, outs: Sequence[TensorType | None]) -> bool:
        """Do the kernels for a device get float32 instead of 16-bit floats?"""
        said = cls.autocast.takes_16_bit
        if said is None:
            return not (cls.moves() or cls.control.bodies) and cls.effect in (Effect.PURE, Effect.RANDOM)
        return not (said(device, outs) if callable(said) else said)

    @classmethod
    def moves(cls) -> bool:
        """Does the op only move elements?"""
        return cls.arithmetic.flops == 0 or cls.storage.view is not None

    @classmethod
    def gives_way_to_parts(cls) -> bool:
        """Do its parts take its place if ranks cut an axis that it needs whole? One that runs at the speed of products keeps its kernel."""
        return cls.decompose is not None and not cls.arithmetic.sums_products

    @classmethod
    def in_mixed_precision(cls) -> str:
        """The dtype in mixed precision: "half", "float32" or "any"."""
        return cls.autocast.mixed or ("any" if cls.moves() else "float32")

    @classmethod
    def view_of(cls, x: Any, ctx: Any, attrs: Mapping[str, Any]) -> Any:
        """The output as a view of the first input on the rank of `ctx`; None if there is no such view."""
        if cls.storage.view_ctx is not None:
            return cls.storage.view_ctx(x, ctx, **attrs)
        return None if cls.storage.view is None else cls.storage.view(x, **attrs)

    @classmethod
    def views_of(cls, x: Any, ctx: Any, attrs: Mapping[str, Any]) -> list[Any] | None:
        """The same as a list, one view for each output."""
        made = cls.view_of(x, ctx, attrs)
        return made if made is None or isinstance(made, list) else [made]

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(cls) or "").split("\n", 1)[0]


def _parameters(function: Callable[..., Any]) -> Collection[str]:
    """The names of a function's parameters. `inspect.signature` takes a tenth of the time in which fluidx is imported.

    >>> _parameters(lambda xp, x, *, out: None)
    ('xp', 'x', 'out')
    """
    code = None if hasattr(function, "__wrapped__") else getattr(function, "__code__", None)
    return inspect.signature(function).parameters if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def instead_of(name: str) -> str:
    """A hint for an unknown op name: for a name of fluid the entry of the table of its names, otherwise the nearest name."""
    return (errors.fluid_op and errors.fluid_op(name)) or nearest(name, OPS, "there are")


def opdef(name: str) -> type[OpDef]:
    """The declaration of an op type, or ProgramError with the nearest name."""
    try:
        return OPS[name]
    except KeyError:
        raise ProgramError(f"there is no op {name!r}; {instead_of(name)}") from None


def all_ops() -> Iterable[type[OpDef]]:
    return (OPS[name] for name in sorted(OPS))
