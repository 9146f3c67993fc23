"""What the declaration of an op may say: its slots and attributes, effect, access pattern, kernels and the rest, with their meaning."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple


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


class OpFields:
    """What the declaration of an op may say. Everything but `name` and `infer` has a default.

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
    # for an op that sums products, and runs at their speed: "matrix", "convolution" or "attention". Prediction reads it
    sums_products: ClassVar[str] = ""
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
