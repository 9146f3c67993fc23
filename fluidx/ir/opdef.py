"""The single declaration of an operator type: slots, attributes, type rule, access pattern, gradient, kernel, samples, docs."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from . import errors
from .attributes import BlockRef, Frozen, coerce, is_exact, stored
from .dtypes import TINY
from .errors import ProgramError, nearest
from .pattern import Pattern, Types, check_exceptions, parse_pattern
from .types import TensorType
from .unknown_rank import at_any_rank
from .valuetypes import AnyRankType, kind_of

if TYPE_CHECKING:
    from .operator import Operator


class Effect(enum.Enum):
    """What an operator does beside computing its outputs."""

    PURE = "pure"  # a function of its inputs: may be dropped, shared or moved
    RANDOM = "random"  # also of its seed and the step count
    HOST = "host"  # prints or otherwise touches the host: keeps its place
    COLLECTIVE = "collective"  # every rank of a group takes part
    P2P = "p2p"  # this rank and one peer take part


class Required:
    """Default of an attribute that has none: `attrs = {"shape": Required(tuple)}`. A tuple holds ints, a tuple[str, ...] strings;
    an Array may also be a tuple of numbers (constants.py: elements)."""

    def __init__(self, type: Any):
        self.type = type

    def __repr__(self) -> str:
        return f"required {self.type.__name__}"


class Slot(NamedTuple):
    """One input or output of an op. Written "X", "X?" (may be absent) or "X*" (a list)."""

    name: str
    optional: bool = False
    many: bool = False

    @staticmethod
    def of(text: str) -> Slot:
        return Slot(text.rstrip("?*"), text.endswith("?"), text.endswith("*"))


@dataclass(frozen=True)
class Sample:
    """Arguments that an op is tested with: arrays in slot order (None for an absent one, a list for a list), and attributes.

    `grad` names the input slots whose gradient is checked by central differences (None: every float input);
    `tolerance` relaxes that check where the function is stiff; `why` says so.
    """

    args: tuple[Any, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    grad: tuple[str, ...] | None = None
    tolerance: float = 5e-3
    why: str = ""

    @staticmethod
    def of(*args: Any, grad: tuple[str, ...] | None = None, tolerance: float = 5e-3, why: str = "", **attrs: Any) -> Sample:
        return Sample(args, attrs, grad, tolerance, why)


OPS: dict[str, type[OpDef]] = {}
_MOST = 1024  # sets of attributes that an op remembers
_NO_NUMBERS = frozenset({*TINY, "string"})


class OpDef:
    """Base of every op declaration. A subclass with a `name` registers itself.

    infer(*types, **attrs) -> TensorType | tuple      the only type rule; may raise ProgramError
    grad(b, op, g) -> variable(s) in input-slot order   `None` for an input without gradient; no `grad`: not differentiable
    pattern                                           the access pattern, from which placements follow; see ir/pattern.py
    kernel(xp, *arrays, **attrs) -> array(s)          `xp` is numpy or cupy. A kernel that has a parameter `out` writes
                                                      there (one array, or a tuple of them) and returns nothing. One with a parameter
                                                      `ctx` gets the rank's run context (step, rank, comm), one with a
                                                      parameter `part` gets the range of the global value that this rank computes
                                                      (ir/parts.py: Part; None: the whole value)
    view(x, **attrs) -> array                         instead of a kernel: the output as a view of the first input, None if there is no such
                                                      view. For an output slot with many values: a list of views; the op has a kernel too
    view_ctx(x, ctx, **attrs) -> array                a view that also depends on the rank; the op has a kernel too
    bind(ins, outs, attrs, ctx) -> callable           optional, for NumPy arrays: a call without arguments, bound to these arrays; it may
                                                      have a parameter `part`, as a kernel
    native(ins, outs, attrs, dry) -> calls            optional, instead of `bind`: calls of C kernels (fluidx.native), None if they do not
                                                      support these arrays. With `dry` only shapes and strides count: the arrays may
                                                      share memory. It may have parameters `part` and `ctx`, as a kernel
    scratch(ins, outs, attrs) -> types                types of the temporary arrays that `bind` gets as `scratch`, from the types of the
                                                      operands; `native_scratch` is the same for `native`
    native_memory_per_thread                          whether the C kernels need much memory for each thread; a plan adds it up
    """

    name: ClassVar[str] = ""
    inputs: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[str, ...]] = ("Out",)
    attrs: ClassVar[Mapping[str, Any]] = {}
    effect: ClassVar[Effect] = Effect.PURE
    # (input slot, output slot) pairs that may share memory: the kernel reads each element before it writes it
    inplace: ClassVar[tuple[tuple[str, str], ...]] = ()
    # the results depend only on the sizes of the inputs: the gradient treats them as constants
    constant: ClassVar[bool] = False
    # attributes that name a sub-block, each with the attribute that lists the values which the sub-block returns ("" for none)
    bodies: ClassVar[Mapping[str, str]] = {}
    # the name of this op's time in Horovod's timeline
    activity: ClassVar[str] = ""
    # fluid's names of a collective, in the NCCL design and since 1.5; a program text can use them
    fluid_names: ClassVar[tuple[str, str] | None] = None

    # the access pattern: a line (see pattern.py), or a function (ins, outs, attrs) -> line or (line, sizes) over flat lists of types; None:
    # every operand must be whole
    pattern: ClassVar[Any] = None
    # for an op that returns its first operand unchanged and states its placement: (placements of the operands, None for an absent one,
    # **attrs) -> {group: entry, None for replicated}; other groups are left open
    annotation: ClassVar[Callable[..., Any] | None] = None
    # for a collective: (entry of its group, **attrs) -> entry of the result; may raise ProgramError
    move: ClassVar[Callable[..., Any] | None] = None
    # "host" or "device": the op copies its operand from the other memory to this one; all other ops work in one memory (see Var.on_host)
    copies_to: ClassVar[str] = ""
    # "sum", "max" or "min": the op reduces operands of one type into this
    folds: ClassVar[str] = ""
    # for an op whose type rule leaves an axis open although its size follows from the feeds: attrs -> for each open axis of the result, in
    # order, (feed, axis of the feed, multiple of its size)
    open_axes: ClassVar[Callable[..., list[tuple[str, int, int]]] | None] = None
    # for an op whose result sizes depend on values: a word for each output, with one letter for each such axis in order. Equal letters are
    # equal sizes; an axis after the last letter has a size of its own. A plan ends at such an operator: its kernel returns new arrays and
    # gets values on the host, and the next plan is made when the sizes are known (executor/dynamic/segmented_run.py)
    sized_by_values: ClassVar[tuple[str, ...]] = ()
    # for a collective: (number of ranks, type, attrs) -> the bytes that each rank sends on average, as a share of the bytes of the whole
    # value, if nothing is sent twice
    sent: ClassVar[Any] = None
    # for an op with `R` in its pattern: (type, attributes) of the collective that computes it from replica-local values
    replica_collective: ClassVar[tuple[str, Mapping[str, Any]] | None] = None
    # for a collective: (attributes) -> (type, attributes) of the one-device operator that it computes from replica-local values
    replica_op: ClassVar[Any] = None
    # for a collective that an algorithm of sends and receives can carry out, the method of the algorithm: "all_reduce" (partial values to
    # sums on all ranks), "reduce" (partial values to sums on the ranks that own them), "spread" (from owners to all ranks), "exchange"
    # (from each rank to every other) or "adaptive" (replica-local values to their adaptive sum on all ranks); see transpiler/algorithms
    algorithm_method: ClassVar[str] = ""
    # for a collective with owners: (type, number of ranks, attrs) -> the bounds of the flat range that each rank owns, None without owners
    blocks: ClassVar[Callable[..., Any] | None] = None
    # for a collective whose blocks are no ranges of the flat value: (type, number of ranks, attrs) -> the shape of each block, None if they
    # are
    boxes: ClassVar[Callable[..., Any] | None] = None
    # arithmetic operations: a number for each point of the loops of the pattern (0: the op only moves elements), or (ins, outs, attrs) ->
    # number for the whole op, with the arguments of `pattern`; None: 1 for each point, 2 where products are summed
    flops: ClassVar[Any] = None
    # do the kernels compute on 16-bit floats directly? Or (device, outs) -> bool, over a flat list of types. None: yes for an op that only
    # moves elements (`flops` is 0, views), communicates or prints. All other kernels get float32: converted before the call and rounded
    # after it
    takes_16_bit: ClassVar[Any] = None
    # kinds of values other than dense tensors of numbers that the op takes or returns: "sequence", "optional", "map", "string", "tensor of
    # any rank" (valuetypes.py). Its kernel works on the host, with lists, None, dicts and arrays of objects; it runs between plans
    beyond_tensors: ClassVar[tuple[str, ...]] = ()
    # does the op take dtypes without arithmetic (dtypes.py: TINY)? True for ops that move elements, and cast
    takes_low_bit: ClassVar[bool] = False
    # in mixed precision: "half" computes in 16 bits, "float32" in 32 bits, "any" in the dtype of its operands. None: "any" for an op that
    # only moves elements, "float32" for every other
    precision: ClassVar[str | None] = None
    # attributes that hold global sizes: (attrs, local input shapes, local output shapes) -> attributes of the rank
    local_attrs: ClassVar[Callable[..., Any] | None] = None
    # for the proof, of an op that only adds, multiplies or rearranges elements: (a, operands by slot, output types, **attrs) -> a value for
    # each output, in terms of `a.sum`, `a.cut`, `a.join` and `a.shaped` (verify/normal_form.py). Of a collective: (a, the values of the
    # members, output type, index, **attrs) -> the value that member `index` gets
    meaning: ClassVar[Callable[..., Any] | None] = None
    # for an op that the proof treats as exact although it rounds: (attrs) -> a sentence about its error, for the report
    rounds: ClassVar[Callable[..., str] | None] = None
    # the result is the first operand, changed in place, under the same name
    in_place: ClassVar[bool] = False
    # for a gradient operator whose result is 0 outside of a part: (builder, operator, total) -> total with the result added in place
    accumulate_into: ClassVar[Callable[..., Any] | None] = None
    # a loop: its sub-block runs again while the first input is true. Otherwise the first input selects one of the sub-blocks. A list input
    # is for the sub-blocks; every other input is one number, equal on all ranks that run them
    repeats: ClassVar[bool] = False
    # the operator is expanded into others before a program runs
    abstract: ClassVar[bool] = False
    # for an op that may return its first input unchanged, bit by bit: (its type, attrs, number of inputs) -> whether it does so when the
    # result has the same type
    identity_if: ClassVar[Callable[..., bool] | None] = None
    # two such operators in a row as one: (attrs of the first, attrs of the second) -> attrs of the one operator, or None
    merge_two: ClassVar[Callable[..., Any] | None] = None
    # for an op on images: the attribute that holds NCHW or NHWC, and the slots that hold images
    layout: ClassVar[tuple[str, tuple[str, ...]] | None] = None
    # operators that replace this one where an axis that must be whole (`!`) is sharded, so that ranks can communicate in between:
    # (operator, function that makes a fresh name) -> list, or None to keep the operator
    expand: ClassVar[Callable[..., Any] | None] = None

    grad: ClassVar[Callable[..., Any] | None] = None
    kernel: ClassVar[Callable[..., Any] | None] = None
    view: ClassVar[Callable[..., Any] | None] = None
    view_ctx: ClassVar[Callable[..., Any] | None] = None
    # (slot, array) -> whether the kernels take an array with these strides there, input or result, as well as a contiguous one
    strided: ClassVar[Callable[..., bool] | None] = None
    # for an op that only copies its inputs into parts of its output: (output, shapes of the inputs, **attrs) -> for each input the view of
    # the output that holds it (None: there is no such view)
    operand_views: ClassVar[Callable[..., list[Any]] | None] = None
    # several operators may write the inputs into the output: memory for the whole output is then assigned when the first one runs
    assembled_by_many: ClassVar[bool] = False
    # for an op with sub-blocks or with state beside its arrays, instead of a kernel: (binder of the plan, operator) -> callable
    bind_control: ClassVar[Callable[..., Any] | None] = None
    # for an op with sub-blocks: (operator, values by name, function that runs a block by number on these values, context) -> None; writes
    # the results into the values
    run_reference: ClassVar[Callable[..., None]]
    bind: ClassVar[Callable[..., Any] | None] = None
    scratch: ClassVar[Callable[..., Any] | None] = None
    native: ClassVar[Callable[..., Any] | None] = None
    native_scratch: ClassVar[Callable[..., Any] | None] = None
    native_memory_per_thread: ClassVar[bool] = False
    # the last call of `native` computes the first result, and another kernel can be attached to it (fluidx.native.then)
    native_tail: ClassVar[bool] = False
    # does `native` support contiguous operands independently of their sizes, except for sizes below 2? Dtypes, number of axes and
    # attributes may count. The answer for one batch size then holds for all. Or (attrs) -> bool
    native_any_size: ClassVar[Any] = False
    # for an elementwise op: (attrs, shapes of the operands, axes of the result) -> scalar expression, {symbol: shape that broadcasts}
    element: ClassVar[Callable[..., Any] | None] = None

    in_slots: ClassVar[tuple[Slot, ...]] = ()
    out_slots: ClassVar[tuple[Slot, ...]] = ()
    slot_of: ClassVar[Mapping[str, Slot]] = {}  # by name, inputs before outputs
    defaults: ClassVar[Frozen] = Frozen()  # of the attributes, in their order; None for a required one
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
    _completed: ClassVar[dict[tuple[Any, ...], Frozen]] = {}  # attributes with their defaults, by what was given

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.defaults = Frozen({name: None if isinstance(d, Required) else d for name, d in cls.attrs.items()})
        cls.required = tuple(name for name, d in cls.attrs.items() if isinstance(d, Required))
        cls._completed = {}
        cls.attr_types = {name: d.type if isinstance(d, Required) else type(d) for name, d in cls.attrs.items()}
        if "name" not in cls.__dict__ or not cls.name:
            return
        if cls.name in OPS and OPS[cls.name].__qualname__ != cls.__qualname__:
            raise TypeError(f"op {cls.name!r} is declared twice: {OPS[cls.name].__module__} and {cls.__module__}")
        for attr, default in cls.attrs.items():
            if isinstance(default, Required) and default.type is BlockRef and attr not in cls.bodies:
                raise TypeError(f"op {cls.name!r}: attribute {attr!r} is a block, so `bodies` must declare the results of that block")
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
            params = inspect.signature(cls.kernel).parameters
            cls.takes_out, cls.takes_ctx, cls.takes_part = "out" in params, "ctx" in params, "part" in params
        cls.bind_takes_part = cls.bind is not None and "part" in inspect.signature(cls.bind).parameters
        told = inspect.signature(cls.native).parameters if cls.native is not None else ()
        cls.native_takes_part, cls.native_takes_ctx = "part" in told, "ctx" in told
        OPS[cls.name] = cls

    @staticmethod
    def infer(*types: Any, **attrs: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def samples() -> Iterator[Sample]:
        return iter(())

    @classmethod
    def typed(cls, *types: Any, **attrs: Any) -> Any:
        """What `infer` says of types that the op takes at all; ProgramError for others."""
        unranked = []
        for k, t in enumerate(types):
            for one in t if t.__class__ is list else (t,):
                if one is not None and (one.__class__ is not TensorType or one.dtype in _NO_NUMBERS):
                    cls._check_taken(cls.in_slots[k].name, one)
                    if one.__class__ is AnyRankType and one.kind not in cls.beyond_tensors:
                        unranked.append(one)
        if not unranked:
            return cls.infer(*types, **attrs)
        return at_any_rank(f"op {cls.name}", lambda *ranked: cls.infer(*ranked, **attrs), types, unranked)

    @classmethod
    def _check_taken(cls, slot: str, t: Any) -> None:
        if t.__class__ is TensorType and t.dtype in TINY:
            if not cls.takes_low_bit:
                raise ProgramError(f"op {cls.name} does not compute in {t.dtype}, found {t}; cast it to float32 or int32 first")
            return
        kind = kind_of(t)
        if kind in cls.beyond_tensors or t.__class__ is AnyRankType and t.dtype not in _NO_NUMBERS:
            return
        if kind == "string":
            raise ProgramError(f"op {cls.name} takes no strings, found {t} as {slot}; make numbers of them, with string_equal")
        raise ProgramError(f"op {cls.name} takes no {kind}, found {t} as {slot}; {t.next_step}")

    # -- helpers over the declaration ------------------------------------------------------------------------------------

    @classmethod
    def arrange(
        cls, slots: Mapping[str, Sequence[Any]], which: Sequence[Slot] | None = None, value: Callable[[Any], Any] = lambda found: found
    ) -> list[Any]:
        """What `value` makes of the entries of a slot mapping, as positional arguments: one value, None, or a list per slot."""
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
        """What `read` gives for the names that an operator reads, arranged as arguments, and what `written` gives for its results."""
        return cls.arrange(op.inputs, cls.in_slots, read), cls.arrange(op.outputs, cls.out_slots, written)

    @classmethod
    def check_slots(cls, op: Operator) -> None:
        """Raise ProgramError unless the operator's slots are the declared ones, with a fitting number of names."""
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
        # an op without inputs is mostly given a seed or values of its own, which nothing asks for again
        types, values, exact = cls.attr_types, [], bool(cls.in_slots)
        for name, value in given.items():
            want = types.get(name)
            if want is None:
                raise ProgramError(f"op {cls.name} has no attribute {name!r}; {nearest(name, cls.attrs, 'it has')}")
            if value.__class__ is not want or not is_exact(value):
                value = coerce(cls.name, name, stored(value, want), want)
                exact = exact and is_exact(value)
            values.append(value)
        # one record for the same attributes: Program.infer knows it again
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
        """The access pattern for flat lists of operand and output types (`flat_slots` gives them), None for an absent one."""
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
        """What an operator takes by itself, not in lists: of one that runs sub-blocks, what says which of them run, and as which round."""
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
        """Do the bodies for a device see float32 in the place of 16-bit floats?"""
        said = cls.takes_16_bit
        if said is None:
            return not (cls.moves() or cls.bodies) and cls.effect in (Effect.PURE, Effect.RANDOM)
        return not (said(device, outs) if callable(said) else said)

    @classmethod
    def moves(cls) -> bool:
        """Does the op only move elements?"""
        return cls.flops == 0 or cls.view is not None

    @classmethod
    def in_mixed_precision(cls) -> str:
        """What the op works in where both are at hand: "half", "float32" or "any"."""
        return cls.precision or ("any" if cls.moves() else "float32")

    @classmethod
    def view_of(cls, x: Any, ctx: Any, attrs: Mapping[str, Any]) -> Any:
        """The output as a view of the first input on the rank of `ctx`; None where it cannot be one."""
        if cls.view_ctx is not None:
            return cls.view_ctx(x, ctx, **attrs)
        return None if cls.view is None else cls.view(x, **attrs)

    @classmethod
    def views_of(cls, x: Any, ctx: Any, attrs: Mapping[str, Any]) -> list[Any] | None:
        """The same as a list, one view for each output."""
        made = cls.view_of(x, ctx, attrs)
        return made if made is None or isinstance(made, list) else [made]

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(cls) or "").split("\n", 1)[0]


def instead_of(name: str) -> str:
    """What to write instead of an op that there is not: of fluid's names what its table says, else the nearest."""
    return (errors.fluid_op and errors.fluid_op(name)) or nearest(name, OPS, "there are")


def opdef(name: str) -> type[OpDef]:
    """The declaration of an op type, or ProgramError with the nearest name."""
    try:
        return OPS[name]
    except KeyError:
        raise ProgramError(f"there is no op {name!r}; {instead_of(name)}") from None


def all_ops() -> Iterable[type[OpDef]]:
    return (OPS[name] for name in sorted(OPS))
