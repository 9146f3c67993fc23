"""Operators on values of which every rank may have its own: on one device there is one, and they leave it as it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir.errors import ProgramError
from ...ir.opdef import Effect, OpDef, Required, Sample
from ...ir.types import Entry, Own, TensorType
from ..shared.samples import counting

_TINY = 1e-30  # a square of a norm


class ReplicaMean(OpDef):
    """The mean of the values that the ranks have of their own; on one device, X.

    Where every rank has the same value, that is it. Source: the averages of LocalSGD (Stich, "Local SGD Converges Fast and Communicates
    Little", 2019) and of the `c_allreduce_avg` that fluid's transpiler writes for it.
    """

    name = "replica_mean"
    flops = 0
    inputs = ("X",)
    pattern = "* -> * | R L(0)"  # a mean of maxima is no maximum of means
    inplace = (("X", "Out"),)
    meets_by = "all_reduce", {"op": "avg"}

    @staticmethod
    def infer(x: TensorType) -> TensorType:
        return x

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.replica_mean(g)

    @staticmethod
    def kernel(xp: Any, x: Any, *, out: Any) -> None:
        xp.copyto(out, x)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3))


class ReplicaSparseMean(ReplicaMean):
    """`replica_mean` of values most of whose elements are 0: the ranks send the others, with their places."""

    name = "replica_sparse_mean"
    meets_by = "sparse_all_reduce", {}

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.replica_mean(g)  # a gradient is not sparse because the value was


class SparseAllReduce(OpDef):
    """The mean of what the ranks of a group hold, on every one of them; elements that are 0 are not sent.

    The ranks tell each other how many others they have, and gather these and their places. How many bytes that is depends on the data, so
    `traffic` does not count it: of k elements among n ranks, each rank sends (n - 1) k values and as many int32 places.
    """

    name = "sparse_all_reduce"
    activity = "ALLGATHER"
    inputs = ("X",)
    attrs = {"group": Required(str)}
    effect = Effect.COLLECTIVE

    @staticmethod
    def of_own(*, group: str) -> tuple[str, dict[str, Any]]:
        return "replica_sparse_mean", {}

    @staticmethod
    def infer(x: TensorType, *, group: str) -> TensorType:
        return x

    @staticmethod
    def move(entry: Entry | None, *, group: str) -> Entry | None:
        return _from_own("sparse_all_reduce", entry)

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str) -> None:
        comm, ranks = ctx.comm, ctx.group(group)
        flat = x.reshape(-1)
        here = xp.flatnonzero(flat)  # NaN is not 0, and is sent
        counts = [xp.zeros(1, np.int64) for _ in ranks]
        comm.all_gather(xp.full(1, len(here), np.int64), counts, ranks)
        _arrived(comm)
        index = np.int32 if flat.size < 2**31 else np.int64
        places, values = ([xp.empty(int(n.item()), dtype) for n in counts] for dtype in (index, flat.dtype))
        comm.all_gather(here.astype(index), places, ranks)
        comm.all_gather(flat[here], values, ranks)
        _arrived(comm)
        total = xp.zeros(flat.shape, flat.dtype)
        for at, some in zip(places, values, strict=True):
            total[at] += some
        xp.divide(total.reshape(out.shape), len(ranks), out=out)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", grad=(), why="needs ranks; tried in tests/transpiler/test_dgc.py")


def _from_own(name: str, entry: Entry | None) -> Entry | None:
    """Where one value of all lies that is made of what each rank has of its own."""
    if not isinstance(entry, Own):
        raise ProgramError(f"op {name} takes what each rank has of its own, not {entry or 'replicate'}")
    return None


def _arrived(comm: Any) -> None:
    if comm.asynchronous:
        comm.order_after(comm.mark())


class ReplicaAdasum(OpDef):
    """What the values that ranks have of their own amount to together: their sum where they are orthogonal, their mean where they agree.

    Two are combined as (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b, ranks in pairs, then pairs in pairs. On one device, and where every
    rank has the same value, X. Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2021); Horovod.
    """

    name = "replica_adasum"
    flops = 0
    inputs = ("X",)
    pattern = "* -> * | R *!"  # what ranks have is weighted by all of its elements
    inplace = (("X", "Out"),)
    meets_by = "adasum_reduce", {}

    @staticmethod
    def infer(x: TensorType) -> TensorType:
        if not x.is_float:
            raise ProgramError(f"op replica_adasum: X must be of floats, found {x}")
        return x

    kernel = ReplicaMean.kernel

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), grad=(), why="it has no gradient")


class AdasumReduce(OpDef):
    """The adaptive sum of what the ranks of a group hold, on every one of them.

    In round k, ranks whose indices differ in bit k exchange what they have and combine it alike: log2(n) times the value is sent. Where n
    is no power of two, the ranks beyond the last one combine with the first ranks before that, and are told the result.
    """

    name = "adasum_reduce"
    activity = "ADASUM"
    inputs = ("X",)
    attrs = {"group": Required(str)}
    effect = Effect.COLLECTIVE
    sent = staticmethod(lambda n: (n.bit_length() - 1) * (1 << n.bit_length() - 1) / n + 2 * (n - (1 << n.bit_length() - 1)) / n)

    @staticmethod
    def of_own(*, group: str) -> tuple[str, dict[str, Any]]:
        return "replica_adasum", {}

    infer = SparseAllReduce.infer

    @staticmethod
    def move(entry: Entry | None, *, group: str) -> Entry | None:
        return _from_own("adasum_reduce", entry)

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str) -> None:
        comm, ranks = ctx.comm, ctx.group(group)
        me, full = ranks.index(ctx.rank), 1 << len(ranks).bit_length() - 1
        mine, theirs = x.copy(), xp.empty_like(x)
        extra = me + full if me + full < len(ranks) else me - full  # with whom the ranks beyond a power of two begin and end

        def swap(peer: int, gives: bool = True, takes: bool = True) -> None:
            comm.exchange([(mine, ranks[peer])] if gives else [], [(theirs, ranks[peer])] if takes else [])
            _arrived(comm)

        if me >= full:
            swap(extra, takes=False)
            swap(extra, gives=False)
            mine = theirs
        else:
            if extra >= full:
                swap(extra, gives=False)
                mine = _adasum(xp, mine, theirs)
            for bit in range(full.bit_length() - 1):
                peer = me ^ 1 << bit
                swap(peer)
                mine = _adasum(xp, *((mine, theirs) if me < peer else (theirs, mine)))
            if extra >= full:
                swap(extra, takes=False)
        xp.copyto(out, mine)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", grad=(), why="needs ranks; tried in tests/transpiler/test_adasum.py")


def _adasum(xp: Any, a: Any, b: Any) -> Any:
    """Two values combined. Both ranks of a pair reckon in one order, so that they get the same bits."""
    wide = np.float64 if a.dtype == np.float64 else np.float32
    x, y = a.reshape(-1).astype(wide, copy=False), b.reshape(-1).astype(wide, copy=False)
    both, own, other = (float(xp.dot(p, q)) for p, q in ((x, y), (x, x), (y, y)))
    # of next to nothing there is no direction: it is added as it is
    of_x, of_y = (1.0 - both / (2.0 * square) if square > _TINY else 1.0 for square in (own, other))
    return (wide(of_x) * x + wide(of_y) * y).astype(a.dtype, copy=False).reshape(a.shape)
