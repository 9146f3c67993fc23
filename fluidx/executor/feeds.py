"""Check feeds against what the program declares, cut them for the ranks, and join what the ranks fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir.dtypes import np_dtype
from ..ir.errors import FeedError, nearest
from ..ir.program import Program
from ..ir.types import At, Partial, Placement, Shard, TensorType

UNEVEN = ("weight", "pad", "drop", "error")


def fetch_names(fetch_list: Any) -> list[str]:
    """Names of a fetch list of Variables and strings; a single one is taken as a list of one."""
    if fetch_list is None:
        return []
    if isinstance(fetch_list, str) or hasattr(fetch_list, "desc"):
        fetch_list = [fetch_list]
    names = [f if isinstance(f, str) else getattr(f, "name", None) for f in fetch_list]
    for f, n in zip(fetch_list, names, strict=True):
        if not isinstance(n, str):
            raise FeedError(f"fetch_list takes Variables and names, got {type(f).__name__}: {f!r}")
    return names  # type: ignore[return-value]


def check_fetch(program: Program, names: Sequence[str]) -> None:
    """Raise FeedError for a name that the program does not declare."""
    block = program.global_block()
    for n in names:
        if n not in block.descs:
            raise FeedError(f"fetch_list names {n!r}, which {program.label()} does not declare; {nearest(n, block.descs, 'it declares')}")


def check_feed(program: Program, feed: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    """The feed as arrays of the declared dtypes. Raises FeedError that names the variable, what was expected and what came."""
    out = {}
    if feed is not None and not isinstance(feed, Mapping):
        raise FeedError(f"feed must be a dict of name to array, got {type(feed).__name__}")
    block = program.global_block()
    for key, value in (feed or {}).items():
        name = key if isinstance(key, str) else getattr(key, "name", str(key))
        d = block.descs.get(name)
        if d is None:
            data = [n for n, v in block.descs.items() if v.is_data]
            raise FeedError(f"feed names {name!r}, which {program.label()} does not declare; {nearest(name, data, 'it takes')}")
        want = np_dtype(d.type.dtype)
        if isinstance(value, np.ndarray) and value.dtype == want:
            array = value
        else:
            array = _converted(name, value, want, d.type)
        if len(array.shape) != len(d.type.shape) or any(a != b and b != -1 for a, b in zip(array.shape, d.type.shape, strict=False)):
            raise FeedError(f"variable {name!r} is declared {d.type}, the feed has shape {list(array.shape)}")
        out[name] = array
    return out


def _converted(name: str, value: Any, want: np.dtype, declared: TensorType) -> np.ndarray:
    is_array = isinstance(value, (np.ndarray, np.generic))
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as e:
        raise FeedError(f"variable {name!r} is declared {declared}, the feed is no array: {e}") from None
    if array.dtype == object or array.dtype.kind in "SU":
        raise FeedError(f"variable {name!r} is declared {declared}, the feed holds {array.dtype} (rows of unequal length, or text?)")
    if array.dtype == want:
        return array
    # plain Python numbers take the declared type; arrays must convert without loss
    if not is_array and np.can_cast(array.dtype, want, "same_kind") or np.can_cast(array.dtype, want, "safe"):
        converted = array.astype(want)
        if want.kind in "iu" and (converted != array).any():
            raise FeedError(
                f"variable {name!r} is declared {declared}, the feed holds {array[converted != array][0]}, which {want.name} cannot"
            )
        return converted
    raise FeedError(f"variable {name!r} is declared {declared}, the feed has dtype {array.dtype}; convert it with .astype({want.name!r})")


def feed_types(feed: Mapping[str, np.ndarray]) -> dict[str, TensorType]:
    return {n: TensorType(a.dtype.name, a.shape) for n, a in feed.items()}


@dataclass(frozen=True)
class Rows:
    """One rank's part of the batch: rows [start, start + count) of the global batch, of which `real` count."""

    start: int
    count: int
    real: int
    weight: float


def split_rows(total: int, ranks: int, uneven: str) -> list[Rows]:
    """How `total` rows are dealt to the ranks; see ParallelExecutor for the policies.

    >>> [(r.start, r.count, r.weight) for r in split_rows(5, 2, "weight")]
    [(0, 3, 1.2), (3, 2, 0.8)]
    """
    if total == 0:
        raise FeedError("the batch has no rows")
    each, rest = divmod(total, ranks)
    if rest == 0:
        return [Rows(r * each, each, each, 1.0) for r in range(ranks)]
    if uneven == "error":
        raise FeedError(
            f"a batch of {total} rows does not divide among {ranks} ranks; feed a multiple of {ranks}, "
            "or choose uneven='weight', 'pad' or 'drop' when making the ParallelExecutor"
        )
    if uneven == "drop":
        if each == 0:
            raise FeedError(f"uneven='drop' would drop all {total} rows: there are {ranks} ranks; use uneven='weight' or 'pad'")
        return [Rows(r * each, each, each, 1.0) for r in range(ranks)]
    if uneven == "pad":
        each += 1
        return [Rows(r * each, each, max(0, min(each, total - r * each)), 1.0) for r in range(ranks)]
    out, start = [], 0
    for r in range(ranks):
        count = each + (r < rest)
        # a rank without rows computes on one borrowed row that weighs nothing
        out.append(Rows(start if count else total - 1, max(count, 1), count, count * ranks / total))
        start += count
    return out


def cut(array: np.ndarray, rows: Rows) -> np.ndarray:
    """One rank's rows; rows past the end repeat the last one."""
    part = array[rows.start : rows.start + rows.count]
    if len(part) == rows.count:
        return part
    return array[np.minimum(np.arange(rows.start, rows.start + rows.count), len(array) - 1)]


def merge(name: str, values: Sequence[Any], placement: Placement, parts: Sequence[Rows] | None) -> np.ndarray:
    """The global value of what the ranks hold: the value, the joined slices, or the reduction."""
    for p in placement:
        if isinstance(p, At):
            return values[p.root]
        if isinstance(p, Shard):
            if parts is not None and p.axis == 0:
                values = [_real_rows(v, r) for v, r in zip(values, parts, strict=True)]
            return np.concatenate(values, axis=p.axis)
        if isinstance(p, Partial):
            return _reduce(values, p.op, parts)
    return values[0]


def _real_rows(value: np.ndarray, rows: Rows) -> np.ndarray:
    return value if rows.real == rows.count else value[: len(value) * rows.real // rows.count]


def _reduce(values: Sequence[np.ndarray], op: str, parts: Sequence[Rows] | None) -> np.ndarray:
    if op in ("max", "min"):
        return np.maximum.reduce(values) if op == "max" else np.minimum.reduce(values)
    if op == "sum":
        kept = [v for k, v in enumerate(values) if parts is None or parts[k].real]
        return np.add.reduce(kept, dtype=values[0].dtype)
    weights = [p.weight for p in parts] if parts is not None else [1.0] * len(values)
    if all(w == 1.0 for w in weights):
        total = np.add.reduce(list(values), dtype=values[0].dtype)
    else:
        total = np.add.reduce([v * w for v, w in zip(values, weights, strict=True) if w])
    return (total / len(values)).astype(values[0].dtype)
