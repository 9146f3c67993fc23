"""Ops that repeat, reverse, shift or mask elements: expand, expand_as, reverse, flip, roll, tril_triu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ir.axis_letters import but
from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Autocast, Control, Native, Rewrite, Storage
from ...ir.opdef import OpDef, Required, Sample
from ...ir.types import ANY, TensorType
from ..shared.native import copy_calls, reduce_calls
from ..shared.samples import f32
from ..shared.types import keeps_single_operand, need_ndim, norm_axes

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
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    rewrite = Rewrite(identity_if=keeps_single_operand)
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
    def _calls(ins, outs, attrs, dry=False):
        return _repeat_calls(outs[0], ins[0], dry)

    native = Native(calls=_calls)

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3), expand_times=(2, 1))
        yield Sample.of(f32(2, 1, 3), expand_times=(1, 4, 2))
        yield Sample.of(f32(1), expand_times=(3,))
        yield Sample.of(f32(5, 2, 1), expand_times=(1, 3, 4))


class ExpandAs(OpDef):
    """X repeated along every axis until it has the shape of `target_tensor`, whose sizes are multiples of X's."""

    name = "expand_as"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
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
    def _calls(ins, outs, attrs, dry=False):
        return _repeat_calls(outs[0], ins[0], dry)

    native = Native(calls=_calls)

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
    def _calls(ins, outs, attrs, dry=False):
        x, g = ins
        times = [o // d if d else 1 for o, d in zip(g.shape, x.shape, strict=True)]
        return reduce_calls("sum", g.reshape(_paired(times, x.shape)), range(0, 2 * x.ndim, 2), outs[0], dry=dry) if x.size else None

    native = Native(calls=_calls, halves=True)

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3), f32(4, 3), grad=(), why="a gradient op")
        yield Sample.of(f32(5, 2, 1), f32(5, 6, 4), expand_times=(1, 3, 4), grad=(), why="a gradient op")


# -- reversing, rolling, masking --------------------------------------------------------------------------------------------


class _Reversal(OpDef):
    """Base of one op with two names; its only attribute lists the axes."""

    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
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
    def _view(cls, x, **attrs):
        (axes,) = attrs.values()
        axes = norm_axes(cls.name, axes, x.ndim)
        return x[tuple(slice(None, None, -1) if i in axes else slice(None) for i in range(x.ndim))]

    storage = Storage(view=_view)


class Reverse(_Reversal):
    """X with the order of its elements reversed along every axis in `axis`."""

    name = "reverse"
    attrs = {"axis": Required(tuple)}

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 2), axis=(0,))
        yield Sample.of(f32(5, 3, 2), axis=(-1, 1))


class Flip(_Reversal):
    """X with the order of its elements reversed along every axis in `dims`: another name of `reverse`."""

    name = "flip"
    attrs = {"dims": Required(tuple)}

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 2), dims=(0, 1))
        yield Sample.of(f32(3, 5, 2), dims=(1,))


class Roll(OpDef):
    """X shifted by `shifts[k]` along axis `dims[k]`; elements that leave at one end enter at the other. Without `dims`, X is flattened."""

    name = "roll"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
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
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
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
