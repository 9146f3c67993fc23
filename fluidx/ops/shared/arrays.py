"""What array modules spell differently. Only here and in the table of kernels does an op ask which module it was given."""

from __future__ import annotations

from typing import Any

import numpy as np

_BLOCK = 65536  # elements whose flat indices add_rows holds at a time: they stay in the cache


def copy(xp: Any, out: Any, x: Any) -> None:
    """Fill `out` with `x`, converted to its dtype."""
    xp.copyto(out, x, casting="unsafe")


def to_host(xp: Any, x: Any) -> np.ndarray:
    """`x` as an array of NumPy: a copy where it lies on a device."""
    return x if xp is np else xp.asnumpy(x)


def copy_across(xp: Any, out: Any, x: Any) -> None:
    """Fill `out` with `x`, of which one may lie on the host and the other on a device. It is through when this returns."""
    if (type(out) is np.ndarray) is (type(x) is np.ndarray):
        xp.copyto(out, x)
    elif type(out) is np.ndarray:
        x.get(out=out)
    else:
        out.set(np.ascontiguousarray(x))


def take(xp: Any, x: Any, ids: Any, axis: int, out: Any) -> None:
    """`out` filled with the slices of `x` along `axis` that `ids` names; they were checked before."""
    if xp is np:
        x.take(ids, axis=axis, out=out, mode="clip")  # with "raise" NumPy would gather into a buffer of its own first
    else:
        xp.take(x, ids, axis=axis, out=out)


def add_rows(xp: Any, table: Any, ids: Any, rows: Any) -> None:
    """`table[ids[k]] += rows[k]` for every k in turn; ids may repeat. `table` is contiguous, [n, width]; `rows` is [len(ids), width]."""
    if rows.size == 0:
        return
    if xp is np:
        _add_rows_flat(table, ids, rows)
    else:
        xp.add.at(table, ids, rows)


def _add_rows_flat(table: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> None:
    """np.add.at has a quick loop for one-dimensional tables only; adding pairs of floats as one complex number halves its work."""
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
