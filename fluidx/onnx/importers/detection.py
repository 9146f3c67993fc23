"""Import of NonMaxSuppression and MelWeightMatrix."""

from __future__ import annotations

import numpy as np

from ...ops.data.boxes import NonMaxSuppression
from ..import_tables import dynamic, on_numpy
from ..limits import checked_shape
from ..node import Node
from ..values import numpy_dtype


@on_numpy("NonMaxSuppression", pure=True)
def non_max_suppression(n: Node) -> object:
    """A score must be above the threshold. ONNX Runtime and TensorFlow drop equal scores too, such as scores padded with 0."""
    boxes, scores, *limits = [None if v is None else np.asarray(v) for v in n.values()]
    center = bool(n.attr("center_point_box", 0))
    return NonMaxSuppression.kernel(np, boxes, scores, *[*limits, None, None, None][:3], center_point_box=center)


@dynamic("NonMaxSuppression", 0, 1, 2, 3, 4)
def computed_non_max_suppression(n: Node) -> object:
    limits = [n.x(k) for k in range(2, 5)]
    return n.b.non_max_suppression(n.x(0), n.x(1), *limits, center_point_box=bool(n.attr("center_point_box", 0)))


@on_numpy("MelWeightMatrix")
def mel_weight_matrix(n: Node) -> object:
    """Column k is a triangle over the bins: it rises from edge k to weight 1 at edge k + 1, and falls to edge k + 2."""
    bins, length, rate, low, high = (np.asarray(v).item() for v in n.values())
    checked_shape([length // 2 + 1, bins + 2])
    low_mel, high_mel = (2595 * np.log10(1 + hertz / 700) for hertz in (low, high))
    mels = low_mel + np.arange(bins + 2) * (high_mel - low_mel) / (bins + 2)
    edges = ((length + 1) * 700 * (10 ** (mels / 2595) - 1) // rate).astype(np.int64)
    left, top, right = (edges[k : k + bins] for k in range(3))
    at = np.arange(length // 2 + 1)[:, None]
    up = np.where((at >= left) & (at <= top), (at - left) / np.maximum(top - left, 1), 0)
    up = np.where((top == left) & (at == top), 1, up)
    down = np.where((at > top) & (at < right), (right - at) / np.maximum(right - top, 1), 0)
    return (up + down).astype(numpy_dtype(n.attr("output_datatype", 1)))
