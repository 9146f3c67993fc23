"""Array operations that NumPy and CuPy spell differently. Only this module and the table of kernels test which of them it is."""

from __future__ import annotations

from typing import Any

import numpy as np

_BLOCK = 65536  # number of elements whose flat indices add_rows holds at a time: they stay in the cache


def copy(xp: Any, out: Any, x: Any) -> None:
    """Copy `x` into `out`, converted to the dtype of `out`."""
    xp.copyto(out, x, casting="unsafe")


def to_host(xp: Any, x: Any) -> np.ndarray:
    """`x` as a NumPy array: a copy if it is on a device."""
    return x if xp is np else xp.asnumpy(x)


def copy_across(xp: Any, out: Any, x: Any) -> None:
    """Copy `x` into `out`; one may be on the host and the other on a device. The copy is complete on return."""
    if (type(out) is np.ndarray) is (type(x) is np.ndarray):
        xp.copyto(out, x)
    elif type(out) is np.ndarray:
        x.get(out=out)
    else:
        out.set(np.ascontiguousarray(x))


def take(xp: Any, x: Any, ids: Any, axis: int, out: Any) -> None:
    """Copy the slices of `x` along `axis` with the indices `ids` into `out`; the caller has checked the indices."""
    if xp is np:
        x.take(ids, axis=axis, out=out, mode="clip")  # with "raise" NumPy would gather into a buffer first
    else:
        xp.take(x, ids, axis=axis, out=out)


def add_rows(xp: Any, table: Any, ids: Any, rows: Any) -> None:
    """`table[ids[k]] += rows[k]` for each k in order; ids may repeat. `table` is contiguous, [n, width]; `rows` is [len(ids), width]."""
    if rows.size == 0:
        return
    if xp is np:
        _add_rows_flat(table, ids, rows)
    else:
        xp.add.at(table, ids, rows)


def _add_rows_flat(table: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> None:
    """Add rows in a flat view: np.add.at is fast for one-dimensional arrays only. Two floats added as one complex number halve its work."""
    width = table.shape[1]
    pair = {"f": np.complex64, "d": np.complex128}.get(table.dtype.char) if width % 2 == 0 else None
    flat = table.reshape(-1)
    if pair is not None:
        width //= 2
        flat = flat.view(pair)
    step = max(1, _BLOCK // width)
    columns = np.arange(width)
    index = np.empty((min(step, len(ids)), width), np.int64)
    for k in range(0, len(ids), step):
        part = ids[k : k + step]
        block = np.ascontiguousarray(rows[k : k + step])
        at = index[: len(part)]
        np.add((part * np.int64(width))[:, None], columns, out=at)
        np.add.at(flat, at.reshape(-1), (block.view(pair) if pair is not None else block).reshape(-1))
