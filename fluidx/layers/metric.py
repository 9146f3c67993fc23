"""Metrics computed in the program: accuracy and auc."""

from __future__ import annotations

from .._checks import whole, wrong
from ..ir import Variable
from .declare import create_global_var
from .helper import LayerWriter


def accuracy(input: Variable, label: Variable, k: int = 1, correct: Variable | None = None, total: Variable | None = None) -> Variable:
    """The share of samples whose label is among the k highest scores, as float32 [1].

    input is [n, classes], label int64 [n, 1]. `correct` and `total`, int32 [1], receive the counts when they are given.

    Raises ProgramError when k is above the number of classes.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()):
    ...     scores, label = fx.data("x", [-1, 10], "float32"), fx.data("y", [-1, 1], "int64")
    ...     fx.layers.accuracy(scores, label, k=5).shape
    (1,)
    """
    helper = LayerWriter("accuracy")
    x, label = helper.variable(input, "input"), helper.variable(label, "label")
    helper.rank(x, "input", 2)
    k = whole(helper.label, "k", k, 1)
    if 0 <= x.shape[1] < k:
        raise wrong(f"{helper.label}: k is {k}, variable {x.name!r} has {x.shape[1]} classes")
    values, indices = helper.op("top_k", x, k=k)
    out = {slot: v for slot, v in (("Correct", correct), ("Total", total)) if v is not None}
    share, *_ = helper.op("accuracy", values, indices, label, out=out)
    share.stop_gradient = True
    return share


def auc(
    input: Variable, label: Variable, curve: str = "ROC", num_thresholds: int = 2**12 - 1, topk: int = 1, slide_steps: int = 1
) -> tuple[Variable, Variable, list[Variable]]:
    """The area under the ROC curve, float64 [1]: (of all batches so far, of the last `slide_steps` batches, [counts]).

    The last column of input [n, 2], or [n, 1], is the score of the positive class; label is int64 [n, 1]. State variables count the scores
    in `num_thresholds` + 1 buckets over [0, 1]: positive and negative ones of the last batches, and of all batches. `slide_steps=0` uses
    all batches as the last ones; `topk` has no effect.

    >>> import numpy as np
    >>> import fluidx as fx
    >>> main, startup = fx.Program(), fx.Program()
    >>> with fx.program_guard(main, startup):
    ...     score, label = fx.data("x", [None, 2], "float32"), fx.data("y", [None, 1], "int64")
    ...     all_batches, last, _ = fx.layers.auc(score, label)
    >>> exe = fx.Executor()
    >>> _ = exe.run(startup)
    >>> feed = {"x": np.float32([[0.1, 0.9], [0.6, 0.4], [0.3, 0.7]]), "y": np.array([[1], [0], [0]])}
    >>> [v.tolist() for v in exe.run(main, feed=feed, fetch_list=[all_batches, last])]
    [[1.0], [1.0]]
    """
    helper = LayerWriter("auc")
    x, label = helper.variable(input, "input"), helper.variable(label, "label")
    helper.rank(x, "input", 2)
    if curve != "ROC":
        raise wrong(f"{helper.label}: curve={curve!r} is not supported; the only one is 'ROC'")
    buckets = whole(helper.label, "num_thresholds", num_thresholds, 1) + 1
    window = whole(helper.label, "slide_steps", slide_steps, 0)
    width = helper.known(x, "input", 1)
    score = helper.op("clip", helper.op("slice", x, axes=(1,), starts=(width - 1,), ends=(width,)), min=0.0, max=1.0)
    at = helper.op("cast", helper.op("scale", score, scale=float(buckets - 1)), dtype="int64")
    zero = helper.op("fill_constant", shape=(1,), dtype=label.dtype, value=0.0)
    right = helper.op("cast", helper.op("not_equal", helper.op("reshape", label, shape=(-1,)), zero), dtype="int64")
    none = helper.op("fill_constant", shape=(buckets,), dtype="int64", value=0.0)
    counts = [helper.op("scatter_nd_add", none, at, v) for v in (right, helper.op("scale", right, scale=-1.0, bias=1.0))]
    of_all = []
    for v, what in zip(counts, ("stat_pos", "stat_neg")):
        total = create_global_var([buckets], 0, "int64", persistable=True, name=helper.fresh(what))
        of_all.append(helper.op("elementwise_add", total, v, out={"Out": total}))
    last = counts if window == 1 else [_of_window(helper, v, window, buckets) for v in counts] if window else of_all
    areas = [_area(helper, *both) for both in (of_all, last)]
    for v in (*areas, *last, *of_all):
        v.stop_gradient = True
    return areas[0], areas[1], [*last, *of_all]


def _of_window(helper: LayerWriter, counts: Variable, steps: int, buckets: int) -> Variable:
    """The sum of the counts of the last `steps` batches, including this one."""
    kept = create_global_var([steps, buckets], 0, "int64", persistable=True, name=helper.fresh("batch_stat"))
    later = helper.op("slice", kept, axes=(0,), starts=(1,), ends=(steps,))
    now = helper.op("concat", [later, helper.op("reshape", counts, shape=(1, buckets))], axis=0)
    return helper.op("reduce_sum", helper.op("assign", now, out={"Out": kept}), dim=(0,))


def _area(helper: LayerWriter, positive: Variable, negative: Variable) -> Variable:
    """The area under the curve by trapezoids, from the highest scores down; 0 if there are no positives or no negatives."""
    positive, negative = (helper.op("cast", v, dtype="float64") for v in (positive, negative))
    above = helper.op("elementwise_sub", helper.op("cumsum", positive, axis=0, reverse=True), helper.op("scale", positive, scale=0.5))
    area = helper.op("reduce_sum", helper.op("elementwise_mul", negative, above), dim=())
    pairs = helper.op("elementwise_mul", *(helper.op("reduce_sum", v, dim=()) for v in (positive, negative)))
    one = helper.op("fill_constant", shape=(1,), dtype="float64", value=1.0)
    return helper.op("elementwise_div", area, helper.op("elementwise_max", pairs, one))


__all__ = ["accuracy", "auc"]
