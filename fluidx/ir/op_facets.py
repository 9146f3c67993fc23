"""What some declarations of ops say beside the fields that every author meets: seven records, each about one concern.

An op says `storage = Storage(inplace=(("X", "Out"),))` in its class. What it does not say has the default here, so readers never test
whether there is a facet: `opdef("relu").storage.inplace`. A subclass of an op class keeps what it does not say again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, dataclass_transform

from .errors import nearest

Function = Callable[..., Any] | None


@dataclass_transform(kw_only_default=True)
class Facet:
    """Base of the records. `word` is the field of OpDef. A member that is a classmethod gets the op class that reads it.

    >>> from fluidx.ir import opdef
    >>> opdef("relu").native.any_size, opdef("relu").comm.move
    (True, None)
    """

    word: ClassVar[str] = ""
    members: ClassVar[tuple[str, ...]] = ()
    _said: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        cls.word = cls.__name__.lower()
        cls.members = tuple(cls.__annotations__)

    def __init__(self, **said: Any):
        self.__dict__.update(said, _said=said)

    @property
    def depends_on_class(self) -> bool:
        """Is a member a classmethod, which differs among the subclasses of an op class?"""
        return any(isinstance(value, classmethod) for value in self._said.values())

    def over(self, inherited: Self, op: type, label: str) -> Self:
        """The facet of the class `op`: what this one says, and what it inherits. TypeError for a member that there is not."""
        for name in self._said:
            if name not in self.members:
                raise TypeError(f"{label}: {type(self).__name__} has no member {name!r}; {nearest(name, self.members, 'it has')}")
        said = {**inherited._said, **self._said}
        made = type(self)()
        made.__dict__.update({name: _of_class(value, op) for name, value in said.items()}, _said=said)
        return made


def _of_class(value: Any, op: type) -> Any:
    return value.__get__(None, op) if isinstance(value, (classmethod, staticmethod)) else value


class Native(Facet):
    """The bodies that compute on a CPU, beside `kernel`: calls of C kernels (fluidx.native), and calls of NumPy."""

    # (ins, outs, attrs, dry) -> calls of C kernels, None if they do not support these arrays. With `dry` only shapes and strides count: the
    # arrays may share memory. It may have parameters `part` and `ctx`, as a kernel, and `scratch`
    calls: Function = None
    # (ins, outs, attrs) -> types of the temporary arrays that `calls` gets as `scratch`, from the types of the operands
    scratch: Function = None
    # does `calls` support contiguous operands independently of their sizes, except for sizes below 2? Dtypes, number of axes and attributes
    # may count. The answer for one batch size then holds for all. Or (attrs) -> bool
    any_size: Any = False
    # does `calls` look at dtypes, and take 16-bit floats in place of float32, or decline them? Otherwise it is not asked about them, and an
    # op that computes gets float32 copies
    halves: bool = False
    # the last of the calls computes the first result, and another kernel can be attached to it (fluidx.native.then)
    tail: bool = False
    # of its first so many inputs, the C kernels round a float32 one to bfloat16 where another one is bfloat16
    rounds: int = 0
    # do the C kernels need much memory for each thread? A plan adds it up
    memory_per_thread: bool = False
    # (ins, outs, attrs, ctx) -> a call without arguments, bound to these NumPy arrays; it may have a parameter `part`, as a kernel
    bind: Function = None
    # the same as `scratch`, for `bind`
    bind_scratch: Function = None


class Storage(Facet):
    """Where operands and results may be in memory."""

    # (input slot, output slot) pairs that may share memory: the kernel reads each element before it writes it
    inplace: tuple[tuple[str, str], ...] = ()
    # (x, **attrs) -> the output as a view of the first input, None if there is no such view. For an output slot with many values: a list of
    # views; the op has a kernel too
    view: Function = None
    # (x, ctx, **attrs) -> a view that also depends on the rank; the op has a kernel too
    view_ctx: Function = None
    # (slot, array) -> whether the kernels take an array with these strides there, input or result, as well as a contiguous one
    strided: Function = None
    # for an op that only copies its inputs into parts of its output: (output, shapes of the inputs, **attrs) -> for each input the view of
    # the output that holds it (None: there is no such view)
    operand_views: Function = None
    # several operators may write the inputs into the output: memory for the whole output is then assigned when the first one runs
    assembled_by_many: bool = False
    # the result is the first operand, changed in place, under the same name
    same_variable: bool = False
    # for a gradient operator whose result is 0 outside of a part: (builder, operator, total) -> total with the result added in place
    accumulate_into: Function = None
    # for an op without inputs: (attrs) -> the FileRange that holds its whole result, in its dtype, or None. A state variable may then be a
    # view of the file, whose pages are copied when they are written
    held_in_file: Function = None
    # "host" or "device": the op copies its operand from the other memory to this one; all other ops work in one memory (see Var.on_host)
    copies_to: str = ""


class Rewrite(Facet):
    """By what a rewrite or a proof may replace the operator."""

    # the results depend only on the sizes of the inputs: the gradient treats them as constants
    constant: bool = False
    # for an op that may return its first input unchanged, bit by bit: (its type, attrs, number of inputs) -> whether it does so when the
    # result has the same type
    identity_if: Callable[..., bool] | None = None
    # two such operators in a row as one: (attrs of the first, attrs of the second) -> attrs of the one operator, or None
    merge_two: Function = None
    # for an op on images: the attribute that holds NCHW or NHWC, and the slots that hold images
    layout: tuple[str, tuple[str, ...]] | None = None
    # "sum", "max" or "min": the op reduces operands of one type into this
    folds: str = ""
    # for the proof, of an op that only adds, multiplies or rearranges elements: (a, operands by slot, output types, **attrs) -> a value for
    # each output, in terms of `a.sum`, `a.cut`, `a.join` and `a.shaped` (verify/normal_form.py). Of a collective: (a, the values of the
    # members, output type, index, **attrs) -> the value that member `index` gets
    meaning: Function = None


class Autocast(Facet):
    """The dtypes in which the kernels compute, and so the casts around them."""

    # do all kernels compute on 16-bit floats directly? Or (device, outs) -> bool, over a flat list of types. None: yes for an op that only
    # moves elements (`flops` is 0, views), communicates or prints. All other kernels get float32: converted before the call and rounded
    # after it. A C kernel that supports 16-bit arrays gets them in any case
    takes_16_bit: Any = None
    # does the op take dtypes without arithmetic (dtypes.py: TINY)? True for ops that move elements, and cast
    takes_low_bit: bool = False
    # in mixed precision: "half" computes in 16 bits, "float32" in 32 bits, "any" in the dtype of its operands. None: "any" for an op that
    # only moves elements, "float32" for every other
    mixed: str | None = None
    # input slots that stay float32 if the op works in 16 bits, such as weights and statistics of norms; they do not decide what it works in
    wide: tuple[str, ...] = ()
    # for an op that the proof treats as exact although it rounds: (attrs) -> a sentence about its error, for the report
    rounds: Callable[..., str] | None = None


class Arithmetic(Facet):
    """How much the op computes; plans and predictions read it."""

    # arithmetic operations: a number for each point of the loops of the pattern (0: the op only moves elements), or (ins, outs, attrs) ->
    # number for the whole op, with the arguments of `pattern`; None: 1 for each point, 2 where products are summed
    flops: Any = None
    # for an op that sums products, and runs at their speed: "matrix", "convolution" or "attention"
    sums_products: str = ""


class Comm(Facet):
    """What ranks exchange, own and call by other names."""

    # for a collective: (entry of its group, **attrs) -> entry of the result; may raise ProgramError
    move: Function = None
    # for a collective: (number of ranks, type, attrs) -> the bytes that each rank sends on average, as a share of the bytes of the whole
    # value, if nothing is sent twice
    sent: Any = None
    # for an op with `R` in its pattern: (type, attributes) of the collective that computes it from replica-local values
    replica_collective: tuple[str, Mapping[str, Any]] | None = None
    # for a collective: (attributes) -> (type, attributes) of the one-device operator that it computes from replica-local values
    replica_op: Any = None
    # for a collective that an algorithm of sends and receives can carry out, the method of the algorithm: "all_reduce" (partial values to
    # sums on all ranks), "reduce" (partial values to sums on the ranks that own them), "spread" (from owners to all ranks), "exchange"
    # (from each rank to every other) or "adaptive" (replica-local values to their adaptive sum on all ranks); see transpiler/algorithms
    algorithm_method: str = ""
    # for a collective with owners: (type, number of ranks, attrs) -> the bounds of the flat range that each rank owns, None without owners
    blocks: Function = None
    # for a collective whose blocks are no ranges of the flat value: (type, number of ranks, attrs) -> the shape of each block, None if they
    # are
    boxes: Function = None
    # attributes that hold global sizes: (attrs, local input shapes, local output shapes) -> attributes of the rank
    local_attrs: Function = None
    # for an op that returns its first operand unchanged and states its placement: (placements of the operands, None for an absent one,
    # **attrs) -> {group: entry, None for replicated}; other groups are left open
    annotation: Function = None
    # fluid's names of a collective, in the NCCL design and since 1.5; a program text can use them
    fluid_names: tuple[str, str] | None = None
    # in the names since 1.5: fluid's names of attributes that are called otherwise here, and the numbers of ranks that fluid writes beside
    # them, of "nranks" (in the group) and "rank" (this one's index)
    fluid_attrs: Mapping[str, str] = {}
    fluid_counts: tuple[str, ...] = ()
    # the name of this op's time in Horovod's timeline
    activity: str = ""


class Control(Facet):
    """What runs beside kernels: sub-blocks, values that are no dense tensors, results whose sizes follow from values."""

    # attributes that name a sub-block, each with the attribute that lists the values which the sub-block returns ("" for none)
    bodies: Mapping[str, str] = {}
    # a loop: its sub-block runs again while the first input is true. Otherwise the first input selects one of the sub-blocks. A list input
    # is for the sub-blocks; every other input is one number, equal on all ranks that run them
    repeats: bool = False
    # for an op with sub-blocks or with state beside its arrays, instead of a kernel: (binder of the plan, operator) -> callable
    bind: Function = None
    # for an op with sub-blocks: (operator, values by name, function that runs a block by number on these values, context) -> None; writes
    # the results into the values
    run_reference: Function = None
    # the operator is replaced by others before a program runs
    abstract: bool = False
    # kinds of values other than dense tensors of numbers that the op takes or returns: "sequence", "optional", "map", "string", "tensor of
    # any rank" (valuetypes.py). Its kernel works on the host, with lists, None, dicts and arrays of objects; it runs between plans
    beyond_tensors: tuple[str, ...] = ()
    # for an op whose result sizes depend on values: a word for each output, with one letter for each such axis in order. Equal letters are
    # equal sizes; an axis after the last letter has a size of its own. A plan ends at such an operator: its kernel returns new arrays and
    # gets values on the host, and the next plan is made when the sizes are known (executor/dynamic/segmented_run.py)
    sized_by_values: tuple[str, ...] = ()
    # for an op whose type rule leaves an axis open although its size follows from the feeds: attrs -> for each open axis of the result, in
    # order, (feed, axis of the feed, multiple of its size)
    open_axes: Callable[..., list[tuple[str, int, int]]] | None = None


FACETS: tuple[type[Facet], ...] = (Native, Storage, Rewrite, Autocast, Arithmetic, Comm, Control)
FACET_OF: Mapping[str, type[Facet]] = {name: kind for kind in reversed(FACETS) for name in kind.members}
