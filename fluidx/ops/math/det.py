"""Determinants."""

from __future__ import annotations

from ...ir import Arithmetic, OpDef, ProgramError, Sample
from ..shared.samples import f32
from ..shared.types import meet


def _square(op, x):
    if not x.is_float or x.ndim < 2 or not meet(x.shape[-1], x.shape[-2]):
        raise ProgramError(f"op {op}: X must hold square matrices of floats in its last two axes, found {x}")


class Det(OpDef):
    """The determinants of the square matrices in the last two axes of X."""

    name = "det"
    inputs = ("X",)
    pattern = "* . . -> *"
    arithmetic = Arithmetic(flops=lambda ins, outs, attrs: abs(ins[0].numel) * ins[0].shape[-1])

    @staticmethod
    def infer(x):
        _square("det", x)
        return x.with_shape(x.shape[:-2])

    @staticmethod
    def grad(b, op, g):
        return b.det_grad(op["X"], g)

    @staticmethod
    def kernel(xp, x, *, out):
        out[...] = xp.linalg.det(x)

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 3))
        yield Sample.of(f32(5, 2, 2).astype("float64"))
        yield Sample.of(f32(1, 1))


class DetGrad(OpDef):
    """The gradient of det: Out@GRAD times the cofactors of each matrix; it is also correct for singular matrices."""

    name = "det_grad"
    inputs, outputs = ("X", "Out@GRAD"), ("X@GRAD",)
    pattern = "* . ., * -> * . . | L(1)"
    arithmetic = Arithmetic(flops=Det.arithmetic.flops)

    @staticmethod
    def infer(x, g):
        return x

    @staticmethod
    def kernel(xp, x, g, *, out):
        u, s, v = xp.linalg.svd(x)
        others = xp.ones_like(s)  # for each singular value, the product of all others
        for k in range(s.shape[-1]):
            for j in range(s.shape[-1]):
                if j != k:
                    others[..., k] *= s[..., j]
        sign = xp.linalg.det(u) * xp.linalg.det(v)
        out[...] = (g * sign)[..., None, None] * xp.matmul(u * others[..., None, :], v)

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 3), f32(1, seed=1).reshape(()), grad=(), why="a gradient op")
        yield Sample.of(f32(5, 3, 3), f32(5, seed=1), grad=(), why="a gradient op")
