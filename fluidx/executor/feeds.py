"""Check feeds and fetch lists against the declarations of a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from ..ir.defaults import default_main_program
from ..ir.dtypes import TINY, dtype_name, kept, np_dtype
from ..ir.errors import FeedError, nearest
from ..ir.operator import Role
from ..ir.program import Program
from ..ir.types import ANY, TensorType, size_names
from ..ir.valuetypes import AnyRankType, MapType, OptionalType, SequenceType, ValueType, tensors, unlike
from ..ir.var import Var


def fetch_names(fetch_list: Any, known: Mapping[str, Var] | None = None) -> list[str]:
    """The names in a fetch list of Variables and strings. A single Variable or string counts as a list of one. Raises FeedError for a
    Variable that is not in `known` (if given), because it belongs to another program."""
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
        if known is not None and name not in known and not isinstance(f, str) and hasattr(f, "block"):
            raise FeedError(
                f"fetch_list has variable {name!r} of {f.block.program.label()}, which is not the program that runs; run that program, or "
                "write the layers inside program_guard(program, startup) of the one that runs"
            )
        names.append(name)
    return names


def check_fetch(program: Program, names: Sequence[str], descs: Mapping[str, Var] | None = None) -> None:
    """Raise FeedError for a name that the program does not declare. `descs`: the declarations of all ranks' programs, if there are
    several ranks."""
    descs = program.global_block().descs if descs is None else descs
    for n in names:
        if n not in descs:
            hint = _or_default(program, n, descs, "it declares")
            raise FeedError(f"fetch_list names {n!r}, which {program.label()} does not declare; {hint}")


def _or_default(program: Program, name: str, options: Iterable[str], what: str = "it takes") -> str:
    """A hint for a name that a program does not declare: the default program declares it (program_guard was forgotten), or a similar
    name."""
    default = default_main_program()
    if program is default and not program.global_block().oplist:
        return "it has no operators: it is the default program; give run() the one that the layers were written in"
    if program is not default and name in default.global_block().descs:
        return f"{default.label()}, the default program, does: write layers inside program_guard(program, startup), or run that one"
    return nearest(name, options, what)


def one_feed(feed: Any) -> Any:
    """The feed of one device. fluid's loaders give it as a list of one. Raises FeedError for a list of several feeds."""
    if not _batches(feed):
        return feed
    if len(feed) != 1:
        raise FeedError(
            f"feed has {len(feed)} batches, and one device takes one; CompiledProgram(main).with_data_parallel(...) and ParallelExecutor "
            "take one for each rank"
        )
    return feed[0]


def joined_feed(descs: Mapping[str, Var], feed: Any) -> Any:
    """Join a list of feeds, one for each rank as fluid's loaders give them, to one feed: batches are concatenated."""
    if not _batches(feed):
        return feed
    if len(feed) == 1:
        return feed[0]
    for k, one in enumerate(feed):
        if one.keys() != feed[0].keys():
            raise FeedError(
                f"feed is a list, one dict for each rank: batch {k} has {', '.join(map(repr, one))}, batch 0 has "
                f"{', '.join(map(repr, feed[0]))}"
            )
    whole: dict[str, Any] = {}
    for name in feed[0]:
        values = [np.asarray(one[name]) for one in feed]
        d = descs.get(name)
        open_rows = d is not None and d.type.__class__ is TensorType and bool(d.type.shape) and d.type.shape[0] == ANY
        if not open_rows and any(not np.array_equal(v, values[0]) for v in values):
            declared = "" if d is None else f" is declared {d.type} and is not split into batches:"
            raise FeedError(f"variable {name!r}{declared} the {len(feed)} batches of the feed must hold one value of it")
        whole[name] = np.concatenate(values) if open_rows else values[0]
    return whole


def _batches(feed: Any) -> bool:
    """Is `feed` a list of feeds?"""
    return isinstance(feed, (list, tuple)) and len(feed) > 0 and all(isinstance(one, Mapping) for one in feed)


def read_feed(readers: Sequence[Any], feed: Any, batches: int = 1) -> Any:
    """Read `batches` batches, one for each rank, from the data loaders of a program. A loader is skipped if `feed` names its variables."""
    given = feed or {}
    if not isinstance(given, Mapping):
        return feed
    found: list[dict[str, Any]] = [dict(given) for _ in range(batches)]
    for reader in readers:
        if not any(v.name in given for v in reader.feed_list):
            for one in found:
                one.update(reader.next_feed())
    return found


def check_feed(program: Program, feed: Mapping[str, Any] | None, descs: Mapping[str, Var] | None = None) -> dict[str, Any]:
    """The feed as arrays of the declared dtypes. Raises FeedError that names the variable, the declared type and the given one."""
    out = {}
    if feed is not None and type(feed) is not dict and not isinstance(feed, Mapping):
        raise FeedError(f"feed must be a dict of name to array, got {type(feed).__name__}")
    descs = program.global_block().descs if descs is None else descs
    for key, value in (feed or {}).items():
        name = key if isinstance(key, str) else getattr(key, "name", str(key))
        d = descs.get(name)
        if d is None:
            data = [n for n, v in descs.items() if v.is_data]
            raise FeedError(f"feed names {name!r}, which {program.label()} does not declare; {_or_default(program, name, data)}")
        if d.type.__class__ is not TensorType or d.type.dtype == "string":
            out[name] = _beyond_tensors(name, value, d.type)
            continue
        want = np_dtype(d.type.dtype)
        if isinstance(value, np.ndarray) and value.dtype == want:
            array = value
        else:
            array = _converted(name, value, want, d.type)
        found, declared = array.shape, d.type.shape
        if found != declared and not _fits(found, declared):
            raise FeedError(f"variable {name!r} is declared {d.type}, the feed has shape {list(found)}{_reshaped(name, declared, found)}")
        out[name] = array
    return out


@lru_cache(maxsize=1024)
def _fits(found: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    """Is a shape that which was declared, open axes apart?"""
    return len(found) == len(declared) and all(b in (a, ANY) for a, b in zip(found, declared, strict=True))


def _reshaped(name: str, declared: Sequence[Any], found: Sequence[int]) -> str:
    """A hint how to reshape a feed whose number of axes is wrong; "" if its sizes do not fit the declaration."""
    rest = [d for d in declared[1:] if isinstance(d, int) and d >= 0]
    if len(declared) == len(found) or len(rest) != len(declared) - 1:
        return ""
    if tuple(rest) == tuple(found) and declared[0] == ANY:
        return f"; feed {name}[None], a batch of one"
    if not found or found[0] * prod(rest) != prod(found) or declared[0] not in (ANY, found[0]):
        return ""
    return f"; feed {name}.reshape({', '.join(map(str, (-1, *rest)))})"


def no_rows(name: str, d: Var, shape: Sequence[int]) -> FeedError:
    """The error for a batch without rows: the mean over it is undefined."""
    return FeedError(f"variable {name!r} is declared {d.type}, the feed has shape {list(shape)}: a batch of no rows; leave it out")


def trains(program: Program) -> bool:
    """Does a program update its parameters?"""
    return any(op.role is Role.OPTIMIZE for op in program.global_block().oplist)


def check_rows(program: Program, feed: Mapping[str, Any]) -> None:
    """Raise FeedError if a training program is fed a batch without rows: its parameters would become NaN. Other programs accept it."""
    for name, value in feed.items():
        d = program.global_block().descs[name]
        if d.type.__class__ is TensorType and d.type.shape[:1] == (ANY,) and not len(value) and trains(program):
            raise no_rows(name, d, value.shape)


def _beyond_tensors(name: str, value: Any, declared: ValueType) -> Any:
    """The value fed to a variable that is not a dense tensor of numbers (a sequence, a map, strings), with its tensors as arrays."""
    made = _with_arrays(name, value, declared)
    if why := unlike(made, declared):
        raise FeedError(f"variable {name!r} is declared {declared}, in the feed {why}")
    return made


def _with_arrays(name: str, value: Any, t: ValueType) -> Any:
    if isinstance(t, OptionalType):
        return None if value is None else _with_arrays(name, value, t.elem)
    if isinstance(t, SequenceType):
        return [_with_arrays(f"{name}[{k}]", v, t.elem) for k, v in enumerate(value)] if isinstance(value, (list, tuple)) else value
    if isinstance(t, MapType) or value is None:
        return value
    if t.dtype == "string":
        array = np.asarray(value)
        return array.astype(object) if array.dtype.kind == "U" else array
    want = np_dtype(t.dtype)
    return value if isinstance(value, np.ndarray) and value.dtype == want else _converted(name, value, want, t)


def sizes_of(feed: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The shape of each feed, by name; () for a value without a shape."""
    return tuple(sorted([(n, getattr(v, "shape", ())) for n, v in feed.items()]))


def check_sizes(descs: Mapping[str, Var], fed: Mapping[str, Any]) -> None:
    """Raise FeedError if axes with one name have different sizes. `fed` has values, or types."""
    known: dict[str, tuple[int, str, int]] = {}
    for name, value in fed.items():
        whole = descs[name].type
        for declared, one in [(whole, value)] if whole.__class__ is TensorType else tensors(value, whole):
            for axis, called in enumerate(size_names(declared.shape)):
                if called is None:
                    continue
                found = one.shape[axis]
                size, first, at = known.setdefault(called, (found, name, axis))
                if size != found:
                    raise FeedError(
                        f"axes called {called!r} have one size in a run: it is {size} along axis {at} of {first!r}, {descs[first].type}, "
                        f"and {found} along axis {axis} of {name!r}, {whole}; feed one size, or declare the axes with two names"
                    )


def _converted(name: str, value: Any, want: np.dtype, declared: TensorType | AnyRankType) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as e:
        raise FeedError(f"variable {name!r} is declared {declared}, the feed is not an array: {e}") from None
    if array.dtype == object or array.dtype.kind in "SU":
        raise FeedError(f"variable {name!r} is declared {declared}, the feed holds {array.dtype} (rows of unequal length, or text?)")
    if array.dtype == want:
        return array
    if declared.dtype in TINY:
        made = f"np.asarray({name}, ml_dtypes.{declared.dtype})"
        raise FeedError(
            f"variable {name!r} is declared {declared}, the feed has dtype {array.dtype}; feed {made}, or feed floats and cast them"
        )
    try:
        return kept(array, want)
    except ValueError as e:
        way = "" if str(e).startswith("holds") else f"; convert it with .astype({want.name!r})"
        raise FeedError(f"variable {name!r} is declared {declared}, the feed {e}{way}") from None


def feed_types(program: Program, feed: Mapping[str, Any]) -> dict[str, Any]:
    """The type of each feed; the declared type for a value that is not a tensor."""
    descs = program.global_block().descs
    return {n: TensorType(dtype_name(a.dtype), a.shape) if isinstance(a, np.ndarray) else descs[n].type for n, a in feed.items()}
