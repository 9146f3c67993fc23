"""Calls of C kernels that several families of ops use: copies, reductions, work on rows, gather and scatter of rows.

Each function returns the calls, or None if the kernel does not support the operands. With `dry` the arrays have shapes and strides only: an
empty list then says that there would be calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ... import native
from ...ir.dtypes import dtype_name
from ...ir.parts import Part

Calls = list[native.NativeCall]

FLOATS = {"float32": "f32", "float64": "f64"}
# the same with 16-bit floats, on which kernels for them compute in float32
NARROW_FLOATS = {**FLOATS, "float16": "f16", "bfloat16": "bf16"}
_FORMATS = {"float32": 0, "float16": 1, "bfloat16": 2}  # the numbers of halves.h: types of elements for kernels of float32
_REDUCED = {**FLOATS, "int32": "i32", "int64": "i64", "bool": "u8"}
_CASTS = {"float32": 0, "float64": 1, "int32": 2, "int64": 3, "bool": 4}  # the numbers of move.h
# the numbers of move.h
_HALVES = {("float16", "float32"): 41, ("float32", "float16"): 42, ("bfloat16", "float32"): 43, ("float32", "bfloat16"): 44,
           ("float16", "bfloat16"): 45, ("bfloat16", "float16"): 46}  # fmt: skip
_HOW = {"sum": 0, "max": 1, "min": 2, "prod": 3, "squares": 4}  # the numbers of reduce.h


def formats(arrays: Sequence[Any]) -> tuple[str, int] | None:
    """The name of the type that a kernel computes in on these arrays, None for an absent one, and the word with their formats (halves.h);
    None if there is no such kernel.

    >>> formats([np.zeros(2, "float32"), None, np.zeros(2, "float16")]), formats([np.zeros(2)])
    (('f32', 16), ('f64', 0))
    >>> formats([np.zeros(2, "float32"), np.zeros(2)]) is None
    True
    """
    dtypes = [a if a is None else dtype_name(a.dtype) for a in arrays]
    if {*dtypes} <= {"float64", None}:
        return "f64", 0
    if not {*dtypes} <= {*_FORMATS, None}:
        return None
    return "f32", sum(_FORMATS[d] << 2 * k for k, d in enumerate(dtypes) if d is not None)


# -- copies -------------------------------------------------------------------------------------------------------------------------


def copy_calls(out: Any, x: Any, dry: bool = False) -> Calls | None:
    """Calls that copy `x` into `out`: broadcast to its shape and converted to its dtype."""
    if x.dtype == out.dtype:
        how = out.itemsize if out.itemsize in (1, 2, 4, 8) else None
    elif dtype_name(x.dtype) in _CASTS and dtype_name(out.dtype) in _CASTS:
        how = 16 + 5 * _CASTS[dtype_name(x.dtype)] + _CASTS[dtype_name(out.dtype)]
    else:
        how = _HALVES.get((x.dtype.name, out.dtype.name))
    if how is None:
        return None
    if dry or not out.size:
        return []
    if x.shape != out.shape:
        x = np.broadcast_to(x, out.shape)
    to, source = native.address(out), native.address(x)
    if np.may_share_memory(out, x):
        return [] if to == source and how < 16 and (out.size == 1 or out.strides == x.strides) else None
    axes: list[list[int]] = []
    for n, t, f in sorted(zip(out.shape, out.strides, x.strides, strict=True), key=lambda axis: -abs(axis[1])):
        if n == 1:
            continue
        if axes and axes[-1][1] == n * t and axes[-1][2] == n * f:
            axes[-1] = [axes[-1][0] * n, t, f]
        else:
            axes.append([n, t, f])
    while len(axes) < 2:
        axes.insert(0, [1, 0, 0])
    if axes[-1][2] != x.itemsize:  # if neighbouring columns are not adjacent in x, neighbouring rows should be
        k = next((k for k, axis in enumerate(axes) if axis[2] == x.itemsize), -2)
        axes.insert(len(axes) - 2, axes.pop(k))
    return [native.NativeCall("copy", (how, to, source, len(axes) - 2, *(w for axis in axes for w in axis)), (out, x))]


def all_of(parts: Sequence[Calls | None]) -> Calls | None:
    """The calls of all parts in order; None if one part is None."""
    calls: Calls = []
    for part in parts:
        if part is None:
            return None
        calls += part
    return calls


def fill_calls(out: Any, value: Any, dry: bool = False) -> Calls | None:
    """Calls that fill `out` with one number."""
    if out.itemsize not in (1, 2, 4, 8):
        return None
    if dry:
        return []
    one = np.empty((), out.dtype)
    one.fill(value)
    return copy_calls(out, one)


# -- reductions ---------------------------------------------------------------------------------------------------------------------


def reduce_calls(how: str, x: Any, axes: Sequence[int], out: Any, divisor: float = 1.0, dry: bool = False) -> Calls | None:
    """Calls that reduce `x` over `axes` by "sum", "max", "min", "prod" or "squares" (the sum of squares) into the contiguous `out`; sums
    are divided by `divisor`.
    """
    kind, how_stored = formats([x, out]) or (_REDUCED.get(dtype_name(x.dtype)) if x.dtype == out.dtype else None, 0)
    if kind is None or not out.flags.c_contiguous or how in ("max", "min") and not x.size:
        return None
    kept, gone = _loops(x, axes)
    if len(kept) > 2 or len(gone) > 2:
        return None
    if dry:
        return []
    if len(gone) == 1:
        n, stride = gone[0]
        down = kept and abs(kept[-1][1]) < abs(stride) or kept and n < 16 and kept[-1][0] >= 64
        gone = [(n, stride), (1, 0)] if down else [(1, 0), (n, stride)]
    gone = [(1, 0)] * (2 - len(gone)) + gone
    kept = [(1, 0)] * (2 - len(kept)) + kept
    loops = (kept[0], gone[0], kept[1], gone[1])
    words = (_HOW[how], native.address(x), native.address(out), *(n for n, _ in loops), *(s for _, s in loops), float(divisor), how_stored)
    return [native.NativeCall(f"reduce_{kind}", words, (x, out))]


def _loops(x: Any, axes: Sequence[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Sizes and strides, in elements, of the kept axes and of the reduced axes; adjacent axes are merged."""
    made: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for k, (n, s) in enumerate(zip(x.shape, x.strides, strict=True)):
        if n == 1:
            continue
        loops, s = made[k in axes], s // x.itemsize
        if loops and loops[-1][1] == n * s:
            loops[-1] = (loops[-1][0] * n, s)
        else:
            loops.append((n, s))
    made[1].sort(key=lambda loop: -abs(loop[1]))
    return made


# -- rows ---------------------------------------------------------------------------------------------------------------------------


def row_calls(
    name: str, arrays: Sequence[Any], axis: int, single: Any = None, labels: Any = None, ignore: int = 0, text: str = "",
    part: Part | None = None, dry: bool = False,
) -> Calls | None:  # fmt: skip
    """Calls of a kernel of rows.h: `arrays` have one shape; `single` and integer `labels` have one element for each row along `axis`. With
    a `part`, that axis holds a part of the classes that labels name.
    """
    x, present = arrays[0], [*arrays, *([] if single is None else [single])]
    known = formats([*arrays, *[None] * (3 - len(arrays)), single])
    if known is None or not all(a.flags.c_contiguous for a in present):
        return None
    if labels is not None and (dtype_name(labels.dtype) not in ("int32", "int64") or not labels.flags.c_contiguous):
        return None
    if dry or not x.size:
        return []
    axis %= x.ndim
    message = text_of(text)
    words = [native.address(a) for a in arrays] + [0] * (3 - len(arrays))
    words += [0 if single is None else native.address(single), *((0, 8) if labels is None else (native.address(labels), labels.itemsize))]
    words += [ignore, prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :]), native.address(message)]
    words += [*((0, x.shape[axis]) if part is None else (part.start, part.size)), known[1]]
    return [native.NativeCall(f"{name}_{known[0]}", tuple(words), (*present, labels, message))]


def text_of(text: str) -> np.ndarray:
    """A text for C, with a zero byte at the end."""
    return np.frombuffer(text.encode() + b"\0", np.uint8)


# -- rows by index -----------------------------------------------------------------------------------------------------------------


def id_calls(
    name: str, op: str, what: str, table: Any, ids: Any, rows: Any, part: Part | None = None, padding: int = -1, more: Sequence[int] = (),
    dry: bool = False, axis: int = 0,
) -> Calls | None:  # fmt: skip
    """Calls of a kernel of move.h between rows of `table` [n, ...] and rows of `rows` [number of ids, ...]. With a `part`, `table` is a
    part of the whole table.

    An id outside of the whole table is an error; its message names `what`. `axis` is the axis of the rows in both arrays.
    """
    if dtype_name(ids.dtype) not in ("int32", "int64") or not ids.flags.c_contiguous or table.dtype != rows.dtype:
        return None
    if not table.flags.c_contiguous or not rows.flags.c_contiguous:
        return None
    if dry:
        return []
    here = table.shape[axis]
    start, size = (0, here) if part is None else (part.start, part.size)
    message = text_of(f"op {op}: id # is out of range; {what} has {size} rows, ids go from 0 to {size - 1}")
    width = prod(table.shape[axis + 1 :]) * (1 if name.startswith("add") else table.itemsize)
    words = [native.address(ids), ids.itemsize, ids.size, start, here, size, native.address(message)]
    words += [native.address(table), native.address(rows), width, width, width, padding, *more]
    return [native.NativeCall(name, tuple(words), (ids, table, rows, message))]


def take_calls(
    op: str, what: str, table: Any, ids: Any, rows: Any, part: Part | None = None, padding: int = -1, dry: bool = False, axis: int = 0
) -> Calls | None:
    """Calls that gather the rows of `table` along an axis that ids name; zeros for `padding` and for rows of another part."""
    return id_calls("take_rows", op, what, table, ids, rows, part, padding, (prod(table.shape[:axis]),), dry, axis)


def add_row_calls(
    op: str, what: str, table: Any, ids: Any, rows: Any, part: Part | None = None, padding: int = -1, clear: int = 1, dry: bool = False
) -> Calls | None:
    """Calls that add rows to those rows of a table that ids name. `clear`: 1 zeroes the table first, 2 the named rows, 0 nothing."""
    kind = {**FLOATS, "int32": "i32", "int64": "i64"}.get(dtype_name(table.dtype))
    return None if kind is None else id_calls(f"add_rows_{kind}", op, what, table, ids, rows, part, padding, (clear,), dry)
