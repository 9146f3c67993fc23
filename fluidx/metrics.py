"""Metrics in Python over the batches of an epoch, from fetched values, under fluid's names.

`update` takes the values of a batch, `eval` gives the metric of all batches since `reset`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._checks import whole, wrong
from .fluid_names import module_getattr


class MetricBase:
    """Base of the metrics. A subclass defines `reset`, `update` and `eval`."""

    def __init__(self, name: str | None = None):
        self._name = name if name is not None else type(self).__name__

    def __str__(self) -> str:
        return self._name

    def reset(self) -> None:
        """Forget all batches."""
        raise NotImplementedError(f"{type(self).__name__} does not define reset()")

    def get_config(self) -> dict[str, Any]:
        """The state of the metric, by the names of its attributes."""
        return {k: v for k, v in vars(self).items() if not k.startswith("_")}

    def update(self, preds: Any, labels: Any) -> None:
        """Take a batch into account."""
        raise NotImplementedError(f"{type(self).__name__} does not define update()")

    def eval(self) -> Any:
        """The metric of all batches so far."""
        raise NotImplementedError(f"{type(self).__name__} does not define eval()")

    @property
    def _label(self) -> str:
        return f"metrics.{type(self).__name__}"

    def _array(self, what: str, value: Any) -> np.ndarray:
        if not isinstance(value, (np.ndarray, np.generic)):
            raise wrong(f"{self._label}: {what} must be an array as run() fetches it, got {type(value).__name__}")
        return np.asarray(value)

    def _number(self, what: str, value: Any) -> float:
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.number, np.ndarray)) or np.size(value) != 1:
            raise wrong(f"{self._label}: {what} must be a number or an array of one, got {type(value).__name__}: {value!r:.60}")
        return float(np.asarray(value).reshape(-1)[0])


class CompositeMetric(MetricBase):
    """Several metrics of the same values: `eval` gives a list."""

    def __init__(self, name: str | None = None):
        super().__init__(name)
        self._metrics: list[MetricBase] = []

    def add_metric(self, metric: MetricBase) -> None:
        """Add a metric."""
        if not isinstance(metric, MetricBase):
            raise wrong(f"{self._label}: a metric must be one of fluidx.metrics, got {type(metric).__name__}")
        self._metrics.append(metric)

    def reset(self) -> None:
        for m in self._metrics:
            m.reset()

    def update(self, preds: Any, labels: Any) -> None:
        for m in self._metrics:
            m.update(preds, labels)

    def eval(self) -> list[Any]:
        return [m.eval() for m in self._metrics]


class _Share(MetricBase):
    """The share of true positives among true positives and other samples, which a subclass counts."""

    def __init__(self, name: str | None = None):
        super().__init__(name)
        self.tp = self.other = 0
        self.reset()

    def reset(self) -> None:
        self.tp = self.other = 0

    def _count(self, preds: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
        found, right = self._array("preds", preds), self._array("labels", labels)
        if found.size != right.size:
            raise wrong(f"{self._label}: preds have {found.size} elements and labels {right.size}; both are one for each sample")
        return np.rint(found.reshape(-1)).astype("int64") == 1, right.reshape(-1) == 1

    def eval(self) -> float:
        total = self.tp + self.other
        return self.tp / total if total else 0.0


class Precision(_Share):
    """The share of truly positive samples among those predicted positive (a prediction that rounds to 1).

    >>> metric = Precision()
    >>> metric.update(preds=np.float32([[0.9], [0.8], [0.1]]), labels=np.int64([[1], [0], [1]]))
    >>> metric.eval()
    0.5
    """

    def update(self, preds: Any, labels: Any) -> None:
        found, right = self._count(preds, labels)
        self.tp += int(np.sum(found & right))
        self.other += int(np.sum(found & ~right))


class Recall(_Share):
    """The share of positive samples that were predicted positive (a prediction that rounds to 1).

    >>> metric = Recall()
    >>> metric.update(preds=np.float32([[0.9], [0.8], [0.1]]), labels=np.int64([[1], [0], [1]]))
    >>> metric.eval()
    0.5
    """

    def update(self, preds: Any, labels: Any) -> None:
        found, right = self._count(preds, labels)
        self.tp += int(np.sum(found & right))
        self.other += int(np.sum(~found & right))


class Accuracy(MetricBase):
    """The mean of the accuracies of batches, weighted, usually by the number of samples.

    >>> metric = Accuracy()
    >>> metric.update(value=np.float32([0.5]), weight=8); metric.update(value=1.0, weight=24)
    >>> metric.eval()
    0.875
    """

    def __init__(self, name: str | None = None):
        super().__init__(name)
        self.reset()

    def reset(self) -> None:
        self.value = self.weight = 0.0

    def update(self, value: Any, weight: Any) -> None:
        value, weight = self._number("value", value), self._number("weight", weight)
        if weight < 0:
            raise wrong(f"{self._label}: weight must be 0 or more, got {weight}")
        self.value += value * weight
        self.weight += weight

    def eval(self) -> float:
        if not self.weight:
            raise wrong(f"{self._label}: there is nothing to average yet; call update() first")
        return self.value / self.weight


class ChunkEvaluator(MetricBase):
    """Precision, recall and F1 of chunks, from the three counts of each batch.

    >>> metric = ChunkEvaluator()
    >>> metric.update(np.int64([10]), np.int64([8]), np.int64([4]))
    >>> metric.eval()
    (0.4, 0.5, 0.4444444444444445)
    """

    def __init__(self, name: str | None = None):
        super().__init__(name)
        self.reset()

    def reset(self) -> None:
        self.num_infer_chunks = self.num_label_chunks = self.num_correct_chunks = 0

    def update(self, num_infer_chunks: Any, num_label_chunks: Any, num_correct_chunks: Any) -> None:  # type: ignore[override]
        self.num_infer_chunks += int(self._number("num_infer_chunks", num_infer_chunks))
        self.num_label_chunks += int(self._number("num_label_chunks", num_label_chunks))
        self.num_correct_chunks += int(self._number("num_correct_chunks", num_correct_chunks))

    def eval(self) -> tuple[float, float, float]:
        precision = self.num_correct_chunks / self.num_infer_chunks if self.num_infer_chunks else 0.0
        recall = self.num_correct_chunks / self.num_label_chunks if self.num_label_chunks else 0.0
        both = precision + recall
        return precision, recall, 2 * precision * recall / both if self.num_correct_chunks else 0.0


class EditDistance(MetricBase):
    """(mean edit distance, share of sequences with a distance above 0), from the distances [sequences, 1] of each batch.

    >>> metric = EditDistance()
    >>> metric.update(np.float32([[0], [2], [4]]), 3)
    >>> metric.eval()
    (2.0, 0.6666666666666666)
    """

    def __init__(self, name: str | None = None):
        super().__init__(name)
        self.reset()

    def reset(self) -> None:
        self.total_distance, self.seq_num, self.instance_error = 0.0, 0, 0

    def update(self, distances: Any, seq_num: Any) -> None:
        found, count = self._array("distances", distances), int(self._number("seq_num", seq_num))
        self.total_distance += float(found.sum())
        self.instance_error += count - int(np.sum(found == 0))
        self.seq_num += count

    def eval(self) -> tuple[float, float]:
        if not self.seq_num:
            raise wrong(f"{self._label}: there are no sequences yet; call update() first")
        return self.total_distance / self.seq_num, self.instance_error / self.seq_num


class Auc(MetricBase):
    """The area under the ROC curve, from scores [n, 2], whose column 1 is that of the positive class, and labels [n, 1].

    Scores are counted in `num_thresholds` + 1 buckets over [0, 1]. `curve` is "ROC".

    >>> metric = Auc(name="auc")
    >>> metric.update(preds=np.float32([[0.1, 0.9], [0.6, 0.4], [0.3, 0.7], [0.8, 0.2]]), labels=np.int64([[1], [0], [0], [1]]))
    >>> metric.eval()
    0.5
    """

    def __init__(self, name: str | None = None, curve: str = "ROC", num_thresholds: int = 4095):
        super().__init__(name)
        if curve != "ROC":
            raise wrong(f"{self._label}: curve={curve!r} is not supported; there is 'ROC'")
        self.curve, self.num_thresholds = curve, whole(self._label, "num_thresholds", num_thresholds, 1)
        self.reset()

    def reset(self) -> None:
        self._positive, self._negative = np.zeros(self.num_thresholds + 1), np.zeros(self.num_thresholds + 1)

    def update(self, preds: Any, labels: Any) -> None:
        scores, right = self._array("preds", preds), self._array("labels", labels).reshape(-1)
        if scores.ndim != 2 or len(scores) != len(right):
            raise wrong(f"{self._label}: preds must be [n, 2] and labels [n, 1], got {list(scores.shape)} and {len(right)} labels")
        at = (np.clip(scores[:, -1].astype("float64"), 0.0, 1.0) * self.num_thresholds).astype("int64")
        np.add.at(self._positive, at[right != 0], 1)
        np.add.at(self._negative, at[right == 0], 1)

    def eval(self) -> float:
        positive, negative = np.cumsum(self._positive[::-1]), np.cumsum(self._negative[::-1])
        if not positive[-1] or not negative[-1]:
            return 0.0
        before = np.concatenate([[0.0], positive[:-1]])
        return float(np.sum(self._negative[::-1] * (before + positive)) / 2 / (positive[-1] * negative[-1]))


__all__ = ["Accuracy", "Auc", "ChunkEvaluator", "CompositeMetric", "EditDistance", "MetricBase", "Precision", "Recall"]
__getattr__ = module_getattr("metrics", __all__)
