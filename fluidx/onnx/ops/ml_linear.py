"""Linear models and support vector machines of ai.onnx.ml."""

from __future__ import annotations

import numpy as np

from ...ir import Variable
from ..node import Node
from ..table import dynamic, on_numpy
from ..values import Outputs
from .ml_scores import class_labels, floats, labels_of, logistic, of_two_classes, of_two_in_program, transformed, transformed_in_program
from .shape import known_sizes

_ML = "ai.onnx.ml"


def _rows(n: Node) -> np.ndarray:
    x = np.asarray(n.value(0))
    x = x.reshape(1, -1) if x.ndim < 2 else x
    return x if x.dtype == np.float64 else x.astype(np.float32)


@on_numpy("LinearRegressor", domain=_ML, pure=True)
def linear_regressor(n: Node) -> object:
    targets = n.attr("targets", 1)
    scores = _rows(n) @ floats(n, "coefficients").reshape(targets, -1).T
    intercepts = floats(n, "intercepts")
    scores = scores + intercepts if intercepts.size else scores
    return transformed(n, scores, n.attr("post_transform", "NONE")).astype(np.float32)


@on_numpy("LinearClassifier", domain=_ML, pure=True)
def linear_classifier(n: Node) -> object:
    """With two labels and one score, the score is that of the second label."""
    x, how = _rows(n), n.attr("post_transform", "NONE")
    scores = x @ floats(n, "coefficients").reshape(-1, x.shape[1]).T
    intercepts = floats(n, "intercepts")
    scores = scores + intercepts if intercepts.size else scores
    labels = labels_of(n, "classlabels_ints")
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


def _kernel(n: Node, x: np.ndarray, vectors: np.ndarray, kind: str) -> np.ndarray:
    """The kernel of each row with each vector."""
    gamma, bias, degree = [*n.attr("kernel_params", []), 0.0, 0.0, 0.0][:3]
    if kind == "RBF":
        apart = np.square(x).sum(1)[:, None] + np.square(vectors).sum(1) - 2 * x @ vectors.T
        return np.exp(-gamma * np.maximum(apart, 0))
    product = x @ vectors.T
    if kind == "LINEAR":
        return product
    if kind == "POLY":
        return (gamma * product + bias) ** degree
    if kind == "SIGMOID":
        return np.tanh(gamma * product + bias)
    raise n.wrong(f"kernel_type must be LINEAR, POLY, RBF or SIGMOID, found {kind!r}")


@on_numpy("SVMRegressor", domain=_ML, pure=True)
def svm_regressor(n: Node) -> object:
    x, coefficients, supports = _rows(n).astype(np.float64), floats(n, "coefficients", np.float64), n.attr("n_supports", 0)
    if supports:
        vectors = floats(n, "support_vectors", np.float64).reshape(supports, -1)
        scores = _kernel(n, x, vectors, n.attr("kernel_type", "LINEAR")) @ coefficients
    else:
        scores = x @ coefficients
    scores = scores + floats(n, "rho", np.float64)[0]
    if n.attr("one_class", 0):
        scores = np.where(scores > 0, 1.0, -1.0)
    return transformed(n, scores[:, None], n.attr("post_transform", "NONE")).astype(np.float32)


@on_numpy("SVMClassifier", domain=_ML, pure=True)
def svm_classifier(n: Node) -> object:
    labels, how = labels_of(n, "classlabels_ints"), n.attr("post_transform", "NONE")
    classes = 1 if labels is None else len(labels)
    counts = n.attr("vectors_per_class", [])
    x, coefficients = _rows(n).astype(np.float64), floats(n, "coefficients", np.float64)
    rho, a, b = (floats(n, name, np.float64) for name in ("rho", "prob_a", "prob_b"))
    votes = None
    if sum(counts):
        scores, votes = _pairs(n, x, coefficients, rho, counts)
        if a.size:
            scores = _shares(np.clip(logistic(-(scores * a + b)), 1e-7, 1 - 1e-7), classes)
    else:
        scores = _kernel(n, x, coefficients.reshape(classes, -1), "LINEAR") + rho[0]
    if scores.shape[1] > 1:
        predicted = (scores if votes is None else votes).argmax(1)
        scores = transformed(n, scores, how)
    elif classes == 2:
        predicted = votes.argmax(1) if votes is not None else scores[:, 0] > 0
        scores = of_two_classes(n, scores[:, 0], how, shares=how != "NONE")
    else:
        predicted = (scores[:, 0] > 0).astype(np.int64)
        scores, labels = transformed(n, scores, how), None
    predicted = np.asarray(predicted, np.int64)
    return Outputs([predicted if labels is None else labels[predicted], scores.astype(np.float32)])


def _pairs(n: Node, x: np.ndarray, coefficients: np.ndarray, rho: np.ndarray, counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The score of each pair of classes, positive if the first class wins, and the number of pairs that each class wins."""
    ends = np.cumsum(counts)
    vectors = floats(n, "support_vectors", np.float64).reshape(ends[-1], -1)
    kernel, weights = _kernel(n, x, vectors, n.attr("kernel_type", "LINEAR")), coefficients.reshape(-1, ends[-1])
    of = [slice(end - count, end) for end, count in zip(ends, counts)]
    scores: list[np.ndarray] = []
    votes = np.zeros((len(x), len(counts)), np.int64)
    for i in range(len(counts)):
        for j in range(i + 1, len(counts)):
            score = kernel[:, of[i]] @ weights[j - 1, of[i]] + kernel[:, of[j]] @ weights[i, of[j]] + rho[len(scores)]
            votes[:, i] += score > 0
            votes[:, j] += score <= 0
            scores.append(score)
    return np.stack(scores, 1), votes


def _shares(pairs: np.ndarray, classes: int) -> np.ndarray:
    """Probabilities of classes from probabilities of pairs: the second method of Wu, Lin & Weng (2004), by the iteration of LIBSVM."""
    r = np.zeros((len(pairs), classes, classes))
    first, second = np.triu_indices(classes, 1)
    r[:, first, second], r[:, second, first] = pairs, 1 - pairs
    q = -r * r.transpose(0, 2, 1)
    q[:, range(classes), range(classes)] = np.square(r).sum(1)
    p = np.full((len(pairs), classes), 1 / classes)
    for _ in range(max(100, classes)):
        qp = np.einsum("nij,nj->ni", q, p)
        pqp = (p * qp).sum(1)
        open_ = np.abs(qp - pqp[:, None]).max(1) >= 0.005 / classes
        if not open_.any():
            break
        for t in range(classes):
            step = np.where(open_, (pqp - qp[:, t]) / q[:, t, t], 0)
            p[:, t] += step
            pqp = (pqp + step * (step * q[:, t, t] + 2 * qp[:, t])) / (1 + step) ** 2
            qp = (qp + step[:, None] * q[:, t]) / (1 + step)[:, None]
            p /= (1 + step)[:, None]
    return p
