"""Losses over a distribution of classes, with their gradients: cross entropy from probabilities and from logits, divergence.

label_smooth, which softens the labels for them, stands here too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ...ir import ANY, ExecutionError, OpDef, ProgramError, Sample, TensorType
from ...ir.parts import Part
from ...ir.words import along
from ..shared.blocked import in_order, row_blocks, row_max, row_sum
from ..shared.native import row_calls
from ..shared.samples import f32, ints, probabilities
from ..shared.types import meet, need_float, norm_axis
from .loss_shared import alike

LABELS = ("int32", "int64", "int8", "int16", "uint8")


# -- labels ------------------------------------------------------------------------------------------------------------------------


def _check_label(op: str, slot: str, x: TensorType, label: TensorType, axis: int, soft: bool, ignore_index: int) -> None:
    if soft:
        if label.dtype != x.dtype or label.ndim != x.ndim or not all(map(meet, label.shape, x.shape)):
            raise ProgramError(f"op {op}: with soft_label, Label must be like {slot} {x}, got {label}")
        return
    want = tuple(1 if k == axis else d for k, d in enumerate(x.shape))
    if label.dtype not in LABELS:
        raise ProgramError(f"op {op}: Label must hold integers, got {label}; for a distribution over classes set soft_label=True")
    if label.ndim != len(want) or not all(map(meet, label.shape, want)):
        raise ProgramError(f"op {op}: Label must have shape {list(want)} for {slot} {x}, got {list(label.shape)}")


def _loss_type(x: TensorType, axis: int) -> TensorType:
    return x.with_shape(1 if k == axis else d for k, d in enumerate(x.shape))


def _folded(a: Any, axis: int) -> Any:
    """The array as [before, along, after] the axis."""
    return a.reshape(prod(a.shape[:axis]), a.shape[axis], prod(a.shape[axis + 1 :]))


def _wrong_label(op: str, label: Any, classes: int, ignore_index: int) -> ExecutionError:
    bad = label[((label < 0) | (label >= classes)) & (label != ignore_index)]
    return ExecutionError(_wrong_label_text(op, int(bad[0]), classes, ignore_index))


def _wrong_label_text(op: str, label: Any, classes: int, ignore_index: int) -> str:
    ignored = f", or {ignore_index} to ignore an example" if not 0 <= ignore_index < classes else ""
    return f"op {op}: label {label} is out of range for {classes} classes; a label is 0 to {classes - 1}{ignored}"


def _native_xent(op: str, kernel: str, x: Any, made: Any, label: Any, single: Any, attrs: Any, dry: bool) -> Any:
    """Calls of softmax_with_cross_entropy or its gradient: `made` is what lies like `x`, `single` what has one element for each label."""
    if attrs["soft_label"]:
        return row_calls(kernel, [x, made, label], attrs["axis"], single, dry=dry)
    ignore = attrs["ignore_index"]
    text = "" if dry else _wrong_label_text(op, "#", x.shape[attrs["axis"]], ignore)
    return row_calls(kernel, [x, made], attrs["axis"], single, label, ignore, text, dry)


def _ignored(op: str, label: np.ndarray, classes: int, ignore_index: int) -> Any:
    """The mask of the ignored examples, None where there are none. Raises ExecutionError for a label out of range; a GPU does not wait
    for the answer: there `_losses` shows it."""
    if not label.size:
        return None
    may_hide = 0 <= ignore_index < classes  # then the range of the labels does not tell whether some are ignored
    if not may_hide and np.minimum.reduce(label, None) >= 0 and np.maximum.reduce(label, None) < classes:
        return None
    mask = label == ignore_index
    if (((label < 0) | (label >= classes)) & ~mask).any():
        raise _wrong_label(op, label, classes, ignore_index)
    return mask if mask.any() else None


def _losses(xp: Any, label: Any, classes: int, ignore_index: int, loss_of: Callable[[Any], Any]) -> Any:
    """`loss_of` the labels, made safe to index with: 0 for an ignored example, NaN for a label out of range."""
    ignored = label == ignore_index
    valid = (label >= 0) & (label < classes) & ~ignored
    return xp.where(valid, loss_of(xp.where(valid, label, 0)), xp.where(ignored, 0.0, xp.nan))


# -- cross entropy ------------------------------------------------------------------------------------------------------------------


def _tiny(x: Any) -> float:
    return 1e-30 if x.dtype == np.float32 else 1e-300


def _surprise(xp: Any, x: Any, label: Any) -> Any:
    """-log of the probability that each row, along the last axis, gives its label."""
    picked = xp.take_along_axis(x, label.astype("int64", copy=False), axis=-1)
    return xp.where(picked > 0, -xp.log(xp.maximum(picked, _tiny(x))), 1e20)


class CrossEntropy(OpDef):
    """-log of the probability that each row gives its label: X holds probabilities along the last axis.

    Label is integer [..., 1], or with `soft_label` a distribution like X, and then Y = -sum(Label * log(X)). An example whose label is
    `ignore_index` has loss 0. log(0) counts as -1e20, as in fluid. Y is [..., 1]. Raises ExecutionError for a label out of range
    (a GPU gives NaN). Source: fluid 1.8 `cross_entropy`.
    """

    name = "cross_entropy"
    inputs, outputs = ("X", "Label"), ("Y",)
    attrs = {"soft_label": False, "ignore_index": -100}
    pattern = staticmethod(lambda ins, outs, attrs: "* c, * c -> * . | c:+ L(1)" if attrs["soft_label"] else "* c, * . -> * . | c!")

    @staticmethod
    def infer(x, label, *, soft_label, ignore_index):
        need_float("cross_entropy", "X", x)
        axis = norm_axis("cross_entropy", -1, x.ndim)
        _check_label("cross_entropy", "X", x, label, axis, soft_label, ignore_index)
        return _loss_type(x, axis)

    @staticmethod
    def grad(b, op, g):
        return b.cross_entropy_grad(op["X"], op["Label"], g, **op.attrs), None

    @staticmethod
    def kernel(xp, x, label, *, out, soft_label, ignore_index):
        if soft_label:
            logs = xp.where(x > 0, xp.log(xp.maximum(x, _tiny(x))), -1e20)
            out[...] = -xp.where(label != 0, label * logs, 0).sum(axis=-1, keepdims=True)
        else:
            out[...] = _losses(xp, label, x.shape[-1], ignore_index, partial(_surprise, xp, x))

    @staticmethod
    def bind(ins, outs, attrs, ctx):
        (x, label), out, ignore = ins, outs[0], attrs["ignore_index"]
        if attrs["soft_label"]:
            return partial(CrossEntropy.kernel, np, x, label, out=out, **attrs)

        def step():
            ignored = _ignored("cross_entropy", label, x.shape[-1], ignore)
            out[...] = _surprise(np, x, label if ignored is None else np.where(ignored, 0, label))
            if ignored is not None:
                out[ignored] = 0

        return step

    native_any_size = True

    @staticmethod
    def native(ins, outs, attrs, dry=False):
        """Of integer labels."""
        (x, label), ignore = ins, attrs["ignore_index"]
        text = "" if dry else _wrong_label_text("cross_entropy", "#", x.shape[-1], ignore)
        return None if attrs["soft_label"] else row_calls("pick", [x], -1, outs[0], label, ignore, text, dry)

    @staticmethod
    def samples():
        yield Sample.of(probabilities(4, 5), ints(4, 1, high=5, seed=1), grad=("X",))
        yield Sample.of(probabilities(4, 5), probabilities(4, 5, seed=1), soft_label=True, grad=("X",), why="Label is a constant")
        yield Sample.of(probabilities(2, 3, 4, seed=2), np.array([[[0], [3], [-100]], [[1], [2], [0]]]), grad=("X",))
        yield Sample.of(probabilities(3, 1, seed=3), np.array([[0], [1], [0]]), ignore_index=1, grad=("X",))


class CrossEntropyGrad(OpDef):
    """Gradient of cross_entropy: -g / x at the label (times Label where it is soft), 0 elsewhere and for ignored examples."""

    name = "cross_entropy_grad"
    inputs, outputs = ("X", "Label", "Y@GRAD"), ("X@GRAD",)
    attrs = {"soft_label": False, "ignore_index": -100}

    @staticmethod
    def pattern(ins, outs, attrs):
        return "* c, * c, * . -> * c | L(1) L(2)" if attrs["soft_label"] else "* c, * ., * . -> * c | c! L(2)"

    @staticmethod
    def infer(x, label, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, x, label, g, *, out, soft_label, ignore_index):
        if soft_label:
            out[...] = -g * label / x
            return
        hot = label == xp.arange(x.shape[-1], dtype=label.dtype)
        if 0 <= ignore_index < x.shape[-1]:
            hot &= label != ignore_index
        out[...] = xp.where(hot, -g / xp.where(hot, x, 1), 0)

    native_any_size = True

    @staticmethod
    def native(ins, outs, attrs, dry=False):
        """Of integer labels."""
        x, label, g = ins
        return None if attrs["soft_label"] else row_calls("pick_grad", [x, outs[0]], -1, g, label, attrs["ignore_index"], dry=dry)

    @staticmethod
    def samples():
        why = "a gradient itself"
        yield Sample.of(probabilities(4, 5), ints(4, 1, high=5, seed=1), f32(4, 1, seed=2), grad=(), why=why)
        yield Sample.of(probabilities(4, 5), probabilities(4, 5, seed=1), f32(4, 1, seed=2), soft_label=True, grad=(), why=why)
        yield Sample.of(probabilities(2, 3, 4), ints(2, 3, 1, high=4, seed=1), f32(2, 3, 1, seed=2), ignore_index=2, grad=(), why=why)


_SWCE_ATTRS = {"soft_label": False, "ignore_index": -100, "axis": -1}


class SoftmaxWithCrossEntropy(OpDef):
    """softmax of the logits along `axis`, and the cross entropy of the labels under it, without the overflow of doing both in turn.

    Label is integer with size 1 along `axis`, or with `soft_label` a distribution like Logits. Softmax is like Logits, Loss has size 1
    along `axis`; an example whose label is `ignore_index` has loss 0. The largest logit is always subtracted first, so
    `numeric_stable_mode` changes nothing. Raises ExecutionError for a label out of range (a GPU gives NaN). Source: fluid 1.8.
    """

    name = "softmax_with_cross_entropy"
    flops = 5
    inputs, outputs = ("Logits", "Label"), ("Softmax", "Loss")
    attrs = {**_SWCE_ATTRS, "numeric_stable_mode": True}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, one = (along(attrs["axis"], ins[0].ndim, word) for word in ("c", "."))
        label, said = (x, " L(1>1)") if attrs["soft_label"] else (one, "")
        return f"{x}, {label} -> {x}, {one} | c!{said}"

    @staticmethod
    def infer(x, label, *, soft_label, ignore_index, axis, numeric_stable_mode):
        need_float("softmax_with_cross_entropy", "Logits", x)
        axis = norm_axis("softmax_with_cross_entropy", axis, x.ndim)
        _check_label("softmax_with_cross_entropy", "Logits", x, label, axis, soft_label, ignore_index)
        return x, _loss_type(x, axis)

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

    @staticmethod
    def kernel(xp, x, label, *, out, soft_label, ignore_index, axis, numeric_stable_mode):
        soft, loss = out
        axis %= x.ndim
        if not x.size:
            return
        a = _folded(x, axis)
        shifted = a - a.max(axis=1, keepdims=True)
        e = xp.exp(shifted)
        total = e.sum(axis=1, keepdims=True)
        soft[...] = (e / total).reshape(x.shape)
        logs = xp.log(total)
        if soft_label:
            d = _folded(label, axis)
            loss[...] = xp.where(d != 0, d * (logs - shifted), 0).sum(axis=1, keepdims=True).reshape(loss.shape)
            return

        def loss_of(safe: Any) -> Any:
            return logs - xp.take_along_axis(shifted, safe.astype("int64"), axis=1)

        loss[...] = _losses(xp, _folded(label, axis), x.shape[axis], ignore_index, loss_of).reshape(loss.shape)

    @staticmethod
    def bind(ins, outs, attrs, ctx):
        (x, label), (soft, loss) = ins, outs
        dense = x.size and all(a.flags.c_contiguous for a in (x, label, soft, loss))
        classes, ignore = x.shape[attrs["axis"]], attrs["ignore_index"]
        plain = partial(SoftmaxWithCrossEntropy.kernel, np, x, label, out=outs, **attrs)
        if attrs["soft_label"]:
            return plain
        if not dense or attrs["axis"] % x.ndim != x.ndim - 1:
            return in_order([partial(_ignored, "softmax_with_cross_entropy", label, classes, ignore), plain])
        x2, s2, l1 = x.reshape(-1, classes), soft.reshape(-1, classes), label.reshape(-1)
        rows_loss, flat = loss.reshape(-1), soft.reshape(-1)
        index = np.empty(len(l1), np.int64)
        check, ignored = _label_index("softmax_with_cross_entropy", l1, classes, ignore, index)
        calls: list[Callable[[], Any]] = [check]
        for rows in row_blocks(len(x2), classes * x.itemsize):
            a, s, part = x2[rows], s2[rows], rows_loss[rows]
            top, picked = np.empty(len(a), x.dtype), np.empty(len(a), x.dtype)
            calls += [*row_max(a, top), partial(np.subtract, a, top[:, None], s)]
            calls.append(partial(np.take, flat, index[rows], None, picked, "clip"))
            calls += [partial(np.exp, s, s), row_sum(s, top), partial(np.divide, s, top[:, None], s)]
            calls += [partial(np.log, top, top), partial(np.subtract, top, picked, part)]
        run = in_order(calls)

        def step():
            run()
            if ignored:
                rows_loss[ignored[0]] = 0

        return step

    native_any_size = True

    @staticmethod
    def native(ins, outs, attrs, dry=False):
        (x, label), (soft, loss) = ins, outs
        return _native_xent("softmax_with_cross_entropy", "xent", x, soft, label, loss, attrs, dry)

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


def _label_index(op: str, label: np.ndarray, classes: int, ignore: int, index: np.ndarray) -> tuple[Callable[[], None], list[np.ndarray]]:
    """A call that checks the labels and puts their logits' flat positions into `index`; the list then holds the mask of ignored ones."""
    starts = np.arange(0, len(label) * classes, classes, dtype=np.int64)
    ignored: list[np.ndarray] = []

    def check():
        ignored.clear()
        mask = _ignored(op, label, classes, ignore)
        np.add(starts, label if mask is None else np.where(mask, 0, label), out=index)
        if mask is not None:
            ignored.append(mask)

    return check, ignored


class SoftmaxWithCrossEntropyGrad(OpDef):
    """Gradient of softmax_with_cross_entropy through Loss: (softmax - one-hot label) * g, 0 for ignored examples."""

    name = "softmax_with_cross_entropy_grad"
    flops = 2
    inputs, outputs = ("Softmax", "Label", "Loss@GRAD"), ("Logits@GRAD",)
    attrs = _SWCE_ATTRS

    @staticmethod
    def pattern(ins, outs, attrs):
        x, one = (along(attrs["axis"], ins[0].ndim, word) for word in ("c", "."))
        label, said = (x, " L(1)") if attrs["soft_label"] else (one, "")
        return f"{x}, {label}, {one} -> {x} | c! L(2){said}"

    @staticmethod
    def infer(x, label, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, soft, label, g, *, out, soft_label, ignore_index, axis):
        axis %= soft.ndim
        if not soft.size:
            return
        s, g3 = _folded(soft, axis), _folded(g, axis)
        if soft_label:
            d = _folded(label, axis)
            out[...] = ((s * d.sum(axis=1, keepdims=True) - d) * g3).reshape(out.shape)
            return
        label3 = _folded(label, axis)
        hot = label3 == xp.arange(s.shape[1], dtype=label3.dtype)[None, :, None]
        out[...] = xp.where(label3 == ignore_index, 0, (s - hot) * g3).reshape(out.shape)

    @staticmethod
    def bind(ins, outs, attrs, ctx):
        (soft, label, g), dx = ins, outs[0]
        dense = soft.size and all(a.flags.c_contiguous for a in (soft, label, g, dx))
        if attrs["soft_label"] or not dense or attrs["axis"] % soft.ndim != soft.ndim - 1:
            return partial(SoftmaxWithCrossEntropyGrad.kernel, np, soft, label, g, out=dx, **attrs)
        classes = soft.shape[-1]
        s2, d2, flat, g2, l1 = soft.reshape(-1, classes), dx.reshape(-1, classes), dx.reshape(-1), g.reshape(-1, 1), label.reshape(-1)
        index, picked = np.empty(len(l1), np.int64), np.empty(len(l1), soft.dtype)
        check, ignored = _label_index("softmax_with_cross_entropy_grad", l1, classes, attrs["ignore_index"], index)
        g1 = g.reshape(-1)

        def step():
            check()
            np.multiply(s2, g2, out=d2)
            np.take(flat, index, out=picked, mode="clip")
            np.subtract(picked, g1, out=picked)
            flat[index] = picked
            if ignored:
                d2[ignored[0]] = 0

        return step

    native_any_size = True

    @staticmethod
    def native(ins, outs, attrs, dry=False):
        soft, label, g = ins
        return _native_xent("softmax_with_cross_entropy_grad", "xent_grad", soft, outs[0], label, g, attrs, dry)

    @staticmethod
    def samples():
        why = "a gradient itself"
        yield Sample.of(probabilities(4, 5), ints(4, 1, high=5, seed=1), f32(4, 1, seed=2), grad=(), why=why)
        yield Sample.of(probabilities(4, 5), np.array([[0], [-100], [4], [2]]), f32(4, 1, seed=2), grad=(), why=why)
        yield Sample.of(probabilities(4, 5), ints(1, 5, high=4, seed=1), f32(1, 5, seed=2), axis=0, grad=(), why=why)
        yield Sample.of(probabilities(4, 5), probabilities(4, 5, seed=3), f32(4, 1, seed=2), soft_label=True, grad=(), why=why)


# -- distributions ------------------------------------------------------------------------------------------------------------------


def _reduction_share(reduction: str, shape: tuple[int, ...], part: Part | None) -> float:
    """What a reduction multiplies the sum with: 1 / elements or rows of the whole."""
    if reduction not in ("mean", "batchmean"):
        return 1.0
    count = part.count if part is not None else shape[0] if reduction == "batchmean" else prod(shape)
    return 1 / max(1, count)


def _reduction_words(reduction: str) -> tuple[str, str, str]:
    """The axes of X and of the loss, and what the reduction does with them."""
    return {
        "none": ("*", "*", ""), "sum": ("*", ".", "*:+"), "mean": ("*", ".", "*:+ #*"), "batchmean": ("n *", ".", "n:+ *:+ #n"),
    }[reduction]  # fmt: skip


class KldivLoss(OpDef):
    """Target * (log(Target) - X), 0 where Target is not positive: the divergence of the log-probabilities X from Target.

    `reduction` none gives each element; mean, batchmean (the sum over the number of rows) and sum give [1]. Source: fluid 1.8 `kldiv_loss`.
    """

    name = "kldiv_loss"
    inputs, outputs = ("X", "Target"), ("Loss",)
    attrs = {"reduction": "mean"}

    @staticmethod
    def infer(x, target, *, reduction):
        if reduction not in ("none", "mean", "batchmean", "sum"):
            raise ProgramError(f"op kldiv_loss: reduction must be none, mean, batchmean or sum, got {reduction!r}")
        t = alike("kldiv_loss", X=x, Target=target)
        if reduction == "batchmean" and t.ndim == 0:
            raise ProgramError("op kldiv_loss: reduction batchmean needs X with a batch axis")
        return t if reduction == "none" else t.with_shape((1,))

    @staticmethod
    def pattern(ins, outs, attrs):
        x, loss, said = _reduction_words(attrs["reduction"])
        return f"{x}, {x} -> {loss} | {said}"

    @staticmethod
    def grad(b, op, g):
        return b.kldiv_loss_grad(op["X"], op["Target"], g, **op.attrs), None

    @staticmethod
    def kernel(xp, x, target, *, out, reduction, part=None):
        loss = xp.where(target > 0, target * (xp.log(xp.where(target > 0, target, 1)) - x), 0)
        out[...] = loss if reduction == "none" else loss.sum() * _reduction_share(reduction, x.shape, part)

    @staticmethod
    def samples():
        x, t = np.log(probabilities(4, 3)), probabilities(4, 3, seed=1)
        t[1, 2] = 0
        for reduction in ("mean", "sum", "batchmean", "none"):
            yield Sample.of(x, t, reduction=reduction, grad=("X",), why="Target is a constant")


class KldivLossGrad(OpDef):
    """Gradient of kldiv_loss: -Target * g where Target is positive, times the share of the reduction."""

    name = "kldiv_loss_grad"
    inputs, outputs = ("X", "Target", "Loss@GRAD"), ("X@GRAD",)
    attrs = {"reduction": "mean"}

    @staticmethod
    def infer(x, target, g, **attrs):
        return x

    @staticmethod
    def pattern(ins, outs, attrs):
        x, loss, said = _reduction_words(attrs["reduction"])
        counted = " ".join(word for word in said.split() if word[0] == "#")
        return f"~{x}, {x}, {loss} -> {x} | {counted} L(2)"

    @staticmethod
    def kernel(xp, x, target, g, *, out, reduction, part=None):
        out[...] = xp.where(target > 0, -target * _reduction_share(reduction, x.shape, part), 0) * g

    @staticmethod
    def samples():
        for reduction, g in (("mean", (1,)), ("sum", (1,)), ("batchmean", (1,)), ("none", (4, 3))):
            x, t = np.log(probabilities(4, 3)), probabilities(4, 3, seed=1)
            yield Sample.of(x, t, f32(*g, seed=2), reduction=reduction, grad=(), why="a gradient itself")


class LabelSmooth(OpDef):
    """(1 - epsilon) * X + epsilon * prior, where the prior is PriorDist [1, classes], or 1 / classes. Source: fluid 1.8 `label_smooth`."""

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
    def kernel(xp, x, prior, *, out, epsilon, part=None):
        classes = x.shape[-1] if part is None else part.count
        out[...] = (1 - epsilon) * x + epsilon * (1 / classes if prior is None else prior.reshape(-1))

    @staticmethod
    def samples():
        yield Sample.of(probabilities(3, 4), None)
        yield Sample.of(probabilities(2, 3, 4), probabilities(1, 4, seed=1), epsilon=0.3, grad=("X",), why="the prior is a constant")
