"""Metrics, which training reports but does not differentiate: accuracy."""

from __future__ import annotations

import numpy as np

from ...ir.errors import ProgramError
from ...ir.opdef import OpDef, Sample
from ...ir.types import TensorType
from ..shared.samples import ints
from ..shared.types import merge_size, need_ids, need_ndim


class AccuracyOp(OpDef):
    """The fraction of rows whose Label is among the row's top-k Indices, and the two counts.

    Out and Indices are the results of top_k [n, k], Label is [n, 1] or [n]. Accuracy [1] is float32, Correct and Total [1] are int32;
    without rows the accuracy is 0.
    """

    name = "accuracy"
    inputs = ("Out", "Indices", "Label")
    outputs = ("Accuracy", "Correct", "Total")
    pattern = staticmethod(lambda ins, outs, attrs: f"~n ., n ., {'n .' if ins[2].ndim == 2 else 'n'} -> ., ., . | n:+ #n")

    @staticmethod
    def infer(out, indices, label):
        need_ndim("accuracy", "Indices", indices, 2)
        need_ids("accuracy", "Indices", indices)
        need_ids("accuracy", "Label", label)
        need_ndim("accuracy", "Label", label, 1, 2)
        if label.ndim == 2 and label.shape[1] != 1:
            raise ProgramError(f"op accuracy: Label must be [n, 1] or [n], found {label}")
        if out.ndim != 2:
            raise ProgramError(f"op accuracy: Out must be top_k's [n, k], found {out}")
        merge_size("accuracy", "the rows of Out and of Indices", out.shape[0], indices.shape[0])
        merge_size("accuracy", "the rows of Indices and of Label", indices.shape[0], label.shape[0])
        return TensorType("float32", (1,)), TensorType("int32", (1,)), TensorType("int32", (1,))

    @staticmethod
    def kernel(xp, values, indices, label, *, out, part=None):
        accuracy, correct, total = out
        n = indices.shape[0]
        hits = (indices == label.reshape(n, 1)).any(axis=1).sum()
        if accuracy is not None:
            accuracy[0] = hits / max(n if part is None else part.count, 1)
        if correct is not None:
            correct[0] = hits
        if total is not None:
            total[0] = n

    @staticmethod
    def samples():
        values = np.zeros((3, 2), "float32")
        yield Sample.of(values, np.array([[1, 0], [2, 1], [0, 2]]), np.array([[0], [0], [0]]), grad=(), why="it counts")
        yield Sample.of(np.zeros((6, 3), "float32"), ints(6, 3, high=5), ints(6, 1, high=5, seed=1), grad=(), why="it counts")
        yield Sample.of(values[:, :1], np.array([[1], [2], [0]]), np.array([1, 2, 0]), grad=(), why="it counts")
