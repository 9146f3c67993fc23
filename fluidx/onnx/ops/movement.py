"""Operators that join, split, slice, repeat, pad and reorder values."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir.dtypes import HALVES, np_dtype
from ...ir.types import ANY
from ...ops.data.slicing import INT_MAX
from ..export_graph import Op
from ..limits import checked_shape
from ..node import Node
from ..table import dynamic, entry, exports, imports, on_numpy
from ..values import numpy_dtype
from .shape import as_int64, known_sizes, reshaped


def _same_scalar(op: Op, slot: str) -> str:
    return op.scalar(slot, op.dtype(slot))


entry("Concat", "concat", axis=0)
entry("Range", "range_between", computed=(0, 1, 2), operands=dict.fromkeys(("Start", "End", "Step"), _same_scalar))
entry("Expand", "expand_by", computed=(1,), operands={"Shape": as_int64})
entry("Tile", "tile_by", computed=(1,), operands={"Times": as_int64})


@dynamic("Slice", 1, 2)
def computed_slice(n: Node) -> object:
    starts, ends = n.x(1), n.x(2)
    axes = n.ints(3)
    axes = list(range(starts.shape[0])) if axes is None else [a % n.rank() for a in axes]
    return n.b.slice_by(n.x(), starts, ends, axes=tuple(axes), steps=tuple(n.ints(4) or ()))


# -- joining and splitting --------------------------------------------------------------------------------------------------------


def _split_sizes(n: Node) -> list[int]:
    """The sizes of Split's results: those given, or equal ones, of which the last may be smaller."""
    given = n.ints(1)
    if given is not None:
        return given
    (whole,), count = known_sizes(n, n.shape()[n.attr("axis", 0) :][:1]), n.attr("num_outputs", len(n.outputs))
    if not 0 < count <= len(n.outputs):
        raise n.wrong(f"num_outputs is {count}, and it has {len(n.outputs)} outputs")
    each = -(-whole // count)
    return [min(each, whole - k * each) for k in range(count)]


@imports("Split")
def split(n: Node) -> object:
    parts = _split_sizes(n)
    return tuple(n.b.split(n.x(), sections=tuple(parts), axis=n.attr("axis", 0), n_out=len(parts)))


_ALL = 10**9  # a larger end of a slice means the end of the axis: converters write such numbers


def _slice_bounds(n: Node) -> tuple[list[int], list[int], list[int], list[int]]:
    """(axes, starts, ends, steps) of Slice, which counts like Python. The exception: a start before the first element is the first, also
    for negative steps."""
    starts, ends = n.ints(1) or [], n.ints(2) or []
    axes, steps = n.ints(3), n.ints(4) or [1] * len(starts)
    axes = list(range(len(starts))) if axes is None else [a % n.rank() for a in axes]
    for a, s, k in zip(axes, starts, steps, strict=True):
        if k < 0 and s < -1:
            known_sizes(n, [n.shape()[a]])
    starts = [s if k > 0 or ANY == (d := n.shape()[a]) else max(s, -d) for a, s, k in zip(axes, starts, steps, strict=True)]
    ends = [INT_MAX if e >= _ALL and n.shape()[a] == ANY else e for a, e in zip(axes, ends, strict=True)]
    return axes, starts, ends, steps


@imports("Slice")
def slice_(n: Node) -> object:
    axes, starts, ends, steps = _slice_bounds(n)
    if all(k == 1 for k in steps):
        return n.b.slice(n.x(), axes=tuple(axes), starts=tuple(starts), ends=tuple(ends))
    return n.b.strided_slice(n.x(), axes=tuple(axes), starts=tuple(starts), ends=tuple(ends), strides=tuple(steps))


# -- repeating ------------------------------------------------------------------------------------------------------------------------


def _repeated(n: Node, old: list[int], times: list[int]) -> object:
    """Operand 0 reshaped to `old` and repeated."""
    if 0 in times or 0 in old:
        return n.b.fill_constant(shape=tuple(d * t for d, t in zip(old, times, strict=True)), dtype=n.dtype(), value=0.0)
    x = reshaped(n, n.x(), old)
    return x if all(t == 1 for t in times) else n.b.expand(x, expand_times=tuple(times))


@imports("Expand")
def expand(n: Node) -> object:
    old, new = list(n.shape()), n.ints(1) or []
    old = [1] * (len(new) - len(old)) + old
    new = [1] * (len(old) - len(new)) + new
    if any(d == ANY and t != 1 for d, t in zip(old, new, strict=True)):  # the open size may be 1
        return n.b.expand_by(n.x(), n.const(n.ints(1), np.int64))
    return _repeated(n, old, [t if d == 1 else 1 for d, t in zip(old, new, strict=True)])


@imports("Tile")
def tile(n: Node) -> object:
    return _repeated(n, list(n.shape()), n.ints(1) or [])


# -- padding ----------------------------------------------------------------------------------------------------------------------

_MODES = ("constant", "reflect", "edge", "wrap")


def _paddings(n: Node) -> list[tuple[int, int]]:
    """(before, after) of each axis of Pad; negative padding crops."""
    mode = n.attr("mode", "constant")
    if mode not in _MODES:
        raise n.wrong(f"there is no mode {mode!r}; it has: {', '.join(_MODES)}")
    pads, axes = n.ints(1) or [], n.ints(3)
    axes = list(range(n.rank())) if axes is None else axes
    found = [(0, 0)] * n.rank()
    for k, axis in enumerate(axes):
        found[axis] = pads[k], pads[k + len(axes)]
    return found


def _crop_bounds(borders: list[tuple[int, int]]) -> tuple[list[int], list[int], list[int]]:
    """(axes, starts, ends) of the slice that negative padding leaves."""
    cut = [(k, -min(lo, 0), hi if hi < 0 else INT_MAX) for k, (lo, hi) in enumerate(borders) if min(lo, hi) < 0]
    return [c[0] for c in cut], [c[1] for c in cut], [c[2] for c in cut]


@imports("Pad")
def pad(n: Node) -> object:
    borders, x = _paddings(n), n.x()
    axes, starts, ends = _crop_bounds(borders)
    if axes:
        x = n.b.slice(x, axes=tuple(axes), starts=tuple(starts), ends=tuple(ends))
    borders = [(max(lo, 0), max(hi, 0)) for lo, hi in borders]
    if n.attr("mode", "constant") == "constant":
        value = float(np.ravel(n.value(2))[0]) if n.has(2) else 0.0
        return n.b.pad(x, paddings=tuple(p for pair in borders for p in pair), pad_value=value) if any(map(any, borders)) else x
    for axis, (lo, hi) in enumerate(borders):
        if lo or hi:  # the padding repeats elements at known positions
            (size,) = known_sizes(n, x.shape[axis : axis + 1])
            source = _source_positions(n, size, lo, hi)
            x = n.b.index_select(x, n.const(source), dim=axis)
    return x


def _source_positions(n: Node, size: int, before: int, after: int) -> np.ndarray:
    """The positions along an axis that the padded axis reads."""
    checked_shape([before + size + after])
    return np.pad(np.arange(size), (before, after), mode=n.attr("mode"))


@on_numpy("Pad")
def host_pad(n: Node) -> object:
    borders, x = _paddings(n), n.value(0)
    for axis, start, end in zip(*_crop_bounds(borders), strict=True):
        x = x[(slice(None),) * axis + (slice(start, end),)]
    borders = [(max(lo, 0), max(hi, 0)) for lo, hi in borders]
    checked_shape([lo + d + hi for d, (lo, hi) in zip(x.shape, borders, strict=True)], x.itemsize)
    mode = n.attr("mode", "constant")
    value = {} if mode != "constant" else {"constant_values": n.value(2).reshape(()) if n.has(2) else "" if x.dtype == object else 0}
    return np.pad(x, borders, mode=mode, **value)


# -- blocks and depth -----------------------------------------------------------------------------------------------------------------


def _depth_to_space(n: Node) -> tuple[list[int], list[int], list[int]]:
    """DepthToSpace as a reshape, a transpose and a reshape: (shape, order of axes, final shape)."""
    (count, depth, *sizes), block = n.shape(), n.attr("blocksize")
    rank = len(sizes)
    blocks, left = [block] * rank, depth // block**rank
    crd = n.attr("mode", "DCR") == "CRD"
    first, place = (2, 1) if crd else (1, 1 + rank)  # positions of the axes within a block, and of the remaining depth
    pairs = [a for k in range(rank) for a in (2 + rank + k, first + k)]
    cut = [left, *blocks] if crd else [*blocks, left]
    return [count, *cut, *sizes], [0, place, *pairs], [count, left, *(d * block for d in sizes)]


def _space_to_depth(n: Node) -> tuple[list[int], list[int], list[int]]:
    """SpaceToDepth in the form of `_depth_to_space`."""
    (count, depth, *sizes), block = n.shape(), n.attr("blocksize")
    rank = len(sizes)
    within, between = [3 + 2 * k for k in range(rank)], [2 + 2 * k for k in range(rank)]
    order = [0, 1, *within, *between] if n.attr("mode", "DCR") == "CRD" else [0, *within, 1, *between]
    cut = [d for size in sizes for d in (size // block, block)]
    return [count, depth, *cut], order, [count, depth * block**rank, *(size // block for size in sizes)]


_BLOCKS = {"DepthToSpace": _depth_to_space, "SpaceToDepth": _space_to_depth}


@imports(*_BLOCKS)
def blocks(n: Node) -> object:
    cut, order, shape = _BLOCKS[n.op_type](n)
    return reshaped(n, n.b.transpose(reshaped(n, n.x(), cut), axis=tuple(order)), shape)


# -- triangles, diagonals, ranges and reversed rows -------------------------------------------------------------------------------


@imports("Trilu")
def trilu(n: Node) -> object:
    return n.b.tril_triu(n.x(), diagonal=(n.ints(1) or [0])[0], lower=not n.attr("upper", 1))


@on_numpy("EyeLike")
def eye_like(n: Node) -> object:
    rows, columns = n.shape()
    code = n.attr("dtype")
    return np.eye(rows, columns, n.attr("k", 0)).astype(np_dtype(n.dtype()) if code is None else numpy_dtype(code))


@on_numpy("Range")
def range_(n: Node) -> object:
    start, limit, delta = (np.ravel(n.value(k))[0] for k in range(3))
    dtype = start.dtype
    if dtype.name in HALVES and n.attr("stash_type", 1):
        start, limit, delta = (np.float32(v) for v in (start, limit, delta))
    if delta == 0:
        raise n.wrong("its step is 0")
    span = int(limit) - int(start) if dtype.kind == "i" else limit - start  # the distance of two int16 may not fit in int16
    (count,) = checked_shape([max(int(np.ceil(span / delta)), 0)])
    return (start + np.arange(count).astype(start.dtype) * delta).astype(dtype)


@imports("ReverseSequence")
def reverse_sequence(n: Node) -> object:
    """Row t of a sequence of length m becomes row m - 1 - t; rows beyond m stay."""
    time, batch = n.attr("time_axis", 0), n.attr("batch_axis", 1)
    x = n.b.transpose(n.x(), axis=(time, batch, *range(2, n.rank())))
    steps, count, *rest = known_sizes(n, x.shape)
    lengths = n.b.unsqueeze(n.x(1), axes=(0,))
    at = n.const(np.arange(steps)[:, None], np.int64)
    one = n.const(np.ones((1, 1)), np.int64)
    mirrored = n.b.elementwise_sub(n.b.elementwise_sub(lengths, one), at)
    rows = n.b.where(n.b.less_than(at, lengths), mirrored, n.b.expand(at, expand_times=(1, count)))
    ids = n.b.elementwise_add(n.b.elementwise_mul(rows, n.const([[count]], np.int64)), n.const(np.arange(count)[None], np.int64))
    table = reshaped(n, x, (steps * count, *rest))
    found = n.b.gather(table, reshaped(n, ids, (steps * count,)))
    return n.b.transpose(reshaped(n, found, x.shape), axis=(time, batch, *range(2, n.rank())))


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("stack")
def stack(op: Op) -> str:
    axis = op.attrs["axis"]
    return op.emit("Concat", *(op.emit("Unsqueeze", x, op.ints([axis])) for x in op.many("X")), axis=axis)


@exports("split")
def export_split(op: Op) -> dict[str, Any]:
    axis, parts = op.attrs["axis"], op.op.outputs["Out"]
    sizes = [op.block.desc(n).type.shape[axis] for n in parts]
    if ANY in sizes:
        return {"Out": _even_split(op, axis, len(parts))}
    return {"Out": op.emit_many("Split", len(parts), op["X"], op.ints(sizes), axis=axis)}


def _even_split(op: Op, axis: int, count: int) -> list[str]:
    return op.emit_many("Split", count, op["X"], axis=axis, **({"num_outputs": count} if op.opset >= 18 else {}))


@exports("unstack")
def unstack(op: Op) -> dict[str, Any]:
    axis, count = op.attrs["axis"], len(op.op.outputs["Out"])
    parts = _even_split(op, axis, count)
    return {"Out": [op.emit("Squeeze", p, op.ints([axis])) for p in parts]}


@exports("slice", "strided_slice")
def cut(op: Op) -> str:
    a = op.attrs
    steps = a.get("strides") or (1,) * len(a["axes"])
    bounds = [_bounds_in_onnx(op, *window) for window in zip(a["axes"], a["starts"], a["ends"], steps, strict=True)]
    starts, ends = [start for start, _ in bounds], [end for _, end in bounds]
    x = op.emit("Slice", op["Input"], op.ints(starts), op.ints(ends), op.ints(a["axes"]), op.ints(steps))
    return op.emit("Squeeze", x, op.ints(a["decrease_axis"])) if a.get("decrease_axis") else x


def _bounds_in_onnx(op: Op, axis: int, start: int, end: int, step: int) -> tuple[int, int]:
    """(start, end) of Slice. Backwards from before the first element, fluid reads nothing and ONNX the first element."""
    size = op.type_of("Input").shape[axis]
    if step > 0 or start >= (-1 if size == ANY else -size):
        return start, end
    if size == ANY:
        raise op.wrong(f"axis {axis} is open, and the slice goes backwards from {start}, which may be before the first element")
    return 0, 0


@exports("flip", "reverse")
def flip(op: Op) -> str:
    """A slice with step -1. Its end is the least int64, because -1 would mean the last element."""
    dims = op.attrs["dims" if op.type == "flip" else "axis"]
    least, ones = [np.iinfo(np.int64).min] * len(dims), [-1] * len(dims)
    return op.emit("Slice", op["X"], op.ints(ones), op.ints(least), op.ints(dims), op.ints(ones))


@exports("roll")
def roll(op: Op) -> str:
    """Along each axis, or along the flattened value, the end moves to the front."""
    t, dims = op.type_of("X"), op.attrs["dims"]
    sizes = [t.shape[d] for d in dims] or [t.numel]
    if any(size < 0 for size in sizes):
        raise op.wrong("a rolled axis is open")
    x = op["X"] if dims else op.emit("Reshape", op["X"], op.ints([-1]))
    for axis, shift, size in zip(dims or (0,), op.attrs["shifts"], sizes, strict=True):
        if size and shift % size:
            end, start = op.emit_many("Split", 2, x, op.ints([size - shift % size, shift % size]), axis=axis)[::-1]
            x = op.emit("Concat", end, start, axis=axis)
    return x if dims else op.emit("Reshape", x, op.ints(t.shape))


@exports("expand")
def export_expand(op: Op) -> str:
    return op.emit("Tile", op["X"], op.ints(op.attrs["expand_times"]))


@exports("expand_as")
def expand_as(op: Op) -> str:
    have, want = op.emit("Shape", op["X"]), op.emit("Shape", op["target_tensor"])
    return op.emit("Tile", op["X"], op.emit("Div", want, have))


@exports("pad")
def export_pad(op: Op) -> str:
    pads = op.attrs["paddings"]
    return op.emit("Pad", op["X"], op.ints([*pads[::2], *pads[1::2]]), _value(op, op.attrs["pad_value"]))


@exports("pad2d")
def pad2d(op: Op) -> str:
    (top, bottom, left, right), mode = op.attrs["paddings"], op.attrs["mode"]
    before, behind = (0, 0, top, left), (0, 0, bottom, right)
    if op.attrs["data_format"] == "NHWC":
        before, behind = (0, top, left, 0), (0, bottom, right, 0)
    value = [_value(op, op.attrs["pad_value"])] if mode == "constant" else []
    return op.emit("Pad", op["X"], op.ints([*before, *behind]), *value, mode=mode)


@exports("tril_triu")
def tril_triu(op: Op) -> str:
    return op.emit("Trilu", op["X"], op.const(np.array(op.attrs["diagonal"], np.int64)), upper=int(not op.attrs["lower"]))


def _value(op: Op, value: float) -> str:
    return op.const(np.array(value, np_dtype(op.dtype("X"))))


@exports("slice_by")
def slice_by(op: Op) -> str:
    axes = [a % op.type_of("X").ndim for a in op.attrs["axes"]]
    steps = [op.ints(op.attrs["steps"])] if op.attrs["steps"] else []
    return op.emit("Slice", op["X"], op.cast("Starts", "int64"), op.cast("Ends", "int64"), op.ints(axes), *steps)


@exports("range_like")
def range_like(op: Op) -> str:
    a = op.attrs
    axis = a["axis"] % op.type_of("Input").ndim
    count = op.emit("Squeeze", op.sizes(op["Input"], axis, axis + 1), op.ints([0]))
    found = op.emit("Range", op.const(np.array(0)), count, op.const(np.array(1)))
    if a["dtype"] != "int64":
        found = op.emit("Cast", found, to=op.code(a["dtype"]))
    for name, node, neutral in (("step", "Mul", 1), ("start", "Add", 0)):
        found = found if a[name] == neutral else op.emit(node, found, op.const(np.array(a[name], np_dtype(a["dtype"]))))
    return found


@exports("slice_like")
def slice_like(op: Op) -> str:
    a = op.attrs
    like = a["like_axis"] % op.type_of("Like").ndim
    count, start = op.sizes(op["Like"], like, like + 1), op.ints([0])
    if op.has("Start"):
        start = op.emit("Reshape", op.cast("Start", "int64"), op.ints([1]))
        count = op.emit("Add", start, count)
    return op.emit("Slice", op["X"], start, count, op.ints([a["axis"] % op.type_of("X").ndim]))


@exports("slice_like_grad")
def slice_like_grad(op: Op) -> str:
    """The gradient with zeros around it."""
    ndim = op.type_of("X").ndim
    axis = op.attrs["axis"] % ndim
    before = op.emit("Reshape", op.cast("Start", "int64"), op.ints([1])) if op.has("Start") else op.ints([0])
    whole, part = (op.sizes(op[slot], axis, axis + 1) for slot in ("X", "Out@GRAD"))
    behind = op.emit("Sub", op.emit("Sub", whole, part), before)
    pads = [op.ints([0] * axis), before, op.ints([0] * (ndim - 1)), behind, op.ints([0] * (ndim - 1 - axis))]
    return op.emit("Pad", op["Out@GRAD"], op.emit("Concat", *pads, axis=0))
