"""Ops that select boxes by score and drop those with too much overlap with a better one: non_max_suppression, multiclass_nms."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Autocast, Control
from ...ir.opdef import OpDef, Sample
from ...ir.types import ANY, TensorType
from ..shared.types import meet, need_ndim, same_dtype


class NonMaxSuppression(OpDef):
    """For each image and class the boxes with the best scores, without those that overlap a better one by more than IouThreshold of their
    union.

    Boxes are [images, boxes, 4]: two corners (y, x), or with `center_point_box` centers and sides. Scores are [images, classes, boxes]. Out
    has a row for each selected box: image, class, box. At most MaxOutput boxes per class (none, if it is absent) are selected, with scores
    above ScoreThreshold.
    """

    name = "non_max_suppression"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(mixed="float32")
    inputs = ("Boxes", "Scores", "MaxOutput?", "IouThreshold?", "ScoreThreshold?")
    attrs = {"center_point_box": False}
    control = Control(sized_by_values=("n",))

    @staticmethod
    def infer(boxes, scores, most=None, overlap=None, threshold=None, *, center_point_box):
        _need_boxes("non_max_suppression", "Boxes", boxes, scores)
        for slot, t in (("MaxOutput", most), ("IouThreshold", overlap), ("ScoreThreshold", threshold)):
            if t is not None and t.numel not in (1, ANY):
                raise ProgramError(f"op non_max_suppression: {slot} must be one number, found {t}")
        return TensorType("int64", (ANY, 3))

    @staticmethod
    def kernel(xp, boxes, scores, most, overlap, threshold, *, center_point_box):
        count, least_union, least = [None if v is None else v.item() for v in (most, overlap, threshold)]
        corners = _corners(boxes, center_point_box)
        chosen = [
            (image, kind, box)
            for image in range(scores.shape[0])
            for kind in range(scores.shape[1])
            for box in best_boxes(corners[image], scores[image, kind], int(count or 0), least_union or 0.0, least)
        ]
        return np.array(chosen, np.int64).reshape(-1, 3)

    @staticmethod
    def samples():
        boxes = np.array([[[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, -0.1, 1, 0.9], [0, 10, 1, 11], [0, 10.1, 1, 11.1]]], "float32")
        scores = np.array([[[0.9, 0.75, 0.6, 0.95, 0.5]]], "float32")
        why = "positions have no gradient"
        yield Sample.of(boxes, scores, np.array([3]), np.array([0.5], "float32"), np.array([0.0], "float32"), grad=(), why=why)
        yield Sample.of(boxes, scores, np.array(1), center_point_box=True, grad=(), why=why)
        yield Sample.of(boxes, scores, grad=(), why=why)


class MulticlassNms(OpDef):
    """The boxes of all classes in an image: rows of class, score and the four corner coordinates (left, top, right, bottom).

    BBoxes are [images, boxes, 4], Scores [images, classes, boxes]. For each class but `background_label`, the candidates are the
    `nms_top_k` best boxes (-1: all) with a score above `score_threshold`. A candidate is dropped if it overlaps a better one by more than
    `nms_threshold` of their union; `nms_eta` reduces this threshold after each box while it is above 0.5. Of each image the `keep_top_k`
    best are kept (-1: all). Index is the flat index of each row's box among all boxes; Count is the number of rows of each image. Corners
    are pixels unless `normalized`.
    """

    name = "multiclass_nms"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(mixed="float32")
    inputs, outputs = ("BBoxes", "Scores"), ("Out", "Index?", "Count?")
    attrs = {
        "background_label": 0, "score_threshold": 0.0, "nms_top_k": -1, "nms_threshold": 0.3, "nms_eta": 1.0, "keep_top_k": -1,
        "normalized": True,
    }  # fmt: skip
    control = Control(sized_by_values=("n", "n", ""))

    @staticmethod
    def infer(boxes, scores, **attrs):
        _need_boxes("multiclass_nms", "BBoxes", boxes, scores)
        return boxes.with_shape((ANY, 6)), TensorType("int32", (ANY, 1)), TensorType("int32", (max(boxes.shape[0], scores.shape[0]),))

    @staticmethod
    def kernel(
        xp, boxes, scores, *, background_label, score_threshold, nms_top_k, nms_threshold, nms_eta, keep_top_k, normalized
    ):  # fmt: skip
        rows, index, counts = [], [], []
        for image, (here, by_class) in enumerate(zip(boxes, scores, strict=True)):
            found = [
                (kind, box)
                for kind, of_kind in enumerate(by_class)
                if kind != background_label
                for box in best_boxes(
                    here, of_kind, nms_top_k, nms_threshold, score_threshold, nms_eta, 0.0 if normalized else 1.0, looked_at=True
                )
            ]
            if 0 <= keep_top_k < len(found):
                order = np.argsort([-by_class[f] for f in found], kind="stable")[:keep_top_k]
                found = sorted((found[k] for k in order), key=lambda f: f[0])
            rows += [(kind, by_class[kind, box], *here[box]) for kind, box in found]
            index += [image * len(here) + box for _, box in found]
            counts.append(len(found))
        return np.array(rows, boxes.dtype).reshape(-1, 6), np.array(index, np.int32).reshape(-1, 1), np.array(counts, np.int32)

    @staticmethod
    def samples():
        boxes = np.array(
            [[[0, 0, 4, 4], [0, 0, 4, 3.8], [5, 5, 9, 9], [5, 6, 9, 9]], [[1, 1, 2, 2], [1, 1, 2, 3], [4, 4, 5, 5], [0, 0, 9, 9]]],
            "float32",
        )
        scores = np.array(
            [[[0.1] * 4, [0.9, 0.8, 0.2, 0.7], [0.3, 0.2, 0.6, 0.5]], [[0.2] * 4, [0.1, 0.1, 0.3, 0.1], [0.8, 0.9, 0.1, 0.2]]], "float32"
        )
        why = "the selection has no gradient"
        yield Sample.of(boxes, scores, score_threshold=0.15, grad=(), why=why)
        yield Sample.of(boxes, scores, keep_top_k=2, nms_top_k=3, nms_threshold=0.7, nms_eta=0.9, normalized=False, grad=(), why=why)


def _need_boxes(op: str, slot: str, boxes: TensorType, scores: TensorType) -> None:
    need_ndim(op, slot, boxes, 3)
    need_ndim(op, "Scores", scores, 3)
    if same_dtype(op, **{slot: boxes, "Scores": scores}) not in ("float32", "float64"):
        raise ProgramError(f"op {op}: {slot} and Scores must be float32 or float64, found {boxes.dtype}; use cast")
    if boxes.shape[2] not in (4, ANY) or not meet(boxes.shape[0], scores.shape[0]) or not meet(boxes.shape[1], scores.shape[2]):
        raise ProgramError(f"op {op}: expected {slot} [images, boxes, 4] and Scores [images, classes, boxes], found {boxes} and {scores}")


def _corners(boxes: np.ndarray, centered: bool) -> np.ndarray:
    """Boxes as [low, low, high, high]."""
    a, b = boxes[..., :2], boxes[..., 2:]
    if centered:
        return np.concatenate([a - b / 2, a + b / 2], -1)
    return np.concatenate([np.minimum(a, b), np.maximum(a, b)], -1)


def best_boxes(
    boxes: np.ndarray, scores: np.ndarray, count: int, overlap: float, threshold: Any, eta: float = 1.0, pixel: float = 0.0,
    looked_at: bool = False,
) -> list[int]:  # fmt: skip
    """Boxes by falling score, without those that overlap a selected one by more than `overlap` of their union: at most `count` boxes,
    selected among the `looked_at` best (-1: all). `eta` reduces `overlap` while it is above 0.5.

    A score must be above the threshold: ONNX Runtime and TensorFlow drop a score equal to it, such as padding with 0.
    """
    left = np.argsort(-scores, kind="stable")
    if threshold is not None:
        left = left[scores[left] > threshold]
    if looked_at:
        left, count = left[: len(left) if count < 0 else count], len(left)
    areas = np.prod(boxes[:, 2:] - boxes[:, :2] + pixel, -1)
    covered = np.zeros(len(scores))  # the largest overlap with a selected box; `overlap` may be reduced later
    chosen: list[int] = []
    while len(left) and len(chosen) < count:
        best, left = left[0], left[1:]
        chosen.append(int(best))
        sides = np.minimum(boxes[best, 2:], boxes[left, 2:]) - np.maximum(boxes[best, :2], boxes[left, :2]) + pixel
        common = np.prod(np.maximum(sides, 0), -1)
        union = areas[best] + areas[left] - common
        share = np.divide(common, union, out=np.zeros_like(common), where=union > 0)
        if eta < 1.0:
            share = covered[left] = np.maximum(covered[left], share)
            overlap *= eta if overlap > 0.5 else 1.0
        left = left[~(share > overlap)]
    return chosen
