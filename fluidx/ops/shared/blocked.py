"""Helpers for NumPy kernels that make several passes over an array block by block, so that later passes find the block in cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

BLOCK_BYTES = 256 << 10  # a block and its scratch fit the L2 cache of a core


def row_blocks(rows: int, row_bytes: int, block_bytes: int = BLOCK_BYTES) -> Iterator[slice]:
    """Slices that together cover `rows`, each of at least one row and about `block_bytes` long.

    >>> list(row_blocks(5, 100, 200))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, block_bytes // max(1, row_bytes))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def in_order(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """One call that runs all of `calls` in order; a single call is returned as it is."""
    return calls[0] if len(calls) == 1 else partial(_run, tuple(calls))


def _run(calls: tuple[Callable[[], Any], ...]) -> None:
    for call in calls:
        call()


def row_max(x: np.ndarray, out: np.ndarray) -> list[Callable[[], Any]]:
    """Calls that write the maximum of each row of the matrix `x` into `out` [rows].

    np.maximum.reduce costs about 50 ns a row, which pays for long rows only. For shorter rows, maxima of whole matrices halve the width
    until it is small (an odd middle column is used twice, which does not change a maximum); then the first axis of a transposed copy is
    reduced. NaN stays NaN.
    """
    calls: list[Callable[[], Any]] = []
    rows, width = x.shape
    if width >= 256:
        return [partial(np.maximum.reduce, x, 1, None, out)]
    while width > 16:
        half = (width + 1) // 2
        folded = np.empty((rows, half), x.dtype)
        calls.append(partial(np.maximum, x[:, :half], x[:, width - half :], out=folded))
        x, width = folded, half
    turned = np.empty((width, rows), x.dtype)
    calls.append(partial(np.copyto, turned, x.T))
    calls.append(partial(np.maximum.reduce, turned, 0, None, out))
    return calls


def row_sum(x: np.ndarray, out: np.ndarray) -> Callable[[], Any]:
    """A call that writes the sum of each row of the contiguous float matrix `x` into `out` [rows].

    A matrix-vector product is several times faster than np.add.reduce for rows of up to a few hundred elements.
    """
    return partial(np.dot, x, np.ones(x.shape[1], x.dtype), out)
