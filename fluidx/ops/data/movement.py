"""Ops that join, cut, repeat and reorder values: concat, split, stack, expand, reverse, roll and their kin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ir.axis_letters import along, but, letters
from ...ir.dtypes import dtype_name
from ...ir.errors import ProgramError
from ...ir.opdef import OpDef, Required, Sample
from ...ir.types import ANY, TensorType
from ..shared.native import all_of, copy_calls, reduce_calls
from ..shared.samples import f32
from ..shared.types import add_sizes, merge_size, need_ndim, need_size, norm_axes, norm_axis, one_whole

# -- joining and cutting ----------------------------------------------------------------------------------------------------


def _same_but(op: str, xs: Sequence[TensorType], axis: int | None) -> list[int]:
    """The common shape of all `xs` apart from `axis`. Raises ProgramError if they differ."""
    if not xs:
        raise ProgramError(f"op {op} needs at least one input X, found none")
    shape = list(xs[0].shape)
    for k, x in enumerate(xs[1:], 1):
        if x.ndim != xs[0].ndim or x.dtype != xs[0].dtype:
            raise ProgramError(f"op {op}: X[{k}] is {x}; expected the dtype and ndim of X[0], {xs[0]}")
        for i, d in enumerate(x.shape):
            if i != axis:
                shape[i] = merge_size(op, f"axis {i} of X[0] {xs[0]} and X[{k}] {x}", shape[i], d)
    return shape


def _pieces(x: Any, axis: int, sizes: Sequence[int]) -> list[Any]:
    """Views of `x` split along `axis` into pieces of the given sizes."""
    out, start, before = [], 0, (slice(None),) * axis
    for n in sizes:
        out.append(x[(*before, slice(start, start + n))])
        start += n
    return out


def _copy_pieces(outs: Sequence[Any], xs: Sequence[Any], dry: bool) -> Any:
    """Copies of each of `xs` into its output; an output may be absent."""
    return all_of([copy_calls(o, x, dry) for o, x in zip(outs, xs, strict=True) if o is not None])


def _lists(words: str, count: int) -> str:
    return ", ".join([words] * count)


class Concat(OpDef):
    """The inputs joined along `axis`; their other sizes are equal."""

    name = "concat"
    flops = 0
    takes_low_bit = True
    beyond_tensors = ("string",)
    identity_if = staticmethod(one_whole)
    inputs = ("X*",)
    attrs = {"axis": 0}

    @staticmethod
    def meaning(a, ins, outs, *, axis):
        axis %= outs[0].ndim
        made = None if outs[0].numel == ANY else a.boxes.join(ins[0], axis, outs[0].shape)
        if made is None:
            made = a.join(ins[0], outs[0].shape) if axis == 0 else a.unknown()
        return [made]

    @staticmethod
    def pattern(ins, outs, attrs):
        x, n = along(attrs["axis"], ins[0].ndim, "."), len(ins)
        return f"{_lists(x, n)} -> {x} | L({','.join(map(str, range(n)))})"

    @staticmethod
    def infer(xs, *, axis):
        axis = norm_axis("concat", axis, xs[0].ndim) if xs else 0
        shape = _same_but("concat", xs, axis)
        shape[axis] = add_sizes([x.shape[axis] for x in xs])
        return xs[0].with_shape(shape)

    @staticmethod
    def grad(b, op, g):
        xs = op["X"]
        return b.concat_grad(xs, g, axis=op.attrs["axis"], n_out=len(xs)) if len(xs) > 1 else [g]

    @staticmethod
    def operand_views(y, shapes, *, axis):
        axis %= y.ndim
        return _pieces(y, axis, [shape[axis] for shape in shapes])

    @staticmethod
    def kernel(xp, xs, *, out, axis):
        xp.concatenate(xs, axis=axis, out=out)

    native_any_size = True

    @staticmethod
    def native(ins, outs, attrs, dry=False):
        (xs,), out = ins, outs[0]
        axis = attrs["axis"] % out.ndim
        return _copy_pieces(_pieces(out, axis, [x.shape[axis] for x in xs]), xs, dry)

    @staticmethod
    def samples():
        yield Sample.of([f32(2, 3), f32(1, 3, seed=1)])
        yield Sample.of([f32(2, 1, 2), f32(2, 3, 2, seed=1), f32(2, 2, 2, seed=2)], axis=-2)
        yield Sample.of([f32(3)])
        yield Sample.of([f32(5, 2, 3), f32(5, 4, 3, seed=1)], axis=1)


class ConcatGrad(OpDef):
    """The gradient of concat, split into pieces with the sizes of the inputs X; only their shapes are read."""

    name = "concat_grad"
    flops = 0
    inputs, outputs = ("X*", "Out@GRAD"), ("X@GRAD*",)
    attrs = {"axis": 0}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, n = along(attrs["axis"], ins[-1].ndim, "."), len(outs)
        return f"{_lists(f'~{x}', n)}, {x} -> {_lists(x, n)} | L({n})"

    @staticmethod
    def infer(xs, g, *, axis):
        return list(xs)

    @staticmethod
    def kernel(xp, xs, g, *, out, axis):
        axis %= g.ndim
        for o, piece in zip(out, _pieces(g, axis, [x.shape[axis] for x in xs]), strict=True):
            o[...] = piece

    native_any_size = True

    @staticmethod
    def native(ins, outs, attrs, dry=False):
        (xs, g), axis = ins, attrs["axis"] % ins[1].ndim
        return _copy_pieces(outs[0], _pieces(g, axis, [x.shape[axis] for x in xs]), dry)

    @staticmethod
    def samples():
        yield Sample.of([f32(2, 3), f32(1, 3)], f32(3, 3), grad=(), why="a gradient op")
        yield Sample.of([f32(5, 2, 3), f32(5, 4, 3)], f32(5, 6, 3), axis=1, grad=(), why="a gradient op")


def _split_sizes(x: TensorType, num: int, sections: Sequence[int], axis: int) -> list[int]:
    """The sizes of the pieces of `axis`."""
    size = x.shape[axis]
    if not sections:
        need_size("split", "num", num, 1)
        if size != ANY and size % num:
            raise ProgramError(f"op split: axis {axis} of {x} has size {size}, which does not divide into {num} equal parts")
        return [size // num if size != ANY else ANY] * num
    if any(s < -1 for s in sections) or list(sections).count(-1) > 1:
        raise ProgramError(f"op split: sections {list(sections)} must be sizes; one of them may be -1 (the rest)")
    known = sum(s for s in sections if s >= 0)
    if size == ANY:
        return list(sections)
    if -1 not in sections and known != size or known > size:
        raise ProgramError(f"op split: sections {list(sections)} add up to {known}; axis {axis} of {x} has size {size}")
    return [size - known if s == -1 else s for s in sections]


def _all_grads(b: Any, op: Any, g: Any) -> list[Any]:
    """The gradient of every output of a "Out*" slot, zeros for an output without gradient."""
    parts = g if isinstance(g, (tuple, list)) else [g]
    return [b.fill_zeros_like(y) if p is None else p for p, y in zip(parts, op["Out"], strict=True)]


class Split(OpDef):
    """X split along `axis` into `num` equal parts, or into parts of the sizes `sections`, of which one may be -1."""

    name = "split"
    flops = 0
    takes_low_bit = True
    beyond_tensors = ("string",)
    identity_if = staticmethod(one_whole)
    inputs, outputs = ("X",), ("Out*",)
    attrs = {"num": 0, "sections": (), "axis": 0}

    @staticmethod
    def pattern(ins, outs, attrs):
        x = along(attrs["axis"], ins[0].ndim, ".")
        return f"{x} -> {_lists(x, len(outs))} | L(0) U(0)"

    @staticmethod
    def meaning(a, ins, outs, *, num, sections, axis):
        return a.rows(ins[0], [t.shape for t in outs]) if axis % a.type(ins[0]).ndim == 0 else [a.unknown()]

    @staticmethod
    def infer(x, *, num, sections, axis):
        axis = norm_axis("split", axis, x.ndim)
        return [x.with_shape((*x.shape[:axis], n, *x.shape[axis + 1 :])) for n in _split_sizes(x, num, sections, axis)]

    @staticmethod
    def grad(b, op, g):
        full = _all_grads(b, op, g)
        return b.concat(full, axis=op.attrs["axis"]) if len(full) > 1 else full[0]

    @staticmethod
    def view(x, *, num, sections, axis):
        axis %= x.ndim
        return _pieces(x, axis, _split_sizes(TensorType(dtype_name(x.dtype), x.shape), num, sections, axis))

    @staticmethod
    def kernel(xp, x, *, out, num, sections, axis):
        axis %= x.ndim
        for o, piece in zip(out, _pieces(x, axis, [o.shape[axis] for o in out]), strict=True):
            o[...] = piece

    native_any_size = True

    @staticmethod
    def native(ins, outs, attrs, dry=False):
        x, axis = ins[0], attrs["axis"] % ins[0].ndim
        return _copy_pieces(outs[0], _pieces(x, axis, [o.shape[axis] for o in outs[0]]), dry)

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 3), num=2)
        yield Sample.of(f32(2, 6), sections=(1, 2, 3), axis=-1)
        yield Sample.of(f32(5, 6, 3), sections=(4, -1), axis=1)
        yield Sample.of(f32(3), num=1)


def _stacked(ndim: int, axis: int) -> tuple[str, str]:
    """The axis words for the slices along `axis` and for the stack, of `ndim` axes."""
    words = letters(ndim - 1, "e").split()
    axis %= ndim
    return " ".join(words), " ".join((*words[:axis], ".", *words[axis:]))


class Stack(OpDef):
    """The inputs, all of one shape, as the slices along a new axis `axis`."""

    name = "stack"
    flops = 0
    takes_low_bit = True
    beyond_tensors = ("string",)
    inputs = ("X*",)
    attrs = {"axis": 0}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, y = _stacked(outs[0].ndim, attrs["axis"])
        return f"{_lists(x, len(ins))} -> {y} | L({','.join(map(str, range(len(ins))))})"

    @staticmethod
    def infer(xs, *, axis):
        shape = _same_but("stack", xs, None)
        axis = norm_axis("stack", axis, xs[0].ndim, extra=1)
        return xs[0].with_shape((*shape[:axis], len(xs), *shape[axis:]))

    @staticmethod
    def grad(b, op, g):
        return b.unstack(g, axis=op.attrs["axis"], num=len(op["X"]), n_out=len(op["X"]))

    @staticmethod
    def kernel(xp, xs, *, out, axis):
        before = (slice(None),) * (axis % out.ndim)
        for k, x in enumerate(xs):
            out[(*before, k)] = x

    @staticmethod
    def native(ins, outs, attrs, dry=False):
        before = (slice(None),) * (attrs["axis"] % outs[0].ndim)
        return _copy_pieces([outs[0][(*before, k, ...)] for k in range(len(ins[0]))], ins[0], dry)

    @staticmethod
    def samples():
        yield Sample.of([f32(2, 3), f32(2, 3, seed=1)])
        yield Sample.of([f32(2, 3), f32(2, 3, seed=1), f32(2, 3, seed=2)], axis=-1)
        yield Sample.of([f32(1)], axis=1)
        yield Sample.of([f32(5, 3), f32(5, 3, seed=1)], axis=1)


def _unstack_count(x: TensorType, *, axis: int, num: int) -> int:
    size = x.shape[norm_axis("unstack", axis, x.ndim)]
    if size == ANY and num <= 0:
        raise ProgramError(f"op unstack: axis {axis} of {x} is open; give the number of outputs as num")
    if num > 0 and size not in (ANY, num):
        raise ProgramError(f"op unstack: axis {axis} of {x} has size {size}; num says {num}")
    return num if num > 0 else size


class Unstack(OpDef):
    """The slices of X along `axis`, one output each; `num` is their number if the axis of X is open."""

    name = "unstack"
    flops = 0
    takes_low_bit = True
    beyond_tensors = ("string",)
    inputs, outputs = ("X",), ("Out*",)
    attrs = {"axis": 0, "num": 0}

    @staticmethod
    def pattern(ins, outs, attrs):
        y, x = _stacked(ins[0].ndim, attrs["axis"])
        return f"{x} -> {_lists(y, len(outs))} | L(0) U(0)"

    @staticmethod
    def infer(x, *, axis, num):
        count = _unstack_count(x, axis=axis, num=num)
        axis %= x.ndim
        return [x.with_shape((*x.shape[:axis], *x.shape[axis + 1 :]))] * count

    @staticmethod
    def grad(b, op, g):
        full = _all_grads(b, op, g)
        return b.stack(full, axis=op.attrs["axis"])

    @staticmethod
    def kernel(xp, x, *, out, axis, num):
        before = (slice(None),) * (axis % x.ndim)
        for k, o in enumerate(out):
            o[...] = x[(*before, k)]

    @staticmethod
    def native(ins, outs, attrs, dry=False):
        before = (slice(None),) * (attrs["axis"] % ins[0].ndim)
        return _copy_pieces(outs[0], [ins[0][(*before, k, ...)] for k in range(len(outs[0]))], dry)

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3))
        yield Sample.of(f32(2, 3), axis=-1, num=3)
        yield Sample.of(f32(5, 2, 3), axis=1)


# -- repeating --------------------------------------------------------------------------------------------------------------


def _paired(times: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """(t0, d0, t1, d1, ...): in this shape the repeats along axis i are a separate axis."""
    return tuple(n for pair in zip(times, shape, strict=True) for n in pair)


def _repeat_into(out: Any, x: Any) -> None:
    times = [o // d if d else 1 for o, d in zip(out.shape, x.shape, strict=True)]
    out.reshape(_paired(times, x.shape))[...] = x.reshape(_paired([1] * x.ndim, x.shape))


def _repeat_calls(out: Any, x: Any, dry: bool) -> Any:
    """Calls of the C kernel for `_repeat_into`: a copy with stride 0 in X along the repeats."""
    if not (out.flags.c_contiguous and x.flags.c_contiguous):
        return None
    times = [o // d if d else 1 for o, d in zip(out.shape, x.shape, strict=True)]
    return copy_calls(out.reshape(_paired(times, x.shape)), x.reshape(_paired([1] * x.ndim, x.shape)), dry)


def _repeated(x: TensorType, times: Sequence[int]) -> tuple[str, str, str, dict[str, int]]:
    """The axis words for X and its repeats, the words for the sum over repeats, and sizes.

    Along a repeated axis the outer factor counts the repeats: it may be sharded, the original axis may not.
    """
    words, repeats = but([k for k, d in enumerate(x.shape) if d == 1], x.ndim), []
    for k, (word, size, t) in enumerate(zip(words.split(), x.shape, times, strict=True)):
        repeats.append(word if t == 1 else f"t{k}" if size == 1 else f"(t{k} {word})")
    sizes = {f"t{k}": t for k, t in enumerate(times) if t != 1}
    return words, " ".join(repeats), " ".join(f"{t}:+" for t in sizes), sizes


def _times(x: TensorType, y: TensorType) -> tuple[int, ...]:
    """The number of repeats of X along each axis (-1: not known yet); two open axes are both the batch."""
    return tuple(1 if d == n else ANY if ANY in (d, n) or d == 0 else n // d for d, n in zip(x.shape, y.shape, strict=True))


class Expand(OpDef):
    """X repeated `expand_times[i]` times along axis i."""

    name = "expand"
    flops = 0
    takes_low_bit = True
    beyond_tensors = ("string",)
    identity_if = staticmethod(one_whole)
    inputs = ("X",)
    attrs = {"expand_times": Required(tuple)}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, y, _, sizes = _repeated(ins[0], attrs["expand_times"])
        return f"{x} -> {y} | L(0) U(0)", sizes

    @staticmethod
    def infer(x, *, expand_times):
        if len(expand_times) != x.ndim or any(t < 1 for t in expand_times):
            raise ProgramError(f"op expand: expand_times {list(expand_times)} must hold {x.ndim} counts of 1 or more for {x}")
        return x.with_shape(d if t == 1 else ANY if d == ANY else d * t for d, t in zip(x.shape, expand_times, strict=True))

    @staticmethod
    def grad(b, op, g):
        return b.expand_grad(op["X"], g, expand_times=op.attrs["expand_times"])

    @staticmethod
    def kernel(xp, x, *, out, expand_times):
        _repeat_into(out, x)

    @staticmethod
    def native(ins, outs, attrs, dry=False):
        return _repeat_calls(outs[0], ins[0], dry)

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3), expand_times=(2, 1))
        yield Sample.of(f32(2, 1, 3), expand_times=(1, 4, 2))
        yield Sample.of(f32(1), expand_times=(3,))
        yield Sample.of(f32(5, 2, 1), expand_times=(1, 3, 4))


class ExpandAs(OpDef):
    """X repeated along every axis until it has the shape of `target_tensor`, whose sizes are multiples of X's."""

    name = "expand_as"
    flops = 0
    takes_low_bit = True
    inputs = ("X", "target_tensor")

    @staticmethod
    def pattern(ins, outs, attrs):
        x, y, _, sizes = _repeated(ins[0], _times(*ins))
        return f"{x}, ~{y} -> {y} | L(0) U(0)", sizes

    @staticmethod
    def infer(x, target):
        need_ndim("expand_as", "target_tensor", target, x.ndim)
        for i, (d, t) in enumerate(zip(x.shape, target.shape, strict=True)):
            if ANY not in (d, t) and (d == 0 or t % d):
                raise ProgramError(f"op expand_as: axis {i} of target_tensor {target} must be a multiple of X's {d}, found {t}")
        return x.with_shape(target.shape)

    @staticmethod
    def grad(b, op, g):
        return b.expand_grad(op["X"], g), None

    @staticmethod
    def kernel(xp, x, target, *, out):
        _repeat_into(out, x)

    @staticmethod
    def native(ins, outs, attrs, dry=False):
        return _repeat_calls(outs[0], ins[0], dry)

    @staticmethod
    def samples():
        yield Sample.of(f32(1, 3), f32(4, 3), grad=("X",))
        yield Sample.of(f32(2, 2), f32(4, 6), grad=("X",))
        yield Sample.of(f32(5, 2, 1), f32(5, 6, 4), grad=("X",))


class ExpandGrad(OpDef):
    """The gradient of expand and expand_as: the sum over all repeats, in the shape of X; only the shape of X is read.

    `expand_times` is the number of repeats of each axis; without it, it follows from the sizes.
    """

    name = "expand_grad"
    inputs, outputs = ("X", "Out@GRAD"), ("X@GRAD",)
    attrs = {"expand_times": ()}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, y, summed, sizes = _repeated(ins[0], attrs["expand_times"] or _times(*ins))
        return f"~{x}, {y} -> {x} | {summed} L(1)", sizes

    @staticmethod
    def infer(x, g, *, expand_times):
        return x

    @staticmethod
    def kernel(xp, x, g, *, out, expand_times):
        times = [o // d if d else 1 for o, d in zip(g.shape, x.shape, strict=True)]
        g.reshape(_paired(times, x.shape)).sum(axis=tuple(range(0, 2 * x.ndim, 2)), out=out)

    @staticmethod
    def native(ins, outs, attrs, dry=False):
        x, g = ins
        times = [o // d if d else 1 for o, d in zip(g.shape, x.shape, strict=True)]
        return reduce_calls("sum", g.reshape(_paired(times, x.shape)), range(0, 2 * x.ndim, 2), outs[0], dry=dry) if x.size else None

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3), f32(4, 3), grad=(), why="a gradient op")
        yield Sample.of(f32(5, 2, 1), f32(5, 6, 4), expand_times=(1, 3, 4), grad=(), why="a gradient op")


# -- reversing, rolling, masking --------------------------------------------------------------------------------------------


class _Reversal(OpDef):
    """Base of one op with two names; its only attribute lists the axes."""

    inputs = ("X",)

    @staticmethod
    def pattern(ins, outs, attrs):
        (axes,) = attrs.values()
        x = but(axes, ins[0].ndim)
        return f"{x} -> {x} | L(0) U(0)"

    @classmethod
    def infer(cls, x, **attrs):
        (axes,) = attrs.values()
        norm_axes(cls.name, axes, x.ndim)
        return x

    @classmethod
    def grad(cls, b, op, g):
        return b.emit(cls.name, g, **op.attrs)

    @classmethod
    def view(cls, x, **attrs):
        (axes,) = attrs.values()
        axes = norm_axes(cls.name, axes, x.ndim)
        return x[tuple(slice(None, None, -1) if i in axes else slice(None) for i in range(x.ndim))]


class Reverse(_Reversal):
    """X with the order of its elements reversed along every axis in `axis`."""

    name = "reverse"
    flops = 0
    takes_low_bit = True
    attrs = {"axis": Required(tuple)}

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 2), axis=(0,))
        yield Sample.of(f32(5, 3, 2), axis=(-1, 1))


class Flip(_Reversal):
    """X with the order of its elements reversed along every axis in `dims`: another name of `reverse`."""

    name = "flip"
    flops = 0
    takes_low_bit = True
    attrs = {"dims": Required(tuple)}

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 2), dims=(0, 1))
        yield Sample.of(f32(3, 5, 2), dims=(1,))


class Roll(OpDef):
    """X shifted by `shifts[k]` along axis `dims[k]`; elements that leave at one end enter at the other. Without `dims`, X is flattened."""

    name = "roll"
    flops = 0
    takes_low_bit = True
    beyond_tensors = ("string",)
    inputs = ("X",)
    attrs = {"shifts": Required(tuple), "dims": ()}

    @staticmethod
    def pattern(ins, outs, attrs):
        x = but(attrs["dims"] or range(ins[0].ndim), ins[0].ndim)
        return f"{x} -> {x} | L(0) U(0)"

    @staticmethod
    def infer(x, *, shifts, dims):
        if len(shifts) != (len(dims) or 1):
            raise ProgramError(f"op roll: expected one shift for each of the axes {list(dims)}, found shifts {list(shifts)}")
        norm_axes("roll", dims, x.ndim)
        return x

    @staticmethod
    def grad(b, op, g):
        return b.roll(g, shifts=tuple(-s for s in op.attrs["shifts"]), dims=op.attrs["dims"])

    @staticmethod
    def kernel(xp, x, *, out, shifts, dims):
        out[...] = xp.roll(x, shifts, dims) if dims else xp.roll(x, shifts[0])

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 2), shifts=(1,), dims=(0,))
        yield Sample.of(f32(3, 5, 4), shifts=(-1, 6), dims=(0, -1))
        yield Sample.of(f32(3, 2), shifts=(2,))


class TrilTriu(OpDef):
    """The lower (or upper) triangle of X's last two axes, zero elsewhere; `diagonal` moves the boundary up."""

    name = "tril_triu"
    flops = 0
    takes_low_bit = True
    inputs = ("X",)
    attrs = {"diagonal": 0, "lower": True}
    pattern = "* r c -> * r c | K L(0)"

    @staticmethod
    def infer(x, *, diagonal, lower):
        need_ndim("tril_triu", "X", x, 2, 99)
        return x

    @staticmethod
    def grad(b, op, g):
        return b.tril_triu(g, **op.attrs)

    @staticmethod
    def kernel(xp, x, *, out, diagonal, lower, part=None):
        if part is not None:
            diagonal += part.box[-2][0] - part.box[-1][0]
        out[...] = (xp.tril if lower else xp.triu)(x, diagonal)

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 3))
        yield Sample.of(f32(2, 3, 4), diagonal=1)
        yield Sample.of(f32(4, 3), lower=False, diagonal=-1)
        yield Sample.of(f32(3, 5, 4))
