"""softmax and log_softmax along one axis, with their gradients.

Along a sharded axis they are expanded into simpler operators, so that a reduction over the axis is also reduced over the ranks.
"""

from __future__ import annotations

from typing import Any

from ...ir import Arithmetic, Native, OpDef, Sample, Storage
from ...ir.axis_letters import along
from ...ir.decomposition import Decomposition
from ..parts_kernel import by_parts
from ..shared.native import row_calls
from ..shared.samples import f32
from ..shared.types import need_float, norm_axis


def _along(words: str, roles: str) -> Any:
    """The pattern of an op along `axis` whose operands all have one shape."""

    def pattern(ins, outs, attrs):
        x = along(attrs["axis"], ins[0].ndim, "c")
        return f"{words.replace('x', x)} | {roles}"

    return staticmethod(pattern)


def softmax_parts(d: Decomposition, x: str, axis: int, out: str = "") -> tuple[str, str]:
    """The names of the logits minus their maximum, and of the sum of their exponentials; with `out` also an operator that writes the
    quotients there.
    """
    along: dict[str, Any] = {"dim": (axis,), "keep_dim": True}
    shifted = d("elementwise_sub", x, d("reduce_max", x, word="largest", **along), word="shifted")
    e = d("exp", shifted, word="exp")
    total = d("reduce_sum", e, word="total", **along)
    if out:
        d("elementwise_div", e, total, out=out)
    return shifted, total


# -- the ops ------------------------------------------------------------------------------------------------------------------------


class _AlongAxis(OpDef):
    """Base of the four ops: operands and result have one shape."""

    attrs = {"axis": -1}
    kernel = by_parts

    @classmethod
    def _calls(cls, ins, outs, attrs, dry=False):
        return row_calls(cls.name, [*ins, outs[0]], attrs["axis"], dry=dry)

    native = Native(calls=_calls, halves=True, any_size=True)


class _Forward(_AlongAxis):
    inputs = ("X",)
    storage = Storage(inplace=(("X", "Out"),))
    pattern = _along("x -> x", "c!")

    @classmethod
    def infer(cls, x, *, axis):
        need_float(cls.name, "X", x)
        norm_axis(cls.name, axis, x.ndim)
        return x

    @classmethod
    def grad(cls, b, op, g):
        return b.emit(f"{cls.name}_grad", op["Out"], g, axis=op.attrs["axis"])


class _Gradient(_AlongAxis):
    inputs, outputs = ("Out", "Out@GRAD"), ("X@GRAD",)
    pattern = _along("x, x -> x", "c! L(1)")

    @staticmethod
    def infer(out, g, *, axis):
        return out

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 5), f32(3, 5, seed=1), grad=(), why="a gradient itself")
        yield Sample.of(f32(5, 3, 4), f32(5, 3, 4, seed=1), axis=1, grad=(), why="a gradient itself")


class Softmax(_Forward):
    """exp(x - max) divided by its sum along `axis`: positive numbers that add up to 1. Source: fluid 1.8 `softmax`."""

    name = "softmax"
    arithmetic = Arithmetic(flops=5)

    @staticmethod
    def decompose(d):
        softmax_parts(d, d["X"], d.attrs["axis"], d.out("Out"))

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 5))
        yield Sample.of(f32(5, 3, 4, seed=1), axis=1)
        yield Sample.of(f32(2, 3, 37, seed=1) * 20)
        yield Sample.of(f32(4, 1, seed=2))
        yield Sample.of(f32(5, seed=3), axis=0)
        yield Sample.of(f32(3, 4, seed=4).astype("float16"), grad=(), why="central differences are not accurate in float16")


class SoftmaxGrad(_Gradient):
    """Gradient of softmax from its output: out * (g - sum(g * out)) along `axis`."""

    name = "softmax_grad"
    arithmetic = Arithmetic(flops=4)
    storage = Storage(inplace=(("Out@GRAD", "X@GRAD"),))

    @staticmethod
    def decompose(d):
        y, g = d["Out"], d["Out@GRAD"]
        dots = d("reduce_sum", d("elementwise_mul", g, y), word="dots", dim=(d.attrs["axis"],), keep_dim=True)
        d("elementwise_mul", d("elementwise_sub", g, dots), y, out=d.out("X@GRAD"))


class LogSoftmax(_Forward):
    """The logarithm of softmax along `axis`, x - max - log(sum(exp(x - max))), without the precision loss of two separate steps."""

    name = "log_softmax"
    arithmetic = Arithmetic(flops=5)

    @staticmethod
    def decompose(d):
        shifted, total = softmax_parts(d, d["X"], d.attrs["axis"])
        d("elementwise_sub", shifted, d("log", total, word="log"), out=d.out("Out"))

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 5))
        yield Sample.of(f32(5, 3, 4, seed=1), axis=1)
        yield Sample.of(f32(4, 1, seed=2))
        yield Sample.of(f32(2, 21, seed=3))


class LogSoftmaxGrad(_Gradient):
    """Gradient of log_softmax from its output: g - exp(out) * sum(g) along `axis`."""

    name = "log_softmax_grad"
    arithmetic = Arithmetic(flops=4)

    @staticmethod
    def decompose(d):
        y, g = d["Out"], d["Out@GRAD"]
        total = d("reduce_sum", g, word="total", dim=(d.attrs["axis"],), keep_dim=True)
        d("elementwise_sub", g, d("elementwise_mul", d("exp", y, word="exp"), total), out=d.out("X@GRAD"))
