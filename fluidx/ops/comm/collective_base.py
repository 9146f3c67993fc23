"""What the declarations of collectives share: how parts of a value are cut, how a placement changes, and the call of the communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

from ...comm.base import REDUCE_OPS
from ...ir.errors import ProgramError, nearest
from ...ir.offsets import Offsets
from ...ir.op_facets import Native
from ...ir.opdef import Effect, OpDef, Sample
from ...ir.parts import REDUCE
from ...ir.parts import bounds as cut_bounds
from ...ir.types import ANY, At, Entry, Partial, Pieces, Shard, TensorType
from ..shared.samples import counting

# how a collective is carried out: the name of an algorithm ("": by the communicator), and the number of the message round in which it
# travels; Specialize writes the sends and receives (transpiler/lowering/write_algorithm.py). By the communicator: the number of the ring,
# of those that NCCL has for a group. The result of a collective does not depend on them.
HOW = {"algorithm": "", "wave": 0, "ring": 0}


def check_reduction(op: str) -> None:
    if op not in REDUCE_OPS:
        raise ProgramError(f"reduction op={op!r}; {nearest(op, REDUCE_OPS, 'there are')}")


def check_cut(op: str, x: TensorType, axis: int, unit: int, bounds: Offsets) -> None:
    """Can a value of this type be sharded like this: along an axis, or into flat ranges if bounds are given?"""
    if not bounds:
        if not 0 <= axis < x.ndim or unit < 1:
            raise ProgramError(f"op {op}: axis {axis} in blocks of {unit} does not shard {x}")
    elif not Offsets.of(bounds).rising or (x.numel != ANY and bounds[-1] != x.numel):
        raise ProgramError(f"op {op}: bounds {list(bounds)} do not partition the elements of {x}")


def cut_entry(group: str, axis: int, unit: int, bounds: Offsets) -> Entry:
    return Pieces(bounds, group) if bounds else Shard(axis, group, unit)


def cut_views(whole: Any, n: int, axis: int, unit: int, bounds: Sequence[int] = ()) -> list[Any]:
    """The parts of an array for the n ranks of a group, as views."""
    if not bounds:
        b = cut_bounds(whole.shape[axis], n, unit)
        return [whole[(slice(None),) * axis + (slice(b[k], b[k + 1]),)] for k in range(n)]
    if len(bounds) != n + 1:
        raise ProgramError(f"bounds {list(bounds)} give {len(bounds) - 1} ranges; the group has {n} ranks")
    flat = whole.reshape(-1)
    return [flat[a:b] for a, b in pairwise(bounds)]


def owned_by(root: int, n: int, size: int) -> Offsets:
    """The bounds of n flat ranges of which the root's holds all elements.

    >>> owned_by(1, 3, 10)
    (0, 0, 10, 10)
    """
    return Offsets.of_sizes({root: size}, n)


def boxes(whole: TensorType, n: int, attrs: Any) -> list[tuple[int, ...]] | None:
    """The shapes of the parts of a value that is sharded along another axis than the first."""
    axis = attrs["axis"]
    return [resized(whole.shape, {axis: k}) for k in widths(whole, n, axis, attrs["unit"])] if axis and not attrs["bounds"] else None


def widths(t: TensorType, n: int, axis: int, unit: int) -> list[int]:
    return [b - a for a, b in pairwise(cut_bounds(t.shape[axis], n, unit))]


def resized(shape: Sequence[int], sizes: Mapping[int, int]) -> tuple[int, ...]:
    return tuple([sizes.get(k, size) for k, size in enumerate(shape)])


def flat_marks(whole: TensorType, n: int, axis: int, unit: int, bounds: Offsets) -> Sequence[int] | None:
    """The bounds of the parts of a value in its flat form; None if they are not flat ranges."""
    if bounds:
        return bounds if len(bounds) == n + 1 else None
    if axis != 0 or whole.numel == ANY or not whole.shape:
        return None
    return [prod(whole.shape[1:]) * k for k in cut_bounds(whole.shape[0], n, unit)]


Attrs = Mapping[str, Any]


def whole(attrs: Attrs) -> None:
    """The entry of a replicated value."""


def at_root(attrs: Attrs) -> Entry:
    return At(attrs["root"], attrs["group"])


def cut(attrs: Attrs) -> Entry:
    return cut_entry(attrs["group"], attrs["axis"], attrs["unit"], attrs["bounds"])


def partial_sums(attrs: Attrs) -> Entry:
    return Partial(attrs.get("op", "sum"), attrs["group"])


EntryOf = Callable[[Attrs], Entry | None]


def moved(*takes: EntryOf, gives: EntryOf) -> Any:
    """`Comm.move` of an op: from one of the entries `takes` of the attributes to the entry `gives`."""
    return classmethod(lambda cls, entry, **attrs: moved_entry(cls.name, takes, gives, entry, attrs))


def moved_entry(name: str, takes: Sequence[EntryOf], gives: EntryOf, entry: Entry | None, attrs: Attrs) -> Entry | None:
    """ProgramError for an entry that the op does not take, and for a reduction that no placement stands for."""
    if (op := attrs.get("op", "sum")) not in REDUCE:
        raise ProgramError(f"{name} of op {op} is no redistribution")
    allowed = [take(attrs) for take in takes]
    if entry not in allowed:
        names = ["replicate" if e is None else str(e) for e in (*allowed, entry)]
        raise ProgramError(f"op {name} takes {' or '.join(names[:-1])}, not {names[-1]}")
    return gives(attrs)


def check_linear(name: str, op: str) -> None:
    if op not in ("sum", "avg"):
        raise ProgramError(f"{name} of op={op!r} has no gradient; 'sum' and 'avg' have")


def native_calls(ctx: Any, name: str, *args: Any) -> Any:
    """The C calls that communicate as the method `name` of the communicator; None if there are none."""
    calls = None if ctx.comm is None else ctx.comm.calls
    return None if calls is None else getattr(calls, name)(*args)


def reduced(a: Any, xs: Any, op: str) -> Any:
    """For the proof: the sum or the mean of the values of the members, None for another reduction."""
    return a.mean(xs) if op == "avg" else a.sum(xs) if op == "sum" else None


class CommunicatorCall(OpDef):
    """Base of the operators that are one call of the communicator of their ring: of `method`, with `_arguments`."""

    effect = Effect.COLLECTIVE
    method: ClassVar[str] = ""  # "": of the op's name
    sampled: ClassVar[Attrs] = {}  # attributes of the sample

    @staticmethod
    def _arguments(x: Any, out: Any, attrs: Attrs, ranks: tuple[int, ...]) -> tuple:
        """The arguments of the method, for an operand, a result and the ranks of the group."""
        raise NotImplementedError

    @classmethod
    def infer(cls, x: TensorType, *, group: str, **attrs: Any) -> TensorType:
        if "op" in attrs:
            check_reduction(attrs["op"])
        if "bounds" in attrs:
            check_cut(cls.name, x, attrs["axis"], attrs["unit"], attrs["bounds"])
        if attrs.get("root", 0) < 0:
            raise ProgramError(f"op {cls.name}: root must be an index into group {group}, from 0 on, got {attrs['root']}")
        return x

    @classmethod
    def _bind(cls, ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        call = getattr(ctx.comm.ring(attrs["ring"]), cls.method or cls.name)
        return partial(call, *cls._arguments(ins[0], outs[0], attrs, ctx.group(attrs["group"])))

    @classmethod
    def _calls(cls, ins: list, outs: list, attrs: Any, ctx: Any, dry: bool = False) -> Any:
        return native_calls(ctx, cls.method or cls.name, *cls._arguments(ins[0], outs[0], attrs, ctx.group(attrs["group"])))

    native = Native(calls=_calls, bind=_bind)

    @classmethod
    def samples(cls) -> Iterator[Sample]:
        yield Sample.of(counting(4, 3), group="dp", **cls.sampled, grad=(), why="needs ranks; tested in tests/comm/test_operators.py")


def parts_of(array: Any, attrs: Attrs, ranks: Sequence[int]) -> list[Any]:
    """The parts of an array for the ranks of a group, as views."""
    return cut_views(array, len(ranks), attrs["axis"], attrs["unit"], attrs["bounds"])


def attrs_of(op: Any, *names: str) -> dict[str, Any]:
    """Some attributes of an operator."""
    return {name: op.attrs[name] for name in names}
