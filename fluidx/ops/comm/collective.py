"""Collectives: operators that every rank of a group runs together, each with its dual as its gradient."""

from __future__ import annotations

from typing import Any

from ...comm.base import REDUCE_OPS
from ...ir.errors import ProgramError, nearest
from ...ir.opdef import Effect, OpDef, Required, Sample
from ...ir.placement import Placed, PlaceError
from ...ir.types import ANY, At, Partial, Placement, Shard, TensorType, show_placement
from ..shared.samples import counting


def check_reduction(op: str) -> None:
    if op not in REDUCE_OPS:
        raise ProgramError(f"reduction op={op!r}; {nearest(op, REDUCE_OPS, 'there are')}")


def move(x: Placed, group: str, expected: tuple[type, ...], becomes: Any, op: str | None = None) -> Placement:
    """The placement after a collective over `group`: its entry must be one of `expected` (and of the same reduction)."""
    entry = x.on(group)
    if not isinstance(entry, expected) or (op is not None and isinstance(entry, Partial) and entry.op != op):
        names = {type(None): "replicate", Partial: f"partial({op})" if op else "partial", Shard: "shard", At: "at"}
        want = " or ".join(names[e] for e in expected)
        raise PlaceError(f"%{x.name} is {show_placement(x.placement)}, expected {want} over {group}")
    rest = tuple(p for p in x.placement if p.group != group)
    return rest if becomes is None else (*rest, becomes)


class NcclInit(OpDef):
    """Create the communicator of a group; every rank of the group runs it once, in the startup program.

    Source: the `ncclInit` operator of Paddle's NCCL design document.
    """

    name = "nccl_init"
    outputs = ()
    attrs = {"group": Required(str)}
    effect = Effect.COLLECTIVE

    @staticmethod
    def infer(*, group: str) -> tuple:
        return ()

    @staticmethod
    def place(*, group: str) -> tuple:
        return ()

    @staticmethod
    def bind(xp: Any, ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        ranks = ctx.group(attrs["group"])
        return lambda: ctx.comm.init_group(ranks)

    @staticmethod
    def samples():
        yield Sample.of(group="dp")


class Barrier(OpDef):
    """Wait until every rank of the group has arrived."""

    name = "barrier"
    outputs = ()
    attrs = {"group": Required(str)}
    effect = Effect.COLLECTIVE

    infer = NcclInit.infer
    place = NcclInit.place

    @staticmethod
    def bind(xp: Any, ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        ranks = ctx.group(attrs["group"])
        return lambda: ctx.comm.barrier(ranks)

    @staticmethod
    def samples():
        yield Sample.of(group="dp")


class AllReduce(OpDef):
    """The sum (or mean, max, min, product) of what the ranks of a group hold, on every one of them.

    The gradient is an all_reduce of the gradient: the terms of all ranks add up.
    """

    name = "all_reduce"
    inputs = ("X",)
    attrs = {"group": Required(str), "op": "sum", "stream": "comm"}
    effect = Effect.COLLECTIVE
    inplace = (("X", "Out"),)

    @staticmethod
    def infer(x: TensorType, *, group: str, op: str, stream: str) -> TensorType:
        check_reduction(op)
        return x

    @staticmethod
    def place(x: Placed, *, group: str, op: str, stream: str) -> Placement:
        return move(x, group, (Partial,), None, op)

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        if op.attrs["op"] not in ("sum", "avg"):
            raise ProgramError(f"all_reduce of op={op.attrs['op']!r} has no gradient; 'sum' and 'avg' have")
        return b.all_reduce(g, group=op.attrs["group"], op=op.attrs["op"])

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str, op: str, stream: str) -> None:
        ctx.comm.all_reduce(x, out, op, ctx.group(group))

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", op="sum", grad=(), why="needs ranks; covered by tests/comm")


class Reduce(OpDef):
    """The reduction of what the ranks of a group hold, on the root only; elsewhere the result is undefined.

    `root` is an index into the group. The gradient is a broadcast from the root.
    """

    name = "reduce"
    inputs = ("X",)
    attrs = {"group": Required(str), "op": "sum", "root": Required(int), "stream": "comm"}
    effect = Effect.COLLECTIVE
    inplace = (("X", "Out"),)

    @staticmethod
    def infer(x: TensorType, *, group: str, op: str, root: int, stream: str) -> TensorType:
        check_reduction(op)
        return x

    @staticmethod
    def place(x: Placed, *, group: str, op: str, root: int, stream: str) -> Placement:
        return move(x, group, (Partial,), At(root, group), op)

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.broadcast(g, group=op.attrs["group"], root=op.attrs["root"])

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str, op: str, root: int, stream: str) -> None:
        ctx.comm.reduce(x, out, op, root, ctx.group(group))

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", root=0, grad=(), why="needs ranks; covered by tests/comm")


class Broadcast(OpDef):
    """The root's value, on every rank of the group. `root` is an index into the group.

    The gradient is a reduce to the root.
    """

    name = "broadcast"
    inputs = ("X",)
    attrs = {"group": Required(str), "root": Required(int), "stream": "comm"}
    effect = Effect.COLLECTIVE
    inplace = (("X", "Out"),)

    @staticmethod
    def infer(x: TensorType, *, group: str, root: int, stream: str) -> TensorType:
        return x

    @staticmethod
    def place(x: Placed, *, group: str, root: int, stream: str) -> Placement:
        entry = x.on(group)
        if isinstance(entry, At) and entry.root != root:
            raise PlaceError(f"%{x.name} is {entry}, but the broadcast is from root {root}")
        return move(x, group, (At, type(None)), None)

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.reduce(g, group=op.attrs["group"], op="sum", root=op.attrs["root"])

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str, root: int, stream: str) -> None:
        ctx.comm.broadcast(x, out, root, ctx.group(group))

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", root=0, grad=(), why="needs ranks; covered by tests/comm")


class AllGather(OpDef):
    """The slices that the ranks of a group hold, joined along axis 0, on every rank.

    `nranks` is the size of the group. The gradient is the dual collective, reduce_scatter.
    """

    name = "all_gather"
    inputs = ("X",)
    attrs = {"group": Required(str), "nranks": Required(int), "stream": "comm"}
    effect = Effect.COLLECTIVE

    @staticmethod
    def infer(x: TensorType, *, group: str, nranks: int, stream: str) -> TensorType:
        if not x.shape:
            raise ProgramError("all_gather joins along axis 0; a value without axes has none. Reshape it to [1]")
        return x.with_shape((ANY if x.shape[0] == ANY else x.shape[0] * nranks, *x.shape[1:]))

    @staticmethod
    def place(x: Placed, *, group: str, nranks: int, stream: str) -> Placement:
        if isinstance(x.on(group), Shard) and x.on(group) != Shard(0, group):
            raise PlaceError(f"%{x.name} is {x.on(group)}; all_gather joins along axis 0")
        return move(x, group, (Shard,), None)

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.reduce_scatter(g, group=op.attrs["group"], nranks=op.attrs["nranks"], op="sum")

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str, nranks: int, stream: str) -> None:
        ctx.comm.all_gather(x, out, ctx.group(group))

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", nranks=1, grad=(), why="needs ranks; covered by tests/comm")


class ReduceScatter(OpDef):
    """Slice number (own index) along axis 0 of the reduction of what the ranks of a group hold.

    `nranks` is the size of the group and must divide axis 0. The gradient is the dual collective, all_gather.
    """

    name = "reduce_scatter"
    inputs = ("X",)
    attrs = {"group": Required(str), "nranks": Required(int), "op": "sum", "stream": "comm"}
    effect = Effect.COLLECTIVE

    @staticmethod
    def infer(x: TensorType, *, group: str, nranks: int, op: str, stream: str) -> TensorType:
        check_reduction(op)
        if not x.shape or (x.shape[0] != ANY and x.shape[0] % nranks):
            raise ProgramError(f"reduce_scatter: axis 0 of {x} must divide by the {nranks} ranks of {group}; pad it or use all_reduce")
        return x.with_shape((ANY if x.shape[0] == ANY else x.shape[0] // nranks, *x.shape[1:]))

    @staticmethod
    def place(x: Placed, *, group: str, nranks: int, op: str, stream: str) -> Placement:
        return move(x, group, (Partial,), Shard(0, group), op)

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        if op.attrs["op"] != "sum":
            raise ProgramError(f"reduce_scatter of op={op.attrs['op']!r} has no gradient; 'sum' has")
        return b.all_gather(g, group=op.attrs["group"], nranks=op.attrs["nranks"])

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str, nranks: int, op: str, stream: str) -> None:
        ctx.comm.reduce_scatter(x, out, op, ctx.group(group))

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", nranks=1, grad=(), why="needs ranks; covered by tests/comm")


class AllToAll(OpDef):
    """Slice j of axis 0 goes to rank j; the result is the slices received, in rank order.

    `nranks` is the size of the group and must divide axis 0. The gradient is an all_to_all back.
    """

    name = "all_to_all"
    inputs = ("X",)
    attrs = {"group": Required(str), "nranks": Required(int), "stream": "comm"}
    effect = Effect.COLLECTIVE

    @staticmethod
    def infer(x: TensorType, *, group: str, nranks: int, stream: str) -> TensorType:
        if not x.shape or (x.shape[0] != ANY and x.shape[0] % nranks):
            raise ProgramError(f"all_to_all: axis 0 of {x} must divide by the {nranks} ranks of {group}")
        return x

    @staticmethod
    def place(x: Placed, *, group: str, nranks: int, stream: str) -> Placement:
        return move(x, group, (Shard,), x.on(group))

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.all_to_all(g, group=op.attrs["group"], nranks=op.attrs["nranks"])

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str, nranks: int, stream: str) -> None:
        ctx.comm.all_to_all(x, out, ctx.group(group))

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", nranks=1, grad=(), why="needs ranks; covered by tests/comm")


class BatchWeight(OpDef):
    """X times this rank's share of the batch: its rows, times the ranks, over all rows. Exactly X when the batch divides evenly.

    It stands behind the gradient's seed, so that the mean over ranks is the mean over rows for an uneven batch too. With op="sum" the
    share is 1, but 0 on a rank that has no rows of its own and computes on a borrowed one.
    """

    name = "batch_weight"
    inputs = ("X",)
    attrs = {"group": Required(str), "op": "avg"}
    effect = Effect.RANDOM  # reads the run context, so it may not be folded or shared, but may be dropped
    inplace = (("X", "Out"),)
    elementwise = True

    @staticmethod
    def infer(x: TensorType, *, group: str, op: str) -> TensorType:
        check_reduction(op)
        return x

    @staticmethod
    def place(x: Placed, *, group: str, op: str) -> Placement:
        return x.placement

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str, op: str) -> None:
        weight = ctx.weight if op == "avg" else float(ctx.weight != 0.0)
        xp.multiply(x, x.dtype.type(weight), out=out)

    @staticmethod
    def samples():
        yield Sample.of(counting(1), group="dp", grad=(), why="stands in backward parts only")
