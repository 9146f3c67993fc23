"""Numeric gradients by central differences, which every gradient is checked against."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def numeric_grad(function: Callable[[np.ndarray], float], x: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    """The gradient of a scalar function at `x` by central differences, as float64, in the shape of `x`.

    `function` is called with `x` itself, where one element is changed by eps * max(1, |element|); afterwards `x` is restored. In
    float64 the error is near 1e-9; float32 needs an eps near 1e-2.

    >>> numeric_grad(lambda x: float((x * x).sum()), np.array([1.0, 2.0])).round(6)
    array([2., 4.])
    """
    grad = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        old = x[index]
        step = eps * max(1.0, abs(float(old)))
        x[index] = old + step
        high, above = function(x), float(x[index])
        x[index] = old - step
        low, below = function(x), float(x[index])
        x[index] = old
        grad[index] = (high - low) / (above - below)
    return grad
