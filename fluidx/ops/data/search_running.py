"""Running products: cumprod and its gradient. The running sum is in `search`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ir.axis_letters import along
from ...ir.opdef import OpDef, Sample
from ..shared.samples import f32, points
from ..shared.types import norm_axis


def _in_order(xp: Any, arrays: Sequence[Any], axis: int, reverse: bool) -> list[Any]:
    """Views with `axis` first, in the order of the running product."""
    front = [xp.moveaxis(a, axis, 0) for a in arrays]
    return [a[::-1] for a in front] if reverse else front


def _products(xp: Any, x: Any, out: Any, exclusive: bool) -> None:
    if not exclusive:
        xp.cumprod(x, axis=0, dtype=out.dtype, out=out)
    elif len(out):
        out[0] = 1
        xp.cumprod(x[:-1], axis=0, dtype=out.dtype, out=out[1:])


class Cumprod(OpDef):
    """The running product of X along `axis`. `exclusive` excludes the element itself from its product; `reverse` starts at the end."""

    name = "cumprod"
    inputs = ("X",)
    attrs = {"axis": -1, "exclusive": False, "reverse": False}

    @staticmethod
    def pattern(ins, outs, attrs):
        x = along(attrs["axis"], ins[0].ndim, "c")
        return f"{x} -> {x} | c!"

    @staticmethod
    def infer(x, *, axis, exclusive, reverse):
        norm_axis("cumprod", axis, x.ndim)
        return x

    @staticmethod
    def grad(b, op, g):
        return b.cumprod_grad(op["X"], g, **op.attrs)

    @staticmethod
    def kernel(xp, x, *, out, axis, exclusive, reverse):
        x, made = _in_order(xp, (x, out), axis, reverse)
        _products(xp, x, made, exclusive)

    @staticmethod
    def samples():
        yield Sample.of(points((2, 3)))
        yield Sample.of(points((3, 2)), axis=0, exclusive=True)
        yield Sample.of(points((2, 3)), axis=1, reverse=True)
        yield Sample.of(points((5, 4, 3)), axis=1, exclusive=True, reverse=True)
        yield Sample.of(np.array([[2, 0, 3, 4], [0, 1, 0, 2]], "float32"))
        yield Sample.of(np.array([1, 2, 3], "int32"))


class CumprodGrad(OpDef):
    """The gradient of cumprod, exact with zeros in X."""

    name = "cumprod_grad"
    inputs, outputs = ("X", "Out@GRAD"), ("X@GRAD",)
    attrs = Cumprod.attrs

    @staticmethod
    def pattern(ins, outs, attrs):
        x = along(attrs["axis"], ins[0].ndim, "c")
        return f"{x}, {x} -> {x} | c! L(1)"

    @staticmethod
    def infer(x, g, *, axis, exclusive, reverse):
        return x

    @staticmethod
    def kernel(xp, x, g, *, out, axis, exclusive, reverse):
        x, g, made = _in_order(xp, (x, g, out), axis, reverse)
        if not len(x):
            return
        # d out[j] / d x[i] is the product of all elements before i (`made` holds it first) times the product of those between i and j
        _products(xp, x, made, exclusive=True)
        rest = xp.zeros_like(g[0]) if exclusive else g[-1].copy()
        made[-1] *= rest
        for i in range(len(x) - 2, -1, -1):
            rest = (g[i + 1] if exclusive else g[i]) + x[i + 1] * rest
            made[i] *= rest

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3), f32(2, 3, seed=1), grad=(), why="a gradient op")
        yield Sample.of(f32(5, 4, 3), f32(5, 4, 3, seed=1), axis=1, exclusive=True, grad=(), why="a gradient op")
