"""Point to point: send and recv, and the ring forms that are lowered to them once a rank is chosen."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from ...ir.errors import ProgramError
from ...ir.opdef import Effect, OpDef, Required, Sample
from ...ir.placement import Placed
from ...ir.types import ANY, At, Partial, Placement, TensorType
from ..shared.samples import counting
from .collective import check_reduction, move


class Send(OpDef):
    """Send X to the rank `peer`, which runs the matching recv.

    Neighbouring send and recv operators with the same `batch` are started together, as one NCCL group: none waits for another.
    """

    name = "send"
    inputs = ("X",)
    outputs = ()
    attrs = {"peer": Required(int), "group": Required(str), "batch": "", "stream": "comm"}
    effect = Effect.P2P

    @staticmethod
    def infer(x: TensorType, *, peer: int, group: str, batch: str, stream: str) -> tuple:
        return ()

    @staticmethod
    def bind(xp: Any, ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        x, peer = ins[0], attrs["peer"]
        return lambda: ctx.comm.exchange([(x, peer)], [])

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), peer=0, group="dp", grad=(), why="needs ranks; covered by tests/comm")


class Recv(OpDef):
    """The value that the rank `peer` sends; `shape` and `dtype` say what it will be."""

    name = "recv"
    attrs = {"peer": Required(int), "shape": Required(tuple), "dtype": "float32", "group": Required(str), "batch": "", "stream": "comm"}
    effect = Effect.P2P

    @staticmethod
    def infer(*, peer: int, shape: tuple, dtype: str, group: str, batch: str, stream: str) -> TensorType:
        return TensorType(dtype, tuple(shape))

    @staticmethod
    def bind(xp: Any, ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        out, peer = outs[0], attrs["peer"]
        return lambda: ctx.comm.exchange([], [(out, peer)])

    @staticmethod
    def samples():
        yield Sample.of(peer=0, shape=(2,), group="dp", grad=(), why="needs ranks; covered by tests/comm")


class Chunk(OpDef):
    """Elements [start, stop) of X laid out flat, as one axis."""

    name = "chunk"
    inputs = ("X",)
    attrs = {"start": Required(int), "stop": Required(int)}
    elementwise = False

    @staticmethod
    def infer(x: TensorType, *, start: int, stop: int) -> TensorType:
        if not 0 <= start < stop or (x.numel >= 0 and stop > x.numel):
            raise ProgramError(f"chunk [{start}, {stop}) does not fit {x} with {x.numel} elements")
        return x.with_shape((stop - start,))

    @staticmethod
    def place(x: Placed, *, start: int, stop: int) -> Placement:
        for p in x.placement:
            move(x, p.group, (Partial, At), None)  # a shard's rows are not a range of the whole laid out flat
        return x.placement

    @staticmethod
    def view(x: Any, *, start: int, stop: int) -> Any:
        return x.reshape(-1)[start:stop] if x.flags.c_contiguous else None

    @staticmethod
    def kernel(xp: Any, x: Any, *, start: int, stop: int) -> Any:
        return xp.ascontiguousarray(x).reshape(-1)[start:stop]

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), start=2, stop=7, grad=(), why="stands in backward parts only")


class Pack(OpDef):
    """The inputs laid out flat, one behind the other: small messages travel as one."""

    name = "pack"
    inputs = ("X*",)

    @staticmethod
    def infer(xs: list[TensorType]) -> TensorType:
        if not xs or len({x.dtype for x in xs}) > 1:
            raise ProgramError(f"pack needs inputs of one dtype, got {', '.join(map(str, xs)) or 'none'}")
        return TensorType(xs[0].dtype, (ANY if any(x.numel == ANY for x in xs) else sum(x.numel for x in xs),))

    @staticmethod
    def bind(xp: Any, ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        pairs, at = [], 0
        for x in ins[0]:
            pairs.append((outs[0][at : at + x.size].reshape(x.shape), x))
            at += x.size
        return partial(_copy_all, pairs)

    kernel = staticmethod(lambda xp, xs: xp.concatenate([x.reshape(-1) for x in xs]))

    @staticmethod
    def samples():
        yield Sample.of([counting(2, 3), counting(4)], grad=(), why="stands beside communication only")


class Unpack(OpDef):
    """The values that pack laid out one behind the other, in their `shapes`."""

    name = "unpack"
    inputs = ("X",)
    outputs = ("Out*",)
    attrs = {"shapes": Required(tuple)}

    @staticmethod
    def infer(x: TensorType, *, shapes: tuple) -> list[TensorType]:
        if x.numel != ANY and sum(prod(s) for s in shapes) != x.numel:
            raise ProgramError(f"unpack: shapes {[list(s) for s in shapes]} do not add up to the elements of {x}")
        return [x.with_shape(s) for s in shapes]

    @staticmethod
    def bind(xp: Any, ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        pairs, at = [], 0
        for out in outs[0]:
            pairs.append((out, ins[0][at : at + out.size].reshape(out.shape)))
            at += out.size
        return partial(_copy_all, pairs)

    @staticmethod
    def kernel(xp: Any, x: Any, *, shapes: tuple) -> list:
        out, at = [], 0
        for s in shapes:
            out.append(x[at : at + prod(s)].reshape(s))
            at += prod(s)
        return out

    @staticmethod
    def samples():
        yield Sample.of(counting(10), shapes=((2, 3), (4,)), grad=(), why="stands beside communication only")


def _copy_all(pairs: list[tuple[Any, Any]]) -> None:
    for out, x in pairs:
        out[...] = x


class _Ring(OpDef):
    """Base of the ring forms: one operator for all ranks, lowered to send, recv and sum by Specialize."""

    inputs = ("X",)
    effect = Effect.COLLECTIVE

    @staticmethod
    def bind(xp: Any, ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        raise ProgramError("a ring operator stands for all ranks; take one rank's program with get_trainer_program(rank)")


class RingReduce(_Ring):
    """The reduction of what the ranks hold, on the root, carried from neighbour to neighbour with a partial sum added at each hop.

    Source: steps 1 to 3 of the ring scheme in Paddle's NCCL design document. Operators of one `wave` travel together.
    """

    name = "ring_reduce"
    attrs = {"group": Required(str), "op": "sum", "root": Required(int), "wave": 0, "stream": "comm"}

    @staticmethod
    def infer(x: TensorType, *, group: str, op: str, root: int, wave: int, stream: str) -> TensorType:
        check_reduction(op)
        if op not in ("sum", "avg"):
            raise ProgramError(f"ring_reduce adds partial sums; op={op!r} is not 'sum' or 'avg'")
        return x

    @staticmethod
    def place(x: Placed, *, group: str, op: str, root: int, wave: int, stream: str) -> Placement:
        return move(x, group, (Partial,), At(root, group), op)

    @staticmethod
    def samples():
        yield Sample.of(counting(4), group="dp", root=0, grad=(), why="lowered before it runs")


class RingBroadcast(_Ring):
    """The root's value on every rank, handed from neighbour to neighbour.

    Source: step 5 of the ring scheme in Paddle's NCCL design document.
    """

    name = "ring_broadcast"
    attrs = {"group": Required(str), "root": Required(int), "wave": 0, "stream": "comm"}

    @staticmethod
    def infer(x: TensorType, *, group: str, root: int, wave: int, stream: str) -> TensorType:
        return x

    @staticmethod
    def place(x: Placed, *, group: str, root: int, wave: int, stream: str) -> Placement:
        return move(x, group, (At, type(None)), None)

    @staticmethod
    def samples():
        yield Sample.of(counting(4), group="dp", root=0, grad=(), why="lowered before it runs")
