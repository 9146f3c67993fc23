"""Losses: cross entropy from probabilities and from logits, and the element-wise losses of fluid, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ..ir import ANY, ExecutionError, OpDef, Partial, ProgramError, Sample, Shard, TensorType
from ..ir.placement import PlaceError, by_group, place_rows
from .blocked import in_order, row_blocks, row_max, row_sum
from .matmul import _f32, is_half, meet, same_dtype
from .softmax import check_axis, check_float, place_along_axis

LABELS = ("int32", "int64", "int8", "int16", "uint8")


def _labels(k: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(k).integers(0, high, shape)


def _probabilities(k: int, *shape: int) -> np.ndarray:
    x = np.random.default_rng(k).random(shape) + 0.2
    return (x / x.sum(axis=-1, keepdims=True)).astype("float32")


def _inside(k: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(k).random(shape) * 0.8 + 0.1).astype("float32")


def _bits(k: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(k).random(shape) < 0.5).astype("float32")


def _widen(*arrays: Any) -> list[Any]:
    return [a.astype("float32") if a is not None and is_half(a.dtype) else a for a in arrays]


# -- cross entropy -----------------------------------------------------------------------------------------------------------------


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
    ignored = f", or {ignore_index} to ignore an example" if not 0 <= ignore_index < classes else ""
    return ExecutionError(f"op {op}: label {int(bad[0])} is out of range for {classes} classes; a label is 0 to {classes - 1}{ignored}")


def _usable(xp: Any, op: str, label: Any, classes: int, ignore_index: int) -> tuple[Any, Any]:
    """(labels made safe to index with, mask of the examples that count or None for all).

    On NumPy a label out of range raises ExecutionError. A GPU does not wait for the answer: see `_poison`.
    """
    counts = label != ignore_index
    valid = (label >= 0) & (label < classes)
    if xp is np:
        if not (valid | ~counts).all():
            raise _wrong_label(op, label, classes, ignore_index)
        if counts.all():
            return label, None
        return np.where(counts, label, 0), counts
    return xp.where(valid & counts, label, 0), counts


def _poison(xp: Any, label: Any, classes: int, ignore_index: int, loss: Any) -> Any:
    """On a GPU an example whose label is out of range has loss NaN, so that it is seen without waiting for the device."""
    if xp is np:
        return loss
    return xp.where(((label < 0) | (label >= classes)) & (label != ignore_index), xp.nan, loss)


def _pick(xp: Any, x3: Any, label3: Any) -> Any:
    return xp.take_along_axis(x3, label3.astype("int64"), axis=1)


def _place_cross_entropy(x, label, **attrs):
    return place_along_axis(x, label, axis=attrs.get("axis", -1))


class CrossEntropy(OpDef):
    """-log of the probability that each row gives its label: X holds probabilities along the last axis.

    Label is integer [..., 1], or with `soft_label` a distribution like X, and then Y = -sum(Label * log(X)). An example whose label is
    `ignore_index` has loss 0. log(0) counts as -1e20, as in fluid. Y is [..., 1]. Raises ExecutionError for a label out of range
    (a GPU gives NaN). Source: fluid 1.8 `cross_entropy`.
    """

    name = "cross_entropy"
    inputs, outputs = ("X", "Label"), ("Y",)
    attrs = {"soft_label": False, "ignore_index": -100}
    place = staticmethod(_place_cross_entropy)

    @staticmethod
    def infer(x, label, *, soft_label, ignore_index):
        check_float("cross_entropy", "X", x)
        axis = check_axis("cross_entropy", x, -1)
        _check_label("cross_entropy", "X", x, label, axis, soft_label, ignore_index)
        return _loss_type(x, axis)

    @staticmethod
    def grad(b, op, g):
        return b.cross_entropy_grad(op["X"], op["Label"], g, **op.attrs), None

    @staticmethod
    def kernel(xp, x, label, *, out, soft_label, ignore_index):
        wide, soft = _widen(x, label)
        tiny = 1e-30 if wide.dtype == np.float32 else 1e-300
        if soft_label:
            logs = xp.where(wide > 0, xp.log(xp.maximum(wide, tiny)), -1e20)
            out[...] = -xp.where(soft != 0, soft * logs, 0).sum(axis=-1, keepdims=True)
            return
        safe, counts = _usable(xp, "cross_entropy", label, x.shape[-1], ignore_index)
        picked = xp.take_along_axis(wide, safe.astype("int64"), axis=-1)
        loss = xp.where(picked > 0, -xp.log(xp.maximum(picked, tiny)), 1e20)
        loss = loss if counts is None else xp.where(counts, loss, 0)
        out[...] = _poison(xp, label, x.shape[-1], ignore_index, loss)

    @staticmethod
    def samples():
        yield Sample.of(_probabilities(0, 4, 5), _labels(1, 5, 4, 1), grad=("X",))
        yield Sample.of(_probabilities(0, 4, 5), _probabilities(1, 4, 5), soft_label=True, grad=("X",), why="Label is a constant")
        yield Sample.of(_probabilities(2, 2, 3, 4), np.array([[[0], [3], [-100]], [[1], [2], [0]]]), grad=("X",))
        yield Sample.of(_probabilities(3, 3, 1), np.array([[0], [1], [0]]), ignore_index=1, grad=("X",))


class CrossEntropyGrad(OpDef):
    """Gradient of cross_entropy: -g / x at the label (times Label where it is soft), 0 elsewhere and for ignored examples."""

    name = "cross_entropy_grad"
    inputs, outputs = ("X", "Label", "YGrad"), ("XGrad",)
    attrs = {"soft_label": False, "ignore_index": -100}
    place = staticmethod(lambda x, label, g, **attrs: place_along_axis(x, label, g))

    @staticmethod
    def infer(x, label, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, x, label, g, *, out, soft_label, ignore_index):
        wide, soft, g = _widen(x, label, g)
        if soft_label:
            out[...] = -g * soft / wide
            return
        hot = label == xp.arange(x.shape[-1], dtype=label.dtype)
        if 0 <= ignore_index < x.shape[-1]:
            hot &= label != ignore_index
        out[...] = xp.where(hot, -g / xp.where(hot, wide, 1), 0)

    @staticmethod
    def samples():
        why = "a gradient itself"
        yield Sample.of(_probabilities(0, 4, 5), _labels(1, 5, 4, 1), _f32(2, 4, 1), grad=(), why=why)
        yield Sample.of(_probabilities(0, 4, 5), _probabilities(1, 4, 5), _f32(2, 4, 1), soft_label=True, grad=(), why=why)


_SWCE_ATTRS = {"soft_label": False, "ignore_index": -100, "axis": -1}


class SoftmaxWithCrossEntropy(OpDef):
    """softmax of the logits along `axis`, and the cross entropy of the labels under it, without the overflow of doing both in turn.

    Label is integer with size 1 along `axis`, or with `soft_label` a distribution like Logits. Softmax is like Logits, Loss has size 1
    along `axis`; an example whose label is `ignore_index` has loss 0. The largest logit is always subtracted first, so
    `numeric_stable_mode` changes nothing. Raises ExecutionError for a label out of range (a GPU gives NaN). Source: fluid 1.8.
    """

    name = "softmax_with_cross_entropy"
    inputs, outputs = ("Logits", "Label"), ("Softmax", "Loss")
    attrs = {**_SWCE_ATTRS, "numeric_stable_mode": True}

    @staticmethod
    def place(x, label, *, axis, **attrs):
        place = place_along_axis(x, label, axis=axis)
        return place, place

    @staticmethod
    def infer(x, label, *, soft_label, ignore_index, axis, numeric_stable_mode):
        check_float("softmax_with_cross_entropy", "Logits", x)
        axis = check_axis("softmax_with_cross_entropy", x, axis)
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
    def kernel(xp, x, label, *, out, **attrs):
        SoftmaxWithCrossEntropy.bind(xp, (x, label), out, attrs, None)()

    @staticmethod
    def plain(xp, x, label, out, *, soft_label, ignore_index, axis, numeric_stable_mode):
        soft, loss = out
        axis %= x.ndim
        wide, distribution = _widen(x, label)
        if not x.size:
            return
        a = _folded(wide, axis)
        shifted = a - a.max(axis=1, keepdims=True)
        e = xp.exp(shifted)
        total = e.sum(axis=1, keepdims=True)
        soft[...] = (e / total).reshape(x.shape)
        logs = xp.log(total)
        if soft_label:
            d = _folded(distribution, axis)
            loss[...] = xp.where(d != 0, d * (logs - shifted), 0).sum(axis=1, keepdims=True).reshape(loss.shape)
            return
        label3 = _folded(label, axis)
        safe, counts = _usable(xp, "softmax_with_cross_entropy", label3, x.shape[axis], ignore_index)
        value = logs - _pick(xp, shifted, safe)
        value = value if counts is None else xp.where(counts, value, 0)
        loss[...] = _poison(xp, label3, x.shape[axis], ignore_index, value).reshape(loss.shape)

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (x, label), (soft, loss) = ins, outs
        dense = x.size and all(a.flags.c_contiguous for a in (x, label, soft, loss))
        if xp is not np or attrs["soft_label"] or not dense or attrs["axis"] % x.ndim != x.ndim - 1 or is_half(x.dtype):
            return partial(SoftmaxWithCrossEntropy.plain, xp, x, label, outs, **attrs)
        classes, ignore = x.shape[-1], attrs["ignore_index"]
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

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 4, 5), _labels(1, 5, 4, 1), grad=("Logits",))
        yield Sample.of(_f32(0, 6, 19) * 10, _labels(1, 19, 6, 1), grad=("Logits",))
        yield Sample.of(_f32(2, 2, 3, 4), _labels(3, 4, 2, 3, 1), grad=("Logits",))
        yield Sample.of(_f32(2, 2, 3, 4), _labels(3, 3, 2, 1, 4), axis=1, grad=("Logits",))
        yield Sample.of(_f32(4, 4, 5), _probabilities(5, 4, 5), soft_label=True, grad=("Logits",), why="Label is a constant")
        yield Sample.of(_f32(6, 4, 3), np.array([[0], [-100], [2], [-100]]), grad=("Logits",))
        yield Sample.of(_f32(6, 4, 3), np.array([[0], [1], [2], [1]], "int32"), ignore_index=1, grad=("Logits",))
        yield Sample.of(_f32(7, 3, 1), np.zeros((3, 1), "int64"), numeric_stable_mode=False, grad=("Logits",))


def _label_index(op: str, label: np.ndarray, classes: int, ignore: int, index: np.ndarray) -> tuple[Callable[[], None], list[np.ndarray]]:
    """A call that checks the labels and puts their logits' flat positions into `index`; the list then holds the mask of ignored ones."""
    starts = np.arange(0, len(label) * classes, classes, dtype=np.int64)
    ignored: list[np.ndarray] = []
    may_hide = 0 <= ignore < classes  # then the range of the labels does not tell whether some are ignored

    def check():
        ignored.clear()
        low, high = np.minimum.reduce(label), np.maximum.reduce(label)
        if low >= 0 and high < classes and not may_hide:
            np.add(starts, label, out=index)
            return
        mask = label == ignore
        if (((label < 0) | (label >= classes)) & ~mask).any():
            raise _wrong_label(op, label, classes, ignore)
        np.add(starts, np.where(mask, 0, label), out=index)
        if mask.any():
            ignored.append(mask)

    return check, ignored


class SoftmaxWithCrossEntropyGrad(OpDef):
    """Gradient of softmax_with_cross_entropy through Loss: (softmax - one-hot label) * g, 0 for ignored examples."""

    name = "softmax_with_cross_entropy_grad"
    inputs, outputs = ("Softmax", "Label", "LossGrad"), ("LogitsGrad",)
    attrs = _SWCE_ATTRS
    place = staticmethod(lambda x, label, g, **attrs: place_along_axis(x, label, g, axis=attrs["axis"]))

    @staticmethod
    def infer(x, label, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, soft, label, g, *, out, **attrs):
        SoftmaxWithCrossEntropyGrad.bind(xp, (soft, label, g), (out,), attrs, None)()

    @staticmethod
    def plain(xp, soft, label, g, out, *, soft_label, ignore_index, axis):
        axis %= soft.ndim
        s, distribution, g = _widen(soft, label, g)
        if not soft.size:
            return
        s, g3 = _folded(s, axis), _folded(g, axis)
        if soft_label:
            d = _folded(distribution, axis)
            out[...] = ((s * d.sum(axis=1, keepdims=True) - d) * g3).reshape(out.shape)
            return
        label3 = _folded(label, axis)
        hot = label3 == xp.arange(s.shape[1], dtype=label3.dtype)[None, :, None]
        out[...] = xp.where(label3 == ignore_index, 0, (s - hot) * g3).reshape(out.shape)

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (soft, label, g), dx = ins, outs[0]
        dense = soft.size and all(a.flags.c_contiguous for a in (soft, label, g, dx))
        if xp is not np or attrs["soft_label"] or not dense or attrs["axis"] % soft.ndim != soft.ndim - 1 or is_half(soft.dtype):
            return partial(SoftmaxWithCrossEntropyGrad.plain, xp, soft, label, g, dx, **attrs)
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

    @staticmethod
    def samples():
        why = "a gradient itself"
        yield Sample.of(_probabilities(0, 4, 5), _labels(1, 5, 4, 1), _f32(2, 4, 1), grad=(), why=why)
        yield Sample.of(_probabilities(0, 4, 5), np.array([[0], [-100], [4], [2]]), _f32(2, 4, 1), grad=(), why=why)
        yield Sample.of(_probabilities(0, 4, 5), _labels(1, 4, 1, 5), _f32(2, 1, 5), axis=0, grad=(), why=why)
        yield Sample.of(_probabilities(0, 4, 5), _probabilities(3, 4, 5), _f32(2, 4, 1), soft_label=True, grad=(), why=why)


# -- element-wise losses -----------------------------------------------------------------------------------------------------------


def _alike(op: str, **types: TensorType) -> TensorType:
    """The common type of operands of one shape and dtype; an open size takes the other's."""
    same_dtype(op, **types)
    (first, x), *rest = types.items()
    check_float(op, first, x)
    for slot, t in rest:
        if t.ndim != x.ndim or not all(map(meet, t.shape, x.shape)):
            raise ProgramError(f"op {op}: {slot} must have the shape of {first} {x}, got {t}")
        x = x.with_shape(max(a, b) for a, b in zip(x.shape, t.shape))
    return x


@by_group
def _place_alike(group, *items):
    """Inputs of one shape, all split alike."""
    entries = {a.on(group) for a in items}
    if len(entries) == 1 and isinstance(entry := entries.pop(), Shard):
        return entry
    listed = ", ".join(f"%{a.name} is {a.on(group) or 'replicate'}" for a in items)
    raise PlaceError(f"the loss works element by element and needs its inputs split alike over {group}: {listed}")


def _place_each(x: Any, y: Any, **attrs: Any) -> Any:
    return _place_alike(x, y)


def _place_each_grad(x: Any, y: Any, g: Any, **attrs: Any) -> Any:
    return _place_alike(x, y, g)


class SquareErrorCost(OpDef):
    """(X - Y) squared, element by element. Source: fluid 1.8 `square_error_cost`."""

    name = "square_error_cost"
    inputs = ("X", "Y")
    elementwise = True
    inplace = (("X", "Out"), ("Y", "Out"))
    place = staticmethod(_place_each)

    @staticmethod
    def infer(x, y):
        return _alike("square_error_cost", X=x, Y=y)

    @staticmethod
    def grad(b, op, g):
        dx = b.square_error_cost_grad(op["X"], op["Y"], g)
        return dx, None if op["Y"].stop_gradient else b.scale(dx, scale=-1.0)

    @staticmethod
    def kernel(xp, x, y, *, out):
        xp.subtract(x, y, out=out)
        xp.multiply(out, out, out=out)

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 4, 1), _f32(1, 4, 1))
        yield Sample.of(_f32(0, 2, 3, 2), _f32(1, 2, 3, 2))


class SquareErrorCostGrad(OpDef):
    """Gradient of square_error_cost with respect to X: 2 * (X - Y) * g."""

    name = "square_error_cost_grad"
    inputs, outputs = ("X", "Y", "OutGrad"), ("XGrad",)
    elementwise = True
    place = staticmethod(_place_each_grad)

    @staticmethod
    def infer(x, y, g):
        return x

    @staticmethod
    def kernel(xp, x, y, g, *, out):
        xp.subtract(x, y, out=out)
        xp.multiply(out, g, out=out)
        xp.add(out, out, out=out)

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 4, 1), _f32(1, 4, 1), _f32(2, 4, 1), grad=(), why="a gradient itself")


def _sigmoid(xp: Any, x: Any) -> Any:
    e = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1, e) / (1 + e)


def _place_normalized(*args: Any, normalize: bool, **attrs: Any) -> Any:
    if normalize and any(a.placement for a in args):
        raise PlaceError("sigmoid_cross_entropy_with_logits with normalize counts over the whole batch, so its inputs must be whole")
    return _place_alike(*args)


class SigmoidCrossEntropyWithLogits(OpDef):
    """-label * log(sigmoid(x)) - (1 - label) * log(1 - sigmoid(x)), element by element and without overflow.

    An element whose label is `ignore_index` has loss 0; `normalize` divides by the number of the others. Source: fluid 1.8.
    """

    name = "sigmoid_cross_entropy_with_logits"
    inputs = ("X", "Label")
    attrs = {"ignore_index": -100, "normalize": False}
    place = staticmethod(_place_normalized)

    @staticmethod
    def infer(x, label, **attrs):
        return _alike("sigmoid_cross_entropy_with_logits", X=x, Label=label)

    @staticmethod
    def grad(b, op, g):
        return b.sigmoid_cross_entropy_with_logits_grad(op["X"], op["Label"], g, **op.attrs), None

    @staticmethod
    def kernel(xp, x, label, *, out, ignore_index, normalize):
        a, z = _widen(x, label)
        loss = xp.maximum(a, 0) - a * z + xp.log1p(xp.exp(-xp.abs(a)))
        counts = z != ignore_index
        loss = xp.where(counts, loss, 0)
        out[...] = loss / xp.maximum(counts.sum(), 1).astype(loss.dtype) if normalize else loss

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 4, 3), _bits(1, 4, 3), grad=("X",), why="Label is a constant")
        label = np.array([[0, 1, -1], [1, -1, 0.5]], "float32")
        yield Sample.of(_f32(0, 2, 3), label, ignore_index=-1, normalize=True, grad=("X",), why="Label is a constant")


class SigmoidCrossEntropyWithLogitsGrad(OpDef):
    """Gradient of sigmoid_cross_entropy_with_logits: (sigmoid(x) - label) * g, 0 where ignored."""

    name = "sigmoid_cross_entropy_with_logits_grad"
    inputs, outputs = ("X", "Label", "OutGrad"), ("XGrad",)
    attrs = {"ignore_index": -100, "normalize": False}
    place = staticmethod(_place_normalized)

    @staticmethod
    def infer(x, label, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, x, label, g, *, out, ignore_index, normalize):
        a, z, g = _widen(x, label, g)
        counts = z != ignore_index
        dx = xp.where(counts, (_sigmoid(xp, a) - z) * g, 0)
        out[...] = dx / xp.maximum(counts.sum(), 1).astype(dx.dtype) if normalize else dx

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 4, 3), _bits(1, 4, 3), _f32(2, 4, 3), grad=(), why="a gradient itself")


class LogLoss(OpDef):
    """-label * log(p + epsilon) - (1 - label) * log(1 - p + epsilon), element by element. Source: fluid 1.8 `log_loss`."""

    name = "log_loss"
    inputs, outputs = ("Predicted", "Labels"), ("Loss",)
    attrs = {"epsilon": 1e-4}
    elementwise = True
    place = staticmethod(_place_each)

    @staticmethod
    def infer(p, label, *, epsilon):
        return _alike("log_loss", Predicted=p, Labels=label)

    @staticmethod
    def grad(b, op, g):
        return b.log_loss_grad(op["Predicted"], op["Labels"], g, **op.attrs), None

    @staticmethod
    def kernel(xp, p, label, *, out, epsilon):
        p, label = _widen(p, label)
        out[...] = -label * xp.log(p + epsilon) - (1 - label) * xp.log(1 - p + epsilon)

    @staticmethod
    def samples():
        yield Sample.of(_inside(0, 5, 1), _bits(1, 5, 1), grad=("Predicted",), why="Labels are constants")
        yield Sample.of(_inside(0, 2, 3), _bits(1, 2, 3), epsilon=0.1, grad=("Predicted",), why="Labels are constants")


class LogLossGrad(OpDef):
    """Gradient of log_loss: (-label / (p + epsilon) + (1 - label) / (1 - p + epsilon)) * g."""

    name = "log_loss_grad"
    inputs, outputs = ("Predicted", "Labels", "LossGrad"), ("PredictedGrad",)
    attrs = {"epsilon": 1e-4}
    elementwise = True
    place = staticmethod(_place_each_grad)

    @staticmethod
    def infer(p, label, g, **attrs):
        return p

    @staticmethod
    def kernel(xp, p, label, g, *, out, epsilon):
        p, label, g = _widen(p, label, g)
        out[...] = ((1 - label) / (1 - p + epsilon) - label / (p + epsilon)) * g

    @staticmethod
    def samples():
        yield Sample.of(_inside(0, 5, 1), _bits(1, 5, 1), _f32(2, 5, 1), grad=(), why="a gradient itself")


class HuberLoss(OpDef):
    """r squared / 2 where |r| <= delta, delta * (|r| - delta / 2) elsewhere, for the residual r = Y - X. Source: fluid 1.8 `huber_loss`."""

    name = "huber_loss"
    inputs, outputs = ("X", "Y"), ("Residual", "Out")
    attrs = {"delta": 1.0}
    place = staticmethod(lambda x, y, **attrs: (_place_alike(x, y),) * 2)

    @staticmethod
    def infer(x, y, *, delta):
        if delta <= 0:
            raise ProgramError(f"op huber_loss: delta must be positive, got {delta}")
        t = _alike("huber_loss", X=x, Y=y)
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
        x, y = _widen(x, y)
        r = y - x
        size = xp.abs(r)
        residual[...] = r
        loss[...] = xp.where(size <= delta, r * r / 2, delta * (size - delta / 2))

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 5, 1) * 3, _f32(1, 5, 1))
        yield Sample.of(_f32(0, 2, 3), _f32(1, 2, 3), delta=0.5)


class HuberLossGrad(OpDef):
    """Gradient of huber_loss with respect to Y: the residual, held between -delta and delta, times g."""

    name = "huber_loss_grad"
    inputs, outputs = ("Residual", "OutGrad"), ("YGrad",)
    attrs = {"delta": 1.0}
    elementwise = True
    place = staticmethod(_place_each)

    @staticmethod
    def infer(r, g, *, delta):
        return r

    @staticmethod
    def kernel(xp, r, g, *, out, delta):
        xp.clip(r, -delta, delta, out=out)
        xp.multiply(out, g, out=out)

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 5, 1) * 3, _f32(1, 5, 1), grad=(), why="a gradient itself")


def _row_sums(xp: Any, a: Any, like: Any) -> Any:
    return a.reshape(len(a), prod(a.shape[1:])).sum(axis=1).reshape(like.shape)


class SmoothL1Loss(OpDef):
    """Per example, the sum of a loss that is square near 0 and linear beyond 1 / sigma squared.

    With d = (X - Y) * InsideWeight and s = sigma squared: s * d squared / 2 where |d| < 1 / s, |d| - 1 / (2 s) elsewhere, all times
    OutsideWeight. Diff is d; Out is [N, 1]. Source: Girshick 2015; fluid 1.8 `smooth_l1_loss`.
    """

    name = "smooth_l1_loss"
    inputs, outputs = ("X", "Y", "InsideWeight?", "OutsideWeight?"), ("Diff", "Out")
    attrs = {"sigma": 1.0}

    @staticmethod
    def place(*args, **attrs):
        return (place_rows(*args),) * 2

    @staticmethod
    def infer(x, y, inside, outside, *, sigma):
        given = {"X": x, "Y": y, "InsideWeight": inside, "OutsideWeight": outside}
        t = _alike("smooth_l1_loss", **{slot: v for slot, v in given.items() if v is not None})
        if t.ndim < 2 or sigma <= 0:
            raise ProgramError(f"op smooth_l1_loss needs X with at least 2 axes and a positive sigma, got {x} and {sigma}")
        return t, t.with_shape((t.shape[0], 1))

    @staticmethod
    def grad(b, op, g):
        if g[0] is not None:
            raise ProgramError("op smooth_l1_loss has a gradient through Out only")
        dx = b.smooth_l1_loss_grad(op["Diff"], op["InsideWeight"], op["OutsideWeight"], g[1], **op.attrs)
        return dx, b.scale(dx, scale=-1.0), None, None

    @staticmethod
    def kernel(xp, x, y, inside, outside, *, out, sigma):
        diff, loss = out
        x, y, inside, outside = _widen(x, y, inside, outside)
        d, s = x - y, sigma * sigma
        if inside is not None:
            d = d * inside
        size = xp.abs(d)
        each = xp.where(size < 1 / s, d * d * (s / 2), size - 0.5 / s)
        if outside is not None:
            each = each * outside
        diff[...] = d
        loss[...] = _row_sums(xp, each, loss)

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 3, 4), _f32(1, 3, 4), None, None)
        yield Sample.of(_f32(0, 2, 3, 2), _f32(1, 2, 3, 2), _inside(2, 2, 3, 2), _inside(3, 2, 3, 2), sigma=2.0, grad=("X", "Y"),
                        why="weights are constants")  # fmt: skip


class SmoothL1LossGrad(OpDef):
    """Gradient of smooth_l1_loss with respect to X: sigma squared * d, held between -1 and 1, times the weights and g."""

    name = "smooth_l1_loss_grad"
    inputs, outputs = ("Diff", "InsideWeight?", "OutsideWeight?", "OutGrad"), ("XGrad",)
    attrs = {"sigma": 1.0}
    place = staticmethod(place_rows)

    @staticmethod
    def infer(d, inside, outside, g, *, sigma):
        return d

    @staticmethod
    def kernel(xp, d, inside, outside, g, *, out, sigma):
        d, inside, outside, g = _widen(d, inside, outside, g)
        slope = xp.clip(d * (sigma * sigma), -1, 1) * g.reshape(len(d), *[1] * (d.ndim - 1))
        for weight in (inside, outside):
            slope = slope if weight is None else slope * weight
        out[...] = slope

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 3, 4), None, None, _f32(1, 3, 1), grad=(), why="a gradient itself")


class BceLoss(OpDef):
    """-label * log(x) - (1 - label) * log(1 - x), element by element, logarithms held at -100 or more. Source: fluid 1.8 `bce_loss`."""

    name = "bce_loss"
    inputs = ("X", "Label")
    elementwise = True
    place = staticmethod(_place_each)

    @staticmethod
    def infer(x, label):
        return _alike("bce_loss", X=x, Label=label)

    @staticmethod
    def grad(b, op, g):
        return b.bce_loss_grad(op["X"], op["Label"], g), None

    @staticmethod
    def kernel(xp, x, label, *, out):
        x, label = _widen(x, label)
        yes, no = (xp.where(p > 0, xp.maximum(xp.log(xp.maximum(p, 1e-38)), -100), -100) for p in (x, 1 - x))
        out[...] = -label * yes - (1 - label) * no

    @staticmethod
    def samples():
        yield Sample.of(_inside(0, 4, 3), _bits(1, 4, 3), grad=("X",), why="Label is a constant")
        edges = np.array([[0.0, 1.0, 0.5, 0.0]], "float32")
        yield Sample.of(edges, np.array([[0.0, 1.0, 1.0, 1.0]], "float32"), grad=(), why="the slope at 0 and 1 is held finite")


class BceLossGrad(OpDef):
    """Gradient of bce_loss: (x - label) / max(x * (1 - x), 1e-12) * g."""

    name = "bce_loss_grad"
    inputs, outputs = ("X", "Label", "OutGrad"), ("XGrad",)
    elementwise = True
    place = staticmethod(_place_each_grad)

    @staticmethod
    def infer(x, label, g):
        return x

    @staticmethod
    def kernel(xp, x, label, g, *, out):
        x, label, g = _widen(x, label, g)
        out[...] = (x - label) / xp.maximum(x * (1 - x), 1e-12) * g

    @staticmethod
    def samples():
        yield Sample.of(_inside(0, 4, 3), _bits(1, 4, 3), _f32(2, 4, 3), grad=(), why="a gradient itself")


def _reduction_share(reduction: str, shape: tuple[int, ...]) -> float:
    return {"mean": 1 / max(1, prod(shape)), "batchmean": 1 / max(1, shape[0])}.get(reduction, 1.0)


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
        t = _alike("kldiv_loss", X=x, Target=target)
        if reduction == "batchmean" and t.ndim == 0:
            raise ProgramError("op kldiv_loss: reduction batchmean needs X with a batch axis")
        return t if reduction == "none" else t.with_shape((1,))

    @staticmethod
    def place(x, target, *, reduction):
        if reduction == "none":
            return _place_alike(x, target)

        @by_group
        def rule(group, x, target):
            entry = x.on(group)
            if isinstance(entry, Shard) and entry == target.on(group):
                means = reduction == "mean" or (reduction == "batchmean" and entry.axis == 0)
                return Partial("avg" if means else "sum", group)
            raise PlaceError(f"op kldiv_loss needs X and Target split alike over {group}")

        return rule(x, target)

    @staticmethod
    def grad(b, op, g):
        return b.kldiv_loss_grad(op["X"], op["Target"], g, **op.attrs), None

    @staticmethod
    def kernel(xp, x, target, *, out, reduction):
        x, t = _widen(x, target)
        loss = xp.where(t > 0, t * (xp.log(xp.where(t > 0, t, 1)) - x), 0)
        out[...] = loss if reduction == "none" else loss.sum() * _reduction_share(reduction, x.shape)

    @staticmethod
    def samples():
        x, t = np.log(_probabilities(0, 4, 3)), _probabilities(1, 4, 3)
        t[1, 2] = 0
        for reduction in ("mean", "sum", "batchmean", "none"):
            yield Sample.of(x, t, reduction=reduction, grad=("X",), why="Target is a constant")


class KldivLossGrad(OpDef):
    """Gradient of kldiv_loss: -Target * g where Target is positive, times the share of the reduction."""

    name = "kldiv_loss_grad"
    inputs, outputs = ("X", "Target", "LossGrad"), ("XGrad",)
    attrs = {"reduction": "mean"}

    @staticmethod
    def infer(x, target, g, **attrs):
        return x

    @staticmethod
    def place(x, target, g, *, reduction):
        return _place_alike(x, target, g) if reduction == "none" else _place_alike(x, target)

    @staticmethod
    def kernel(xp, x, target, g, *, out, reduction):
        t, g = _widen(target, g)
        out[...] = xp.where(t > 0, -t * _reduction_share(reduction, x.shape), 0) * g

    @staticmethod
    def samples():
        yield Sample.of(np.log(_probabilities(0, 4, 3)), _probabilities(1, 4, 3), _f32(2, 1), grad=(), why="a gradient itself")


class HingeLoss(OpDef):
    """max(0, 1 - x * (2 * label - 1)), element by element, for labels 0 and 1. Source: fluid 1.8 `hinge_loss`."""

    name = "hinge_loss"
    inputs, outputs = ("Logits", "Labels"), ("Loss",)
    elementwise = True
    place = staticmethod(_place_each)

    @staticmethod
    def infer(x, label):
        return _alike("hinge_loss", Logits=x, Labels=label)

    @staticmethod
    def grad(b, op, g):
        return b.hinge_loss_grad(op["Logits"], op["Labels"], g), None

    @staticmethod
    def kernel(xp, x, label, *, out):
        out[...] = xp.maximum(1 - x * (2 * label - 1), 0)

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 6, 1) * 2, _bits(1, 6, 1), grad=("Logits",), why="Labels are constants")


class HingeLossGrad(OpDef):
    """Gradient of hinge_loss: -(2 * label - 1) * g where the loss is positive."""

    name = "hinge_loss_grad"
    inputs, outputs = ("Logits", "Labels", "LossGrad"), ("LogitsGrad",)
    elementwise = True
    place = staticmethod(_place_each_grad)

    @staticmethod
    def infer(x, label, g):
        return x

    @staticmethod
    def kernel(xp, x, label, g, *, out):
        sign = 2 * label - 1
        out[...] = xp.where(x * sign < 1, -sign * g, 0)

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 6, 1) * 2, _bits(1, 6, 1), _f32(2, 6, 1), grad=(), why="a gradient itself")


class MarginRankLoss(OpDef):
    """max(0, margin - label * (x1 - x2)) for labels 1 (x1 is to rank higher) and -1.

    Activated is 1 where the loss is positive. Source: fluid 1.8.
    """

    name = "margin_rank_loss"
    inputs, outputs = ("X1", "X2", "Label"), ("Out", "Activated")
    attrs = {"margin": 0.1}
    place = staticmethod(lambda *args, **attrs: (_place_alike(*args),) * 2)

    @staticmethod
    def infer(x1, x2, label, *, margin):
        t = _alike("margin_rank_loss", X1=x1, X2=x2, Label=label)
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
        label = _bits(2, 5, 1) * 2 - 1
        yield Sample.of(_f32(0, 5, 1), _f32(1, 5, 1), label, grad=("X1", "X2"), why="Label is a constant")
        yield Sample.of(_f32(0, 5, 1), _f32(1, 5, 1), label, margin=1.5, grad=("X1", "X2"), why="Label is a constant")


class LabelSmooth(OpDef):
    """(1 - epsilon) * X + epsilon * prior, where the prior is PriorDist [1, classes], or 1 / classes. Source: fluid 1.8 `label_smooth`."""

    name = "label_smooth"
    inputs = ("X", "PriorDist?")
    attrs = {"epsilon": 0.1}

    @staticmethod
    def place(x, prior, **attrs):
        @by_group
        def rule(group, x, *rest):
            entry = x.on(group)
            if isinstance(entry, Shard) and entry.axis < x.type.ndim - 1 and all(p.on(group) is None for p in rest):
                return entry
            raise PlaceError(f"label_smooth works along the last axis of %{x.name}, which is {entry or 'replicate'} over {group}")

        return rule(x, *([] if prior is None else [prior]))

    @staticmethod
    def infer(x, prior, *, epsilon):
        check_float("label_smooth", "X", x)
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
    def kernel(xp, x, prior, *, out, epsilon):
        a, prior = _widen(x, prior)
        out[...] = (1 - epsilon) * a + epsilon * (1 / x.shape[-1] if prior is None else prior.reshape(-1))

    @staticmethod
    def samples():
        yield Sample.of(_probabilities(0, 3, 4), None)
        yield Sample.of(_probabilities(0, 2, 3, 4), _probabilities(1, 1, 4), epsilon=0.3, grad=("X",), why="the prior is a constant")
