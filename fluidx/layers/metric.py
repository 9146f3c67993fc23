"""Metrics that are computed in the program."""

from __future__ import annotations

from .._checks import whole, wrong
from ..ir import Variable
from .helper import LayerHelper


def accuracy(input: Variable, label: Variable, k: int = 1, correct: Variable | None = None, total: Variable | None = None) -> Variable:
    """The share of samples whose label is among the k highest scores, as float32 [1].

    input is [n, classes], label int64 [n, 1]. `correct` and `total`, int32 [1], receive the counts when they are given.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()):
    ...     scores, label = fx.data("x", [-1, 10], "float32"), fx.data("y", [-1, 1], "int64")
    ...     fx.layers.accuracy(scores, label, k=5).shape
    (1,)
    """
    helper = LayerHelper("accuracy")
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


__all__ = ["accuracy"]
