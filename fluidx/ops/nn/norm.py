"""norm, which the layer l2_normalize uses, and lrn, with their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir import OpDef, ProgramError, Sample, TensorType
from ...ir.axis_letters import along
from ..parts_kernel import by_parts
from ..shared.samples import f32, positive
from ..shared.types import need_float, norm_axis


class Norm(OpDef):
    """X divided by its length along `axis`, sqrt(sum of squares + epsilon), and that length (`axis` kept with size 1).

    Source: fluid 1.8 `norm`, which l2_normalize uses.
    """

    name = "norm"
    inputs, outputs = ("X",), ("Out", "Norm")
    attrs = {"axis": -1, "epsilon": 1e-10}

    @staticmethod
    def pattern(ins, outs, attrs):
        x = along(attrs["axis"], ins[0].ndim, "c")
        return f"{x} -> {x}, {x} | c!"

    @staticmethod
    def infer(x, *, axis, epsilon):
        need_float("norm", "X", x)
        at = norm_axis("norm", axis, x.ndim)
        return x, TensorType(x.dtype, tuple(1 if k == at else d for k, d in enumerate(x.shape)))

    @staticmethod
    def decompose(d):
        squares = d("reduce_sum", d("square", d["X"]), dim=(d.attrs["axis"],), keep_dim=True)
        length = d.chain(squares, ("scale", {"bias": d.attrs["epsilon"]}), ("sqrt", {}), out=d.out("Norm"))
        d("elementwise_div", d["X"], length, out=d.out("Out"))

    @staticmethod
    def grad(b, op, g):
        if g[1] is not None:
            raise ProgramError("op norm has a gradient through Out only; use sqrt(reduce_sum(square(x))) to differentiate the length")
        return b.norm_grad(op["Out"], op["Norm"], g[0], axis=op.attrs["axis"])

    kernel = by_parts

    @staticmethod
    def samples():
        why = "the length is not differentiable here"
        yield Sample.of(f32(3, 4), why=why)
        yield Sample.of(f32(5, 3, 4, seed=1), axis=1, epsilon=1e-3, why=why)


class NormGrad(OpDef):
    """Gradient of norm: (g - out * sum(g * out)) / norm along `axis`."""

    name = "norm_grad"
    inputs, outputs = ("Out", "Norm", "Out@GRAD"), ("X@GRAD",)
    attrs = {"axis": -1}

    @staticmethod
    def pattern(ins, outs, attrs):
        x = along(attrs["axis"], ins[0].ndim, "c")
        return f"{x}, {x}, {x} -> {x} | c! L(2)"

    @staticmethod
    def infer(y, length, g, *, axis):
        return y

    @staticmethod
    def decompose(d):
        y, g = d["Out"], d["Out@GRAD"]
        dots = d("reduce_sum", d("elementwise_mul", g, y), dim=(d.attrs["axis"],), keep_dim=True)
        d.chain(g, ("elementwise_sub", d("elementwise_mul", y, dots), {}), ("elementwise_div", d["Norm"], {}), out=d.out("X@GRAD"))

    kernel = by_parts

    @staticmethod
    def samples():
        x = f32(3, 4)
        length = np.sqrt((x * x).sum(axis=1, keepdims=True))
        yield Sample.of(x / length, length, f32(3, 4, seed=1), grad=(), why="a gradient itself")
        x = f32(5, 3, 4)
        length = np.sqrt((x * x).sum(axis=1, keepdims=True))
        yield Sample.of(x / length, length, f32(5, 3, 4, seed=1), axis=1, grad=(), why="a gradient itself")


def _neighbours(xp: Any, squares: Any, n: int, back: bool = False) -> Any:
    """For each channel the sum over the window of `n` channels around it (mirrored with `back`)."""
    before = n - 1 - (n - 1) // 2 if back else (n - 1) // 2
    c, total = squares.shape[1], xp.zeros_like(squares)
    for k in range(-before, n - before):
        low, high = max(0, -k), min(c, c - k)
        if low < high:
            total[:, low:high] += squares[:, low + k : high + k]
    return total


class Lrn(OpDef):
    """Local response normalization over `n` neighbouring channels: x / (k + alpha * sum of squares) ** beta.

    MidOut is the term in parentheses. Source: Krizhevsky, Sutskever and Hinton 2012; fluid 1.8 `lrn`.
    """

    name = "lrn"
    inputs, outputs = ("X",), ("Out", "MidOut")
    attrs = {"n": 5, "k": 1.0, "alpha": 1e-4, "beta": 0.75}
    pattern = "n c * -> n c *, n c * | c!"

    @staticmethod
    def infer(x, *, n, k, alpha, beta):
        need_float("lrn", "X", x)
        if x.ndim < 2 or n < 1:
            raise ProgramError(f"op lrn needs X with at least 2 axes and n of at least 1, got {x} and n {n}")
        return x, x

    @staticmethod
    def grad(b, op, g):
        if g[1] is not None:
            raise ProgramError("op lrn has a gradient through Out only")
        return b.lrn_grad(op["X"], op["MidOut"], g[0], **op.attrs)

    @staticmethod
    def kernel(xp, x, *, out, n, k, alpha, beta):
        y, mid = out
        mid[...] = k + alpha * _neighbours(xp, x * x, n)
        y[...] = x * mid**-beta

    @staticmethod
    def samples():
        why = "MidOut is not differentiable"
        yield Sample.of(f32(2, 6, 2, 2), n=3, alpha=0.5, why=why)
        yield Sample.of(f32(1, 3, 2, 2, seed=1), n=4, alpha=0.1, k=2.0, why=why)
        yield Sample.of(f32(5, 6, 3, 4, seed=2), n=3, alpha=0.5, why=why)


class LrnGrad(OpDef):
    """Gradient of lrn: g * mid**-beta - 2 * alpha * beta * x * (sum of g * x * mid**(-beta - 1) over channels with x in their window)."""

    name = "lrn_grad"
    inputs, outputs = ("X", "MidOut", "Out@GRAD"), ("X@GRAD",)
    attrs = {"n": 5, "k": 1.0, "alpha": 1e-4, "beta": 0.75}
    pattern = "n c *, n c *, n c * -> n c * | c! L(2)"

    @staticmethod
    def infer(x, mid, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, x, mid, g, *, out, n, k, alpha, beta):
        seen = _neighbours(xp, g * x * mid ** (-beta - 1), n, back=True)
        out[...] = g * mid**-beta - 2 * alpha * beta * x * seen

    @staticmethod
    def samples():
        yield Sample.of(f32(1, 4, 2, 2), positive(1, 4, 2, 2, seed=1), f32(1, 4, 2, 2, seed=2), n=3, grad=(), why="a gradient itself")
        x, mid, g = f32(5, 6, 3, 4), positive(5, 6, 3, 4, seed=1), f32(5, 6, 3, 4, seed=2)
        yield Sample.of(x, mid, g, n=3, alpha=0.5, grad=(), why="a gradient itself")
