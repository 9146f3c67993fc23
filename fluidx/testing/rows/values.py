"""Values and their local values, written from the definitions of placements. `ir/parts.py` is not used, so that errors in it are found.

Terms of a sum have mixed signs and unrelated sizes, because proportional terms would pass wrong rows, such as one for abs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ir import TensorType, np_dtype
from ...ir.types import Entry

Arrays = list[Any]  # in slot order, lists flattened, None for an absent value

JOIN = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class RowFailure(Exception):
    """A row gives a wrong result; the message says why."""


def are_whole(x: np.ndarray) -> bool:
    return x.dtype.kind in "iub" or bool(np.isfinite(x).all() and (x == np.rint(x)).all() and np.abs(x).max(initial=0) < 1 << 20)


def terms_of(x: np.ndarray, op: str, n: int, rng: np.random.Generator, kept: bool) -> list[np.ndarray]:
    """Terms for n ranks whose reduction by `op` is x. With `kept`, one rank has x and the others have the identity of `op`."""
    at = rng.integers(n)
    if kept:
        return [x if k == at else np.full_like(x, identity(op, x.dtype)) for k in range(n)]
    if op == "sum":
        if x.dtype.kind in "iu":
            others = list(rng.integers(0, 9, (n - 1, *x.shape)).astype(x.dtype))
        else:
            draws = rng.standard_normal((n - 1, *x.shape)) * 3
            others = list((np.rint(draws * 3) if are_whole(x) else draws).astype(x.dtype))
        if x.dtype.kind in "iu":
            others = [-o if k % 2 == 0 else o for k, o in enumerate(others)]
            rest = x.copy()
            for o in others:
                rest = rest - o
        else:
            rest = (x.astype("float64") - sum(o.astype("float64") for o in others)).astype(x.dtype)
        others.insert(int(at), rest)
        return others
    owner = rng.integers(0, n, x.shape)
    out = []
    for k in range(n):
        if x.dtype.kind == "b":
            lower = np.zeros_like(x) if op == "max" else np.ones_like(x)
        elif x.dtype.kind in "iu":
            step = rng.integers(0, 4, x.shape).astype(x.dtype)
            lower = np.where(x >= step, x - step, x) if op == "max" else x + step
        else:
            step = rng.uniform(0.3, 3, x.shape).astype(x.dtype)
            lower = x - step if op == "max" else x + step
        out.append(np.where(owner == k, x, lower).astype(x.dtype))
    return out


def identity(op: str, dtype: np.dtype) -> Any:
    if op == "sum":
        return dtype.type(0)
    if dtype.kind == "b":
        return op == "min"
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return info.min if op == "max" else info.max
    return dtype.type(-np.inf if op == "max" else np.inf)


def axis_slice(x: np.ndarray, axis: int, start: int, stop: int) -> np.ndarray:
    return np.ascontiguousarray(x[(slice(None),) * axis + (slice(start, stop),)])


def garbage(t: TensorType, shape: Sequence[int], zeros: bool) -> np.ndarray:
    """An array of meaningless values, for an operand of which only the shape may be read."""
    dtype = np_dtype(t.dtype)
    if zeros:
        return np.broadcast_to(np.zeros((), dtype), tuple(shape))
    return np.full(tuple(shape), np.nan if t.is_float else True if dtype.kind == "b" else 101, dtype)


def cut_at(size: int, n: int, style: str, rng: np.random.Generator) -> tuple[int, ...]:
    """Random bounds that split `size` items among n ranks. "uneven" leaves no rank empty if size >= n."""
    if style == "uneven" and size >= n:
        inner = sorted(rng.choice(np.arange(1, size), n - 1, replace=False).tolist())
        even = [k * size // n for k in range(1, n)]
        if inner == even and size > n:  # the executor's own even split would not test other bounds
            inner = [inner[0] + (1 if inner[0] + 1 < (inner[1] if n > 2 else size) else -1 if inner[0] > 1 else 0), *inner[1:]]
        return (0, *inner, size)
    if style == "first empty":
        return (0, 0, *sorted(rng.integers(0, size + 1, n - 2).tolist()), size)
    if style == "last empty":
        return (0, *sorted(rng.integers(0, size + 1, n - 2).tolist()), size, size)
    return (0, *sorted(rng.integers(0, size + 1, n - 1).tolist()), size)


def local_shape(t: TensorType | None, entry: Entry | None, bounds: tuple[int, ...], r: int) -> tuple[int, ...] | None:
    """The shape of the local value on rank r."""
    if t is None:
        return None
    if entry is not None and entry.bounds is not None:
        return (bounds[r + 1] - bounds[r],)
    if entry is None or entry.axis is None:
        return t.shape
    out = list(t.shape)
    if bounds[-1] * entry.unit != out[entry.axis]:
        raise RowFailure(f"{bounds[-1]} blocks of {entry.unit} are not axis {entry.axis} of {t}")
    out[entry.axis] = (bounds[r + 1] - bounds[r]) * entry.unit
    return tuple(out)


def differs(got: np.ndarray, want: np.ndarray, tolerance: float) -> str | None:
    """A text that says where and how two arrays differ; None if they are equal within the tolerance."""
    if got.shape != want.shape:
        return f"it has shape {list(got.shape)}, not {list(want.shape)}"
    same = got == want
    if same.all():
        return None
    if want.dtype.kind not in "iub":
        a, b = got.astype("float64"), want.astype("float64")
        same = same | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= tolerance)
        if same.all():
            return None
    at = tuple(int(v) for v in np.argwhere(~same)[0])
    return f"{got[at]} where one device has {want[at]}, at {list(at)} and {int((~same).sum()) - 1} more of {want.size}"


def show_entry(e: Entry | None) -> str:
    return "whole" if e is None else e.label


def show_entries(entries: Sequence[Entry | None]) -> str:
    return ", ".join(map(show_entry, entries))
