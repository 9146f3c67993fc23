"""The losses that `set_training` builds by name, for the usual heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from ..ir import ANY, Operator, Program, TensorType, Variable
from ..ir.dtypes import HALVES
from ..ir.errors import nearest
from ..ir.sizes import StandInShapes
from ..ir.unique_name import unused
from .errors import OnnxError
from .model import OnnxModel

_REST = 1 << 31  # an end of a slice beyond every axis


class Head(NamedTuple):
    """The labels that a loss takes. `class_axis` is that of the scores in the output; None if labels are numbers."""

    class_axis: int | None
    label_shape: Callable[[Sequence[int]], Sequence[int]]  # of the output's shape
    counts_labels: bool = False  # is the mean over the labels that are not ignored, instead of all?
    predicts_next: bool = False  # are the scores at a position those of the next label?
    yes_or_no: bool = False  # is each label 1 for yes, or 0 for no?


def _one_each(shape: Sequence[int]) -> Sequence[int]:
    return [*shape[:-1], 1]


def _like_output(shape: Sequence[int]) -> Sequence[int]:
    return list(shape)


def _one_position(shape: Sequence[int]) -> Sequence[int]:
    return list(shape[:-1])


HEADS = {
    "softmax_with_cross_entropy": Head(-1, _one_each),
    "token_classification": Head(-1, _one_position, counts_labels=True),
    "causal_language_model": Head(-1, _one_position, counts_labels=True, predicts_next=True),
    "segmentation": Head(1, lambda shape: [shape[0], *shape[2:]], counts_labels=True),
    "sigmoid_cross_entropy_with_logits": Head(None, _like_output, yes_or_no=True),
    "square_error_cost": Head(None, _like_output),
    "absolute_error": Head(None, _like_output),
    "huber_loss": Head(None, _like_output),
}  # name of a loss -> its labels
OTHER_NAMES = {
    **dict.fromkeys(
        ("cross_entropy", "cross_entropy_loss", "CrossEntropyLoss", "categorical_crossentropy", "nll_loss", "classification"),
        "softmax_with_cross_entropy",
    ),
    **dict.fromkeys(("mse", "mse_loss", "MSELoss", "mean_squared_error", "l2_loss", "regression"), "square_error_cost"),
    **dict.fromkeys(
        ("bce", "bce_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "BCEWithLogitsLoss"),
        "sigmoid_cross_entropy_with_logits",
    ),
    **dict.fromkeys(("mae", "mae_loss", "l1", "l1_loss", "L1Loss", "mean_absolute_error"), "absolute_error"),
    **dict.fromkeys(("huber", "HuberLoss", "smooth_l1", "smooth_l1_loss", "SmoothL1Loss"), "huber_loss"),
    **dict.fromkeys(("causal_lm", "language_model", "next_token"), "causal_language_model"),
    **dict.fromkeys(("token", "tagging", "ner"), "token_classification"),
}  # names of other frameworks and of tasks


@dataclass(frozen=True)
class Loss:
    """A loss with options, for `set_training(loss=...)`. The result is a mean.

    | name | output | labels |
    |---|---|---|
    | `softmax_with_cross_entropy` | `[n, ..., classes]` | int64 `[n, ..., 1]` |
    | `token_classification` | `[n, positions, classes]` | int64 `[n, positions]` |
    | `causal_language_model` | `[n, positions, classes]` | int64 `[n, positions]`, the tokens themselves: position i predicts label i + 1 |
    | `segmentation` | `[n, classes, height, width]` | int64 `[n, height, width]` |
    | `sigmoid_cross_entropy_with_logits` | any shape | floats between 0 and 1, of that shape |
    | `square_error_cost`, `absolute_error`, `huber_loss` | any shape | floats of that shape |

    A label of `ignore_index` has no loss. The first loss, without the next two options, is a mean over all labels, in which ignored ones
    count as 0. Otherwise ignored labels do not count: the next three losses, and the first with `class_weight` or
    `label_smoothing`, are means over those that are not ignored. `class_weight`, a number for each class, makes it a weighted mean.
    `label_smoothing` is the share of each label that is spread over all classes. `pos_weight`, a number or one for each of the last axis,
    is how much the label 1 counts in sigmoid_cross_entropy_with_logits, whose mean stays a plain one, as in PyTorch. `delta` is the error
    from which huber_loss is linear. If the model ends in a softmax, the loss takes its input.

    >>> import fluidx as fx
    >>> fx.onnx.Loss("segmentation", class_weight=(1, 4), ignore_index=255)
    Loss(name='segmentation', class_weight=(1, 4), label_smoothing=0.0, ignore_index=255, delta=1.0, pos_weight=None)
    """

    name: str
    class_weight: Sequence[float] | None = None
    label_smoothing: float = 0.0
    ignore_index: int = -100
    delta: float = 1.0
    pos_weight: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.name not in HEADS:
            near = f"did you mean {OTHER_NAMES[self.name]!r}?" if self.name in OTHER_NAMES else nearest(str(self.name), HEADS, "there are")
            raise OnnxError(f"set_training: there is no loss {self.name!r}; {near}; or give a function")
        if self.head.class_axis is None and (self.class_weight is not None or self.label_smoothing):
            has = f"{self.name} has numbers{'; pos_weight weighs the label 1' * self.head.yes_or_no}"
            raise OnnxError(f"set_training: class_weight and label_smoothing are for labels that are classes, and {has}")
        if self.pos_weight is not None and not self.head.yes_or_no:
            raise OnnxError(f"set_training: pos_weight is for sigmoid_cross_entropy_with_logits, and the loss is {self.name}")
        if self.pos_weight is not None and not all(_is_number(w) and w > 0 for w in self._pos_weights):
            raise OnnxError(f"set_training: pos_weight must be numbers above 0, got {self.pos_weight!r}")
        if not _is_number(self.label_smoothing) or not 0 <= self.label_smoothing < 1:
            raise OnnxError(f"set_training: label_smoothing must be at least 0 and below 1, got {self.label_smoothing!r}")
        if not _is_number(self.delta) or self.delta <= 0:
            raise OnnxError(f"set_training: delta must be a number above 0, got {self.delta!r}")
        weights = self.class_weight
        if weights is not None and not (all(_is_number(w) and w >= 0 for w in weights) and any(weights)):
            raise OnnxError(f"set_training: class_weight must be numbers of at least 0, and not all 0, got {weights!r}")

    @property
    def head(self) -> Head:
        return HEADS[self.name]

    @property
    def _pos_weights(self) -> Sequence[float]:
        return self.pos_weight if isinstance(self.pos_weight, (list, tuple)) else (self.pos_weight,)

    def build(self, program: Program, y: Variable) -> Variable:
        """The loss of the output `y`, under the guard of its program. It declares the data variable of labels, see `label_name`."""
        from .. import layers
        from ..layers.declare import fluid_data

        head = self.head
        need = 3 if head.predicts_next or head.class_axis == 1 else 2 if head.class_axis is not None else 0
        if y.ndim < need:
            raise OnnxError(f"set_training: {self.name} takes an output of {need} axes or more, and {y.name!r} is {y.desc.type}")
        if head.class_axis is not None:
            return self._of_classes(program, y)
        y = _in_float32(y)
        label = fluid_data(label_name(program), head.label_shape(y.shape), y.dtype)
        if self.name == "absolute_error":
            return layers.mean(layers.abs(layers.elementwise_sub(y, label)))
        if self.name == "huber_loss":
            return layers.mean(layers.huber_loss(y, label, float(self.delta)))
        each = getattr(layers, self.name)(y, label)
        return layers.mean(each if self.pos_weight is None else layers.elementwise_add(each, self._more_for_yes(y, label)))

    def _more_for_yes(self, y: Variable, label: Variable) -> Variable:
        """label (pos_weight - 1) times the loss that a label 1 would have; 0 for an ignored label, which is negative."""
        from .. import layers

        weights = np.array(self._pos_weights, np.float64)
        if weights.size not in (1, y.shape[-1]):
            raise OnnxError(f"set_training: pos_weight has {weights.size} numbers, but the output {y.name!r} is {y.desc.type}")
        yes = layers.sigmoid_cross_entropy_with_logits(y, layers.ones_like(y))
        more = layers.elementwise_mul(layers.relu(label), layers.assign((weights - 1).astype(y.dtype)))
        return layers.elementwise_mul(more, yes)

    def _of_classes(self, program: Program, y: Variable) -> Variable:
        from .. import layers
        from ..layers.declare import fluid_data

        head, axis = self.head, self.head.class_axis
        assert axis is not None
        scores = _in_float32(before_softmax(program, y, axis))
        label = fluid_data(label_name(program), head.label_shape(y.shape), "int64")
        if axis == 1:
            scores = layers.transpose(scores, [0, *range(2, y.ndim), 1])
        if label.ndim < scores.ndim:
            label = layers.unsqueeze(label, [label.ndim])
        if head.predicts_next:
            scores = layers.slice(scores, axes=[1], starts=[0], ends=[-1])
            label = layers.slice(label, axes=[1], starts=[1], ends=[_REST])
        if self.class_weight is None and not self.label_smoothing:
            each = layers.softmax_with_cross_entropy(scores, label, ignore_index=self.ignore_index)
            return _mean_of(each, self._counted(label, each.dtype)) if head.counts_labels else layers.mean(each)
        return self._weighted(scores, label)

    def _counted(self, label: Variable, dtype: str) -> Variable:
        """1 for each label that is not ignored, 0 for the others."""
        from .. import layers

        return layers.cast(layers.not_equal(label, layers.fill_constant([1], label.dtype, self.ignore_index)), dtype)

    def _weighted(self, scores: Variable, label: Variable) -> Variable:
        """The mean with a weight for each class, of labels that are spread over all classes."""
        import numpy as np

        from .. import layers

        classes, dtype = scores.shape[-1], scores.dtype
        if classes == ANY:
            raise OnnxError(f"set_training: class_weight and label_smoothing need a fixed number of classes, and {scores.name!r} has none")
        if self.class_weight is not None and len(self.class_weight) != classes:
            raise OnnxError(f"set_training: class_weight has {len(self.class_weight)} numbers, but the output has {classes} classes")
        counted = self._counted(label, dtype)
        known = layers.elementwise_mul(label, layers.cast(counted, label.dtype))  # ignored labels become class 0, with weight 0
        hot = layers.cast(layers.one_hot(known, classes), dtype)
        spread = layers.label_smooth(hot, epsilon=float(self.label_smoothing)) if self.label_smoothing else hot
        if self.class_weight is not None:
            weight = layers.assign(np.array(self.class_weight, dtype))
            spread = layers.elementwise_mul(spread, weight)
            counted = layers.elementwise_mul(counted, layers.reduce_sum(layers.elementwise_mul(hot, weight), dim=-1, keep_dim=True))
        each = layers.softmax_with_cross_entropy(scores, spread, soft_label=True)
        return _mean_of(layers.elementwise_mul(each, self._counted(label, dtype)), counted)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and isfinite(value)


def _mean_of(each: Variable, weights: Variable) -> Variable:
    """The sum of losses over the sum of weights, [1]; 0 if no label counts."""
    from .. import layers

    least = layers.fill_constant([1], each.dtype, 1e-6)
    return layers.elementwise_div(layers.reduce_sum(each), layers.elementwise_max(layers.reduce_sum(weights), least))


def label_name(program: Program) -> str:
    """The name of the labels that a loss adds to the program: "label", or "label_1" if the model has a value of that name."""
    return unused("label", program.global_block().descs, "_{}".format)


def scores_of(model: OnnxModel, name: str | None) -> Variable:
    """The value of the model that a loss takes: the named one, the only output, or the only one that is an array of floats. Of a map of
    classes to probabilities (ZipMap) it is the array."""
    if name is not None:
        return model[name]
    if len(model.fetches) == 1:
        return model.fetches[0]
    arrays = [_array_of(model.program, v) for v in model.fetches]
    floats = [v for v in arrays if v is not None and v.desc.type.is_float]
    if len(floats) == 1:
        return floats[0]
    has = ", ".join(o.name for o in model.proto.graph.output)
    raise OnnxError(
        f"set_training: loss takes one output, but the model has {has}; name one, scores={model.proto.graph.output[0].name!r} "
        "(--scores on the command line), or give a head that returns one"
    )


def _array_of(program: Program, v: Variable) -> Variable | None:
    """The output itself, if it is an array, or the array that a ZipMap reads."""
    made = _maker(program, v)
    if made is not None and made.type == "zip_map":
        return program.global_block().var(made.inputs["X"][0])
    return v if isinstance(v.desc.type, TensorType) else None


def before_softmax(program: Program, y: Variable, axis: int = -1) -> Variable:
    """The input of the softmax over `axis` that computes y; y if there is none. Below opset 13, softmax has two axes and a reshape around
    it."""
    block, sizes = program.global_block(), StandInShapes(program.global_block())
    made = _maker(program, y)
    inner = _maker(program, block.var(made.inputs["X"][0])) if made is not None and made.type == "reshape" else made
    if inner is None or inner.type != "softmax":
        return y
    x = block.var(inner.inputs["X"][0])
    if inner.attrs["axis"] % x.ndim != axis % x.ndim:
        return y
    flat = _maker(program, x) if inner is not made else None
    before = block.var(flat.inputs["X"][0]) if flat is not None and flat.type == "flatten" else x
    return before if before.shape[-1:] == x.shape[-1:] and sizes.equal(before, y) else y


def _maker(program: Program, v: Variable) -> Operator | None:
    return next((op for op in reversed(program.ops) if v.name in op.output_arg_names), None)


def _in_float32(y: Variable) -> Variable:
    """The value; in float32 if it has 16 bits, whose sums a loss would round."""
    from .. import layers

    return layers.cast(y, "float32") if y.dtype in HALVES else y
