"""Elementwise losses for yes/no labels, with their gradients: logistic losses and margins."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir import OpDef, ProgramError, Sample
from ..shared.samples import between, bits, f32
from .loss_shared import EachGrad, elementwise_infer


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


class LogLoss(OpDef):
    """-label * log(p + epsilon) - (1 - label) * log(1 - p + epsilon), element by element. Source: fluid 1.8 `log_loss`."""

    name = "log_loss"
    inputs, outputs = ("Predicted", "Labels"), ("Loss",)
    attrs = {"epsilon": 1e-4}
    pattern = "*, * -> *"

    @staticmethod
    def infer(p, label, *, epsilon):
        return elementwise_infer("log_loss", Predicted=p, Labels=label)

    @staticmethod
    def grad(b, op, g):
        return b.log_loss_grad(op["Predicted"], op["Labels"], g, **op.attrs), None

    @staticmethod
    def kernel(xp, p, label, *, out, epsilon):
        out[...] = -label * xp.log(p + epsilon) - (1 - label) * xp.log(1 - p + epsilon)

    @staticmethod
    def samples():
        yield Sample.of(between(5, 1), bits(5, 1, seed=1), grad=("Predicted",), why="Labels are constants")
        yield Sample.of(between(2, 3), bits(2, 3, seed=1), epsilon=0.1, grad=("Predicted",), why="Labels are constants")


class LogLossGrad(EachGrad):
    """Gradient of log_loss: (-label / (p + epsilon) + (1 - label) / (1 - p + epsilon)) * g."""

    name = "log_loss_grad"
    inputs, outputs = ("Predicted", "Labels", "Loss@GRAD"), ("Predicted@GRAD",)
    attrs = {"epsilon": 1e-4}

    @staticmethod
    def kernel(xp, p, label, g, *, out, epsilon):
        out[...] = ((1 - label) / (1 - p + epsilon) - label / (p + epsilon)) * g

    @staticmethod
    def samples():
        yield Sample.of(between(5, 1), bits(5, 1, seed=1), f32(5, 1, seed=2), grad=(), why="a gradient itself")
        yield Sample.of(between(5, 3), bits(5, 3, seed=1), f32(5, 3, seed=2), epsilon=0.1, grad=(), why="a gradient itself")


class BceLoss(OpDef):
    """-label * log(x) - (1 - label) * log(1 - x), element by element; logarithms are at least -100. Source: fluid 1.8 `bce_loss`."""

    name = "bce_loss"
    inputs = ("X", "Label")
    pattern = "*, * -> *"

    @staticmethod
    def infer(x, label):
        return elementwise_infer("bce_loss", X=x, Label=label)

    @staticmethod
    def grad(b, op, g):
        return b.bce_loss_grad(op["X"], op["Label"], g), None

    @staticmethod
    def kernel(xp, x, label, *, out):
        yes, no = (xp.where(p > 0, xp.maximum(xp.log(xp.maximum(p, 1e-38)), -100), -100) for p in (x, 1 - x))
        out[...] = -label * yes - (1 - label) * no

    @staticmethod
    def samples():
        yield Sample.of(between(4, 3), bits(4, 3, seed=1), grad=("X",), why="Label is a constant")
        edges = np.array([[0.0, 1.0, 0.5, 0.0]], "float32")
        yield Sample.of(
            edges, np.array([[0.0, 1.0, 1.0, 1.0]], "float32"), grad=(), why="the slope at 0 and 1 is limited to a finite value"
        )


class BceLossGrad(EachGrad):
    """Gradient of bce_loss: (x - label) / max(x * (1 - x), 1e-12) * g."""

    name = "bce_loss_grad"
    inputs, outputs = ("X", "Label", "Out@GRAD"), ("X@GRAD",)

    @staticmethod
    def kernel(xp, x, label, g, *, out):
        out[...] = (x - label) / xp.maximum(x * (1 - x), 1e-12) * g

    @staticmethod
    def samples():
        yield Sample.of(between(4, 3), bits(4, 3, seed=1), f32(4, 3, seed=2), grad=(), why="a gradient itself")


class HingeLoss(OpDef):
    """max(0, 1 - x * (2 * label - 1)), element by element, for labels 0 and 1. Source: fluid 1.8 `hinge_loss`."""

    name = "hinge_loss"
    inputs, outputs = ("Logits", "Labels"), ("Loss",)
    pattern = "*, * -> *"

    @staticmethod
    def infer(x, label):
        return elementwise_infer("hinge_loss", Logits=x, Labels=label)

    @staticmethod
    def grad(b, op, g):
        return b.hinge_loss_grad(op["Logits"], op["Labels"], g), None

    @staticmethod
    def kernel(xp, x, label, *, out):
        out[...] = xp.maximum(1 - x * (2 * label - 1), 0)

    @staticmethod
    def samples():
        yield Sample.of(f32(6, 1) * 2, bits(6, 1, seed=1), grad=("Logits",), why="Labels are constants")
        yield Sample.of(f32(6, 4) * 2, bits(6, 4, seed=1), grad=("Logits",), why="Labels are constants")


class HingeLossGrad(EachGrad):
    """Gradient of hinge_loss: -(2 * label - 1) * g where the loss is positive."""

    name = "hinge_loss_grad"
    inputs, outputs = ("Logits", "Labels", "Loss@GRAD"), ("Logits@GRAD",)

    @staticmethod
    def kernel(xp, x, label, g, *, out):
        sign = 2 * label - 1
        out[...] = xp.where(x * sign < 1, -sign * g, 0)

    @staticmethod
    def samples():
        yield Sample.of(f32(6, 1) * 2, bits(6, 1, seed=1), f32(6, 1, seed=2), grad=(), why="a gradient itself")
        yield Sample.of(f32(6, 4) * 2, bits(6, 4, seed=1), f32(6, 4, seed=2), grad=(), why="a gradient itself")


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
