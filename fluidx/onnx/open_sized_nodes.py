"""Nodes with open sizes among their operands: those that take a shape or a bound, such as Reshape, Range and Slice, and write operators
whose results have that size for every feed."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..ir import Variable
from ..ir.errors import FluidxError
from ..ir.types import ANY
from ..ops.data.slicing import INT_MAX
from .errors import OnnxError
from .symbolic_sizes import OpenSizes, axis_of, computed, computed_on_host, is_open, offset, refusal, shape_outputs, sizes_of

if TYPE_CHECKING:
    from .node import Node


def open_size_outputs(n: Node) -> Any:
    """The outputs of a node that computes with open sizes; None if no operand is open."""
    if n.op_type in ("Shape", "Size"):
        v = n.operands[0]
        return shape_outputs(n, v) if isinstance(v, Variable) and ANY in v.shape else None
    at = {k for k, v in enumerate(n.operands) if isinstance(v, OpenSizes)}
    if not at:
        return None
    user = _USERS.get(n.op_type)
    try:
        if user is None or not at <= user.operands:
            return computed_on_host(n)
        if n.op_type != "Reshape" and not all(n.operands[k].exact for k in at):  # a reshape compares numbers of elements
            raise refusal(n, "it takes an open size that was divided, perhaps with a remainder")
        return user.write(n)
    except OnnxError as refused:
        try:
            return computed(n)
        except FluidxError:
            raise refused from None


# -- shapes -----------------------------------------------------------------------------------------------------------------------


def _target(n: Node, k: int) -> list[int]:
    return [int(v) for v in n.importer.array(n.operands[k]).ravel()]


def _reshape(n: Node) -> Variable:
    """A Reshape to open sizes. An open size is that of the same axis, written 0, or the rest of the elements, written -1."""
    x, target = n.x(0), _target(n, 1)
    have = sizes_of(n, x)
    sizes = [have[k] if t == 0 and not n.attr("allowzero", 0) and k < len(have) else t for k, t in enumerate(target)]
    rest = prod(d for d in sizes if d != ANY)
    if ANY in sizes and rest and prod(have) % rest == 0:
        sizes[sizes.index(ANY)] = prod(have) // rest
    shape = [(0 if k < len(have) and have[k] == d else ANY) if is_open(d) else d for k, d in enumerate(sizes)]
    return n.b.reshape(x, shape=tuple(shape)) if shape.count(ANY) < 2 else _reshape_by_runs(n, x, have, sizes)


def _reshape_by_runs(n: Node, x: Variable, have: list[int], want: list[int]) -> Variable:
    """A reshape with several open sizes. Runs of axes with the same elements get the same number of axes, by axes of size 1, so that open
    axes outside of the one run that changes keep their positions."""
    wide: list[int] = []
    aimed: list[int] = []
    for one, other in _runs(have, want):
        many = max(len(one), len(other))
        wide += one + [0] * (many - len(one))  # 0: an axis that x does not have
        aimed += other + [0] * (many - len(other))
    shape = [1 if t == 0 else 0 if t == h else ANY if is_open(t) else t for h, t in zip(wide, aimed, strict=True)]
    if shape.count(ANY) > 1:
        raise refusal(n, "more than one size of its result is open")
    if new := [k for k, h in enumerate(wide) if h == 0]:
        x = n.b.unsqueeze(x, axes=tuple(new))
    y = n.b.reshape(x, shape=tuple(shape))
    gone = tuple(k for k, t in enumerate(aimed) if t == 0)
    return n.b.squeeze(y, axes=gone) if gone else y


def _runs(have: list[int], want: list[int]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of axes of two shapes that have equal products."""
    found: list[tuple[list[int], list[int]]] = []
    one: list[int] = []
    other: list[int] = []
    left, right = have[::-1], want[::-1]
    while left or right:
        if left and (prod(one) <= prod(other) or not right):
            one.append(left.pop())
        else:
            other.append(right.pop())
        if one and other and prod(one) == prod(other):
            found.append((one, other))
            one, other = [], []
    if found and (one or other):
        found[-1] = found[-1][0] + one, found[-1][1] + other
    return found if found else [(have, want)]


def _expand(n: Node) -> Variable:
    x, target = n.x(0), _target(n, 1)
    have = sizes_of(n, x)
    axes = max(len(have), len(target))
    have, target = [1] * (axes - len(have)) + have, [1] * (axes - len(target)) + target
    if any(is_open(h) and t not in (1, h) and not is_open(t) for h, t in zip(have, target, strict=True)):
        raise refusal(n, "it would repeat along an open axis if that axis has one element")
    return _repeat(n, x, [1 if t == h else t for h, t in zip(have, target, strict=True)])


def _tile(n: Node) -> Variable:
    x, times = n.x(0), _target(n, 1)
    if any(is_open(t) and h != 1 for h, t in zip(sizes_of(n, x), times, strict=True)):
        raise refusal(n, "it repeats more than one element an open number of times")
    known = tuple(1 if is_open(t) else t for t in times)
    return _repeat(n, n.b.expand(x, expand_times=known) if max(known) > 1 else x, [t if is_open(t) else 1 for t in times])


def _repeat(n: Node, x: Variable, sizes: list[int]) -> Variable:
    """x broadcast with ones of these sizes; x has the last axes of `sizes`."""
    known = tuple(1 if is_open(t) else t for t in sizes)
    fills = [n.b.fill_constant(shape=known, dtype=x.dtype, value=1.0)] if prod(known) != 1 or len(known) > x.ndim else []
    fills += [_like(n, t, [1] * k + [ANY] + [1] * (len(sizes) - k - 1), k, x.dtype, 1.0) for k, t in enumerate(sizes) if is_open(t)]
    for ones in fills:
        x = n.b.logical_and(x, ones) if x.dtype == "bool" else n.b.elementwise_mul(x, ones)
    return x


def _constant_of_shape(n: Node) -> Variable:
    value, shape = n.attr("value", np.zeros(1, np.float32)), _target(n, 0)
    at = next(k for k, d in enumerate(shape) if is_open(d))
    known = [d if not is_open(d) or k == at else 1 for k, d in enumerate(shape)]
    first = _like(n, shape[at], known, at, value.dtype.name, n.filler(value))
    return _repeat(n, first, [d if is_open(d) and k != at else 1 for k, d in enumerate(shape)])


def _like(n: Node, number: int, shape: list[int], axis: int, dtype: str, value: float) -> Variable:
    v, source = axis_of(n, number)
    shape = [ANY if k == axis else d for k, d in enumerate(shape)]
    return n.b.fill_constant_batch_size_like(v, shape=tuple(shape), dtype=dtype, value=value, input_dim_idx=source, output_dim_idx=axis)


# -- ranges and slices ------------------------------------------------------------------------------------------------------------


def _number(n: Node, k: int) -> tuple[int, int]:
    """Operand k, one number, and its least value."""
    v = n.operands[k]
    found = n.importer.array(v)
    if isinstance(found, Variable) or found.size != 1:
        raise refusal(n, "it takes an open size together with a value that the program computes")
    return int(found.reshape(-1)[0]), int((v.least if isinstance(v, OpenSizes) else found).reshape(-1)[0])


def _range(n: Node) -> Variable:
    """Start, Start + Delta, ... before Limit. The number of elements is a size, and Start may be a number that the program computes."""
    (start, _), (limit, _), (step, _) = (_number(n, k) for k in range(3))
    if is_open(step) or not step or (limit - start) % step:
        raise refusal(n, "the number of its elements is open and computed with a remainder")
    dtype = next(v.dtype if isinstance(v, OpenSizes) else v.dtype.name for v in n.operands)
    count, first = (limit - start) // step, 0.0 if is_open(start) else float(start)
    if is_open(count):
        v, axis = axis_of(n, count)
        made = n.b.range_like(v, axis=axis, start=first, step=float(step), dtype=dtype)
    elif abs(count) < 1 << 32:
        made = n.b.range(start=first, end=first + max(count, 0) * step, step=float(step), dtype=dtype)
    else:
        raise refusal(n, "the number of its elements may be negative")
    return n.b.elementwise_add(made, n.b.reshape(n.x(0), shape=(1,))) if is_open(start) else made


class _Bounds(NamedTuple):
    """A slice of an axis that has `size` elements; `least_start` and `least_end` are the least values of the bounds."""

    size: int
    start: int
    end: int
    least_start: int
    least_end: int

    def from_end(self, bound: int, least: int) -> int | None:
        """A bound as a number of elements from the end of the axis, 0 or negative; None if it is no such number for every size."""
        return bound - self.size if is_open(bound) and is_open(self.size) and -(1 << 32) < bound - self.size <= 0 <= least else None


def _slice(n: Node) -> Variable:
    """A Slice to open bounds, in steps of 1: each is counted from the end, or the number of elements is a size."""
    x, rank = n.x(0), n.rank()
    axes, steps = n.ints(3), n.ints(4) or ()
    starts, ends = n.operands[1], n.operands[2]
    sizes, (first, last) = sizes_of(n, x), (_target(n, k) for k in (1, 2))
    least = [(v.least if isinstance(v, OpenSizes) else n.importer.array(v)).ravel().tolist() for v in (starts, ends)]
    axes = [a % rank for a in (range(len(first)) if axes is None else axes)]
    if any(step != 1 for step in steps):
        raise refusal(n, "its steps are not 1")
    plain: list[tuple[int, int, int]] = []
    for k, axis in enumerate(axes):
        bounds = _Bounds(sizes[axis], first[k], last[k], least[0][k], least[1][k])
        known = _known_bounds(bounds)
        if known is not None:
            plain.append((axis, *known))
        else:
            x = _sliced_to_size(n, x, axis, bounds, k)
    if plain:
        some, froms, tos = zip(*plain, strict=True)
        x = n.b.slice(x, axes=some, starts=froms, ends=tos)
    return x


def _known_bounds(c: _Bounds) -> tuple[int, int] | None:
    """The bounds as numbers that count from the start or from the end; None if they have none for every size."""
    start = c.start if not is_open(c.start) else c.from_end(c.start, c.least_start)
    end = min(c.end, INT_MAX) if not is_open(c.end) else c.from_end(c.end, c.least_end)
    if is_open(c.end) and end is None and is_open(c.size) and is_open(c.end - c.size):
        end = 0  # beyond the end
    if start is None or end is None or (is_open(c.start) and start == 0):
        return None
    return start, INT_MAX if is_open(c.end) and end == 0 else end


def _sliced_to_size(n: Node, x: Variable, axis: int, c: _Bounds, k: int) -> Variable:
    """The slice of one axis by an operator that takes its number of elements from another value."""
    if not is_open(c.start) and c.start != 0 or min(c.least_start, c.least_end) < 0:
        raise refusal(n, "it cuts an axis at an open size")
    to_end = c.end == c.size or not is_open(c.end) and c.end >= (1 << 31) - 1
    count = (c.size if to_end else c.end) - c.start
    if not is_open(count) or is_open(c.size) and not (c.size == c.end or to_end or is_open(c.size - c.end)):
        raise refusal(n, "it cuts an axis at an open size, which may be beyond its end")
    v, source = axis_of(n, count)
    start = None
    if is_open(c.start):
        start = n.b.slice(n.x(1), axes=(0,), starts=(k,), ends=(k + 1,)) if n.shape(1)[0] > 1 else n.x(1)
    return n.b.slice_like(x, v, start, axis=axis, like_axis=source)


def _trilu(n: Node) -> Variable:
    """A triangle whose diagonal is an open size: positions are compared."""
    b, x, shape = n.b, n.x(0), [-1, 1]
    rows, columns = (b.range_like(x, axis=axis, dtype="int64") for axis in (-2, -1))
    bound = b.elementwise_add(b.reshape(rows, shape=tuple(shape)), b.reshape(n.x(1), shape=(1,)))
    kept = (b.greater_equal if n.attr("upper", 1) else b.less_equal)(columns, bound)
    return b.where(kept, x, b.fill_zeros_like(x)) if x.dtype == "bool" else b.elementwise_mul(x, b.cast(kept, dtype=x.dtype))


class _User(NamedTuple):
    """Which operands of a node may be open sizes, and a function that writes it."""

    operands: frozenset[int]
    write: Callable[[Node], Any]


_USERS = {
    "Reshape": _User(frozenset({1}), _reshape), "Expand": _User(frozenset({1}), _expand), "Tile": _User(frozenset({1}), _tile),
    "ConstantOfShape": _User(frozenset({0}), _constant_of_shape), "Range": _User(frozenset({0, 1, 2}), _range),
    "Slice": _User(frozenset({1, 2}), _slice), "Trilu": _User(frozenset({1}), _trilu),
}  # fmt: skip
