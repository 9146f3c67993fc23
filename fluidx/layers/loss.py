"""Losses. Each returns one value per sample (train with `layers.mean` of it), unless its docstring says that it returns a single one."""

from __future__ import annotations

from typing import Any

from .._checks import number, whole, wrong
from ..ir import Variable
from .helper import LayerWriter
from .layer_from_signature import above_zero, among, row
from .nn import one_hot


def _labels(helper: LayerWriter, label: Any, soft_label: bool) -> Variable:
    label = helper.variable(label, "label")
    if not soft_label and label.dtype not in ("int32", "int64"):
        raise wrong(f"{helper.label}: label must hold int64 or int32 class indices; variable {label.name!r} is {label.dtype} (soft_label?)")
    return label


def cross_entropy(input: Variable, label: Variable, soft_label: bool = False, ignore_index: int = -100) -> Variable:
    """-log of the probability that `input` (probabilities, not logits) gives to the label: [n, classes] and [n, 1] give [n, 1].

    With `soft_label` the labels are probabilities of input's shape. A label of `ignore_index` has loss 0.

    Types: input is float16, bfloat16, float32 or float64, and so is the result; hard labels are int64 or int32.

    Raises ProgramError for labels of another dtype or shape.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     probabilities = fx.layers.softmax(fx.data("x", [-1, 10], "float32"))
    ...     fx.layers.cross_entropy(probabilities, fx.data("y", [-1, 1], "int64"))
    <Variable cross_entropy_0.tmp_0: f32[-1,1]>
    """
    helper = LayerWriter("cross_entropy")
    x, label = helper.variable(input, "input"), _labels(helper, label, soft_label)
    return helper.op("cross_entropy", x, label, soft_label=bool(soft_label), ignore_index=whole(helper.label, "ignore_index", ignore_index))


def softmax_with_cross_entropy(
    logits: Variable,
    label: Variable,
    soft_label: bool = False,
    ignore_index: int = -100,
    numeric_stable_mode: bool = True,
    return_softmax: bool = False,
    axis: int = -1,
) -> Any:
    """cross_entropy(softmax(logits), label) along an axis, computed without overflow; with `return_softmax` also the softmax.

    Hard labels have size 1 along the axis: [n, classes] and int64 [n, 1] give [n, 1]. `numeric_stable_mode` has no effect: it is always on.

    Types: logits are float16, bfloat16, float32 or float64, and so is the loss; hard labels are int64 or int32.

    Raises ProgramError for labels of another dtype, or of a shape that does not fit.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     x, y = fx.data("x", [-1, 10], "float32"), fx.data("y", [-1, 1], "int64")
    ...     fx.layers.softmax_with_cross_entropy(x, y).shape
    (-1, 1)
    """
    helper = LayerWriter("softmax_with_cross_entropy")
    x, label = helper.variable(logits, "logits"), _labels(helper, label, soft_label)
    helper.axis(x, axis)
    softmax, loss = helper.op(
        "softmax_with_cross_entropy",
        x,
        label,
        soft_label=bool(soft_label),
        ignore_index=whole(helper.label, "ignore_index", ignore_index),
        axis=axis,
    )
    return (loss, softmax) if return_softmax else loss


def mse_loss(input: Variable, label: Variable) -> Variable:
    """The mean of (input - label) squared over all elements, as a [1] variable."""
    helper = LayerWriter("mse_loss")
    cost = helper.op("square_error_cost", helper.variable(input, "input"), helper.variable(label, "label"))
    return helper.op("mean", cost)


def dice_loss(input: Variable, label: Variable, epsilon: float = 1e-5) -> Variable:
    """1 - 2 * overlap / (sum of input + sum of labels + epsilon), the mean over the samples, [1].

    input has probabilities [n, ..., classes], label the class at each position, [n, ..., 1].

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     x, label = fx.data("x", [None, 4, 2], "float32"), fx.data("y", [None, 4, 1], "int64")
    ...     fx.layers.dice_loss(x, label).shape
    (1,)
    """
    helper = LayerWriter("dice_loss")
    x, label = helper.variable(input, "input"), helper.variable(label, "label")
    if x.ndim < 2 or label.ndim != x.ndim or label.shape[-1] != 1:
        raise wrong(f"{helper.label}: input must be [n, ..., classes] and label [n, ..., 1], got {x.desc.type} and {label.desc.type}")
    hot = one_hot(label, helper.known(x, "input", -1))
    dims = tuple(range(1, x.ndim))
    overlap, own, right = (helper.op("reduce_sum", v, dim=dims) for v in (helper.op("elementwise_mul", x, hot), x, hot))
    below = helper.op("scale", helper.op("elementwise_add", own, right), bias=number(helper.label, "epsilon", epsilon))
    return helper.op("mean", helper.op("scale", helper.op("elementwise_div", overlap, below), scale=-2.0, bias=1.0))


# fmt: off
log_loss = row(
    "log_loss(input, label, epsilon=1e-4, name=None)",
    "-label * log(p + epsilon) - (1 - label) * log(1 - p + epsilon), for probabilities p of shape [n, 1].",
)
bce_loss = row("bce_loss(input, label, name=None)", "The binary cross entropy of probabilities and labels, element by element.")
huber_loss = row(
    "huber_loss(input, label, delta: float)",
    "Half the squared error if the error is within `delta`, else delta * (|error| - delta / 2).", result=1, delta=above_zero,
)
margin_rank_loss = row(
    "margin_rank_loss(label, left, right, margin=0.1, name=None)",
    "max(0, margin - label * (left - right)) for labels 1 (left ranks higher) and -1, element by element.",
    slots=["left", "right", "label"], result=0,
)

square_error_cost = row("square_error_cost(input, label)", """
    (input - label) squared, element by element.

    Shapes: input and label have one shape, which is that of the result.

    Types: input is float16, bfloat16, float32 or float64, and so is the result.

    Raises ProgramError when the shapes differ.

    >>> fx.layers.mean(fx.layers.square_error_cost(fx.data("y", [-1, 1], "float32"), fx.data("label", [-1, 1], "float32")))
    <Variable mean_0.tmp_0: f32[1]>
    """)

sigmoid_cross_entropy_with_logits = row("sigmoid_cross_entropy_with_logits(x, label, ignore_index=-100, name=None, normalize=False)", """
    The binary cross entropy of sigmoid(x) and labels in [0, 1], element by element, computed without overflow.

    A label of `ignore_index` has loss 0; `normalize` divides by the number of labels that count.

    Shapes: x and label have one shape, which is that of the result.

    Types: x and label are floats, and so is the result.

    Raises ProgramError when the shapes differ.

    >>> fx.layers.sigmoid_cross_entropy_with_logits(fx.data("x", [-1, 5], "float32"), fx.data("label", [-1, 5], "float32"))
    <Variable sigmoid_cross_entropy_with_logits_0.tmp_0: f32[-1,5]>
    """)

smooth_l1 = row(
    "smooth_l1(x, y, inside_weight: Variable | None = None, outside_weight: Variable | None = None, sigma: float | None = None)", """
    The smooth L1 loss of each sample, [n, 1]. It is the sum over the elements of d * d * sigma² / 2 if |d| < 1 / sigma², else |d| - 0.5
    / sigma², with d = (x - y) * inside_weight. Each term is multiplied by `outside_weight`.
    """, "smooth_l1_loss", kind="smooth_l1_loss", result=1)

kldiv_loss = row("kldiv_loss(x, target, reduction='mean', name=None)", """
    target * (log(target) - x) for log-probabilities x: its \"mean\", its \"sum\", the sum over the batch size (\"batchmean\"), or \"none\".
    """, reduction=among("none", "batchmean", "mean", "sum"))
# fmt: on

__all__ = [
    "bce_loss", "cross_entropy", "dice_loss", "huber_loss", "kldiv_loss", "log_loss", "margin_rank_loss", "mse_loss",
    "sigmoid_cross_entropy_with_logits", "smooth_l1", "softmax_with_cross_entropy", "square_error_cost",
]  # fmt: skip
