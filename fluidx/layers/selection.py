"""Layers that select elements by value, so that result sizes depend on values. A run plans the following operators when it knows the sizes.
"""

from __future__ import annotations

from typing import Any

from .._checks import number, whole, wrong
from ..ir import Variable, as_dtype
from .helper import LayerWriter
from .layer_from_signature import row


def _unique(kind: str, x: Variable, dtype: Any, counted: bool) -> tuple[Variable, ...]:
    helper = LayerWriter(kind)
    x = helper.variable(x, "x")
    helper.rank(x, "x", 1)
    dtype = as_dtype(dtype)
    if dtype not in ("int32", "int64"):
        raise wrong(f"{helper.label}: dtype, the dtype of positions, must be int32 or int64, got {dtype}")
    out, _, index, count = helper.op("unique", x, dtype=dtype, out={"First": None} if counted else {"First": None, "Count": None})
    return (out, index, count) if counted else (out, index)


def unique(x: Variable, dtype: Any = "int32") -> tuple[Variable, Variable]:
    """The distinct elements of a vector in order of first occurrence, and the position of each element of x among them, of `dtype`.

    >>> import numpy as np
    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()):
    ...     out, index = fx.layers.unique(fx.data("x", [-1], "int64"))
    >>> [v.tolist() for v in fx.Executor().run(main, feed={"x": np.array([2, 3, 3, 1, 5, 3])}, fetch_list=[out, index])]
    [[2, 3, 1, 5], [0, 1, 1, 2, 3, 1]]
    """
    out, index = _unique("unique", x, dtype, False)
    return out, index


def unique_with_counts(x: Variable, dtype: Any = "int32") -> tuple[Variable, Variable, Variable]:
    """As `unique`, and the count of each distinct element in x."""
    out, index, count = _unique("unique_with_counts", x, dtype, True)
    return out, index, count


def multiclass_nms(
    bboxes: Variable,
    scores: Variable,
    score_threshold: float,
    nms_top_k: int,
    keep_top_k: int,
    nms_threshold: float = 0.3,
    normalized: bool = True,
    nms_eta: float = 1.0,
    background_label: int = 0,
    name: str | None = None,
    return_index: bool = False,
    return_rois_num: bool = False,
) -> Any:
    """Non-maximum suppression for each class: rows of class, score, left, top, right, bottom.

    `bboxes` are [images, boxes, 4], `scores` [images, classes, boxes]. For each class except `background_label`, the `nms_top_k` boxes with
    the best scores above `score_threshold` are candidates. A candidate is removed if its IoU with a better one is above `nms_threshold`.
    `nms_eta` below 1 reduces this threshold after each box, down to 0.5. `keep_top_k` boxes of an image are kept, -1: all.

    fluid assigns rows to images by LoD. Here `return_rois_num` returns the number of rows of each image, [images] int32, and `return_index`
    the index of each row among all boxes, [rows, 1] int32. If nothing is found there are no rows; fluid returns one row of -1.
    """
    helper = LayerWriter("multiclass_nms", name)
    bboxes, scores = helper.variable(bboxes, "bboxes"), helper.variable(scores, "scores")
    left_out = {slot: None for slot, asked in (("Index", return_index), ("Count", return_rois_num)) if not asked}
    out, index, count = helper.op(
        "multiclass_nms", bboxes, scores, out=left_out or None,
        background_label=whole(helper.label, "background_label", background_label),
        score_threshold=number(helper.label, "score_threshold", score_threshold), nms_top_k=whole(helper.label, "nms_top_k", nms_top_k, -1),
        nms_threshold=number(helper.label, "nms_threshold", nms_threshold), nms_eta=number(helper.label, "nms_eta", nms_eta),
        keep_top_k=whole(helper.label, "keep_top_k", keep_top_k, -1), normalized=bool(normalized),
    )  # fmt: skip
    found = [v for v in (out, index, count) if v is not None]
    return found[0] if len(found) == 1 else tuple(found)


# fmt: off
masked_select = row("masked_select(x, mask, name=None)", """
    The elements of x where `mask`, a bool of its shape, is true, as a vector. These elements get the gradients.

    >>> import numpy as np
    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()):
    ...     x = fx.data("x", [-1, 3], "float32")
    ...     y = fx.layers.masked_select(x, x > 1.0)
    >>> fx.Executor().run(main, feed={"x": np.float32([[1, 2, 3]])}, fetch_list=[y])[0].tolist()
    [2.0, 3.0]
    """)
# fmt: on

__all__ = ["masked_select", "multiclass_nms", "unique", "unique_with_counts"]
