"""Support vector machines: kernels of each row with the vectors, weighted and summed for each class, and the scores of pairs of classes.

A C kernel takes a few rows at a time and everything that follows from them; NumPy takes all rows step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .. import native
from .kept_calls import KeptCalls

KINDS = ("LINEAR", "RBF", "POLY", "SIGMOID")  # in the order of vectors.h
_LANES = 16  # vectors of a panel, as in vectors.h


class PairScores(NamedTuple):
    """For each row: the score of each pair of classes, positive if the first class wins; the number of pairs that each class wins; the
    probabilities of the classes, or None."""

    scores: np.ndarray
    wins: np.ndarray
    shares: np.ndarray | None


@dataclass(frozen=True)
class SupportVectors:
    """Vectors [count, features] in the order of their classes, and weights [sums, count]. Class k has the vectors from `starts[k]` up to
    `starts[k + 1]`. All arrays are float64."""

    vectors: np.ndarray
    weights: np.ndarray
    starts: np.ndarray
    kind: str
    gamma: float
    bias: float
    degree: float
    _calls: KeptCalls = field(default_factory=KeptCalls, init=False)

    def sums(self, x: np.ndarray) -> np.ndarray:
        """[rows, classes, sums]: the kernels of float64 rows with the vectors of each class, times the weights, summed."""
        if self.kind == "LINEAR":
            return (x @ self._hyperplanes).reshape(len(x), len(self.starts) - 1, len(self.weights))
        if native.enabled():
            return self._by_c_kernel(x)[0]
        kernel, found = self._kernel(x), np.empty((len(x), len(self.starts) - 1, len(self.weights)))
        for k, (start, stop) in enumerate(zip(self.starts, self.starts[1:])):
            found[:, k] = kernel[:, start:stop] @ self.weights[:, start:stop].T
        return found

    def pairs(self, x: np.ndarray, rho: np.ndarray, a: np.ndarray | None = None, b: np.ndarray | None = None) -> PairScores:
        """The scores of the pairs of classes for float64 rows, with probabilities if `a` and `b` are given: for each pair, a and b of the
        logistic function that makes a probability of the score."""
        if native.enabled():
            scores, wins, shares = self._by_c_kernel(x, rho, a, b)
            return PairScores(scores, wins, None if a is None else shares)
        classes = len(self.starts) - 1
        sums, (first, second) = self.sums(x), np.triu_indices(classes, 1)
        scores = sums[:, first, second - 1] + sums[:, second, first] + rho
        wins = np.zeros((len(x), classes), np.int64)
        for pair, (i, j) in enumerate(zip(first, second)):
            wins[:, i] += scores[:, pair] > 0
            wins[:, j] += scores[:, pair] <= 0
        if a is None or b is None:
            return PairScores(scores, wins, None)
        with np.errstate(over="ignore"):
            shares = np.clip(1 / (1 + np.exp(scores * a + b)), 1e-7, 1 - 1e-7)
        return PairScores(scores, wins, _coupled(shares, classes))

    def _kernel(self, x: np.ndarray) -> np.ndarray:
        """[rows, count]: the kernel of each row with each vector."""
        if self.kind == "RBF":
            apart = np.square(x).sum(1)[:, None] + np.square(self.vectors).sum(1) - 2 * x @ self.vectors.T
            return np.exp(-self.gamma * np.maximum(apart, 0))
        product = self.gamma * (x @ self.vectors.T) + self.bias
        return np.tanh(product) if self.kind == "SIGMOID" else product**self.degree

    @cached_property
    def _hyperplanes(self) -> np.ndarray:
        """[features, classes * sums]: the vectors of each class, times the weights, summed. Their products with a row are its sums."""
        parts = [self.weights[:, start:stop] @ self.vectors[start:stop] for start, stop in zip(self.starts, self.starts[1:])]
        return np.ascontiguousarray(np.concatenate(parts).T)

    @cached_property
    def _panels(self) -> np.ndarray:
        """The vectors as the C kernel reads them: [panels, features, lanes]."""
        count, features = self.vectors.shape
        whole = np.zeros((-(-count // _LANES) * _LANES, features))
        whole[:count] = self.vectors
        return np.ascontiguousarray(whole.reshape(-1, _LANES, features).transpose(0, 2, 1))

    def _by_c_kernel(
        self, x: np.ndarray, rho: np.ndarray | None = None, a: np.ndarray | None = None, b: np.ndarray | None = None
    ) -> Sequence[np.ndarray]:
        """The sums; with `rho` the scores, the wins and the probabilities of `pairs`, which are empty without `a` and `b`."""
        held = (self._panels, self.weights, self.starts)
        classes, sums = len(self.starts) - 1, len(self.weights)

        def call(x: np.ndarray) -> tuple[native.NativeCall, list[np.ndarray]]:
            found, pairs, made = np.empty((len(x), classes, sums)), list[Any](), list[np.ndarray]()
            if rho is not None:
                made = [np.empty((len(x), len(rho))), np.empty((len(x), classes), np.int64), np.empty((len(x), classes * (a is not None)))]
                pairs = [rho, *made[:2], *((a, b, made[2]) if a is not None else ())]
            at_panels, at_weights, at_starts = map(native.address, held)
            rest = [native.address(v) for v in pairs]
            words = (
                native.address(x), *x.shape, at_panels, len(self.vectors), at_weights, at_starts, classes, sums, KINDS.index(self.kind),
                self.gamma, self.bias, self.degree, native.address(found), *rest, *[0] * (6 - len(rest)),
            )  # fmt: skip
            return native.NativeCall("vectors_f64", words, (x, *held, found, *pairs)), made or [found]

        return self._calls.run(tuple(map(id, (rho, a, b))), x, call)


def _coupled(pairs: np.ndarray, classes: int) -> np.ndarray:
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
