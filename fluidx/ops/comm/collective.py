"""Collectives: operators that every rank of a group runs together, each with its dual as its gradient.

Types are global, so a collective is the identity on the global value and only changes its placement; `move` defines the change. With
op="avg" and "prod" a collective is an operation on values, not a redistribution, because no placement stands for such partial values.

The gradient of the sum over the ranks' losses with respect to local values: for a replicated value each rank holds a partial sum of it.
"""

from __future__ import annotations

from typing import Any

from ...ir.errors import ProgramError
from ...ir.offsets import Offsets
from ...ir.op_facets import Comm, Native, Rewrite, Storage
from ...ir.opdef import Effect, OpDef, Required, Sample
from ...ir.types import Entry, Shard, TensorType
from .collective_base import (
    HOW,
    Attrs,
    CommunicatorCall,
    at_root,
    attrs_of,
    boxes,
    check_cut,
    check_linear,
    cut,
    cut_views,
    flat_marks,
    moved,
    moved_entry,
    native_calls,
    owned_by,
    partial_sums,
    parts_of,
    reduced,
    resized,
    whole,
    widths,
)
from .volume import share

CUT = ("group", "axis", "unit", "bounds")


class _WithoutValue(OpDef):
    """Base of the calls that every rank of a group makes without a value."""

    outputs = ()
    attrs = {"group": Required(str)}
    effect = Effect.COLLECTIVE

    @classmethod
    def infer(cls, *, group: str, rings: int = 1) -> tuple:
        if rings < 1:
            raise ProgramError(f"op {cls.name}: group {group} has 1 ring or more, got {rings}")
        return ()

    @staticmethod
    def samples():
        yield Sample.of(group="dp")


class NcclInit(_WithoutValue):
    """Create the communicators of a group, one for each of its `rings`; every rank of the group runs it once, in the startup program.

    Ranks that share memory or send messages have no rings. Source: the `ncclInit` operator of Paddle's NCCL design document.
    """

    name = "nccl_init"
    comm = Comm(fluid_names=("ncclInit", "c_comm_init"), fluid_counts=("nranks", "rank"), activity="INIT_NCCL")
    attrs = {"group": Required(str), "rings": 1}

    @staticmethod
    def _bind(ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        ranks = ctx.group(attrs["group"])
        return lambda: [comm.init_group(ranks) for comm in dict.fromkeys(map(ctx.comm.ring, range(attrs["rings"])))]

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, ctx: Any, dry: bool = False) -> Any:
        return native_calls(ctx, "init_group", ctx.group(attrs["group"]))

    native = Native(calls=_calls, bind=_bind)


class Barrier(_WithoutValue):
    """Wait until every rank of the group has arrived."""

    name = "barrier"
    comm = Comm(fluid_names=("barrier", "barrier"), activity="BARRIER")

    @staticmethod
    def _bind(ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        ranks = ctx.group(attrs["group"])
        return lambda: ctx.comm.barrier(ranks)

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, ctx: Any, dry: bool = False) -> Any:
        return native_calls(ctx, "barrier", ctx.group(attrs["group"]))

    native = Native(calls=_calls, bind=_bind)


class AllReduce(CommunicatorCall):
    """The sum (or mean, max, min, product) of the values of all ranks of a group, on each of them.

    The gradient is an all_reduce of the gradient: partial sums of all ranks add up.
    """

    name = "all_reduce"
    inputs = ("X",)
    attrs = {"group": Required(str), "op": "sum", **HOW}
    storage = Storage(inplace=(("X", "Out"),))

    @staticmethod
    def _move(entry: Entry | None, **attrs: Any) -> Entry | None:
        means = entry is not None and entry.is_own and attrs["op"] == "avg"  # of replica-local values
        return None if means else moved_entry("all_reduce", [partial_sums], whole, entry, attrs)

    comm = Comm(
        move=_move,
        sent=lambda n, *_: share("all_reduce", n),
        replica_op=lambda group, op, **how: ("replica_mean", {}) if op == "avg" else None,
        algorithm_method="all_reduce",
        fluid_names=("ncclAllReduce", "c_allreduce_{op}"),
        activity="ALLREDUCE",
    )
    rewrite = Rewrite(meaning=lambda a, xs, out, index, *, op, **_: reduced(a, xs, op))

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        check_linear("all_reduce", op.attrs["op"])
        return b.all_reduce(g, **attrs_of(op, "group", "op"))

    @staticmethod
    def _arguments(x: Any, out: Any, attrs: Attrs, ranks: tuple[int, ...]) -> tuple:
        return x, out, attrs["op"], ranks


class Reduce(CommunicatorCall):
    """The reduction of the values of all ranks of a group, on the root only; elsewhere the result is undefined.

    `root` is an index into the group. The gradient is a broadcast from the root; for a mean it is divided by the number of ranks.
    """

    name = "reduce"
    inputs = ("X",)
    attrs = {"group": Required(str), "op": "sum", "root": Required(int), **HOW}
    sampled = {"root": 0}
    storage = Storage(inplace=(("X", "Out"),))
    comm = Comm(
        move=moved(partial_sums, gives=at_root),
        sent=lambda n, *_: share("reduce", n),
        algorithm_method="reduce",
        blocks=lambda t, n, attrs: owned_by(attrs["root"], n, t.numel),
        fluid_names=("ncclReduce", "c_reduce_{op}"),
        fluid_attrs={"root": "root_id"},
        activity="REDUCE",
    )
    rewrite = Rewrite(meaning=lambda a, xs, out, index, *, op, root, **_: a.nothing if index != root else reduced(a, xs, op))

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        check_linear("reduce", op.attrs["op"])
        where = attrs_of(op, "group", "root")
        if op.attrs["op"] == "avg":
            return b.all_reduce(b.own_term(g, **where), group=where["group"], op="avg")
        return b.broadcast(g, **where)

    @staticmethod
    def _arguments(x: Any, out: Any, attrs: Attrs, ranks: tuple[int, ...]) -> tuple:
        return x, out, attrs["op"], attrs["root"], ranks


class Broadcast(CommunicatorCall):
    """The root's value, on every rank of the group. `root` is an index into the group.

    X is read on the root only. The gradient is a reduce to the root, and 0 elsewhere.
    """

    name = "broadcast"
    inputs = ("X",)
    attrs = {"group": Required(str), "root": Required(int), **HOW}
    sampled = {"root": 0}
    storage = Storage(inplace=(("X", "Out"),))
    comm = Comm(
        move=moved(at_root, whole, gives=whole),
        sent=lambda n, *_: share("spread", n),
        algorithm_method="spread",
        blocks=lambda t, n, attrs: owned_by(attrs["root"], n, t.numel),
        fluid_names=("ncclBcast", "c_broadcast"),
        activity="BROADCAST",
    )
    rewrite = Rewrite(meaning=lambda a, xs, out, index, *, root, **_: xs[root])

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        where = attrs_of(op, "group", "root")
        return b.own_term(b.reduce(g, op="sum", **where), **where)

    @staticmethod
    def _arguments(x: Any, out: Any, attrs: Attrs, ranks: tuple[int, ...]) -> tuple:
        return x, out, attrs["root"], ranks


class AllGather(CommunicatorCall):
    """The whole of a value that is sharded among the ranks of a group, on every rank.

    The shards are along `axis`, between blocks of `unit` neighbours, or the flat ranges between `bounds`. The gradient is the dual
    collective, reduce_scatter.
    """

    name = "all_gather"
    inputs = ("X",)
    attrs = {"group": Required(str), "axis": 0, "unit": 1, "bounds": Offsets(), **HOW}
    sampled = {"axis": 1}
    comm = Comm(
        move=moved(cut, gives=whole),
        sent=lambda n, *_: share("spread", n),
        algorithm_method="spread",
        blocks=lambda t, n, attrs: flat_marks(t, n, attrs["axis"], attrs["unit"], attrs["bounds"]),
        boxes=boxes,
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
        return b.reduce_scatter(g, op="sum", **attrs_of(op, *CUT))

    @staticmethod
    def _arguments(x: Any, out: Any, attrs: Attrs, ranks: tuple[int, ...]) -> tuple:
        return x, parts_of(out, attrs, ranks), ranks


class ReduceScatter(CommunicatorCall):
    """This rank's part of the reduction of the values of all ranks of a group.

    The parts are shards along `axis`, between blocks of `unit` neighbours, or the flat ranges between `bounds`. The gradient is the dual
    collective, all_gather.
    """

    name = "reduce_scatter"
    inputs = ("X",)
    attrs = {"group": Required(str), "op": "sum", "axis": 0, "unit": 1, "bounds": Offsets(), **HOW}
    sampled = {"axis": 1}
    comm = Comm(
        move=moved(partial_sums, gives=cut),
        sent=lambda n, *_: share("reduce", n),
        algorithm_method="reduce",
        blocks=lambda t, n, attrs: flat_marks(t, n, attrs["axis"], attrs["unit"], attrs["bounds"]),
        boxes=boxes,
        fluid_names=("c_reducescatter", "c_reducescatter"),
        fluid_counts=("nranks",),
        activity="REDUCESCATTER",
    )

    @staticmethod
    def _meaning(a: Any, xs: Any, out: TensorType, index: int, *, op: str, axis: int, unit: int, bounds: Offsets, **_: Any) -> Any:
        total = reduced(a, xs, op)
        marks = None if total is None else flat_marks(a.type(total), len(xs), axis, unit, bounds)
        return None if marks is None else a.shaped(a.cut(total, marks[index], marks[index + 1]), out.shape)

    rewrite = Rewrite(meaning=_meaning)

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        check_linear("reduce_scatter", op.attrs["op"])
        where = attrs_of(op, *CUT)
        if op.attrs["op"] == "avg":
            return b.all_reduce(b.pad_part(g, **where), group=where["group"], op="avg")
        return b.all_gather(g, **where)

    @staticmethod
    def _arguments(x: Any, out: Any, attrs: Attrs, ranks: tuple[int, ...]) -> tuple:
        return parts_of(x, attrs, ranks), out, attrs["op"], ranks


class AllToAll(CommunicatorCall):
    """A value that is sharded along `axis`, sharded along `to_axis` instead.

    The shards are between blocks of `unit` and of `to_unit` neighbours. The gradient is an all_to_all back.
    """

    name = "all_to_all"
    inputs = ("X",)
    attrs = {"group": Required(str), "axis": 0, "unit": 1, "to_axis": Required(int), "to_unit": 1, **HOW}
    sampled = {"to_axis": 1}

    @staticmethod
    def _boxes(t: TensorType, n: int, attrs: Any) -> list[tuple[int, ...]]:
        """The shapes of the parts from each rank to each rank, in this order."""
        axis, to_axis = attrs["axis"], attrs["to_axis"]
        columns = widths(t, n, to_axis, attrs["to_unit"])
        return [resized(t.shape, {axis: a, to_axis: b}) for a in widths(t, n, axis, attrs["unit"]) for b in columns]

    @classmethod
    def infer(cls, x: TensorType, *, group: str, **attrs: Any) -> TensorType:
        check_cut("all_to_all", x, attrs["axis"], attrs["unit"], Offsets())
        check_cut("all_to_all", x, attrs["to_axis"], attrs["to_unit"], Offsets())
        if attrs["axis"] == attrs["to_axis"]:
            raise ProgramError(f"op all_to_all moves a shard from one axis to another; both are {attrs['axis']}")
        return x

    comm = Comm(
        move=moved(
            lambda attrs: Shard(attrs["axis"], attrs["group"], attrs["unit"]),
            gives=lambda attrs: Shard(attrs["to_axis"], attrs["group"], attrs["to_unit"]),
        ),
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
    def _arguments(x: Any, out: Any, attrs: Attrs, ranks: tuple[int, ...]) -> tuple:
        sends = cut_views(x, len(ranks), attrs["to_axis"], attrs["to_unit"])
        return sends, cut_views(out, len(ranks), attrs["axis"], attrs["unit"]), ranks
