"""Scores of ai.onnx.ml models: `post_transform`, and labels of classes."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

from ...ir import Variable
from ..node import Node

_ZERO = 1e-7  # SOFTMAX_ZERO treats smaller numbers as 0: float32 has no finer steps next to 1
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


def logistic(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    e = np.exp(np.minimum(x, 0))
    return np.asarray(e / (e + np.exp(np.minimum(-x, 0))))


def transformed(n: Node, scores: np.ndarray, how: str) -> np.ndarray:
    """The scores [rows, classes] after `post_transform`. As in ONNX Runtime, a single score only has PROBIT."""
    if how == "NONE" or (scores.shape[-1] == 1 and how in TRANSFORMS and how != "PROBIT"):
        return scores
    if how == "LOGISTIC":
        return logistic(scores)
    if how == "SOFTMAX":
        e = np.exp(scores - scores.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    if how == "SOFTMAX_ZERO":
        e = np.where(np.abs(scores) <= _ZERO, 0, np.exp(scores - scores.max(-1, keepdims=True)))
        return e / np.maximum(e.sum(-1, keepdims=True), np.finfo(e.dtype).tiny)
    if how == "PROBIT":
        return _probit(scores)
    raise n.wrong(f"post_transform must be one of {', '.join(TRANSFORMS)}, found {how!r}")


def _probit(p: np.ndarray) -> np.ndarray:
    """The quantile p of the normal distribution; NaN outside of [0, 1]."""
    inverse = NormalDist().inv_cdf
    flat = [inverse(v) if 0 < v < 1 else np.inf * np.sign(v - 0.5) if v in (0, 1) else np.nan for v in p.ravel().tolist()]
    return np.array(flat, p.dtype).reshape(p.shape)


def transformed_in_program(n: Node, scores: Variable, how: str) -> Variable:
    """`transformed` for scores that a program computes."""
    _check_in_program(n, how)
    if how == "NONE" or scores.shape[-1] == 1:
        return scores
    return n.b.sigmoid(scores) if how == "LOGISTIC" else n.b.softmax(scores, axis=-1)


def _check_in_program(n: Node, how: str) -> None:
    if how not in ("NONE", "LOGISTIC", "SOFTMAX"):
        raise n.wrong(f"a program has post_transform NONE, SOFTMAX and LOGISTIC, found {how!r}; fx.onnx.session runs it")


def labels_of(n: Node, ints: str) -> np.ndarray | None:
    """The labels of the classes, numbers or strings; None if the node has none."""
    texts, numbers = n.attr("classlabels_strings"), n.attr(ints)
    if texts:
        return np.array(texts, object)
    return np.array(numbers, np.int64) if numbers else None


def floats(n: Node, name: str, dtype: Any = np.float32) -> np.ndarray:
    """An attribute that is a list of floats, or the tensor attribute in its place."""
    found = n.attr(f"{name}_as_tensor")
    return n.floats(name).astype(dtype) if found is None else found


def of_two_classes(n: Node, score: np.ndarray, how: str, shares: bool) -> np.ndarray:
    """Both columns for the one score, which is that of the second class. With `shares` they add up to 1, else they are opposite."""
    if how == "PROBIT":
        return _probit(score)[:, None]
    if how == "LOGISTIC":
        return logistic(_two_columns(-score, score))
    if how not in TRANSFORMS:
        raise n.wrong(f"post_transform must be one of {', '.join(TRANSFORMS)}, found {how!r}")
    return _two_columns(1 - score if shares else -score, score)


def _two_columns(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """np.stack in a third of its time."""
    both = np.empty((len(first), 2), first.dtype)
    both[:, 0], both[:, 1] = first, second
    return both


def of_two_in_program(n: Node, score: Variable, how: str) -> Variable:
    """`of_two_classes` for scores [rows, 1] that a program computes, with shares."""
    _check_in_program(n, how)
    other = n.b.scale(score, scale=-1.0, bias=0.0 if how == "LOGISTIC" else 1.0)
    both = n.b.concat([other, score], axis=1)
    return n.b.sigmoid(both) if how == "LOGISTIC" else both


def class_labels(n: Node, predicted: Variable, labels: np.ndarray | None) -> Variable:
    """The labels for positions of classes [rows], or the positions if there are no labels."""
    return predicted if labels is None else n.b.index_select(n.importer.variable(labels), predicted, dim=0)
