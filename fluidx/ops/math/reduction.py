"""Reductions over axes, and the squared norm.

A reduction over all axes gives shape [1], as in fluid, which has no 0-d tensors.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import ClassVar

import numpy as np

from ...ir import Arithmetic, Native, OpDef, ProgramError, Sample, TensorType
from ...ir.axis_letters import letters
from ...ir.dtypes import FLOATS, HALVES
from ...ir.parts import Part
from ..shared.native import reduce_calls, row_calls
from ..shared.samples import points
from ..shared.types import NUMBERS, norm_axes


def reduced_axes(op, dim, ndim):
    return tuple(sorted(norm_axes(op, dim, ndim))) if dim else tuple(range(ndim))


def kept_shape(shape, axes):
    """The shape with size 1 for the reduced axes."""
    return tuple(1 if k in axes else d for k, d in enumerate(shape))


def _result(x, axes, keep_dim):
    return kept_shape(x.shape, axes) if keep_dim else tuple(d for k, d in enumerate(x.shape) if k not in axes) or (1,)


def reduction_words(x, dim, keep_dim):
    """The axis words of an operand and of its reduction over the axes `dim`, and the words of the reduced axes.

    >>> reduction_words(TensorType("float32", (2, 3, 4)), (1,), False)
    ('e0 e1 e2', 'e0 e2', ['e1'])
    """
    if not dim:  # no reduced axis is named: flat ranges are allowed
        return "*", "*" if keep_dim else ".", ["*"]
    axes, e = reduced_axes("", dim, x.ndim), letters(x.ndim, "e").split()
    kept = ["." if k in axes else f for k, f in enumerate(e) if keep_dim or k not in axes]
    return " ".join(e), " ".join(kept) or ".", [e[k] for k in axes]


# -- sums ----------------------------------------------------------------------------------------------------------------------


class _Reduction(OpDef):
    """Base of reductions with the attributes `dim` (axes, () for all) and `keep_dim`."""

    inputs = ("X",)
    attrs = {"dim": (), "keep_dim": False}
    dtypes: ClassVar[tuple[str, ...]] = NUMBERS
    method: ClassVar[str] = ""  # name of the function of the array module
    axis_words: ClassVar[tuple[str, ...]] = ("{}!",)  # words of the access pattern for each reduced axis
    groups: ClassVar[str] = ""  # groups of the access pattern: linear and monotone ones
    how: ClassVar[str] = ""  # `how` of shared.native.reduce_calls
    native = Native(any_size=True, halves=True)

    @classmethod
    def pattern(cls, ins, outs, attrs):
        x, y, gone = reduction_words(ins[0], attrs.get("dim", ()), attrs.get("keep_dim", False))
        return f"{x} -> {y} | {' '.join(word.format(f) for word in cls.axis_words for f in gone)} {cls.groups}"

    def __init_subclass__(cls, **kwargs):
        name = cls.__dict__.get("name", "")
        if name:
            cls.infer = staticmethod(partial(_infer, name, cls.dtypes))  # type: ignore[method-assign]
            if cls.kernel is None:
                cls.kernel = staticmethod(_kernel_of(cls))
            if cls.how:
                cls.native = Native(calls=_native_of(cls)).over(cls.native, cls, name)
        super().__init_subclass__(**kwargs)

    @classmethod
    def _over(cls, xp, x, axes):
        """The result, for any array module."""
        return getattr(xp, cls.method)(x, axis=axes)


def _infer(name, dtypes, x, *, dim=(), keep_dim=False):
    if x.dtype not in dtypes:
        want = "bool" if dtypes == ("bool",) else "a number dtype"
        raise ProgramError(f"op {name}: expected X of {want}, found {x.dtype}; cast it first")
    return x.with_shape(_result(x, reduced_axes(name, dim, x.ndim), keep_dim))


def _kernel_of(cls):
    def kernel(xp, x, *, out, dim=(), keep_dim=False):
        out[...] = cls._over(xp, x, reduced_axes(cls.name, dim, x.ndim)).reshape(out.shape)

    return kernel


def _native_of(cls):
    def native(ins, outs, attrs, dry=False):
        return reduce_calls(cls.how, ins[0], reduced_axes(cls.name, attrs.get("dim", ()), ins[0].ndim), outs[0], dry=dry)

    return native


def _samples(dtype="float32", low=-3.0, high=3.0):
    def x(shape, seed=0):
        return points(shape, low, high, seed=seed) if dtype == "float32" else points(shape, seed=seed) > 0

    yield Sample.of(x((3, 5)))
    yield Sample.of(x((2, 3, 4)), dim=(1,))
    yield Sample.of(x((4, 3, 2)), dim=(0,))
    yield Sample.of(x((2, 3, 4)), dim=(-1,), keep_dim=True)
    yield Sample.of(x((2, 3, 4, 5)), dim=(0, 2, 3))
    yield Sample.of(x((2, 3, 4, 5)), dim=(1, 3), keep_dim=True)
    yield Sample.of(x((2, 3)), keep_dim=True)
    yield Sample.of(x((7,)), dim=(0,))
    yield Sample.of(x((1,)))
    if dtype == "float32":
        yield Sample.of(x((3, 4)).astype("float64"), dim=(0,))
        yield Sample.of(x((3, 4)).astype("float16"), dim=(0,), grad=(), why="float16 is not accurate enough for differences")
        yield Sample.of(np.arange(1, 13).reshape(3, 4), dim=(1,))
        yield Sample.of(np.arange(1, 13, dtype="int32").reshape(3, 4), dim=(0,))


# -- the ops ------------------------------------------------------------------------------------------------------------------------


class ReduceSum(_Reduction):
    """The sum over the axes `dim` (all axes if it is empty); the reduced axes are removed unless `keep_dim`."""

    name = "reduce_sum"
    method = how = "sum"
    axis_words, groups = ("{}:+",), "L(0)"
    samples = staticmethod(_samples)

    @staticmethod
    def grad(b, op, g):
        return b.reduce_sum_grad(op["X"], g, **op.attrs)


def count_of(x, axes, part: Part | None):
    """The number of elements that each result is the mean of: in the whole value, if `x` is a part of it."""
    return prod(x.shape[k] for k in axes) if part is None else part.count


class _Mean(_Reduction):
    """Base of the means: a sum, divided by the number of elements of the whole value."""

    dtypes = FLOATS
    axis_words, groups = ("{}:+", "#{}"), "L(0)"

    @staticmethod
    def kernel(xp, x, *, out, dim=(), keep_dim=False, part=None):
        axes = reduced_axes("mean", dim, x.ndim)
        out[...] = (x.sum(axis=axes) / count_of(x, axes, part)).reshape(out.shape)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        x = ins[0]
        axes = reduced_axes("mean", attrs.get("dim", ()), x.ndim)
        return reduce_calls("sum", x, axes, outs[0], count_of(x, axes, part), dry)

    native = Native(calls=_calls, halves=True)


class ReduceMean(_Mean):
    """The mean over the axes `dim` (all axes if it is empty); the reduced axes are removed unless `keep_dim`."""

    name = "reduce_mean"

    @staticmethod
    def samples():
        return (s for s in _samples() if s.args[0].dtype.kind == "f")

    @staticmethod
    def grad(b, op, g):
        return b.reduce_mean_grad(op["X"], g, **op.attrs)


class Mean(_Mean):
    """The mean of all elements, of shape [1]."""

    name = "mean"
    attrs = {}

    @staticmethod
    def samples():
        for shape in ((3, 5), (2, 3, 4), (1,), (7,)):
            yield Sample.of(points(shape))
        yield Sample.of(points((3, 4)).astype("float64"))

    @staticmethod
    def grad(b, op, g):
        return b.reduce_mean_grad(op["X"], g)


class ReduceMax(_Reduction):
    """The largest element over the axes `dim` (all if it is empty); reduced axes are removed unless `keep_dim`. Equal ones all get the
    gradient.
    """

    name = "reduce_max"
    method = how = "max"
    axis_words, groups = ("{}:max",), "U(0>max)"
    samples = staticmethod(_samples)

    @staticmethod
    def grad(b, op, g):
        return b.reduce_max_grad(op["X"], op["Out"], g, **op.attrs)


class ReduceMin(_Reduction):
    """The smallest element over the axes `dim` (all if it is empty); reduced axes are removed unless `keep_dim`. Equal ones all get the
    gradient.
    """

    name = "reduce_min"
    method = how = "min"
    axis_words, groups = ("{}:min",), "U(0>min)"
    samples = staticmethod(_samples)

    @staticmethod
    def grad(b, op, g):
        return b.reduce_max_grad(op["X"], op["Out"], g, **op.attrs)


class ReduceProd(_Reduction):
    """The product over the axes `dim` (all axes if it is empty); the reduced axes are removed unless `keep_dim`."""

    name = "reduce_prod"
    method = how = "prod"

    @staticmethod
    def samples():
        yield from _samples(low=0.5, high=1.5)
        yield Sample.of(np.array([[0, 2, 3], [1, 2, 3], [0, 0, 4]], "float32"), dim=(1,))

    @staticmethod
    def grad(b, op, g):
        return b.reduce_prod_grad(op["X"], g, **op.attrs)


class ReduceAll(_Reduction):
    """True where all elements over the axes `dim` (all axes if it is empty) are true."""

    name = "reduce_all"
    method, how = "all", "min"
    axis_words, groups = ("{}:min",), "U(0>min)"
    dtypes = ("bool",)
    samples = staticmethod(lambda: _samples("bool"))


class ReduceAny(_Reduction):
    """True where at least one element over the axes `dim` (all axes if it is empty) is true."""

    name = "reduce_any"
    method, how = "any", "max"
    axis_words, groups = ("{}:max",), "U(0>max)"
    dtypes = ("bool",)
    samples = staticmethod(lambda: _samples("bool"))


class LogSumExp(_Reduction):
    """log(sum(exp(X))) over the axes `dim` (all axes if it is empty), without overflow."""

    name = "logsumexp"
    dtypes = ReduceMean.dtypes

    @classmethod
    def _over(cls, xp, x, axes):
        top = x.max(axis=axes, keepdims=True)
        top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
        return xp.log(xp.exp(x - top).sum(axis=axes, keepdims=True)) + top

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        """Only over the last axes, which are the rows of a matrix."""
        x, out = ins[0], outs[0]
        axes = reduced_axes("logsumexp", attrs["dim"], x.ndim)
        if axes != tuple(range(x.ndim - len(axes), x.ndim)) or not x.flags.c_contiguous or not x.size:
            return None
        return row_calls("logsumexp", [x.reshape(-1, prod(x.shape[k] for k in axes))], 1, out, dry=dry)

    native = Native(calls=_calls, halves=True)

    @staticmethod
    def samples():
        yield from ReduceMean.samples()
        yield Sample.of(
            np.array([[1000, 1000], [-1000, -1001]], "float32"), dim=(1,), grad=(), why="differences of 1000 are not accurate enough"
        )
        yield Sample.of(np.array([[-np.inf, -np.inf], [np.inf, 0], [-np.inf, 0]], "float32"), dim=(1,), grad=(), why="infinite")

    @staticmethod
    def grad(b, op, g):
        return b.logsumexp_grad(op["X"], op["Out"], g, **op.attrs)


# -- norms --------------------------------------------------------------------------------------------------------------------------


class SquaredL2Norm(OpDef):
    """The sum of the squares of all elements, of shape [1]; float32 for 16-bit floats, otherwise the dtype of X."""

    name = "squared_l2_norm"
    arithmetic = Arithmetic(flops=2)
    inputs = ("X",)
    pattern = "* -> . | *:+"

    @staticmethod
    def infer(x):
        if not x.is_float:
            raise ProgramError(f"op squared_l2_norm: expected X of a float dtype, found {x.dtype}; cast it first")
        return TensorType("float32" if x.dtype in HALVES else x.dtype, (1,))

    @staticmethod
    def grad(b, op, g):
        x = op["X"]
        twice = b.scale(g, scale=2.0)
        return b.elementwise_mul(x, twice if twice.dtype == x.dtype else b.cast(twice, dtype=x.dtype))

    @staticmethod
    def kernel(xp, x, *, out):
        line = x.reshape(-1)
        out[0] = xp.dot(line, line)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        return reduce_calls("squares", ins[0], range(ins[0].ndim), outs[0], dry=dry)

    native = Native(calls=_calls, halves=True)

    @staticmethod
    def samples():
        yield Sample.of(points((3, 5)), tolerance=1e-2)
        yield Sample.of(points((1,)))
        yield Sample.of(points((7,)).astype("float64"))
        yield Sample.of(points((2, 3)).astype("float16"), grad=(), why="float16 is not accurate enough for differences")
