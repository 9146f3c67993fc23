"""Shapes and dtypes: normalized axes, open sizes, 16-bit floats, and the checks that type rules use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import isfinite, prod, trunc
from typing import Any

import numpy as np

from ...ir.dtypes import FLOATS, INTS, dtype_name, np_dtype
from ...ir.errors import ExecutionError, ProgramError
from ...ir.types import ANY, TensorType, equal_size

NUMBERS = (*FLOATS, *INTS)


def type_of(a: Any) -> TensorType:
    """The type of an array."""
    return TensorType(dtype_name(a.dtype), tuple(a.shape))


def same_elements(x: TensorType, attrs: Any, count: int) -> bool:
    """`Rewrite.identity_if` for an op that keeps all elements in order: with at most one open axis, equal types mean equal shapes."""
    return x.shape.count(ANY) <= 1


def keeps_single_operand(x: TensorType, attrs: Any, count: int) -> bool:
    """`Rewrite.identity_if` for an op that joins or repeats: a single operand of known sizes, if the result is not larger."""
    return count == 1 and ANY not in x.shape


def empty_arrays(types: Sequence[TensorType]) -> list[Any]:
    """NumPy arrays of these types, for a kernel without scratch memory from a plan."""
    return [np.empty(t.shape, np_dtype(t.dtype)) for t in types]


def norm_axis(op: str, axis: int, ndim: int, extra: int = 0) -> int:
    """`axis` counted from the front. Raises ProgramError if it is outside of `ndim + extra` axes.

    >>> norm_axis("concat", -1, 3)
    2
    """
    n = ndim + extra
    if not -n <= axis < n:
        raise ProgramError(f"op {op}: axis {axis} is out of range; expected {-n} to {n - 1} for {n} axes")
    return axis % n


def norm_axes(op: str, axes: Sequence[int], ndim: int) -> tuple[int, ...]:
    """`norm_axis` of several axes, in the given order. Raises ProgramError if one is named twice."""
    out = tuple(norm_axis(op, a, ndim) for a in axes)
    if len(set(out)) != len(out):
        raise ProgramError(f"op {op}: axes {list(axes)} name one axis twice")
    return out


def meet(a: int, b: int) -> bool:
    """Can two sizes be equal? An open size can equal any."""
    return a == b or ANY in (a, b)


def merge_size(op: str, what: str, a: int, b: int) -> int:
    """The common size of two equal axes, of which one may be open. Raises ProgramError if they differ."""
    if not meet(a, b):
        raise ProgramError(f"op {op}: {what} must be equal, found {a} and {b}")
    return equal_size(a, b)


def add_sizes(sizes: Sequence[int]) -> int:
    """The sum of sizes, open if one of them is."""
    return ANY if ANY in sizes else sum(sizes)


def mul_sizes(sizes: Sequence[int]) -> int:
    """The product of sizes, open if one of them is."""
    return ANY if ANY in sizes else prod(sizes)


def need_fit(op: str, label: str, value: float, dtype: str, cut: bool = False) -> None:
    """Raise ProgramError if an integer dtype does not hold a number; `label` names the number in the message. With `cut`, a fraction is
    rounded towards 0.

    >>> need_fit("clip", "min", -0.5, "uint8", cut=True)
    """
    if dtype not in INTS:
        return
    low, high = _bounds(dtype)
    kept = trunc(value) if cut and isfinite(value) else value
    if not low <= kept <= high or kept % 1:
        raise ProgramError(f"op {op}: {label} is {value}, but {dtype} holds integers from {low} to {high}; use one of them, or cast first")


@cache
def _bounds(dtype: str) -> tuple[int, int]:
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def need_ndim(op: str, slot: str, x: TensorType, low: int, high: int | None = None) -> None:
    """Raise ProgramError unless `x` has `low` to `high` axes (exactly `low` if `high` is left out)."""
    high = low if high is None else high
    if not low <= x.ndim <= high:
        want = f"{low}" if high == low else f"{low} to {high}" if high < 99 else f"at least {low}"
        raise ProgramError(f"op {op}: expected {slot} with ndim {want}, found ndim {x.ndim}: {x}")


def need_ids(op: str, slot: str, x: TensorType) -> None:
    """Raise ProgramError unless `x` holds int32 or int64."""
    if x.dtype not in ("int32", "int64"):
        raise ProgramError(f"op {op}: {slot} must be int32 or int64, found {x.dtype}")


def need_float(op: str, slot: str, t: TensorType) -> None:
    """Raise ProgramError unless `t` is a float type."""
    if not t.is_float:
        raise ProgramError(f"op {op} needs a float {slot}, got {t}; use cast")


def need_dtype(op: str, slot: str, x: TensorType, like: TensorType, like_slot: str) -> None:
    """Raise ProgramError unless two inputs have one dtype."""
    if x.dtype != like.dtype:
        raise ProgramError(f"op {op}: {slot} must have the dtype of {like_slot}, {like.dtype}, found {x.dtype}")


def same_dtype(op: str, **types: TensorType | None) -> str:
    """The dtype that all given operands share, or ProgramError naming the ones that differ."""
    given = {slot: t.dtype for slot, t in types.items() if t is not None}
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{slot} is {dtype}" for slot, dtype in given.items())
        raise ProgramError(f"op {op} needs operands of one dtype, but {listed}; use cast")
    return next(iter(given.values()))


def need_size(op: str, name: str, value: int, least: int) -> None:
    """Raise ProgramError unless an attribute is at least `least`."""
    if value < least:
        raise ProgramError(f"op {op}: attribute {name} must be {least} or more, found {value}")


def check_range(xp: Any, op: str, ids: Any, size: int, what: str) -> None:
    """Raise ExecutionError naming the first id outside [0, size). `ids` is a contiguous int32 or int64 array."""
    if ids.size == 0:
        return
    # seen as unsigned, a negative id is a huge one: a single reduction finds both kinds of error
    unsigned = ids.view(xp.uint64 if ids.itemsize == 8 else xp.uint32)
    if int(unsigned.max()) < size:
        return
    bad = int(ids.reshape(-1)[unsigned.reshape(-1) >= size][0])
    raise ExecutionError(f"op {op}: id {bad} is out of range; {what} has {size} rows, ids go from 0 to {size - 1}")
