"""Messages: send and recv, and the operators that pack values into flat messages and unpack them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from ...ir.dtypes import as_dtype
from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Autocast, Comm, Control, Native, Rewrite, Storage
from ...ir.opdef import Effect, OpDef, Required, Sample
from ...ir.types import ANY, At, TensorType
from ..shared.native import all_of, copy_calls
from ..shared.samples import counting
from .collective_base import at_root, moved, native_calls


class Send(OpDef):
    """Send X to the rank `peer`, which runs the matching recv.

    Neighbouring send and recv operators with the same `batch` are started together, as one NCCL group: the sends are posted first, and none
    waits for another. So none of them may send a value that another of them receives.
    """

    name = "send"
    comm = Comm(fluid_names=("send_v2", "send_v2"))
    inputs = ("X",)
    outputs = ()
    attrs = {"peer": Required(int), "group": Required(str), "batch": ""}
    effect = Effect.P2P

    @staticmethod
    def infer(x: TensorType, *, peer: int, group: str, batch: str) -> tuple:
        return ()

    @staticmethod
    def _bind(ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        x, peer = ins[0], attrs["peer"]
        return lambda: ctx.comm.exchange([(x, peer)], [])

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, ctx: Any, dry: bool = False) -> Any:
        return native_calls(ctx, "exchange", [(ins[0], attrs["peer"])], [])

    native = Native(calls=_calls, bind=_bind)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), peer=0, group="dp", grad=(), why="needs ranks; tested in tests/comm/test_operators.py")


class Recv(OpDef):
    """The value that the rank `peer` sends; `shape` and `dtype` are its type.

    For a value with open axes, `open` has two numbers for each open axis: an axis of the feed `like`, and the multiple of its size. The
    sizes are those of the whole value, of which this rank may receive a part.
    """

    name = "recv"
    comm = Comm(fluid_names=("recv_v2", "recv_v2"), fluid_attrs={"shape": "out_shape"})
    attrs = {
        "peer": Required(int), "shape": Required(tuple), "dtype": "float32", "group": Required(str), "batch": "", "like": "", "open": (),
    }  # fmt: skip
    effect = Effect.P2P
    control = Control(open_axes=lambda attrs: [(attrs["like"], *pair) for pair in _pairs(attrs["open"])])

    @staticmethod
    def infer(*, peer: int, shape: tuple, dtype: str, group: str, batch: str, like: str, open: tuple) -> TensorType:
        opened = shape.count(ANY)
        if (open or like) and (len(open) != 2 * opened or not like or any(axis < 0 or times < 1 for axis, times in _pairs(open))):
            raise ProgramError(f"op recv: open={list(open)}, like={like!r} does not give the size of {opened} open axes of {list(shape)}")
        return TensorType(as_dtype(dtype), tuple(shape))

    @staticmethod
    def _bind(ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        out, peer = outs[0], attrs["peer"]
        return lambda: ctx.comm.exchange([], [(out, peer)])

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, ctx: Any, dry: bool = False) -> Any:
        return native_calls(ctx, "exchange", [], [(outs[0], attrs["peer"])])

    native = Native(calls=_calls, bind=_bind)

    @staticmethod
    def samples():
        yield Sample.of(peer=0, shape=(2,), group="dp", grad=(), why="needs ranks; tested in tests/comm/test_operators.py")


def _pairs(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=False))


class TransferOp(OpDef):
    """A value of the rank with index `root`, on the rank with index `to`. One operator for all ranks; in a rank program it is a send or a
    recv.

    Neighbours with the same `batch` are started together, like sends and receives. The gradient is a transfer back.
    """

    name = "transfer"
    inputs = ("X",)
    attrs = {"group": Required(str), "root": Required(int), "to": Required(int), "batch": ""}
    effect = Effect.COLLECTIVE
    control = Control(abstract=True)

    @staticmethod
    def infer(x: TensorType, *, group: str, root: int, to: int, batch: str) -> TensorType:
        if root == to:
            raise ProgramError(f"op transfer: rank {root} of {group} would send to itself")
        return x

    comm = Comm(move=moved(at_root, gives=lambda attrs: At(attrs["to"], attrs["group"])))

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.transfer(g, group=op.attrs["group"], root=op.attrs["to"], to=op.attrs["root"])

    @staticmethod
    def _bind(ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        raise ProgramError("transfer is an operator of the program for all ranks; take one rank's program with get_trainer_program(rank)")

    native = Native(bind=_bind)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="pp", root=0, to=1, grad=(), why="lowered before it runs")


def _whole(types: Any) -> str:
    """The axis words for operands of which no axis may be sharded."""
    return ", ".join(" ".join("." * t.ndim) for t in types)


class Chunk(OpDef):
    """Elements [start, stop) of X in flat form, as one axis."""

    name = "chunk"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    inputs = ("X",)
    attrs = {"start": Required(int), "stop": Required(int)}
    pattern = staticmethod(lambda ins, outs, attrs: f"{_whole(ins)} -> . | L(0) U(0)")
    rewrite = Rewrite(meaning=lambda a, ins, outs, *, start, stop: [a.cut(ins[0], start, stop)])

    @staticmethod
    def infer(x: TensorType, *, start: int, stop: int) -> TensorType:
        if not 0 <= start <= stop or (x.numel >= 0 and stop > x.numel):
            raise ProgramError(f"chunk [{start}, {stop}) does not fit {x} with {x.numel} elements")
        return x.with_shape((stop - start,))

    @staticmethod
    def _view(x: Any, *, start: int, stop: int) -> Any:
        return x.reshape(-1)[start:stop] if x.flags.c_contiguous else None

    storage = Storage(view=_view)

    @staticmethod
    def kernel(xp: Any, x: Any, *, start: int, stop: int) -> Any:
        return xp.ascontiguousarray(x).reshape(-1)[start:stop]

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), start=2, stop=7, grad=(), why="only used in backward parts")


class Pack(OpDef):
    """The inputs in flat form, joined: small messages travel as one."""

    name = "pack"
    comm = Comm(activity="MEMCPY_IN_FUSION_BUFFER")
    arithmetic = Arithmetic(flops=0)
    inputs = ("X*",)
    pattern = staticmethod(lambda ins, outs, attrs: f"{_whole(ins)} -> . | L({','.join(map(str, range(len(ins))))}) F")
    rewrite = Rewrite(meaning=lambda a, ins, outs: [a.join(ins[0])])

    @staticmethod
    def infer(xs: list[TensorType]) -> TensorType:
        if not xs or len({x.dtype for x in xs}) > 1:
            raise ProgramError(f"pack needs inputs of one dtype, got {', '.join(map(str, xs)) or 'none'}")
        return TensorType(xs[0].dtype, (ANY if any(x.numel == ANY for x in xs) else sum(x.numel for x in xs),))

    @staticmethod
    def _bind(ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        return partial(_copy_all, _packed(ins[0], outs[0]))

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, dry: bool = False) -> Any:
        return all_of([copy_calls(place, x, dry) for place, x in _packed(ins[0], outs[0])])

    native = Native(calls=_calls, bind=_bind)

    kernel = staticmethod(lambda xp, xs: xp.concatenate([x.reshape(-1) for x in xs]))
    storage = Storage(strided=lambda slot, a: slot == "X", operand_views=lambda out, shapes: _rows(out, shapes), assembled_by_many=True)

    @staticmethod
    def samples():
        yield Sample.of([counting(2, 3), counting(4)], grad=(), why="only used next to communication")


class Unpack(OpDef):
    """Values with the given `shapes`, read one after the other from the flat inputs: the inverse of pack."""

    name = "unpack"
    comm = Comm(local_attrs=lambda attrs, ins, outs: {**attrs, "shapes": tuple(outs)}, activity="MEMCPY_OUT_FUSION_BUFFER")
    arithmetic = Arithmetic(flops=0)
    inputs = ("X*",)
    outputs = ("Out*",)
    attrs = {"shapes": Required(tuple[tuple[int, ...], ...])}
    pattern = staticmethod(lambda ins, outs, attrs: f"{_whole(ins)} -> {_whole(outs)} | L({','.join(map(str, range(len(ins))))}) F")
    rewrite = Rewrite(meaning=lambda a, ins, outs, *, shapes: a.rows(a.join(ins[0]), shapes))

    @staticmethod
    def infer(xs: list[TensorType], *, shapes: tuple) -> list[TensorType]:
        if not xs or len({x.dtype for x in xs}) > 1:
            raise ProgramError(f"unpack needs inputs of one dtype, got {', '.join(map(str, xs)) or 'none'}")
        if all(x.numel != ANY for x in xs) and sum(prod(s) for s in shapes) != sum(x.numel for x in xs):
            raise ProgramError(f"unpack: shapes {[list(s) for s in shapes]} do not add up to the elements of {', '.join(map(str, xs))}")
        return [xs[0].with_shape(s) for s in shapes]

    @staticmethod
    def _bind(ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        pairs = _unpacked(ins[0], outs[0])
        return None if pairs is None else partial(_copy_all, pairs)

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, dry: bool = False) -> Any:
        pairs = _unpacked(ins[0], outs[0])
        return None if pairs is None else all_of([copy_calls(place, x, dry) for place, x in pairs])

    native = Native(calls=_calls, bind=_bind)

    @staticmethod
    def kernel(xp: Any, xs: list, *, shapes: tuple) -> list:
        return _rows(xp.concatenate([x.reshape(-1) for x in xs]) if len(xs) > 1 else xs[0].reshape(-1), shapes)

    @staticmethod
    def _view(x: Any, *, shapes: tuple) -> Any:
        return _rows(x.reshape(-1), shapes) if x.flags.c_contiguous and x.size == sum(map(prod, shapes)) else None

    storage = Storage(view=_view, operand_views=lambda out, given, *, shapes: _rows(out.reshape(-1), given), assembled_by_many=True)

    @staticmethod
    def samples():
        yield Sample.of([counting(10)], shapes=((2, 3), (4,)), grad=(), why="only used next to communication")
        yield Sample.of([counting(4), counting(2, 3)], shapes=((2, 5),), grad=(), why="only used next to communication")


def _rows(flat: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Views of a flat array as values of these shapes, one after the other."""
    ends = list(accumulate(map(prod, shapes), initial=0))
    return [flat[a:b].reshape(s) for (a, b), s in zip(pairwise(ends), shapes, strict=True)]


def _packed(xs: list, out: Any) -> list[tuple[Any, Any]]:
    """(target, source) for each input that is not stored in the output already."""
    return [(part, x) for part, x in zip(_rows(out, [x.shape for x in xs]), xs, strict=True) if not _is_in_place(part, x)]


def _is_in_place(place: Any, x: Any) -> bool:
    """Is an input already stored at its position in the output?"""
    return x.flags.c_contiguous and place.__array_interface__["data"][0] == x.__array_interface__["data"][0]


def _unpacked(xs: list, outs: list) -> list[tuple[Any, Any]] | None:
    """(target, source) for all pieces; None for strided arrays, whose flat form is a copy of their present values."""
    if not all(x.flags.c_contiguous for x in (*xs, *outs)):
        return None
    targets = _flats(outs)
    return [(place, x) for given in _flats(xs) for place, x in _overlaps(given, targets) if not _is_in_place(place, x)]


def _flats(arrays: list) -> list[tuple[int, Any]]:
    """Flat views of arrays, each with its offset in their sequence."""
    out, at = [], 0
    for a in arrays:
        out.append((at, a.reshape(-1)))
        at += a.size
    return out


def _overlaps(x: tuple[int, Any], outs: list[tuple[int, Any]]) -> list[tuple[Any, Any]]:
    """(target, source) for the outputs that overlap one input."""
    start, source = x
    found = []
    for at, out in outs:
        low, high = max(at, start), min(at + out.size, start + source.size)
        if low < high:
            found.append((out[low - at : high - at], source[low - start : high - start]))
    return found


def _copy_all(pairs: list[tuple[Any, Any]]) -> None:
    for out, x in pairs:
        out[...] = x
