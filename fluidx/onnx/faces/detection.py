"""Boxes, and the weights of a mel spectrogram: what is computed on the host, of values that steer what follows."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..limits import room
from ..node import Node
from ..values import numpy_dtype
from . import host


@host("NonMaxSuppression", computes=True)
def non_max_suppression(n: Node) -> object:
    """A score has to lie above the threshold: ONNX Runtime and TensorFlow leave away what equals it, such as scores padded with 0."""
    boxes, scores, *limits = n.values()
    count, overlap, threshold = [None if v is None else np.asarray(v).item() for v in [*limits, None, None, None][:3]]
    corners = _corners(boxes, n.attr("center_point_box", 0))
    chosen = [
        (batch, c, box)
        for batch in range(scores.shape[0])
        for c in range(scores.shape[1])
        for box in _chosen(corners[batch], scores[batch, c], int(count or 0), overlap or 0.0, threshold)
    ]
    return np.array(chosen, np.int64).reshape(-1, 3)


def _corners(boxes: np.ndarray, centered: int) -> np.ndarray:
    """Boxes as [low, low, high, high]."""
    a, b = boxes[..., :2], boxes[..., 2:]
    if centered:
        return np.concatenate([a - b / 2, a + b / 2], -1)
    return np.concatenate([np.minimum(a, b), np.maximum(a, b)], -1)


def _chosen(boxes: np.ndarray, scores: np.ndarray, count: int, overlap: float, threshold: Any) -> list[int]:
    """Boxes by falling score, without those that cover one before by more than `overlap` of their union."""
    left = np.argsort(-scores, kind="stable")
    if threshold is not None:
        left = left[scores[left] > threshold]
    areas = np.prod(boxes[:, 2:] - boxes[:, :2], -1)
    chosen: list[int] = []
    while len(left) and len(chosen) < count:
        best, left = left[0], left[1:]
        chosen.append(int(best))
        sides = np.minimum(boxes[best, 2:], boxes[left, 2:]) - np.maximum(boxes[best, :2], boxes[left, :2])
        common = np.prod(np.maximum(sides, 0), -1)
        union = areas[best] + areas[left] - common
        left = left[~(np.divide(common, union, out=np.zeros_like(common), where=union > 0) > overlap)]
    return chosen


@host("MelWeightMatrix")
def mel_weight_matrix(n: Node) -> object:
    """Column k is a triangle over the bins from edge k up to edge k + 1, which has weight 1, and down to edge k + 2."""
    bins, length, rate, low, high = (np.asarray(v).item() for v in n.values())
    room([length // 2 + 1, bins + 2])
    low_mel, high_mel = (2595 * np.log10(1 + hertz / 700) for hertz in (low, high))
    mels = low_mel + np.arange(bins + 2) * (high_mel - low_mel) / (bins + 2)
    edges = ((length + 1) * 700 * (10 ** (mels / 2595) - 1) // rate).astype(np.int64)
    left, top, right = (edges[k : k + bins] for k in range(3))
    at = np.arange(length // 2 + 1)[:, None]
    up = np.where((at >= left) & (at <= top), (at - left) / np.maximum(top - left, 1), 0)
    up = np.where((top == left) & (at == top), 1, up)
    down = np.where((at > top) & (at < right), (right - at) / np.maximum(right - top, 1), 0)
    return (up + down).astype(numpy_dtype(n.attr("output_datatype", 1)))
