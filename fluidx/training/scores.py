"""Scores of predictions on the validation examples, by name: accuracy, f1, mae, ..."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import exp
from typing import Any

import numpy as np

from ..metrics import Accuracy, Auc, MetricBase, Precision, Recall
from ..onnx.errors import OnnxError
from ..onnx.losses import Loss

_LARGEST = 700.0  # e to a higher power overflows


class ShareRight(Accuracy):
    """The share of predictions that are their label."""

    def update(self, preds: Any, labels: Any) -> None:
        if labels.size:
            super().update(float(np.mean(preds == labels)), labels.size)


class MeanOverClasses(MetricBase):
    """The mean over the classes of a function of (precision, recall) of each."""

    def __init__(self, of: Callable[[float, float], float], name: str):
        super().__init__(name)
        self._of = of
        self.reset()

    def reset(self) -> None:
        self._classes: dict[int, tuple[Precision, Recall]] = defaultdict(lambda: (Precision(), Recall()))

    def update(self, preds: Any, labels: Any) -> None:
        for c in np.union1d(preds, labels):
            for metric in self._classes[int(c)]:
                metric.update((preds == c).astype("float32"), (labels == c).astype("int64"))

    def eval(self) -> float:
        return float(np.mean([self._of(p.eval(), r.eval()) for p, r in self._classes.values()])) if self._classes else 0.0


class OfErrors(MetricBase):
    """A function of the sums of |error|, of error² and of (label - mean of labels)², and of their number."""

    def __init__(self, of: Callable[[float, float, float, int], float], name: str):
        super().__init__(name)
        self._of = of
        self.reset()

    def reset(self) -> None:
        self._sums, self._mean, self._count = np.zeros(3), 0.0, 0

    def update(self, preds: Any, labels: Any) -> None:
        y = np.asarray(labels, "float64")
        if not y.size:
            return
        d = preds - y
        mean = y.flat[0] + np.mean(y - y.flat[0])  # exact if all are equal
        count, apart = self._count + y.size, mean - self._mean
        between = apart * apart * self._count * (y.size / count)  # as Chan, Golub and LeVeque join the spreads of two samples
        self._sums += [np.abs(d).sum(), (d * d).sum(), ((y - mean) ** 2).sum() + between]
        self._mean, self._count = mean if not self._count else self._mean + apart * (y.size / count), count

    def eval(self) -> float:
        absolute, squared, spread = map(float, self._sums)
        return float(self._of(absolute, squared, spread, self._count))


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _r2(absolute: float, squared: float, spread: float, count: int) -> float:
    return 1 - squared / spread if spread > 0 else 0.0


OF_CLASSES: dict[str, Callable[[], MetricBase]] = {
    "accuracy": ShareRight,
    "f1": lambda: MeanOverClasses(_f1, "f1"),
    "precision": lambda: MeanOverClasses(lambda p, r: p, "precision"),
    "recall": lambda: MeanOverClasses(lambda p, r: r, "recall"),
    "auc": Auc,
}
OF_NUMBERS: dict[str, Callable[[], MetricBase]] = {
    "mae": lambda: OfErrors(lambda a, s, v, n: a / n, "mae"),
    "mse": lambda: OfErrors(lambda a, s, v, n: s / n, "mse"),
    "rmse": lambda: OfErrors(lambda a, s, v, n: (s / n) ** 0.5, "rmse"),
    "r2": lambda: OfErrors(_r2, "r2"),
}
PERPLEXITY = "perplexity"  # e to the power of the loss, of the tokens that count
METRICS = (*OF_CLASSES, PERPLEXITY, *OF_NUMBERS)
LOWER_IS_BETTER = {"mae", "mse", "rmse", "loss", PERPLEXITY}


class Score:
    """A metric of a loss's kind of output. f1, precision and recall are means over the classes.

    >>> score = Score("f1", Loss("softmax_with_cross_entropy"))
    >>> score.update(np.eye(2)[[0, 1, 1, 1]], np.array([[0], [0], [1], [1]]))
    >>> round(score.eval(), 4)  # of class 0: precision 1, recall 1/2; of class 1: precision 2/3, recall 1
    0.7333
    """

    def __init__(self, name: str, loss: Loss):
        self.name, self.loss = name, loss
        self._of_classes = loss.head.class_axis is not None or loss.head.yes_or_no
        metrics = OF_CLASSES if self._of_classes else OF_NUMBERS
        if name == PERPLEXITY:
            self._check_perplexity()
        elif name not in metrics:
            kind = "classes" if self._of_classes else "numbers"
            raise OnnxError(f"--metric {name} does not fit --loss {loss.name}, whose labels are {kind}; there are: {', '.join(metrics)}")
        self._metric = metrics[name]() if name != PERPLEXITY else None

    def _check_perplexity(self) -> None:
        loss = self.loss
        if loss.head.class_axis != -1 or not loss.head.counts_labels:
            fit = "causal_language_model or token_classification"
            raise OnnxError(f"--metric {PERPLEXITY} does not fit --loss {loss.name}: it is of tokens, with --loss {fit}")
        if not has_perplexity(loss):
            raise OnnxError(f"--metric {PERPLEXITY} follows from a loss without --class-weight and --label-smoothing; leave them out")

    def reset(self) -> None:
        if self._metric is not None:
            self._metric.reset()

    def update(self, output: np.ndarray, label: np.ndarray) -> None:
        """Take a batch of outputs and labels into account."""
        if self._metric is None:
            return
        if self.name == "auc":
            self._metric.update(*self._probabilities(output, label))
        elif not self._of_classes:
            self._metric.update(output, label)
        elif self.loss.head.class_axis is None:
            self._metric.update(output.ravel() > 0, label.ravel() > 0.5)
        else:
            self._metric.update(*self._classes(output, label))

    def eval(self, loss: float = np.nan) -> float:
        """The score of what was taken into account, of which `loss` is the mean loss."""
        return float(self._metric.eval()) if self._metric is not None else exp(min(loss, _LARGEST))

    def _classes(self, output: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The predicted class and the label at each position that counts."""
        axis, head = self.loss.head.class_axis, self.loss.head
        assert axis is not None
        found = output.argmax(axis=axis)
        label = label.reshape(found.shape)
        if head.predicts_next:
            found, label = found[:, :-1], label[:, 1:]
        counts = label != self.loss.ignore_index
        return found[counts], label[counts]

    def _probabilities(self, output: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores between 0 and 1 that rise with those of the second class."""
        two = self.loss.head.class_axis is not None
        if two and (output.ndim != 2 or output.shape[1] != 2):
            raise OnnxError(f"--metric auc is for two classes, and the output of the model has shape {list(output.shape)}")
        rise = np.float64(output[:, 1] - output[:, 0] if two else output.ravel())
        p = 0.5 * (1 + np.tanh(rise / 2))
        return np.stack([1 - p, p], axis=1), label.reshape(-1, 1) > 0.5


def has_perplexity(loss: Loss) -> bool:
    """Is the loss the mean of -log p over tokens?"""
    return loss.head.class_axis == -1 and loss.head.counts_labels and loss.class_weight is None and not loss.label_smoothing


def shown(name: str, value: float) -> str:
    """
    >>> shown("accuracy", 0.9375), shown("rmse", 2.5)
    ('accuracy 93.8%', 'rmse 2.5')
    """
    return f"{name} {value:.1%}" if name in OF_CLASSES else f"{name} {value:.4g}"
