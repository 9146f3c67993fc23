"""Linear models and support vector machines of ai.onnx.ml."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ...ir import Variable
from ..node import Node
from ..support_vectors import KINDS, SupportVectors
from ..table import dynamic, on_numpy
from ..values import Outputs
from .ml_scores import class_labels, floats, labels_of, of_two_classes, of_two_in_program, transformed, transformed_in_program
from .shape import known_sizes

_ML = "ai.onnx.ml"


def _rows(n: Node) -> np.ndarray:
    x = np.asarray(n.value(0))
    x = x.reshape(1, -1) if x.ndim < 2 else x
    return x if x.dtype == np.float64 else x.astype(np.float32)


class _Linear(NamedTuple):
    """The attributes of a linear model: coefficients [features, scores], intercepts or none."""

    coefficients: np.ndarray
    intercepts: np.ndarray
    labels: np.ndarray | None
    how: str

    @classmethod
    def of(cls, n: Node, scores: int, features: int = -1) -> _Linear:
        coefficients = np.ascontiguousarray(floats(n, "coefficients").reshape(scores, features).T)
        return cls(coefficients, floats(n, "intercepts"), labels_of(n, "classlabels_ints"), n.attr("post_transform", "NONE"))

    def scores(self, x: np.ndarray) -> np.ndarray:
        made = x @ self.coefficients
        return made + self.intercepts if self.intercepts.size else made


@on_numpy("LinearRegressor", domain=_ML, pure=True)
def linear_regressor(n: Node) -> object:
    m = n.cached(lambda: _Linear.of(n, n.attr("targets", 1)))
    return transformed(n, m.scores(_rows(n)), m.how).astype(np.float32)


@on_numpy("LinearClassifier", domain=_ML, pure=True)
def linear_classifier(n: Node) -> object:
    """With two labels and one score, the score is that of the second label."""
    x = _rows(n)
    m = n.cached(lambda: _Linear.of(n, -1, x.shape[1]))
    scores, labels, how = m.scores(x), m.labels, m.how
    if scores.shape[1] > 1:
        predicted = scores.argmax(1)
        scores = transformed(n, scores, how)
    else:
        predicted = (scores[:, 0] > 0).astype(np.int64)
        two = labels is not None and len(labels) == 2
        scores = of_two_classes(n, scores[:, 0], how, shares=True) if two else transformed(n, scores, how)
        labels = labels if two else None
    return Outputs([predicted if labels is None else labels[predicted], scores.astype(np.float32)])


def _rows_in_program(n: Node) -> Variable:
    x = n.x() if n.rank() > 1 else n.b.reshape(n.x(), shape=(1, -1))
    return n.cast(x, "float32")


def _scores_in_program(n: Node) -> Variable:
    """The scores [rows, classes]. Coefficients and intercepts are trained if constants of nodes are."""
    x = _rows_in_program(n)
    (features,) = known_sizes(n, x.shape[1:])
    held = {"coefficients": floats(n, "coefficients").reshape(-1, features).T, "intercepts": floats(n, "intercepts")}
    weights = [n.importer.node_constant(f"{n.outputs[-1]}.{name}", np.ascontiguousarray(v)) for name, v in held.items() if v.size]
    product = n.b.matmul(x, n.importer.variable(weights[0]))
    return product if len(weights) == 1 else n.b.elementwise_add(product, n.importer.variable(weights[1]))


@dynamic("LinearRegressor", 0, domain=_ML)
def computed_regressor(n: Node) -> object:
    return transformed_in_program(n, _scores_in_program(n), n.attr("post_transform", "NONE"))


@dynamic("LinearClassifier", 0, domain=_ML)
def computed_classifier(n: Node) -> object:
    scores, how, labels = _scores_in_program(n), n.attr("post_transform", "NONE"), labels_of(n, "classlabels_ints")
    if scores.shape[1] > 1:
        return class_labels(n, n.b.arg_max(scores, axis=1), labels), transformed_in_program(n, scores, how)
    above = n.b.greater_than(scores, n.b.fill_zeros_like(scores))
    predicted = n.b.reshape(n.b.cast(above, dtype="int64"), shape=(-1,))
    if labels is None or len(labels) != 2:
        return predicted, transformed_in_program(n, scores, how)
    return class_labels(n, predicted, labels), of_two_in_program(n, scores, how)


# -- support vectors --------------------------------------------------------------------------------------------------------------------


def _doubles(n: Node, name: str) -> np.ndarray:
    """An attribute that is a list of floats, as the C kernel reads it."""
    return np.ascontiguousarray(floats(n, name), np.float64).reshape(-1)


def _machine(n: Node, counts: list[int]) -> SupportVectors:
    """The machine of a node, with so many vectors for each class. The model is not trusted: sizes that do not fit are an error. They are
    compared as Python integers, since sums of numbers in a file may have more than 64 bits."""
    vectors, weights = _doubles(n, "support_vectors"), _doubles(n, "coefficients")
    kind, (gamma, bias, degree) = n.attr("kernel_type", "LINEAR"), [*n.attr("kernel_params", []), 0.0, 0.0, 0.0][:3]
    if kind not in KINDS:
        raise n.wrong(f"kernel_type must be LINEAR, POLY, RBF or SIGMOID, found {kind!r}")
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise n.wrong(f"numbers of support vectors must be integers of at least 0, found {counts}")
    sums, total = max(len(counts) - 1, 1), sum(counts)
    if weights.size != sums * total or vectors.size % total:
        raise n.wrong(f"it has {total} support vectors, which {vectors.size} numbers and {weights.size} coefficients do not fit")
    starts = np.array([0, *accumulate(counts)], np.int64)
    return SupportVectors(vectors.reshape(total, -1), weights.reshape(sums, total), starts, kind, gamma, bias, degree)


def _fitting(n: Node, x: np.ndarray, machine: SupportVectors) -> np.ndarray:
    """The rows in float64. Raises OnnxError if they have another number of features than the vectors."""
    if x.shape[1:] != machine.vectors.shape[1:]:
        raise n.wrong(f"its support vectors have {machine.vectors.shape[1]} features, the input has shape {list(x.shape)}")
    return x.astype(np.float64)


def _sums_of_features(n: Node, x: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """The products of the rows and the coefficients of a machine without vectors: [features] or [features, classes]."""
    if x.shape[1:] != coefficients.shape[:1]:
        raise n.wrong(f"its coefficients are for {coefficients.shape[0]} features, the input has shape {list(x.shape)}")
    return np.asarray(x.astype(np.float64) @ coefficients)


def _first_rho(n: Node, rho: np.ndarray) -> float:
    if not rho.size:
        raise n.wrong("attribute rho is missing or empty; it is the number that is added to the scores")
    return float(rho[0])


class _Regressor(NamedTuple):
    """The attributes of an SVMRegressor: a machine, or coefficients of features if it has no vectors."""

    machine: SupportVectors | None
    coefficients: np.ndarray
    rho: float
    one_class: bool
    how: str

    @classmethod
    def of(cls, n: Node) -> _Regressor:
        supports, how = n.attr("n_supports", 0), n.attr("post_transform", "NONE")
        machine = _machine(n, [supports]) if supports else None
        rho = _first_rho(n, _doubles(n, "rho"))
        return cls(machine, _doubles(n, "coefficients"), rho, bool(n.attr("one_class", 0)), how)


@on_numpy("SVMRegressor", domain=_ML, pure=True)
def svm_regressor(n: Node) -> object:
    x, m = _rows(n), n.cached(lambda: _Regressor.of(n))
    scores = _sums_of_features(n, x, m.coefficients) if m.machine is None else m.machine.sums(_fitting(n, x, m.machine))[:, 0, 0]
    scores = scores + m.rho
    if m.one_class:
        scores = np.where(scores > 0, 1.0, -1.0)
    return transformed(n, scores[:, None], m.how).astype(np.float32)


def _check_pairs(n: Node, labels: int, classes: int, found: list[int]) -> None:
    """Raise OnnxError unless each class has a label and each pair of classes has a rho and, if there are any, a prob_a and a prob_b."""
    if labels != classes:
        raise n.wrong(f"vectors_per_class has {classes} classes, but there are {labels} labels of classes")
    if classes < 2:
        raise n.wrong("vectors_per_class has one class; an SVMClassifier with support vectors compares two or more")
    pairs, (rho, a, b) = classes * (classes - 1) // 2, found
    if rho != pairs or a != b or a not in (0, pairs):
        raise n.wrong(f"{classes} classes have {pairs} pairs; found {rho} rho, {a} prob_a and {b} prob_b")


class _Classifier(NamedTuple):
    """The attributes of an SVMClassifier: a machine with one rho for each pair, or coefficients of features for each class."""

    machine: SupportVectors | None
    coefficients: np.ndarray
    rho: np.ndarray
    prob_a: np.ndarray | None
    prob_b: np.ndarray | None
    labels: np.ndarray | None
    classes: int
    how: str

    @classmethod
    def of(cls, n: Node) -> _Classifier:
        labels, counts = labels_of(n, "classlabels_ints"), n.attr("vectors_per_class", [])
        classes = 1 if labels is None else len(labels)
        coefficients, rho, a, b = (_doubles(n, name) for name in ("coefficients", "rho", "prob_a", "prob_b"))
        machine = _machine(n, counts) if any(counts) else None
        if machine is None:
            if coefficients.size % classes:
                raise n.wrong(f"{coefficients.size} coefficients do not divide evenly among {classes} classes")
            coefficients, rho = coefficients.reshape(classes, -1).T, np.array([_first_rho(n, rho)])
        else:
            _check_pairs(n, 0 if labels is None else len(labels), len(counts), [len(v) for v in (rho, a, b)])
        how, has = n.attr("post_transform", "NONE"), bool(a.size)
        return cls(machine, coefficients, rho, a if has else None, b if has else None, labels, classes, how)

    def scores(self, n: Node, x: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The scores of pairs, or those of classes if there are probabilities or no vectors; and the pairs that each class wins."""
        if self.machine is None:
            return _sums_of_features(n, x, self.coefficients) + self.rho[0], None
        scores, wins, shares = self.machine.pairs(_fitting(n, x, self.machine), self.rho, self.prob_a, self.prob_b)
        return scores if shares is None else shares, wins


@on_numpy("SVMClassifier", domain=_ML, pure=True)
def svm_classifier(n: Node) -> object:
    x, m = _rows(n), n.cached(lambda: _Classifier.of(n))
    (scores, votes), labels = m.scores(n, x), m.labels
    if scores.shape[1] > 1:
        predicted = (scores if votes is None else votes).argmax(1)
        scores = transformed(n, scores, m.how)
    elif m.classes == 2:
        predicted = votes.argmax(1) if votes is not None else scores[:, 0] > 0
        scores = of_two_classes(n, scores[:, 0], m.how, shares=m.how != "NONE")
    else:
        predicted = (scores[:, 0] > 0).astype(np.int64)
        scores, labels = transformed(n, scores, m.how), None
    predicted = np.asarray(predicted, np.int64)
    return Outputs([predicted if labels is None else labels[predicted], scores.astype(np.float32)])
