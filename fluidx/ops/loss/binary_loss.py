"""Elementwise losses for yes/no labels, with their gradients: logistic losses and margins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...ir import OpDef, ProgramError, Sample
from ..expr import log, max, where
from ..shared.samples import between, bits, f32
from .elementwise_loss import elementwise_loss
from .loss_shared import elementwise_infer


def _sigmoid(xp: Any, x: Any) -> Any:
    e = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1, e) / (1 + e)


class SigmoidCrossEntropyWithLogits(OpDef):
    """-label * log(sigmoid(x)) - (1 - label) * log(1 - sigmoid(x)), element by element and without overflow.

    An element with the label `ignore_index` has loss 0; `normalize` divides by the number of the other elements. Source: fluid 1.8.
    """

    name = "sigmoid_cross_entropy_with_logits"
    inputs = ("X", "Label")
    attrs = {"ignore_index": -100, "normalize": False}
    pattern = staticmethod(lambda ins, outs, attrs: "*, * -> *" + (" | *!" if attrs["normalize"] else ""))

    @staticmethod
    def infer(x, label, **attrs):
        return elementwise_infer("sigmoid_cross_entropy_with_logits", X=x, Label=label)

    @staticmethod
    def grad(b, op, g):
        return b.sigmoid_cross_entropy_with_logits_grad(op["X"], op["Label"], g, **op.attrs), None

    @staticmethod
    def kernel(xp, x, label, *, out, ignore_index, normalize):
        loss = xp.maximum(x, 0) - x * label + xp.log1p(xp.exp(-xp.abs(x)))
        counts = label != ignore_index
        loss = xp.where(counts, loss, 0)
        out[...] = loss / xp.maximum(counts.sum(), 1).astype(loss.dtype) if normalize else loss

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 3), bits(4, 3, seed=1), grad=("X",), why="Label is a constant")
        label = np.array([[0, 1, -1], [1, -1, 0.5]], "float32")
        yield Sample.of(f32(2, 3), label, ignore_index=-1, normalize=True, grad=("X",), why="Label is a constant")


class SigmoidCrossEntropyWithLogitsGrad(OpDef):
    """Gradient of sigmoid_cross_entropy_with_logits: (sigmoid(x) - label) * g, 0 where ignored."""

    name = "sigmoid_cross_entropy_with_logits_grad"
    inputs, outputs = ("X", "Label", "Out@GRAD"), ("X@GRAD",)
    attrs = {"ignore_index": -100, "normalize": False}
    pattern = staticmethod(lambda ins, outs, attrs: "*, *, * -> * | L(2)" + (" *!" if attrs["normalize"] else ""))

    @staticmethod
    def infer(x, label, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, x, label, g, *, out, ignore_index, normalize):
        counts = label != ignore_index
        dx = xp.where(counts, (_sigmoid(xp, x) - label) * g, 0)
        out[...] = dx / xp.maximum(counts.sum(), 1).astype(dx.dtype) if normalize else dx

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 3), bits(4, 3, seed=1), f32(4, 3, seed=2), grad=(), why="a gradient itself")
        label = np.array([[0, 1, -1], [1, -1, 0.5]], "float32")
        yield Sample.of(f32(2, 3), label, f32(2, 3, seed=2), ignore_index=-1, normalize=True, grad=(), why="a gradient itself")


def _bits(draw: Callable[..., Any], *cases: tuple[tuple[int, ...], dict[str, Any]], slot: str, why: str) -> Callable[[], Iterator[Sample]]:
    """Samples with labels 0 and 1 for operands of these shapes, with attributes."""
    return lambda: (Sample.of(draw(*shape), bits(*shape, seed=1), grad=(slot,), why=why, **attrs) for shape, attrs in cases)


LogLoss = elementwise_loss(
    "log_loss", lambda predicted, labels, *, epsilon: -labels * log(predicted + epsilon) - (1 - labels) * log(1 - predicted + epsilon),
    lambda predicted, labels, g, *, epsilon: ((1 - labels) / (1 - predicted + epsilon) - labels / (predicted + epsilon)) * g,
    doc="-label * log(p + epsilon) - (1 - label) * log(1 - p + epsilon), element by element. Source: fluid 1.8 `log_loss`.",
    grad_doc="Gradient of log_loss: (-label / (p + epsilon) + (1 - label) / (1 - p + epsilon)) * g.",
    samples=_bits(between, ((5, 1), {}), ((2, 3), {"epsilon": 0.1}), slot="Predicted", why="Labels are constants"),
    out="Loss", attrs={"epsilon": 1e-4},
)  # fmt: skip


def _bounded_log(p: Any) -> Any:
    return where(p > 0, max(log(max(p, 1e-38)), -100.0), -100.0)


def _bce_samples() -> Iterator[Sample]:
    yield Sample.of(between(4, 3), bits(4, 3, seed=1), grad=("X",), why="Label is a constant")
    edges = np.array([[0.0, 1.0, 0.5, 0.0]], "float32")
    yield Sample.of(edges, np.array([[0.0, 1.0, 1.0, 1.0]], "float32"), grad=(), why="the slope at 0 and 1 is limited to a finite value")


BceLoss = elementwise_loss(
    "bce_loss", lambda x, label: -label * _bounded_log(x) - (1 - label) * _bounded_log(1 - x),
    lambda x, label, g: (x - label) / max(x * (1 - x), 1e-12) * g,
    doc="-label * log(x) - (1 - label) * log(1 - x), element by element; logarithms are at least -100. Source: fluid 1.8 `bce_loss`.",
    grad_doc="Gradient of bce_loss: (x - label) / max(x * (1 - x), 1e-12) * g.", samples=_bce_samples,
)  # fmt: skip

HingeLoss = elementwise_loss(
    "hinge_loss", lambda logits, labels: max(1 - logits * (2 * labels - 1), 0.0),
    lambda logits, labels, g: where(logits * (2 * labels - 1) < 1, -(2 * labels - 1) * g, 0.0),
    doc="max(0, 1 - x * (2 * label - 1)), element by element, for labels 0 and 1. Source: fluid 1.8 `hinge_loss`.",
    grad_doc="Gradient of hinge_loss: -(2 * label - 1) * g where the loss is positive.",
    samples=_bits(lambda *shape: f32(*shape) * 2, ((6, 1), {}), ((6, 4), {}), slot="Logits", why="Labels are constants"), out="Loss",
)  # fmt: skip


class MarginRankLoss(OpDef):
    """max(0, margin - label * (x1 - x2)) for the labels 1 (x1 should rank higher) and -1.

    Activated is 1 where the loss is positive. Source: fluid 1.8.
    """

    name = "margin_rank_loss"
    inputs, outputs = ("X1", "X2", "Label"), ("Out", "Activated")
    attrs = {"margin": 0.1}
    pattern = "*, *, * -> *, *"

    @staticmethod
    def infer(x1, x2, label, *, margin):
        t = elementwise_infer("margin_rank_loss", X1=x1, X2=x2, Label=label)
        return t, t

    @staticmethod
    def grad(b, op, g):
        if g[1] is not None:
            raise ProgramError("op margin_rank_loss has a gradient through Out only")
        dx = b.elementwise_mul(b.elementwise_mul(op["Label"], op["Activated"]), g[0])
        return b.scale(dx, scale=-1.0), dx, None

    @staticmethod
    def kernel(xp, x1, x2, label, *, out, margin):
        loss, active = out
        value = margin - label * (x1 - x2)
        loss[...] = xp.maximum(value, 0)
        active[...] = value > 0

    @staticmethod
    def samples():
        label = bits(5, 1, seed=2) * 2 - 1
        yield Sample.of(f32(5, 1), f32(5, 1, seed=1), label, grad=("X1", "X2"), why="Label is a constant")
        yield Sample.of(f32(5, 1), f32(5, 1, seed=1), label, margin=1.5, grad=("X1", "X2"), why="Label is a constant")
        wide = bits(5, 3, seed=2) * 2 - 1
        yield Sample.of(f32(5, 3), f32(5, 3, seed=1), wide, grad=("X1", "X2"), why="Label is a constant")
