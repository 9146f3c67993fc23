"""Look-up of elements in a table of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def table_values(x: np.ndarray, keys: Sequence[Any], values: np.ndarray, default: Any) -> np.ndarray:
    """For each element the value at the position of the equal key, otherwise the default; NaN equals NaN here.

    >>> table_values(np.array([3, 7, 3]), [7, 3], np.array(["a", "b"], object), "?").tolist()
    ['b', 'a', 'b']
    """
    places = {_key(k): at for at, k in enumerate(keys)}
    distinct, inverse = (x.ravel(), slice(None)) if x.dtype.kind == "O" else np.unique(x, return_inverse=True)
    at = np.array([places.get(_key(v), len(keys)) for v in distinct.tolist()], np.int64)[inverse].ravel()
    table = np.empty(len(values) + 1, values.dtype)
    table[:-1], table[-1] = values, default
    return table[at].reshape(x.shape)


def _key(value: Any) -> Any:
    return "nan" if value != value else value
