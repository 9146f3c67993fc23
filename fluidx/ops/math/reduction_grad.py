"""Gradients of the reductions, and the sum of a gradient over the axes along which an operand was broadcast."""

from __future__ import annotations

import numpy as np

from ...ir import ANY, Arithmetic, Native, OpDef, ProgramError, Sample, TensorType, np_dtype
from ...ir.axis_letters import letters
from ..expr.native import expression_calls
from ..expr.nodes import const, make_node, sym
from ..shared.broadcast import aligned
from ..shared.native import copy_calls, reduce_calls
from ..shared.samples import points
from .reduction import (
    LogSumExp,
    ReduceMax,
    ReduceMean,
    ReduceProd,
    ReduceSum,
    count_of,
    kept_shape,
    reduced_axes,
    reduction_words,
)


def _like_samples(op, with_out):
    """The samples of a gradient op, made from those of its forward op."""
    for s in op.samples():
        t = op.infer(TensorType(s.args[0].dtype.name, s.args[0].shape), **s.attrs)
        if not t.is_float:
            continue
        out = np.empty(t.shape, np_dtype(t.dtype))
        with np.errstate(divide="ignore"):
            op.kernel(np, s.args[0], out=out, **s.attrs)
        g = points(t.shape, seed=9).astype(out.dtype)
        args = (s.args[0], out, g) if with_out else (s.args[0], g)
        yield Sample(args, s.attrs, grad=(), why="a gradient op has no gradient of its own")


def _grad_infer(x, *rest, **attrs):
    return x


def _grad_pattern(line, *words):
    """The pattern of a gradient op, from a line with {x} for the axes of X and {y} for those of Out; `words` describe a reduced axis."""

    def pattern(ins, outs, attrs):
        x, y, gone = reduction_words(ins[0], attrs["dim"], attrs["keep_dim"])
        return " ".join([line.format(x=x, y=y), *(word.format(f) for word in words for f in gone)])

    return staticmethod(pattern)


class ReduceSumGrad(OpDef):
    """The gradient of reduce_sum: Out@GRAD broadcast to the shape of X; only X's shape is read."""

    name = "reduce_sum_grad"
    arithmetic = Arithmetic(flops=0)
    inputs, outputs = ("X", "Out@GRAD"), ("X@GRAD",)
    attrs = {"dim": (), "keep_dim": False}
    infer = staticmethod(_grad_infer)
    samples = staticmethod(lambda: _like_samples(ReduceSum, False))
    pattern = _grad_pattern("~{x}, {y} -> {x} | L(1)")

    @staticmethod
    def kernel(xp, x, g, *, out, dim, keep_dim):
        xp.copyto(out, g.reshape(kept_shape(x.shape, reduced_axes("reduce_sum_grad", dim, x.ndim))))

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        x, g = ins
        return copy_calls(outs[0], g.reshape(kept_shape(x.shape, reduced_axes("reduce_sum_grad", attrs["dim"], x.ndim))), dry)

    native = Native(calls=_calls, any_size=True)


class ReduceMeanGrad(OpDef):
    """The gradient of reduce_mean and mean: Out@GRAD divided by the number of elements, in the shape of X; only X's shape is read."""

    name = "reduce_mean_grad"
    inputs, outputs = ("X", "Out@GRAD"), ("X@GRAD",)
    attrs = {"dim": (), "keep_dim": False}
    infer = staticmethod(_grad_infer)
    samples = staticmethod(lambda: _like_samples(ReduceMean, False))
    pattern = _grad_pattern("~{x}, {y} -> {x} | L(1)", "#{}")

    @staticmethod
    def kernel(xp, x, g, *, out, dim, keep_dim, part=None):
        axes = reduced_axes("reduce_mean_grad", dim, x.ndim)
        out[...] = g.reshape(kept_shape(x.shape, axes)) / count_of(x, axes, part)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        x, g = ins
        axes = reduced_axes("reduce_mean_grad", attrs["dim"], x.ndim)
        count = count_of(x, axes, part)
        e = make_node("div", sym("g"), const(float(count)))
        return expression_calls(e, {"g": g.reshape(kept_shape(x.shape, axes))}, outs[0], dry) if count else None

    native = Native(calls=_calls, halves=True, any_size=True)


class ReduceMaxGrad(OpDef):
    """The gradient of reduce_max and reduce_min: Out@GRAD where X equals Out, 0 elsewhere."""

    name = "reduce_max_grad"
    inputs, outputs = ("X", "Out", "Out@GRAD"), ("X@GRAD",)
    attrs = {"dim": (), "keep_dim": False}
    infer = staticmethod(_grad_infer)
    samples = staticmethod(lambda: _like_samples(ReduceMax, True))
    pattern = _grad_pattern("{x}, {y}, {y} -> {x} | L(2)")

    @staticmethod
    def kernel(xp, x, y, g, *, out, dim, keep_dim):
        kept = kept_shape(x.shape, reduced_axes("reduce_max_grad", dim, x.ndim))
        xp.multiply(g.reshape(kept), x == y.reshape(kept), out)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        x, y, g = ins
        kept = kept_shape(x.shape, reduced_axes("reduce_max_grad", attrs["dim"], x.ndim))
        e = make_node("mul", sym("g"), make_node("eq", sym("x"), sym("y")))
        return expression_calls(e, {"x": x, "y": y.reshape(kept), "g": g.reshape(kept)}, outs[0], dry)

    native = Native(calls=_calls, halves=True)


class ReduceProdGrad(OpDef):
    """The gradient of reduce_prod: Out@GRAD times the product of the other elements, exact with zeros among them."""

    name = "reduce_prod_grad"
    inputs, outputs = ("X", "Out@GRAD"), ("X@GRAD",)
    attrs = {"dim": (), "keep_dim": False}
    infer = staticmethod(_grad_infer)
    samples = staticmethod(lambda: _like_samples(ReduceProd, False))
    pattern = _grad_pattern("{x}, {y} -> {x} | L(1)", "{}!")

    @staticmethod
    def kernel(xp, x, g, *, out, dim, keep_dim):
        axes = reduced_axes("reduce_prod_grad", dim, x.ndim)
        zero = x == 0
        zeros = zero.sum(axis=axes, keepdims=True)
        filled = xp.where(zero, xp.ones_like(x), x)
        rest = xp.prod(filled, axis=axes, keepdims=True)
        # without a zero, every other element is in the product; with one zero, only the gradient of that element is not 0
        share = xp.where(zeros == 0, rest / filled, xp.where(zero & (zeros == 1), rest, xp.zeros_like(rest)))
        xp.multiply(g.reshape(rest.shape), share, out)


class LogSumExpGrad(OpDef):
    """The gradient of logsumexp: Out@GRAD times exp(X - Out), the softmax of X over `dim`."""

    name = "logsumexp_grad"
    inputs, outputs = ("X", "Out", "Out@GRAD"), ("X@GRAD",)
    attrs = {"dim": (), "keep_dim": False}
    infer = staticmethod(_grad_infer)
    samples = staticmethod(lambda: (s for s in _like_samples(LogSumExp, True) if np.isfinite(s.args[1]).all()))
    pattern = _grad_pattern("{x}, {y}, {y} -> {x} | L(2)")

    @staticmethod
    def kernel(xp, x, y, g, *, out, dim, keep_dim):
        kept = kept_shape(x.shape, reduced_axes("logsumexp_grad", dim, x.ndim))
        xp.subtract(x, y.reshape(kept), out)
        xp.exp(out, out)
        xp.multiply(out, g.reshape(kept), out)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        x, y, g = ins
        kept = kept_shape(x.shape, reduced_axes("logsumexp_grad", attrs["dim"], x.ndim))
        e = make_node("mul", make_node("exp", make_node("sub", sym("x"), sym("y"))), sym("g"))
        return expression_calls(e, {"x": x, "y": y.reshape(kept), "g": g.reshape(kept)}, outs[0], dry)

    native = Native(calls=_calls, halves=True)


# -- sum over broadcast axes -----------------------------------------------------------------------------------------------------


def _broadcast_axes(x, like, axis):
    """The axes of X that `like` lacks or has with size 1, and the shape of `like` aligned with X."""
    if all(d == 1 for d in like):  # `like` may also be beside a flat part of X, which has one axis
        meets = (1,) * len(x)
    else:
        meets = aligned("reduce_to", x, like, axis)
        meets = (1,) * (len(x) - len(meets)) + meets
    return tuple(k for k, (a, b) in enumerate(zip(x, meets, strict=True)) if b == 1 and a != 1), meets


class ReduceTo(OpDef):
    """X summed to the shape of Like, from which X was broadcast; `axis` aligns Like with X, as in elementwise_add.

    This is the gradient of an operand that was broadcast. Only Like's shape is read.
    """

    name = "reduce_to"
    inputs = ("X", "Like")
    attrs = {"axis": -1}

    @staticmethod
    def infer(x, like, *, axis):
        if like.ndim > x.ndim:
            raise ProgramError(f"op reduce_to: expected Like with at most the {x.ndim} axes of X, found {like.ndim}")
        _, meets = _broadcast_axes(x.shape, like.shape, axis)
        for a, b in zip(x.shape, meets, strict=True):
            if a != b and b != 1 and ANY not in (a, b):
                raise ProgramError(
                    f"op reduce_to: Like of shape {list(like.shape)} does not broadcast to X of shape {list(x.shape)}: {b} against {a}"
                )
        return x.with_shape(like.shape)

    @staticmethod
    def pattern(ins, outs, attrs):
        x, like = ins
        linear = "L(0)" if x.dtype != "bool" else ""
        if like.shape == x.shape:
            return f"*, ~* -> * | {linear}"
        if all(d == 1 for d in like.shape):
            return f"*, ~* -> * | *:+ {linear}"
        down, _ = _broadcast_axes(x.shape, like.shape, attrs["axis"])
        e = letters(x.ndim, "e").split()
        first = x.ndim - like.ndim if attrs["axis"] == -1 or like.ndim == x.ndim else attrs["axis"]
        words = ["." if k in down or k >= x.ndim else e[k] for k in range(first, first + like.ndim)]
        y = " ".join(words)
        return f"{' '.join(e)}, ~{y} -> {y} | {' '.join(f'{f}:+' for f in e if f not in words)} {linear}"

    @staticmethod
    def kernel(xp, x, like, *, out, axis):
        axes, _ = _broadcast_axes(x.shape, like.shape, axis)
        out[...] = x.sum(axis=axes).reshape(out.shape)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        return reduce_calls("sum", ins[0], _broadcast_axes(ins[0].shape, ins[1].shape, attrs["axis"])[0], outs[0], dry=dry)

    native = Native(calls=_calls, halves=True, any_size=True)

    @staticmethod
    def samples():
        shapes = (
            ((3, 5), (5,), -1), ((3, 5), (3, 5), -1), ((2, 3, 4), (3, 1), -1), ((3, 4), (1,), -1), ((2, 3, 4, 5), (3,), 1),
            ((2, 3, 4), (2,), 0), ((2, 3, 4), (2, 1, 4), -1), ((7,), (1,), -1), ((1, 3), (1, 3), -1), ((1, 3), (3,), -1),
            ((2, 3, 4, 5), (2, 1, 1, 5), -1), ((3, 4), (1, 1), -1),
        )  # fmt: skip
        for k, (x, like, axis) in enumerate(shapes):
            yield Sample.of(points(x, seed=k), points(like), axis=axis, grad=(), why="only gradients are reduced this way")
        yield Sample.of(np.arange(12).reshape(3, 4), np.zeros(4, "int64"), grad=(), why="integers")
