"""Sample arrays for tests of operators: sizes come first, `seed` makes two arrays differ, and every run draws the same values."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np


def f32(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal float32 values."""
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def points(
    shape: Sequence[int], low: float = -3.0, high: float = 3.0, kinks: Sequence[float] = (), seed: int = 0, dtype: str = "float32"
) -> np.ndarray:
    """Values in [low, high), at least 0.05 away from each of `kinks`."""
    x = np.random.default_rng(seed).uniform(low, high, tuple(shape))
    for k in kinks:
        x = np.where(np.abs(x - k) < 0.05, k + 0.1, x)
    return x.astype(dtype)


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    """float32 values between 0.5 and 1.5."""
    return (np.random.default_rng(seed).random(shape) + 0.5).astype("float32")


def between(*shape: int, seed: int = 0) -> np.ndarray:
    """float32 values between 0.1 and 0.9, such as a sigmoid returns."""
    return (np.random.default_rng(seed).random(shape) * 0.8 + 0.1).astype("float32")


def probabilities(*shape: int, seed: int = 0) -> np.ndarray:
    """float32 values above 0 whose sum over the last axis is 1."""
    x = np.random.default_rng(seed).random(shape) + 0.2
    return (x / x.sum(axis=-1, keepdims=True)).astype("float32")


def apart(*shape: int, seed: int = 0) -> np.ndarray:
    """float32 values at least 0.25 apart: the steps of a difference quotient must not change which one is the maximum."""
    size = prod(shape)
    return (np.random.default_rng(seed).permutation(size).reshape(shape) * 0.25 - size / 8).astype("float32")


def counting(*shape: int) -> np.ndarray:
    """1, 2, 3, ... as float32."""
    return np.arange(1, 1 + prod(shape), dtype="float32").reshape(shape)


def bits(*shape: int, seed: int = 0) -> np.ndarray:
    """Zeros and ones as float32."""
    return (np.random.default_rng(seed).random(shape) < 0.5).astype("float32")


def ints(*shape: int, high: int, low: int = 0, seed: int = 0) -> np.ndarray:
    """int64 values from `low` to `high` - 1: class labels, row numbers."""
    return np.random.default_rng(seed).integers(low, high, shape)


def eight_bits(*shape: int, signed: bool = False, seed: int = 0) -> np.ndarray:
    """uint8 values, or int8 values if `signed`, with the least and the largest one among them."""
    limits = np.iinfo("int8" if signed else "uint8")
    x = np.random.default_rng(seed).integers(limits.min, limits.max, shape, endpoint=True)
    x.flat[::7], x.flat[3::11] = limits.min, limits.max
    return x.astype(limits.dtype)


def i64(*values: Any) -> np.ndarray:
    """The values themselves as int64."""
    return np.array(values, "int64")
