"""Maps as Python dicts: conversions that operators of programs and sessions of ONNX models use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...ir.errors import ExecutionError


def rows_as_maps(x: np.ndarray, keys: Sequence[Any]) -> list[dict[Any, Any]]:
    """Each row of [rows, columns], or the one row of [columns], as a dict from the keys of the columns.

    >>> rows_as_maps(np.array([[1, 2]]), ["a", "b"])
    [{'a': 1, 'b': 2}]
    """
    rows = x if x.ndim == 2 else np.atleast_2d(x)
    if rows.shape[1] != len(keys):
        raise ExecutionError(f"there are {len(keys)} keys for {rows.shape[1]} columns")
    return [dict(zip(keys, row)) for row in rows.tolist()]


def maps_as_rows(maps: Sequence[Mapping[Any, Any]], keys: Sequence[Any], dtype: Any) -> np.ndarray:
    """The values of each dict for the given keys, one row for each dict: 0, or "", for a missing key."""
    blank = "" if np.dtype(dtype).kind == "O" else 0
    return np.array([[one.get(key, blank) for key in keys] for one in maps], dtype).reshape(len(maps), len(keys))


def values_in_order(given: Mapping[int, Any], dtype: Any, size: int) -> np.ndarray:
    """The values of a dict as a row: in the order of the keys, or, if `size` is not 0, each at the position of its key in a row of `size`,
    with 0 elsewhere.
    """
    texts, keys = np.dtype(dtype).kind == "O", sorted(given)
    values = [_text(given[k]) if texts else given[k] for k in keys]
    if not size:
        return np.array([values], dtype)
    if keys and not 0 <= keys[0] <= keys[-1] < size:
        raise ExecutionError(f"the keys are {keys[0]} to {keys[-1]}, but the row has positions 0 to {size - 1}")
    out = np.full((1, size), "0" if texts else 0, dtype)
    out[0, keys] = values
    return out


def _text(value: Any) -> str:
    return f"{value:f}" if isinstance(value, (float, np.floating)) else str(value)
