"""Losses on a distribution over classes, with their gradients: cross entropy of probabilities, and divergence.

This module also has label_smooth, which smooths the labels of such losses.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...ir import ANY, Native, OpDef, ProgramError, Sample
from ...ir.decomposition import Decomposition
from ..parts_kernel import by_parts
from ..shared.mean_parts import per_element
from ..shared.native import row_calls
from ..shared.samples import f32, ints, probabilities
from ..shared.types import meet, need_float, norm_axis
from .labels import after_check, check_label, class_range, loss_type, losses, wrong_label_text
from .loss_shared import elementwise_infer

# -- cross entropy ------------------------------------------------------------------------------------------------------------------


def _smallest(x: Any) -> float:
    return 1e-30 if x.dtype == np.float32 else 1e-300


def _label_loss(xp: Any, x: Any, label: Any) -> Any:
    """-log of the probability of the label, for each row along the last axis."""
    picked = xp.take_along_axis(x, label.astype("int64", copy=False), axis=-1)
    return xp.where(picked <= 0, 1e20, -xp.log(xp.maximum(picked, _smallest(x))))  # NaN stays NaN


class CrossEntropy(OpDef):
    """-log of the probability of each row's label; X holds probabilities along the last axis.

    Label is an integer [..., 1], or with `soft_label` a distribution like X, and then Y = -sum(Label * log(X)). An example with the label
    `ignore_index` has loss 0. log(0) counts as -1e20, as in fluid. Y is [..., 1]. Raises ExecutionError for a label out of range (on a GPU
    the loss is NaN). Source: fluid 1.8 `cross_entropy`.
    """

    name = "cross_entropy"
    inputs, outputs = ("X", "Label"), ("Y",)
    attrs = {"soft_label": False, "ignore_index": -100}
    pattern = staticmethod(lambda ins, outs, attrs: "* c, * c -> * . | c:+ L(1)" if attrs["soft_label"] else "* c, * . -> * . | c:+ c@")

    @staticmethod
    def infer(x, label, *, soft_label, ignore_index):
        need_float("cross_entropy", "X", x)
        axis = norm_axis("cross_entropy", -1, x.ndim)
        check_label("cross_entropy", "X", x, label, axis, soft_label)
        return loss_type(x, axis)

    @staticmethod
    def grad(b, op, g):
        return b.cross_entropy_grad(op["X"], op["Label"], g, **op.attrs), None

    @staticmethod
    def kernel(xp, x, label, *, out, soft_label, ignore_index, part=None):
        if soft_label:
            logs = xp.where(x <= 0, -1e20, xp.log(xp.maximum(x, _smallest(x))))
            out[...] = -xp.where(label != 0, label * logs, 0).sum(axis=-1, keepdims=True)
        else:
            out[...] = losses(xp, label, x.shape[-1], ignore_index, partial(_label_loss, xp, x), part)

    @classmethod
    def _bind(cls, ins, outs, attrs, ctx, part=None):
        return after_check(cls.name, cls.kernel, ins[1], ins, outs[0], attrs, part)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        """Only for integer labels."""
        (x, label), ignore = ins, attrs["ignore_index"]
        text = "" if dry else wrong_label_text("cross_entropy", "#", class_range(x.shape[-1], part)[1], ignore)
        return None if attrs["soft_label"] else row_calls("pick", [x], -1, outs[0], label, ignore, text, part, dry)

    native = Native(calls=_calls, halves=True, any_size=True, bind=_bind)

    @staticmethod
    def samples():
        yield Sample.of(probabilities(4, 5), ints(4, 1, high=5, seed=1), grad=("X",))
        yield Sample.of(probabilities(4, 5), probabilities(4, 5, seed=1), soft_label=True, grad=("X",), why="Label is a constant")
        yield Sample.of(probabilities(2, 3, 4, seed=2), np.array([[[0], [3], [-100]], [[1], [2], [0]]]), grad=("X",))
        yield Sample.of(probabilities(3, 1, seed=3), np.array([[0], [1], [0]]), ignore_index=1, grad=("X",))


class CrossEntropyGrad(OpDef):
    """Gradient of cross_entropy: -g / x at the label (times Label if it is soft), 0 elsewhere and for ignored examples."""

    name = "cross_entropy_grad"
    inputs, outputs = ("X", "Label", "Y@GRAD"), ("X@GRAD",)
    attrs = {"soft_label": False, "ignore_index": -100}

    @staticmethod
    def pattern(ins, outs, attrs):
        return "* c, * c, * . -> * c | L(1) L(2)" if attrs["soft_label"] else "* c, * ., * . -> * c | c@ L(2)"

    @staticmethod
    def infer(x, label, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, x, label, g, *, out, soft_label, ignore_index, part=None):
        if soft_label:
            out[...] = -g * label / x
            return
        first, classes = class_range(x.shape[-1], part)
        hot = label == xp.arange(first, first + x.shape[-1])
        if 0 <= ignore_index < classes:
            hot &= label != ignore_index
        out[...] = xp.where(hot, -g / xp.where(hot, x, 1), 0)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        """Only for integer labels."""
        x, label, g = ins
        ignore = attrs["ignore_index"]
        return None if attrs["soft_label"] else row_calls("pick_grad", [x, outs[0]], -1, g, label, ignore, part=part, dry=dry)

    native = Native(calls=_calls, halves=True, any_size=True)

    @staticmethod
    def samples():
        why = "a gradient itself"
        yield Sample.of(probabilities(4, 5), ints(4, 1, high=5, seed=1), f32(4, 1, seed=2), grad=(), why=why)
        yield Sample.of(probabilities(4, 5), probabilities(4, 5, seed=1), f32(4, 1, seed=2), soft_label=True, grad=(), why=why)
        yield Sample.of(probabilities(2, 3, 4), ints(2, 3, 1, high=4, seed=1), f32(2, 3, 1, seed=2), ignore_index=2, grad=(), why=why)


# -- distributions ------------------------------------------------------------------------------------------------------------------


def _averaged(d: Decomposition, total: str, out: str = "") -> str:
    """A sum over X divided by the divisor of the reduction."""
    axes = {"mean": range(d.type(d["X"]).ndim), "batchmean": [0]}.get(d.attrs["reduction"])
    return d("assign", total, out=out) if axes is None else per_element(d, total, d["X"], axes, out)


def _positive(d: Decomposition, value: str, otherwise: float = 0.0, out: str = "") -> str:
    """`value` where Target is positive."""
    zero, other = (d("fill_any_like", d["Target"], value=v) for v in (0.0, otherwise))
    return d("where", d("greater_than", d["Target"], zero), value, other, out=out)


def _reduction_words(reduction: str) -> tuple[str, str, str]:
    """The axis words of X and of the loss, and the word for the reduced axes."""
    return {
        "none": ("*", "*", ""), "sum": ("*", ".", "*:+"), "mean": ("*", ".", "*:+ #*"), "batchmean": ("n *", ".", "n:+ *:+ #n"),
    }[reduction]  # fmt: skip


class KldivLoss(OpDef):
    """Target * (log(Target) - X), 0 where Target is not positive: the divergence of the log-probabilities X from Target.

    `reduction` "none" returns each element; "mean", "batchmean" (the sum divided by the number of rows) and "sum" return [1]. Source: fluid
    1.8 `kldiv_loss`.
    """

    name = "kldiv_loss"
    inputs, outputs = ("X", "Target"), ("Loss",)
    attrs = {"reduction": "mean"}

    @staticmethod
    def infer(x, target, *, reduction):
        if reduction not in ("none", "mean", "batchmean", "sum"):
            raise ProgramError(f"op kldiv_loss: reduction must be none, mean, batchmean or sum, got {reduction!r}")
        t = elementwise_infer("kldiv_loss", X=x, Target=target)
        if reduction == "batchmean" and t.ndim == 0:
            raise ProgramError("op kldiv_loss: reduction batchmean needs X with a batch axis")
        return t if reduction == "none" else t.with_shape((1,))

    @staticmethod
    def pattern(ins, outs, attrs):
        x, loss, exceptions_text = _reduction_words(attrs["reduction"])
        return f"{x}, {x} -> {loss} | {exceptions_text}"

    @staticmethod
    def grad(b, op, g):
        return b.kldiv_loss_grad(op["X"], op["Target"], g, **op.attrs), None

    @staticmethod
    def decompose(d):
        beyond = d("elementwise_sub", d("log", _positive(d, d["Target"], 1.0)), d["X"])
        none = d.attrs["reduction"] == "none"
        each = _positive(d, d("elementwise_mul", d["Target"], beyond), out=d.out("Loss") if none else "")
        if not none:
            _averaged(d, d("reduce_sum", each), d.out("Loss"))

    kernel = by_parts

    @staticmethod
    def samples():
        x, t = np.log(probabilities(4, 3)), probabilities(4, 3, seed=1)
        t[1, 2] = 0
        for reduction in ("mean", "sum", "batchmean", "none"):
            yield Sample.of(x, t, reduction=reduction, grad=("X",), why="Target is a constant")


class KldivLossGrad(OpDef):
    """Gradient of kldiv_loss: -Target * g where Target is positive, times the factor of the reduction."""

    name = "kldiv_loss_grad"
    inputs, outputs = ("X", "Target", "Loss@GRAD"), ("X@GRAD",)
    attrs = {"reduction": "mean"}

    @staticmethod
    def infer(x, target, g, **attrs):
        return x

    @staticmethod
    def pattern(ins, outs, attrs):
        x, loss, exceptions_text = _reduction_words(attrs["reduction"])
        counted = " ".join(word for word in exceptions_text.split() if word[0] == "#")
        return f"~{x}, {x}, {loss} -> {x} | {counted} L(2)"

    @staticmethod
    def decompose(d):
        slope = d("scale", _positive(d, d["Target"]), scale=-1.0)
        d("elementwise_mul", slope, _averaged(d, d["Loss@GRAD"]), out=d.out("X@GRAD"))

    kernel = by_parts

    @staticmethod
    def samples():
        for reduction, g in (("mean", (1,)), ("sum", (1,)), ("batchmean", (1,)), ("none", (4, 3))):
            x, t = np.log(probabilities(4, 3)), probabilities(4, 3, seed=1)
            yield Sample.of(x, t, f32(*g, seed=2), reduction=reduction, grad=(), why="a gradient itself")


class LabelSmooth(OpDef):
    """(1 - epsilon) * X + epsilon * prior, where the prior is PriorDist [1, classes] or 1 / classes. Source: fluid 1.8 `label_smooth`."""

    name = "label_smooth"
    inputs = ("X", "PriorDist?")
    attrs = {"epsilon": 0.1}
    pattern = staticmethod(lambda ins, outs, attrs: f"* c, . c -> * c | {'#c' if ins[1] is None else 'L(0,1)'}")

    @staticmethod
    def infer(x, prior, *, epsilon):
        need_float("label_smooth", "X", x)
        if not 0 <= epsilon <= 1:
            raise ProgramError(f"op label_smooth: epsilon must be between 0 and 1, got {epsilon}")
        classes = x.shape[-1] if x.ndim else ANY
        if prior is not None and (prior.ndim != 2 or prior.shape[0] not in (1, ANY) or not meet(prior.shape[1], classes)):
            raise ProgramError(f"op label_smooth: PriorDist must have shape [1, {classes}] for X {x}, got {prior}")
        return x

    @staticmethod
    def grad(b, op, g):
        return b.scale(g, scale=1 - op.attrs["epsilon"]), None

    @staticmethod
    def decompose(d):
        x, epsilon = d.type(d["X"]), d.attrs["epsilon"]
        if d["PriorDist"]:
            prior = d.chain(d["PriorDist"], ("reshape", {"shape": (-1,)}), ("scale", {"scale": epsilon}))
        else:
            prior = per_element(d, d("fill_constant", shape=(1,), dtype=x.dtype, value=epsilon), d["X"], [x.ndim - 1])
        d("elementwise_add", d("scale", d["X"], scale=1 - epsilon), prior, out=d.out("Out"))

    kernel = by_parts

    @staticmethod
    def samples():
        yield Sample.of(probabilities(3, 4), None)
        yield Sample.of(probabilities(2, 3, 4), probabilities(1, 4, seed=1), epsilon=0.3, grad=("X",), why="the prior is a constant")
