"""softmax and log_softmax along one axis, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...ir import OpDef, Sample, TensorType
from ...ir.pattern import along
from ..shared.blocked import in_order, row_blocks, row_max, row_sum
from ..shared.samples import f32
from ..shared.types import is_half, need_float, norm_axis


def _rows_form(*arrays: Any, axis: int) -> bool:
    """True when the arrays can be seen as float32 or float64 matrices whose rows lie along the last axis."""
    x = arrays[0]
    return x.size > 0 and axis % x.ndim == x.ndim - 1 and not is_half(x.dtype) and all(a.flags.c_contiguous for a in arrays)


def _matrix(a: Any) -> Any:
    return a.reshape(-1, a.shape[-1])


def _infer(op: str) -> Any:
    def infer(x: TensorType, *, axis: int) -> TensorType:
        need_float(op, "X", x)
        norm_axis(op, axis, x.ndim)
        return x

    return staticmethod(infer)


def _infer_grad(out: TensorType, g: TensorType, *, axis: int) -> TensorType:
    return out


def _along(words: str, roles: str) -> Any:
    """The pattern of an op whose operands all lie alike and that works along `axis`."""

    def pattern(ins, outs, attrs):
        x = along(attrs["axis"], ins[0].ndim, "c")
        return f"{words.replace('x', x)} | {roles}"

    return staticmethod(pattern)


class Softmax(OpDef):
    """exp(x - max) divided by its sum along `axis`: positive numbers that add up to 1. Source: fluid 1.8 `softmax`."""

    name = "softmax"
    inputs = ("X",)
    attrs = {"axis": -1}
    inplace = (("X", "Out"),)
    onnx = "Softmax"
    infer = _infer("softmax")
    pattern = _along("x -> x", "c!")

    @staticmethod
    def grad(b, op, g):
        return b.softmax_grad(op["Out"], g, axis=op.attrs["axis"])

    @staticmethod
    def kernel(xp, x, *, out, axis):
        Softmax.bind(xp, (x,), (out,), {"axis": axis}, None)()

    @staticmethod
    def plain(xp, x, out, axis):
        if is_half(x.dtype):
            wide = x.astype("float32")
            Softmax.plain(xp, wide, wide, axis)
            out[...] = wide
            return
        if not x.size:
            return
        xp.subtract(x, x.max(axis=axis, keepdims=True), out=out)
        xp.exp(out, out=out)
        xp.divide(out, out.sum(axis=axis, keepdims=True), out=out)

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        x, out = ins[0], outs[0]
        if xp is not np or not _rows_form(x, out, axis=attrs["axis"]):
            return partial(Softmax.plain, xp, x, out, **attrs)
        calls: list[Callable[[], Any]] = []
        x2, out2 = _matrix(x), _matrix(out)
        for rows in row_blocks(len(x2), x2.shape[1] * x.itemsize):
            a, o = x2[rows], out2[rows]
            top = np.empty(len(a), x.dtype)
            calls += [*row_max(a, top), partial(np.subtract, a, top[:, None], o), partial(np.exp, o, o)]
            calls += [row_sum(o, top), partial(np.divide, o, top[:, None], o)]
        return in_order(calls)

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 5))
        yield Sample.of(f32(5, 3, 4, seed=1), axis=1)
        yield Sample.of(f32(2, 3, 37, seed=1) * 20)
        yield Sample.of(f32(4, 1, seed=2))
        yield Sample.of(f32(5, seed=3), axis=0)
        yield Sample.of(f32(3, 4, seed=4).astype("float16"), grad=(), why="central differences drown in float16")


class SoftmaxGrad(OpDef):
    """Gradient of softmax from its output: out * (g - sum(g * out)) along `axis`."""

    name = "softmax_grad"
    inputs, outputs = ("Out", "Out@GRAD"), ("X@GRAD",)
    attrs = {"axis": -1}
    inplace = (("Out@GRAD", "X@GRAD"),)
    infer = staticmethod(_infer_grad)
    pattern = _along("x, x -> x", "c! L(1)")

    @staticmethod
    def kernel(xp, y, g, *, out, axis):
        SoftmaxGrad.bind(xp, (y, g), (out,), {"axis": axis}, None)()

    @staticmethod
    def plain(xp, y, g, out, axis):
        if is_half(y.dtype):
            wide = g.astype("float32")
            SoftmaxGrad.plain(xp, y.astype("float32"), wide, wide, axis)
            out[...] = wide
            return
        xp.subtract(g, (g * y).sum(axis=axis, keepdims=True), out=out)
        xp.multiply(out, y, out=out)

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (y, g), out = ins, outs[0]
        if xp is not np or not _rows_form(y, g, out, axis=attrs["axis"]):
            return partial(SoftmaxGrad.plain, xp, y, g, out, **attrs)
        calls: list[Callable[[], Any]] = []
        y2, g2, out2 = _matrix(y), _matrix(g), _matrix(out)
        for rows in row_blocks(len(y2), y2.shape[1] * y.itemsize):
            a, d, o = y2[rows], g2[rows], out2[rows]
            dots = np.empty(len(a), y.dtype)
            calls += [partial(np.vecdot, a, d, dots), partial(np.subtract, d, dots[:, None], o), partial(np.multiply, o, a, o)]
        return in_order(calls)

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 5), f32(3, 5, seed=1), grad=(), why="a gradient itself")
        yield Sample.of(f32(5, 3, 4), f32(5, 3, 4, seed=1), axis=1, grad=(), why="a gradient itself")


class LogSoftmax(OpDef):
    """The logarithm of softmax along `axis`, x - max - log(sum(exp(x - max))), without the loss of precision of doing both in turn."""

    name = "log_softmax"
    inputs = ("X",)
    attrs = {"axis": -1}
    inplace = (("X", "Out"),)
    onnx = "LogSoftmax"
    infer = _infer("log_softmax")
    pattern = _along("x -> x", "c!")

    @staticmethod
    def grad(b, op, g):
        return b.log_softmax_grad(op["Out"], g, axis=op.attrs["axis"])

    @staticmethod
    def kernel(xp, x, *, out, axis):
        LogSoftmax.bind(xp, (x,), (out,), {"axis": axis}, None)()

    @staticmethod
    def plain(xp, x, out, axis):
        if is_half(x.dtype):
            wide = x.astype("float32")
            LogSoftmax.plain(xp, wide, wide, axis)
            out[...] = wide
            return
        if not x.size:
            return
        xp.subtract(x, x.max(axis=axis, keepdims=True), out=out)
        xp.subtract(out, xp.log(xp.exp(out).sum(axis=axis, keepdims=True)), out=out)

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        x, out = ins[0], outs[0]
        if xp is not np or not _rows_form(x, out, axis=attrs["axis"]):
            return partial(LogSoftmax.plain, xp, x, out, **attrs)
        calls: list[Callable[[], Any]] = []
        x2, out2 = _matrix(x), _matrix(out)
        blocks = list(row_blocks(len(x2), x2.shape[1] * x.itemsize))
        scratch = np.empty((blocks[0].stop, x2.shape[1]), x.dtype)
        for rows in blocks:
            a, o = x2[rows], out2[rows]
            top, e = np.empty(len(a), x.dtype), scratch[: len(a)]
            calls += [*row_max(a, top), partial(np.subtract, a, top[:, None], o), partial(np.exp, o, e)]
            calls += [row_sum(e, top), partial(np.log, top, top), partial(np.subtract, o, top[:, None], o)]
        return in_order(calls)

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 5))
        yield Sample.of(f32(5, 3, 4, seed=1), axis=1)
        yield Sample.of(f32(4, 1, seed=2))
        yield Sample.of(f32(2, 21, seed=3))


class LogSoftmaxGrad(OpDef):
    """Gradient of log_softmax from its output: g - exp(out) * sum(g) along `axis`."""

    name = "log_softmax_grad"
    inputs, outputs = ("Out", "Out@GRAD"), ("X@GRAD",)
    attrs = {"axis": -1}
    infer = staticmethod(_infer_grad)
    pattern = _along("x, x -> x", "c! L(1)")

    @staticmethod
    def kernel(xp, y, g, *, out, axis):
        LogSoftmaxGrad.bind(xp, (y, g), (out,), {"axis": axis}, None)()

    @staticmethod
    def plain(xp, y, g, out, axis):
        if is_half(y.dtype):
            wide = xp.empty(y.shape, "float32")
            LogSoftmaxGrad.plain(xp, y.astype("float32"), g.astype("float32"), wide, axis)
            out[...] = wide
            return
        xp.exp(y, out=out)
        xp.multiply(out, g.sum(axis=axis, keepdims=True), out=out)
        xp.subtract(g, out, out=out)

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (y, g), out = ins, outs[0]
        if xp is not np or not _rows_form(y, g, out, axis=attrs["axis"]):
            return partial(LogSoftmaxGrad.plain, xp, y, g, out, **attrs)
        calls: list[Callable[[], Any]] = []
        y2, g2, out2 = _matrix(y), _matrix(g), _matrix(out)
        for rows in row_blocks(len(y2), y2.shape[1] * y.itemsize):
            a, d, o = y2[rows], g2[rows], out2[rows]
            total = np.empty(len(a), y.dtype)
            calls += [row_sum(d, total), partial(np.exp, a, o), partial(np.multiply, o, total[:, None], o), partial(np.subtract, d, o, o)]
        return in_order(calls)

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 5), f32(3, 5, seed=1), grad=(), why="a gradient itself")
        yield Sample.of(f32(5, 3, 4), f32(5, 3, 4, seed=1), axis=1, grad=(), why="a gradient itself")
