"""Ops that join and split values along an axis: concat, split, stack, unstack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ir.axis_letters import along, letters
from ...ir.dtypes import dtype_name
from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Autocast, Control, Native, Rewrite, Storage
from ...ir.opdef import OpDef, Sample
from ...ir.types import ANY, TensorType
from ..shared.native import all_of, copy_calls
from ..shared.samples import f32
from ..shared.types import add_sizes, keeps_single_operand, merge_size, need_size, norm_axis


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
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    inputs = ("X*",)
    attrs = {"axis": 0}

    @staticmethod
    def _meaning(a, ins, outs, *, axis):
        axis %= outs[0].ndim
        made = None if outs[0].numel == ANY else a.strided.join(ins[0], axis, outs[0].shape)
        if made is None:
            made = a.join(ins[0], outs[0].shape) if axis == 0 else a.unknown()
        return [made]

    rewrite = Rewrite(identity_if=keeps_single_operand, meaning=_meaning)

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
    def _operand_views(y, shapes, *, axis):
        axis %= y.ndim
        return _pieces(y, axis, [shape[axis] for shape in shapes])

    storage = Storage(operand_views=_operand_views)

    @staticmethod
    def kernel(xp, xs, *, out, axis):
        xp.concatenate(xs, axis=axis, out=out)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        (xs,), out = ins, outs[0]
        axis = attrs["axis"] % out.ndim
        return _copy_pieces(_pieces(out, axis, [x.shape[axis] for x in xs]), xs, dry)

    native = Native(calls=_calls, any_size=True)

    @staticmethod
    def samples():
        yield Sample.of([f32(2, 3), f32(1, 3, seed=1)])
        yield Sample.of([f32(2, 1, 2), f32(2, 3, 2, seed=1), f32(2, 2, 2, seed=2)], axis=-2)
        yield Sample.of([f32(3)])
        yield Sample.of([f32(5, 2, 3), f32(5, 4, 3, seed=1)], axis=1)


class ConcatGrad(OpDef):
    """The gradient of concat, split into pieces with the sizes of the inputs X; only their shapes are read."""

    name = "concat_grad"
    arithmetic = Arithmetic(flops=0)
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

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        (xs, g), axis = ins, attrs["axis"] % ins[1].ndim
        return _copy_pieces(outs[0], _pieces(g, axis, [x.shape[axis] for x in xs]), dry)

    native = Native(calls=_calls, any_size=True)

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
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    inputs, outputs = ("X",), ("Out*",)
    attrs = {"num": 0, "sections": (), "axis": 0}

    @staticmethod
    def pattern(ins, outs, attrs):
        x = along(attrs["axis"], ins[0].ndim, ".")
        return f"{x} -> {_lists(x, len(outs))} | L(0) U(0)"

    @staticmethod
    def _meaning(a, ins, outs, *, num, sections, axis):
        return a.rows(ins[0], [t.shape for t in outs]) if axis % a.type(ins[0]).ndim == 0 else [a.unknown()]

    rewrite = Rewrite(identity_if=keeps_single_operand, meaning=_meaning)

    @staticmethod
    def infer(x, *, num, sections, axis):
        axis = norm_axis("split", axis, x.ndim)
        return [x.with_shape((*x.shape[:axis], n, *x.shape[axis + 1 :])) for n in _split_sizes(x, num, sections, axis)]

    @staticmethod
    def grad(b, op, g):
        full = _all_grads(b, op, g)
        return b.concat(full, axis=op.attrs["axis"]) if len(full) > 1 else full[0]

    @staticmethod
    def _view(x, *, num, sections, axis):
        axis %= x.ndim
        return _pieces(x, axis, _split_sizes(TensorType(dtype_name(x.dtype), x.shape), num, sections, axis))

    storage = Storage(view=_view)

    @staticmethod
    def kernel(xp, x, *, out, num, sections, axis):
        axis %= x.ndim
        for o, piece in zip(out, _pieces(x, axis, [o.shape[axis] for o in out]), strict=True):
            o[...] = piece

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        x, axis = ins[0], attrs["axis"] % ins[0].ndim
        return _copy_pieces(outs[0], _pieces(x, axis, [o.shape[axis] for o in outs[0]]), dry)

    native = Native(calls=_calls, any_size=True)

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
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
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
    def _calls(ins, outs, attrs, dry=False):
        before = (slice(None),) * (attrs["axis"] % outs[0].ndim)
        return _copy_pieces([outs[0][(*before, k, ...)] for k in range(len(ins[0]))], ins[0], dry)

    native = Native(calls=_calls)

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
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
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
    def _calls(ins, outs, attrs, dry=False):
        before = (slice(None),) * (attrs["axis"] % ins[0].ndim)
        return _copy_pieces(outs[0], [ins[0][(*before, k, ...)] for k in range(len(outs[0]))], dry)

    native = Native(calls=_calls)

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3))
        yield Sample.of(f32(2, 3), axis=-1, num=3)
        yield Sample.of(f32(5, 2, 3), axis=1)
