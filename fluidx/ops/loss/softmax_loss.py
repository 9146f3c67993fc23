"""softmax with cross entropy as one operator, its gradient, and both expanded into parts for sharded classes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir import Arithmetic, Native, OpDef, Sample
from ...ir.axis_letters import along
from ...ir.parts import Part
from ..nn.softmax import softmax_parts
from ..parts_kernel import by_parts
from ..shared.native import row_calls
from ..shared.samples import f32, ints, positive, probabilities
from ..shared.types import need_float, norm_axis
from .labels import after_check, check_label, class_range, folded, loss_type, losses, wrong_label_text

_SWCE_ATTRS = {"soft_label": False, "ignore_index": -100, "axis": -1}


def _loss(xp: Any, shifted: Any, logs: Any, label: Any, soft_label: bool, ignore_index: int, part: Part | None = None) -> Any:
    """The losses from logits minus their maximum, [before, classes, after], and the logarithm of the sum of their exponentials."""
    if soft_label:
        return xp.where(label != 0, label * (logs - shifted), 0).sum(axis=1, keepdims=True)

    def loss_of(column: Any) -> Any:
        return logs - xp.take_along_axis(shifted, column.astype("int64", copy=False), axis=1)

    return losses(xp, label, shifted.shape[1], ignore_index, loss_of, part)


def _native_xent(op: str, kernel: str, x: Any, made: Any, label: Any, single: Any, attrs: Any, dry: bool, part: Part | None = None) -> Any:
    """Calls of softmax_with_cross_entropy or its gradient: `made` has the shape of `x`, `single` one element for each label."""
    if attrs["soft_label"]:
        return row_calls(kernel, [x, made, label], attrs["axis"], single, dry=dry)
    ignore = attrs["ignore_index"]
    text = "" if dry else wrong_label_text(op, "#", class_range(x.shape[attrs["axis"]], part)[1], ignore)
    return row_calls(kernel, [x, made], attrs["axis"], single, label, ignore, text, part, dry)


class LabelLoss(OpDef):
    """The loss of softmax_with_cross_entropy from Shifted, logits minus the maximum of each row, and Total, the sum of their exponentials.

    It is log(Total) - Shifted at the label, or with `soft_label` the sum of that over all classes, weighted by Label. For a part of the
    classes it is a partial sum of the loss: the rank with the class of the label computes all of it.
    """

    name = "label_loss"
    arithmetic = Arithmetic(flops=2)
    inputs, outputs = ("Shifted", "Total", "Label"), ("Loss",)
    attrs = _SWCE_ATTRS

    @staticmethod
    def pattern(ins, outs, attrs):
        x, one = (along(attrs["axis"], ins[0].ndim, word) for word in ("c", "."))
        label, exceptions_text = (x, "L(2)") if attrs["soft_label"] else (one, "c@")
        return f"{x}, {one}, {label} -> {one} | c:+ {exceptions_text}"

    @staticmethod
    def infer(x, total, label, *, soft_label, ignore_index, axis):
        need_float("label_loss", "Shifted", x)
        axis = norm_axis("label_loss", axis, x.ndim)
        check_label("label_loss", "Shifted", x, label, axis, soft_label)
        return loss_type(x, axis)

    @staticmethod
    def kernel(xp, x, total, label, *, out, soft_label, ignore_index, axis, part=None):
        axis %= x.ndim
        logs = xp.log(folded(total, axis))
        out[...] = _loss(xp, folded(x, axis), logs, folded(label, axis), soft_label, ignore_index, part).reshape(out.shape)

    @classmethod
    def _bind(cls, ins, outs, attrs, ctx, part=None):
        return after_check("softmax_with_cross_entropy", cls.kernel, ins[2], ins, outs[0], attrs, part)

    native = Native(bind=_bind)

    @staticmethod
    def samples():
        why = "it is a part of an operator that declares the gradient"
        yield Sample.of(-positive(4, 5), positive(4, 1, seed=2), ints(4, 1, high=5, seed=1), grad=(), why=why)
        yield Sample.of(-positive(4, 5), positive(4, 1, seed=2), np.array([[0], [-100], [4], [2]]), grad=(), why=why)
        label = ints(2, 1, 3, high=5, seed=1)
        yield Sample.of(-positive(2, 5, 3), positive(2, 1, 3, seed=2), label, axis=1, ignore_index=2, grad=(), why=why)
        yield Sample.of(-positive(4, 5), positive(4, 1, seed=2), probabilities(4, 5, seed=1), soft_label=True, grad=(), why=why)


# -- as one operator ----------------------------------------------------------------------------------------------------------------


class SoftmaxWithCrossEntropy(OpDef):
    """softmax of the logits along `axis`, and the cross entropy of the labels, without the overflow of two separate steps.

    Label is an integer with size 1 along `axis`, or with `soft_label` a distribution like Logits. Softmax has the shape of Logits, Loss has
    size 1 along `axis`; an example with the label `ignore_index` has loss 0. The largest logit is always subtracted first, so
    `numeric_stable_mode` changes nothing. Raises ExecutionError for a label out of range (on a GPU the loss is NaN). Source: fluid 1.8.
    """

    name = "softmax_with_cross_entropy"
    arithmetic = Arithmetic(flops=5)
    inputs, outputs = ("Logits", "Label"), ("Softmax", "Loss")
    attrs = {**_SWCE_ATTRS, "numeric_stable_mode": True}

    @staticmethod
    def decompose(d):
        """The largest logit and the sum of exponentials of each row, which ranks can reduce, and the results for each class from them."""
        shifted, total = softmax_parts(d, d["Logits"], d.attrs["axis"], d.out("Softmax"))
        d("label_loss", shifted, total, d["Label"], out=d.out("Loss"), **{k: d.attrs[k] for k in _SWCE_ATTRS})

    @staticmethod
    def pattern(ins, outs, attrs):
        x, one = (along(attrs["axis"], ins[0].ndim, word) for word in ("c", "."))
        label, exceptions_text = (x, " L(1>1)") if attrs["soft_label"] else (one, "")
        return f"{x}, {label} -> {x}, {one} | c!{exceptions_text}"

    @staticmethod
    def infer(x, label, *, soft_label, ignore_index, axis, numeric_stable_mode):
        need_float("softmax_with_cross_entropy", "Logits", x)
        axis = norm_axis("softmax_with_cross_entropy", axis, x.ndim)
        check_label("softmax_with_cross_entropy", "Logits", x, label, axis, soft_label)
        return x, loss_type(x, axis)

    @staticmethod
    def grad(b, op, g):
        of_softmax, of_loss = g
        attrs = {k: op.attrs[k] for k in _SWCE_ATTRS}
        dx = None
        if of_loss is not None:
            dx = b.softmax_with_cross_entropy_grad(op["Softmax"], op["Label"], of_loss, **attrs)
        if of_softmax is not None:
            through = b.softmax_grad(op["Softmax"], of_softmax, axis=attrs["axis"])
            dx = through if dx is None else b.elementwise_add(dx, through)
        return dx, None

    kernel = by_parts

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        (x, label), (soft, loss) = ins, outs
        return _native_xent("softmax_with_cross_entropy", "xent", x, soft, label, loss, attrs, dry)

    native = Native(calls=_calls, halves=True, any_size=True)

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 5), ints(4, 1, high=5, seed=1), grad=("Logits",))
        yield Sample.of(f32(6, 19) * 10, ints(6, 1, high=19, seed=1), grad=("Logits",))
        yield Sample.of(f32(2, 3, 4, seed=2), ints(2, 3, 1, high=4, seed=3), grad=("Logits",))
        yield Sample.of(f32(2, 3, 4, seed=2), ints(2, 1, 4, high=3, seed=3), axis=1, grad=("Logits",))
        yield Sample.of(f32(4, 5, seed=4), probabilities(4, 5, seed=5), soft_label=True, grad=("Logits",), why="Label is a constant")
        yield Sample.of(f32(4, 3, seed=6), np.array([[0], [-100], [2], [-100]]), grad=("Logits",))
        yield Sample.of(f32(4, 3, seed=6), np.array([[0], [1], [2], [1]], "int32"), ignore_index=1, grad=("Logits",))
        yield Sample.of(f32(3, 1, seed=7), np.zeros((3, 1), "int64"), numeric_stable_mode=False, grad=("Logits",))


class SoftmaxWithCrossEntropyGrad(OpDef):
    """Gradient of softmax_with_cross_entropy through Loss: (softmax - one-hot label) * g, 0 for ignored examples."""

    name = "softmax_with_cross_entropy_grad"
    arithmetic = Arithmetic(flops=2)
    inputs, outputs = ("Softmax", "Label", "Loss@GRAD"), ("Logits@GRAD",)
    attrs = _SWCE_ATTRS

    @staticmethod
    def decompose(d):
        """For soft labels: (softmax * the sum of each row's labels - labels) * g."""
        if d.attrs["soft_label"]:
            soft, label, g = d["Softmax"], d["Label"], d["Loss@GRAD"]
            total = d("reduce_sum", label, word="labels", dim=(d.attrs["axis"],), keep_dim=True)
            each = d("elementwise_sub", d("elementwise_mul", soft, total), label)
            d("elementwise_mul", each, g, out=d.out("Logits@GRAD"))

    @staticmethod
    def pattern(ins, outs, attrs):
        x, one = (along(attrs["axis"], ins[0].ndim, word) for word in ("c", "."))
        label, exceptions_text = (x, "c! L(1)") if attrs["soft_label"] else (one, "c@")
        return f"{x}, {label}, {one} -> {x} | L(2) {exceptions_text}"

    @staticmethod
    def infer(x, label, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, soft, label, g, *, out, soft_label, ignore_index, axis, part=None):
        axis %= soft.ndim
        if not soft.size:
            return
        s, g3 = folded(soft, axis), folded(g, axis)
        if soft_label:
            d = folded(label, axis)
            out[...] = ((s * d.sum(axis=1, keepdims=True) - d) * g3).reshape(out.shape)
            return
        label3 = folded(label, axis)
        first, _ = class_range(s.shape[1], part)
        hot = label3 == xp.arange(first, first + s.shape[1])[None, :, None]
        out[...] = xp.where(label3 == ignore_index, 0, (s - hot) * g3).reshape(out.shape)

    @classmethod
    def _bind(cls, ins, outs, attrs, ctx, part=None):
        return after_check(cls.name, cls.kernel, ins[1], ins, outs[0], attrs, part)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        soft, label, g = ins
        return _native_xent("softmax_with_cross_entropy_grad", "xent_grad", soft, outs[0], label, g, attrs, dry, part)

    native = Native(calls=_calls, halves=True, any_size=True, bind=_bind)

    @staticmethod
    def samples():
        why = "a gradient itself"
        yield Sample.of(probabilities(4, 5), ints(4, 1, high=5, seed=1), f32(4, 1, seed=2), grad=(), why=why)
        yield Sample.of(probabilities(4, 5), np.array([[0], [-100], [4], [2]]), f32(4, 1, seed=2), grad=(), why=why)
        yield Sample.of(probabilities(4, 5), ints(1, 5, high=4, seed=1), f32(1, 5, seed=2), axis=0, grad=(), why=why)
        yield Sample.of(probabilities(4, 5), probabilities(4, 5, seed=3), f32(4, 1, seed=2), soft_label=True, grad=(), why=why)
