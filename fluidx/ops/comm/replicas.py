"""Operators on replica-local values: on one device there is only one such value, and they return it unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Comm, Rewrite, Storage
from ...ir.opdef import Effect, OpDef, Required, Sample
from ...ir.types import Entry, TensorType
from ..data.search import share_of
from ..shared.samples import counting


class ReplicaMean(OpDef):
    """The mean of replica-local values; on one device, X.

    If every rank has the same value, the mean is this value. Source: the averages of LocalSGD (Stich, "Local SGD Converges Fast and
    Communicates Little", 2019) and of the `c_allreduce_avg` that fluid's transpiler writes for it.
    """

    name = "replica_mean"
    arithmetic = Arithmetic(flops=0)
    inputs = ("X",)
    pattern = "* -> * | R L(0)"  # a mean of maxima is not a maximum of means
    storage = Storage(inplace=(("X", "Out"),))
    comm = Comm(replica_collective=("all_reduce", {"op": "avg"}))
    rewrite = Rewrite(meaning=lambda a, ins, outs, **how: [a.each("replica_mean", ins[0], outs[0].dtype)])

    @staticmethod
    def infer(x: TensorType, **how: Any) -> TensorType:
        return x

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.replica_mean(g)

    @staticmethod
    def kernel(xp: Any, x: Any, *, out: Any, **how: Any) -> None:
        xp.copyto(out, x)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3))


def _check_share(op: str, share: float) -> None:
    if not 0.0 <= share <= 1.0:
        raise ProgramError(f"op {op}: share, the fraction of nonzero elements, must be from 0 to 1, got {share!r}")


class ReplicaSparseMean(ReplicaMean):
    """`replica_mean` of values with mostly zero elements: the ranks send the nonzero elements and their positions.

    `share` is the expected fraction of nonzero elements, for estimates of the bytes sent.
    """

    name = "replica_sparse_mean"
    attrs = {"share": 1.0}
    comm = Comm(replica_collective=("sparse_all_reduce", {}))

    @staticmethod
    def infer(x: TensorType, *, share: float = 1.0, **how: Any) -> TensorType:
        _check_share("replica_sparse_mean", share)
        return x

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.replica_mean(g)  # the gradient of a sparse value is not sparse


class SparseAllReduce(OpDef):
    """The mean of the values of all ranks of a group, on each of them; zero elements are not sent.

    The ranks exchange the numbers of their nonzero elements, and gather these elements and their positions. The number of bytes depends on
    the data: with k nonzero elements and n ranks, each rank sends (n - 1) k values and positions, int32 if that is enough, and the number
    k. `traffic` computes k from the `share` of all elements.
    """

    name = "sparse_all_reduce"
    inputs = ("X",)
    attrs = {"group": Required(str), "share": 1.0}
    effect = Effect.COLLECTIVE

    @staticmethod
    def _replica_op(*, group: str, share: float) -> tuple[str, dict[str, Any]]:
        return "replica_sparse_mean", {"share": share}

    @staticmethod
    def _sent(n: int, t: TensorType, attrs: Any) -> float:
        if not t.numel:
            return 0.0
        pair = t.nbytes // t.numel + _place(t.numel).itemsize
        return (n - 1) * (share_of(t.numel, attrs["share"]) * pair + np.dtype(np.int64).itemsize) / t.nbytes

    @staticmethod
    def infer(x: TensorType, *, group: str, share: float) -> TensorType:
        _check_share("sparse_all_reduce", share)
        return x

    @staticmethod
    def _move(entry: Entry | None, **attrs: Any) -> Entry | None:
        return from_replica_local("sparse_all_reduce", entry)

    comm = Comm(move=_move, sent=_sent, replica_op=_replica_op, activity="ALLGATHER")

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str, share: float) -> None:
        comm, ranks = ctx.comm, ctx.group(group)
        flat = x.reshape(-1)
        here = xp.flatnonzero(flat)  # NaN is not 0, and is sent
        counts = [xp.zeros(1, np.int64) for _ in ranks]
        comm.all_gather(xp.full(1, len(here), np.int64), counts, ranks)
        wait_for_data(comm)
        index = _place(flat.size)
        places, values = ([xp.empty(int(n.item()), dtype) for n in counts] for dtype in (index, flat.dtype))
        comm.all_gather(here.astype(index), places, ranks)
        comm.all_gather(flat[here], values, ranks)
        wait_for_data(comm)
        total = xp.zeros(flat.shape, flat.dtype)
        for at, some in zip(places, values, strict=True):
            total[at] += some
        xp.divide(total.reshape(out.shape), len(ranks), out=out)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", grad=(), why="needs ranks; tested in tests/transpiler/test_dgc.py")


def _place(numel: int) -> np.dtype:
    """The dtype of positions among so many elements."""
    return np.dtype(np.int32 if numel < 2**31 else np.int64)


def from_replica_local(name: str, entry: Entry | None) -> Entry | None:
    """The placement of a value computed from replica-local values."""
    if entry is None or not entry.is_own:
        raise ProgramError(f"op {name} takes replica-local values, not {entry or 'replicate'}")
    return None


def wait_for_data(comm: Any) -> None:
    """Make later work on the device wait for the data that was sent and received."""
    if comm.asynchronous:
        comm.order_after(comm.mark())
