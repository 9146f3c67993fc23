"""Collectives: operators that every rank of a group runs together, each with its dual as its gradient.

Types are global, so a collective is the identity on the global value and only changes its placement; `move` defines the change. With
op="avg" and "prod" a collective is an operation on values, not a redistribution, because no placement stands for such partial values.

The gradient of the sum over the ranks' losses with respect to local values: for a replicated value each rank holds a partial sum of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

from ...comm.base import REDUCE_OPS
from ...ir.errors import ProgramError, nearest
from ...ir.offsets import Offsets
from ...ir.op_facets import Comm, Native, Rewrite, Storage
from ...ir.opdef import Effect, OpDef, Required, Sample
from ...ir.parts import REDUCE
from ...ir.parts import bounds as cut_bounds
from ...ir.types import ANY, At, Entry, Partial, Pieces, Shard, TensorType
from ..shared.samples import counting
from .volume import share

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


def _boxes(whole: TensorType, n: int, attrs: Any) -> list[tuple[int, ...]] | None:
    """The shapes of the parts of a value that is sharded along another axis than the first."""
    axis = attrs["axis"]
    return [_resized(whole.shape, {axis: k}) for k in _widths(whole, n, axis, attrs["unit"])] if axis and not attrs["bounds"] else None


def _widths(t: TensorType, n: int, axis: int, unit: int) -> list[int]:
    return [b - a for a, b in pairwise(cut_bounds(t.shape[axis], n, unit))]


def _resized(shape: Sequence[int], sizes: Mapping[int, int]) -> tuple[int, ...]:
    return tuple([sizes.get(k, size) for k, size in enumerate(shape)])


def flat_marks(whole: TensorType, n: int, axis: int, unit: int, bounds: Offsets) -> Sequence[int] | None:
    """The bounds of the parts of a value in its flat form; None if they are not flat ranges."""
    if bounds:
        return bounds if len(bounds) == n + 1 else None
    if axis != 0 or whole.numel == ANY or not whole.shape:
        return None
    return [prod(whole.shape[1:]) * k for k in cut_bounds(whole.shape[0], n, unit)]


def expect(op: str, entry: Entry | None, *allowed: Entry | None) -> None:
    """Raise ProgramError unless the operand has one of these entries for the group of the operator."""
    if entry not in allowed:
        names = ["replicate" if e is None else str(e) for e in (*allowed, entry)]
        raise ProgramError(f"op {op} takes {' or '.join(names[:-1])}, not {names[-1]}")


def check_move(name: str, op: str) -> None:
    if op not in REDUCE:
        raise ProgramError(f"{name} of op {op} is no redistribution")


def check_linear(name: str, op: str) -> None:
    if op not in ("sum", "avg"):
        raise ProgramError(f"{name} of op={op!r} has no gradient; 'sum' and 'avg' have")


def native_calls(ctx: Any, name: str, *args: Any) -> Any:
    """The C calls that communicate as the method `name` of the communicator; None if there are none."""
    calls = None if ctx.comm is None else ctx.comm.calls
    return None if calls is None else getattr(calls, name)(*args)


class NcclInit(OpDef):
    """Create the communicators of a group, one for each of its `rings`; every rank of the group runs it once, in the startup program.

    Ranks that share memory or send messages have no rings. Source: the `ncclInit` operator of Paddle's NCCL design document.
    """

    name = "nccl_init"
    comm = Comm(fluid_names=("ncclInit", "c_comm_init"), fluid_counts=("nranks", "rank"), activity="INIT_NCCL")
    outputs = ()
    attrs = {"group": Required(str), "rings": 1}
    effect = Effect.COLLECTIVE

    @staticmethod
    def infer(*, group: str, rings: int) -> tuple:
        if rings < 1:
            raise ProgramError(f"op nccl_init: group {group} has 1 ring or more, got {rings}")
        return ()

    @staticmethod
    def _bind(ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        ranks = ctx.group(attrs["group"])
        return lambda: [comm.init_group(ranks) for comm in dict.fromkeys(map(ctx.comm.ring, range(attrs["rings"])))]

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, ctx: Any, dry: bool = False) -> Any:
        return native_calls(ctx, "init_group", ctx.group(attrs["group"]))

    native = Native(calls=_calls, bind=_bind)

    @staticmethod
    def samples():
        yield Sample.of(group="dp")


class Barrier(OpDef):
    """Wait until every rank of the group has arrived."""

    name = "barrier"
    comm = Comm(fluid_names=("barrier", "barrier"), activity="BARRIER")
    outputs = ()
    attrs = {"group": Required(str)}
    effect = Effect.COLLECTIVE

    @staticmethod
    def infer(*, group: str) -> tuple:
        return ()

    @staticmethod
    def _bind(ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        ranks = ctx.group(attrs["group"])
        return lambda: ctx.comm.barrier(ranks)

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, ctx: Any, dry: bool = False) -> Any:
        return native_calls(ctx, "barrier", ctx.group(attrs["group"]))

    native = Native(calls=_calls, bind=_bind)

    @staticmethod
    def samples():
        yield Sample.of(group="dp")


class AllReduce(OpDef):
    """The sum (or mean, max, min, product) of the values of all ranks of a group, on each of them.

    The gradient is an all_reduce of the gradient: partial sums of all ranks add up.
    """

    name = "all_reduce"
    inputs = ("X",)
    attrs = {"group": Required(str), "op": "sum", **HOW}
    effect = Effect.COLLECTIVE
    storage = Storage(inplace=(("X", "Out"),))

    @staticmethod
    def infer(x: TensorType, *, group: str, op: str, **how: Any) -> TensorType:
        check_reduction(op)
        return x

    @staticmethod
    def _move(entry: Entry | None, *, group: str, op: str, **how: Any) -> Entry | None:
        if entry is not None and entry.is_own and AllReduce.comm.replica_op(group=group, op=op) is not None:
            return None
        check_move("all_reduce", op)
        expect("all_reduce", entry, Partial(op, group))
        return None

    comm = Comm(
        move=_move,
        sent=lambda n, *_: share("all_reduce", n),
        replica_op=lambda group, op, **how: ("replica_mean", {}) if op == "avg" else None,
        algorithm_method="all_reduce",
        fluid_names=("ncclAllReduce", "c_allreduce_{op}"),
        activity="ALLREDUCE",
    )

    @staticmethod
    def _meaning(a: Any, xs: Any, out: TensorType, index: int, *, op: str, **_: Any) -> Any:
        return a.mean(xs) if op == "avg" else a.sum(xs) if op == "sum" else None

    rewrite = Rewrite(meaning=_meaning)

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        check_linear("all_reduce", op.attrs["op"])
        return b.all_reduce(g, group=op.attrs["group"], op=op.attrs["op"])

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str, op: str, ring: int, **how: Any) -> None:
        ctx.comm.ring(ring).all_reduce(x, out, op, ctx.group(group))

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, ctx: Any, dry: bool = False) -> Any:
        return native_calls(ctx, "all_reduce", ins[0], outs[0], attrs["op"], ctx.group(attrs["group"]))

    native = Native(calls=_calls)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", op="sum", grad=(), why="needs ranks; tested in tests/comm/test_operators.py")


class Reduce(OpDef):
    """The reduction of the values of all ranks of a group, on the root only; elsewhere the result is undefined.

    `root` is an index into the group. The gradient is a broadcast from the root; for a mean it is divided by the number of ranks.
    """

    name = "reduce"
    inputs = ("X",)
    attrs = {"group": Required(str), "op": "sum", "root": Required(int), **HOW}
    effect = Effect.COLLECTIVE
    storage = Storage(inplace=(("X", "Out"),))

    @staticmethod
    def infer(x: TensorType, *, group: str, op: str, root: int, **how: Any) -> TensorType:
        check_reduction(op)
        return x

    @staticmethod
    def _move(entry: Entry | None, *, group: str, op: str, root: int, **how: Any) -> Entry | None:
        check_move("reduce", op)
        expect("reduce", entry, Partial(op, group))
        return At(root, group)

    comm = Comm(
        move=_move,
        sent=lambda n, *_: share("reduce", n),
        algorithm_method="reduce",
        blocks=lambda t, n, attrs: owned_by(attrs["root"], n, t.numel),
        fluid_names=("ncclReduce", "c_reduce_{op}"),
        fluid_attrs={"root": "root_id"},
        activity="REDUCE",
    )

    @staticmethod
    def _meaning(a: Any, xs: Any, out: TensorType, index: int, *, op: str, root: int, **_: Any) -> Any:
        return a.nothing if index != root else a.mean(xs) if op == "avg" else a.sum(xs) if op == "sum" else None

    rewrite = Rewrite(meaning=_meaning)

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        check_linear("reduce", op.attrs["op"])
        where = {"group": op.attrs["group"], "root": op.attrs["root"]}
        if op.attrs["op"] == "avg":
            return b.all_reduce(b.own_term(g, **where), group=where["group"], op="avg")
        return b.broadcast(g, **where)

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str, op: str, root: int, ring: int, **how: Any) -> None:
        ctx.comm.ring(ring).reduce(x, out, op, root, ctx.group(group))

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, ctx: Any, dry: bool = False) -> Any:
        return native_calls(ctx, "reduce", ins[0], outs[0], attrs["op"], attrs["root"], ctx.group(attrs["group"]))

    native = Native(calls=_calls)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", root=0, grad=(), why="needs ranks; tested in tests/comm/test_operators.py")


class Broadcast(OpDef):
    """The root's value, on every rank of the group. `root` is an index into the group.

    X is read on the root only. The gradient is a reduce to the root, and 0 elsewhere.
    """

    name = "broadcast"
    inputs = ("X",)
    attrs = {"group": Required(str), "root": Required(int), **HOW}
    effect = Effect.COLLECTIVE
    storage = Storage(inplace=(("X", "Out"),))

    @staticmethod
    def infer(x: TensorType, *, group: str, root: int, **how: Any) -> TensorType:
        return x

    @staticmethod
    def _move(entry: Entry | None, *, group: str, root: int, **how: Any) -> Entry | None:
        expect("broadcast", entry, At(root, group), None)
        return None

    comm = Comm(
        move=_move,
        sent=lambda n, *_: share("spread", n),
        algorithm_method="spread",
        blocks=lambda t, n, attrs: owned_by(attrs["root"], n, t.numel),
        fluid_names=("ncclBcast", "c_broadcast"),
        activity="BROADCAST",
    )

    @staticmethod
    def _meaning(a: Any, xs: Any, out: TensorType, index: int, *, root: int, **_: Any) -> Any:
        return xs[root]

    rewrite = Rewrite(meaning=_meaning)

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        where = {"group": op.attrs["group"], "root": op.attrs["root"]}
        return b.own_term(b.reduce(g, op="sum", **where), **where)

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str, root: int, ring: int, **how: Any) -> None:
        ctx.comm.ring(ring).broadcast(x, out, root, ctx.group(group))

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, ctx: Any, dry: bool = False) -> Any:
        return native_calls(ctx, "broadcast", ins[0], outs[0], attrs["root"], ctx.group(attrs["group"]))

    native = Native(calls=_calls)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", root=0, grad=(), why="needs ranks; tested in tests/comm/test_operators.py")


class Parted(OpDef):
    """Base of the collectives that send a part to each rank; `arguments` are those of the communicator's method."""

    effect = Effect.COLLECTIVE
    arguments: ClassVar[Callable[..., tuple]]

    @classmethod
    def _bind(cls, ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        return partial(getattr(ctx.comm.ring(attrs["ring"]), cls.name), *cls.arguments(ins, outs, attrs, ctx))

    @classmethod
    def _calls(cls, ins: list, outs: list, attrs: Any, ctx: Any, dry: bool = False) -> Any:
        return native_calls(ctx, cls.name, *cls.arguments(ins, outs, attrs, ctx))

    native = Native(calls=_calls, bind=_bind)


class AllGather(Parted):
    """The whole of a value that is sharded among the ranks of a group, on every rank.

    The shards are along `axis`, between blocks of `unit` neighbours, or the flat ranges between `bounds`. The gradient is the dual
    collective, reduce_scatter.
    """

    name = "all_gather"
    inputs = ("X",)
    attrs = {"group": Required(str), "axis": 0, "unit": 1, "bounds": Offsets(), **HOW}

    @staticmethod
    def infer(x: TensorType, *, group: str, axis: int, unit: int, bounds: Offsets, **how: Any) -> TensorType:
        check_cut("all_gather", x, axis, unit, bounds)
        return x

    @staticmethod
    def _move(entry: Entry | None, *, group: str, axis: int, unit: int, bounds: Offsets, **how: Any) -> Entry | None:
        expect("all_gather", entry, cut_entry(group, axis, unit, bounds))
        return None

    comm = Comm(
        move=_move,
        sent=lambda n, *_: share("spread", n),
        algorithm_method="spread",
        blocks=lambda t, n, attrs: flat_marks(t, n, attrs["axis"], attrs["unit"], attrs["bounds"]),
        boxes=_boxes,
        fluid_names=("c_allgather", "c_allgather"),
        fluid_counts=("nranks",),
        activity="ALLGATHER",
    )

    @staticmethod
    def _meaning(a: Any, xs: Any, out: TensorType, index: int, *, axis: int, unit: int, bounds: Offsets, **_: Any) -> Any:
        marks = flat_marks(out, len(xs), axis, unit, bounds)
        return None if marks is None else a.gathered(xs, marks, out.shape)

    rewrite = Rewrite(meaning=_meaning)

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.reduce_scatter(g, op="sum", **_cut_of(op))

    @staticmethod
    def arguments(ins: list, outs: list, attrs: Any, ctx: Any) -> tuple:
        ranks = ctx.group(attrs["group"])
        return ins[0], cut_views(outs[0], len(ranks), attrs["axis"], attrs["unit"], attrs["bounds"]), ranks

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", axis=1, grad=(), why="needs ranks; tested in tests/comm/test_operators.py")


class ReduceScatter(Parted):
    """This rank's part of the reduction of the values of all ranks of a group.

    The parts are shards along `axis`, between blocks of `unit` neighbours, or the flat ranges between `bounds`. The gradient is the dual
    collective, all_gather.
    """

    name = "reduce_scatter"
    inputs = ("X",)
    attrs = {"group": Required(str), "op": "sum", "axis": 0, "unit": 1, "bounds": Offsets(), **HOW}

    @staticmethod
    def infer(x: TensorType, *, group: str, op: str, axis: int, unit: int, bounds: Offsets, **how: Any) -> TensorType:
        check_reduction(op)
        check_cut("reduce_scatter", x, axis, unit, bounds)
        return x

    @staticmethod
    def _move(entry: Entry | None, *, group: str, op: str, axis: int, unit: int, bounds: Offsets, **how: Any) -> Entry | None:
        check_move("reduce_scatter", op)
        expect("reduce_scatter", entry, Partial(op, group))
        return cut_entry(group, axis, unit, bounds)

    comm = Comm(
        move=_move,
        sent=lambda n, *_: share("reduce", n),
        algorithm_method="reduce",
        blocks=lambda t, n, attrs: flat_marks(t, n, attrs["axis"], attrs["unit"], attrs["bounds"]),
        boxes=_boxes,
        fluid_names=("c_reducescatter", "c_reducescatter"),
        fluid_counts=("nranks",),
        activity="REDUCESCATTER",
    )

    @staticmethod
    def _meaning(a: Any, xs: Any, out: TensorType, index: int, *, op: str, axis: int, unit: int, bounds: Offsets, **_: Any) -> Any:
        total = a.mean(xs) if op == "avg" else a.sum(xs) if op == "sum" else None
        marks = None if total is None else flat_marks(a.type(total), len(xs), axis, unit, bounds)
        return None if marks is None else a.shaped(a.cut(total, marks[index], marks[index + 1]), out.shape)

    rewrite = Rewrite(meaning=_meaning)

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        check_linear("reduce_scatter", op.attrs["op"])
        cut = _cut_of(op)
        if op.attrs["op"] == "avg":
            return b.all_reduce(b.pad_part(g, **cut), group=cut["group"], op="avg")
        return b.all_gather(g, **cut)

    @staticmethod
    def arguments(ins: list, outs: list, attrs: Any, ctx: Any) -> tuple:
        ranks = ctx.group(attrs["group"])
        return cut_views(ins[0], len(ranks), attrs["axis"], attrs["unit"], attrs["bounds"]), outs[0], attrs["op"], ranks

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", axis=1, grad=(), why="needs ranks; tested in tests/comm/test_operators.py")


class AllToAll(Parted):
    """A value that is sharded along `axis`, sharded along `to_axis` instead.

    The shards are between blocks of `unit` and of `to_unit` neighbours. The gradient is an all_to_all back.
    """

    name = "all_to_all"
    inputs = ("X",)
    attrs = {"group": Required(str), "axis": 0, "unit": 1, "to_axis": Required(int), "to_unit": 1, **HOW}

    @staticmethod
    def _boxes(t: TensorType, n: int, attrs: Any) -> list[tuple[int, ...]]:
        """The shapes of the parts from each rank to each rank, in this order."""
        axis, to_axis = attrs["axis"], attrs["to_axis"]
        columns = _widths(t, n, to_axis, attrs["to_unit"])
        return [_resized(t.shape, {axis: a, to_axis: b}) for a in _widths(t, n, axis, attrs["unit"]) for b in columns]

    @staticmethod
    def infer(x: TensorType, *, group: str, axis: int, unit: int, to_axis: int, to_unit: int, **how: Any) -> TensorType:
        check_cut("all_to_all", x, axis, unit, Offsets())
        check_cut("all_to_all", x, to_axis, to_unit, Offsets())
        if axis == to_axis:
            raise ProgramError(f"op all_to_all moves a shard from one axis to another; both are {axis}")
        return x

    @staticmethod
    def _move(entry: Entry | None, *, group: str, axis: int, unit: int, to_axis: int, to_unit: int, **how: Any) -> Entry | None:
        expect("all_to_all", entry, Shard(axis, group, unit))
        return Shard(to_axis, group, to_unit)

    comm = Comm(
        move=_move,
        sent=lambda n, *_: share("exchange", n),
        algorithm_method="exchange",
        boxes=_boxes,
        fluid_names=("alltoall", "alltoall"),
        activity="ALLTOALL",
    )

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        a = op.attrs
        return b.all_to_all(g, group=a["group"], axis=a["to_axis"], unit=a["to_unit"], to_axis=a["axis"], to_unit=a["unit"])

    @staticmethod
    def arguments(ins: list, outs: list, attrs: Any, ctx: Any) -> tuple:
        ranks = ctx.group(attrs["group"])
        sends = cut_views(ins[0], len(ranks), attrs["to_axis"], attrs["to_unit"])
        return sends, cut_views(outs[0], len(ranks), attrs["axis"], attrs["unit"]), ranks

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", to_axis=1, grad=(), why="needs ranks; tested in tests/comm/test_operators.py")


def _cut_of(op: Any) -> dict[str, Any]:
    return {k: op.attrs[k] for k in ("group", "axis", "unit", "bounds")}
