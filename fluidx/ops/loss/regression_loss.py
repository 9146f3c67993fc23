"""Losses of a number against a target number, with their gradients: squared error, Huber and smooth L1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...ir import OpDef, ProgramError, Sample
from ...ir.decomposition import Decomposition
from ..parts_kernel import by_parts
from ..shared.samples import between, f32
from .elementwise_loss import elementwise_loss
from .loss_shared import elementwise_infer


def _squared_samples() -> Iterator[Sample]:
    yield Sample.of(f32(4, 1), f32(4, 1, seed=1))
    yield Sample.of(f32(2, 3, 4), f32(2, 3, 4, seed=1))


SquareErrorCost = elementwise_loss(
    "square_error_cost", lambda x, y: (x - y) * (x - y), lambda x, y, g: (x - y) * g + (x - y) * g,
    doc="(X - Y) squared, element by element. Source: fluid 1.8 `square_error_cost`.",
    grad_doc="Gradient of square_error_cost with respect to X: 2 * (X - Y) * g.", samples=_squared_samples, both=True,
)  # fmt: skip


class HuberLoss(OpDef):
    """r squared / 2 where |r| <= delta, delta * (|r| - delta / 2) elsewhere, for the residual r = Y - X. Source: fluid 1.8 `huber_loss`."""

    name = "huber_loss"
    inputs, outputs = ("X", "Y"), ("Residual", "Out")
    attrs = {"delta": 1.0}
    pattern = "*, * -> *, *"

    @staticmethod
    def infer(x, y, *, delta):
        if delta <= 0:
            raise ProgramError(f"op huber_loss: delta must be positive, got {delta}")
        t = elementwise_infer("huber_loss", X=x, Y=y)
        return t, t

    @staticmethod
    def grad(b, op, g):
        of_residual, of_loss = g
        dy = b.huber_loss_grad(op["Residual"], of_loss, **op.attrs) if of_loss is not None else None
        if of_residual is not None:
            dy = of_residual if dy is None else b.elementwise_add(dy, of_residual)
        return b.scale(dy, scale=-1.0), dy

    @staticmethod
    def kernel(xp, x, y, *, out, delta):
        residual, loss = out
        r = y - x
        size = xp.abs(r)
        residual[...] = r
        loss[...] = xp.where(size <= delta, r * r / 2, delta * (size - delta / 2))

    @staticmethod
    def samples():
        yield Sample.of(f32(5, 1) * 3, f32(5, 1, seed=1))
        yield Sample.of(f32(2, 3), f32(2, 3, seed=1), delta=0.5)


class HuberLossGrad(OpDef):
    """Gradient of huber_loss with respect to Y: the residual clipped to [-delta, delta], times g."""

    name = "huber_loss_grad"
    inputs, outputs = ("Residual", "Out@GRAD"), ("Y@GRAD",)
    attrs = {"delta": 1.0}
    pattern = "*, * -> * | L(1)"

    @staticmethod
    def infer(x, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, r, g, *, out, delta):
        xp.clip(r, -delta, delta, out=out)
        xp.multiply(out, g, out=out)

    @staticmethod
    def samples():
        yield Sample.of(f32(5, 1) * 3, f32(5, 1, seed=1), grad=(), why="a gradient itself")
        yield Sample.of(f32(5, 4) * 3, f32(5, 4, seed=1), delta=0.5, grad=(), why="a gradient itself")


def _weighted(d: Decomposition, slot: str) -> Any:
    """The step that multiplies by an operand, None if it is absent."""
    return ("elementwise_mul", d[slot], {}) if d[slot] else None


class SmoothL1Loss(OpDef):
    """Per example, the sum of a loss that is quadratic near 0 and linear beyond 1 / sigma squared.

    With d = (X - Y) * InsideWeight and s = sigma squared: s * d squared / 2 where |d| < 1 / s, |d| - 1 / (2 s) elsewhere, all times
    OutsideWeight. Diff is d; Out is [N, 1]. Source: Girshick 2015; fluid 1.8 `smooth_l1_loss`.
    """

    name = "smooth_l1_loss"
    inputs, outputs = ("X", "Y", "InsideWeight?", "OutsideWeight?"), ("Diff", "Out")
    attrs = {"sigma": 1.0}

    @staticmethod
    def infer(x, y, inside, outside, *, sigma):
        given = {"X": x, "Y": y, "InsideWeight": inside, "OutsideWeight": outside}
        t = elementwise_infer("smooth_l1_loss", **{slot: v for slot, v in given.items() if v is not None})
        if t.ndim < 2 or sigma <= 0:
            raise ProgramError(f"op smooth_l1_loss needs X with at least 2 axes and a positive sigma, got {x} and {sigma}")
        return t, t.with_shape((t.shape[0], 1))

    @staticmethod
    def pattern(ins, outs, attrs):
        return "n *, n *, n *, n * -> n *, n . | *:+" + (" L(3>1)" if ins[3] is not None else "")

    @staticmethod
    def grad(b, op, g):
        if g[0] is not None:
            raise ProgramError("op smooth_l1_loss has a gradient through Out only")
        dx = b.smooth_l1_loss_grad(op["Diff"], op["InsideWeight"], op["OutsideWeight"], g[1], **op.attrs)
        return dx, b.scale(dx, scale=-1.0), None, None

    @staticmethod
    def decompose(d):
        """With c = min(|d|, 1 / s) the loss is s * c * (|d| - c / 2)."""
        s = d.attrs["sigma"] ** 2
        inside, outside = (_weighted(d, slot) for slot in ("InsideWeight", "OutsideWeight"))
        diff = d.chain(d["X"], ("elementwise_sub", d["Y"], {}), inside, out=d.out("Diff"))
        size = d("abs", diff)
        near = d("clip", size, min=0.0, max=1 / s)
        beyond = d("elementwise_sub", size, d("scale", near, scale=0.5))
        rest: Any = ("flatten", {"axis": 1}), ("reduce_sum", {"dim": (1,), "keep_dim": True})
        d.chain(near, ("elementwise_mul", beyond, {}), ("scale", {"scale": s}), outside, *rest, out=d.out("Out"))

    kernel = by_parts

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 4), f32(3, 4, seed=1), None, None)
        yield Sample.of(f32(2, 3, 4), f32(2, 3, 4, seed=1), between(2, 3, 4, seed=2), between(2, 3, 4, seed=3), sigma=2.0, grad=("X", "Y"),
                        why="weights are constants")  # fmt: skip


class SmoothL1LossGrad(OpDef):
    """Gradient of smooth_l1_loss with respect to X: sigma squared * d, clipped to [-1, 1], times the weights and g."""

    name = "smooth_l1_loss_grad"
    inputs, outputs = ("Diff", "InsideWeight?", "OutsideWeight?", "Out@GRAD"), ("X@GRAD",)
    attrs = {"sigma": 1.0}

    @staticmethod
    def infer(d, inside, outside, g, *, sigma):
        return d

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"n *, n *, n *, n . -> n * | {' '.join(f'L({k})' for k in (1, 2, 3) if ins[k] is not None)}"

    @staticmethod
    def decompose(d):
        weights = [_weighted(d, slot) for slot in ("InsideWeight", "OutsideWeight")]
        more = tuple(range(2, d.type(d["Diff"]).ndim))
        g = d("unsqueeze", d["Out@GRAD"], axes=more) if more else d["Out@GRAD"]
        steps: Any = ("scale", {"scale": d.attrs["sigma"] ** 2}), ("clip", {"min": -1.0, "max": 1.0}), ("elementwise_mul", g, {})
        d.chain(d["Diff"], *steps, *weights, out=d.out("X@GRAD"))

    kernel = by_parts

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 4), None, None, f32(3, 1, seed=1), grad=(), why="a gradient itself")
        weights = between(2, 3, 4, seed=2), between(2, 3, 4, seed=3)
        yield Sample.of(f32(2, 3, 4), *weights, f32(2, 1, seed=1), sigma=2.0, grad=(), why="a gradient itself")
