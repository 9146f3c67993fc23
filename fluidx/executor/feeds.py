"""Check what is fed and fetched against what the program declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..ir.dtypes import TINY, dtype_name, np_dtype
from ..ir.errors import FeedError, nearest
from ..ir.program import Program, Var
from ..ir.types import TensorType, size_names


def fetch_names(fetch_list: Any) -> list[str]:
    """Names of a fetch list of Variables and strings; a single one is taken as a list of one."""
    if fetch_list is None:
        return []
    if isinstance(fetch_list, str) or hasattr(fetch_list, "desc"):
        fetch_list = [fetch_list]
    if not isinstance(fetch_list, Iterable):
        raise FeedError(f"fetch_list takes a list of Variables and names, got {type(fetch_list).__name__}: {fetch_list!r}")
    names: list[str] = []
    for f in fetch_list:
        name = f if isinstance(f, str) else getattr(f, "name", None)
        if not isinstance(name, str):
            raise FeedError(f"fetch_list takes Variables and names, got {type(f).__name__}: {f!r}")
        names.append(name)
    return names


def check_fetch(program: Program, names: Sequence[str], descs: Mapping[str, Var] | None = None) -> None:
    """Raise FeedError for a name that the program does not declare. `descs`: what all ranks' programs declare, if there are several."""
    descs = program.global_block().descs if descs is None else descs
    for n in names:
        if n not in descs:
            raise FeedError(f"fetch_list names {n!r}, which {program.label()} does not declare; {nearest(n, descs, 'it declares')}")


def check_feed(program: Program, feed: Mapping[str, Any] | None, descs: Mapping[str, Var] | None = None) -> dict[str, np.ndarray]:
    """The feed as arrays of the declared dtypes. Raises FeedError that names the variable, what was expected and what came."""
    out = {}
    if feed is not None and type(feed) is not dict and not isinstance(feed, Mapping):
        raise FeedError(f"feed must be a dict of name to array, got {type(feed).__name__}")
    descs = program.global_block().descs if descs is None else descs
    for key, value in (feed or {}).items():
        name = key if isinstance(key, str) else getattr(key, "name", str(key))
        d = descs.get(name)
        if d is None:
            data = [n for n, v in descs.items() if v.is_data]
            raise FeedError(f"feed names {name!r}, which {program.label()} does not declare; {nearest(name, data, 'it takes')}")
        want = np_dtype(d.type.dtype)
        if isinstance(value, np.ndarray) and value.dtype == want:
            array = value
        else:
            array = _converted(name, value, want, d.type)
        found, declared = array.shape, d.type.shape
        if found != declared and (len(found) != len(declared) or any(a != b and b != -1 for a, b in zip(found, declared, strict=True))):
            raise FeedError(f"variable {name!r} is declared {d.type}, the feed has shape {list(array.shape)}")
        out[name] = array
    return out


def check_sizes(descs: Mapping[str, Var], fed: Mapping[str, Sequence[int]]) -> None:
    """Raise FeedError when the shapes of a feed give one name of an axis two sizes."""
    known: dict[str, tuple[int, str, int]] = {}
    for name, shape in fed.items():
        for axis, called in enumerate(size_names(descs[name].type.shape)):
            if called is None:
                continue
            size, first, at = known.setdefault(called, (shape[axis], name, axis))
            if size != shape[axis]:
                raise FeedError(
                    f"axes called {called!r} have one size in a run: it is {size} along axis {at} of {first!r}, {descs[first].type}, and "
                    f"{shape[axis]} along axis {axis} of {name!r}, {descs[name].type}; feed one size, or declare the axes with two names"
                )


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
    if declared.dtype in TINY:
        made = f"np.asarray({name}, ml_dtypes.{declared.dtype})"
        raise FeedError(
            f"variable {name!r} is declared {declared}, the feed has dtype {array.dtype}; feed {made}, or feed floats and cast them"
        )
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
    return {n: TensorType(dtype_name(a.dtype), a.shape) for n, a in feed.items()}
