"""Nodes with open sizes among their operands: those that take a shape or a bound, such as Reshape, Range and Slice, and write operators
whose results have that size for every feed."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..ir import Variable
from ..ir.errors import FluidxError
from ..ir.types import ANY
from ..ops.data.slicing import INT_MAX
from .errors import OnnxError
from .size_forms import SizeForm, form_of
from .symbolic_sizes import OpenSizes, axis_of, computed, computed_on_host, forms_of, is_open, refusal, shape_outputs, sizes_of
from .table import SIZE_IMPORTERS, by_sizes

if TYPE_CHECKING:
    from .node import Node

_LEAST = 1 << 32  # a larger number is an open size or, above those, a product of some


def open_size_outputs(n: Node) -> Any:
    """The outputs of a node that computes with open sizes; None if no operand is open."""
    if n.op_type in ("Shape", "Size"):
        v = n.operands[0]
        return shape_outputs(n, v) if isinstance(v, Variable) and ANY in v.shape else None
    at = {k for k, v in enumerate(n.operands) if isinstance(v, OpenSizes)}
    if not at:
        return None
    operands, write = SIZE_IMPORTERS.get(n.op_type, (frozenset(), computed_on_host))
    try:
        return write(n) if at <= operands else computed_on_host(n)
    except OnnxError as refused:
        try:
            return computed(n)
        except FluidxError:
            raise refused from None


# -- shapes -----------------------------------------------------------------------------------------------------------------------


def _target(n: Node, k: int) -> list[int]:
    return [int(v) for v in n.importer.array(n.operands[k]).ravel()]


@by_sizes("Reshape", 1)
def _reshape(n: Node) -> Variable:
    """A Reshape to open sizes. An open size is that of the same axis, written 0, or the rest of the elements, written -1."""
    x, target = n.x(0), _target(n, 1)
    have = sizes_of(n, x)
    sizes = [have[k] if t == 0 and not n.attr("allowzero", 0) and k < len(have) else t for k, t in enumerate(target)]
    rest = prod(d for d in sizes if d != ANY)
    if ANY in sizes and rest and prod(have) % rest == 0:
        sizes[sizes.index(ANY)] = prod(have) // rest
    shape = [(0 if k < len(have) and have[k] == d else ANY) if d >= _LEAST else d for k, d in enumerate(sizes)]
    if shape.count(ANY) < 2:
        return n.b.reshape(x, shape=tuple(shape))
    like = n.operands[1].of
    try:
        return _reshape_by_runs(n, x, have, sizes)
    except OnnxError:
        if like is None or n.b.block.find(like.name) is None:
            raise
        return n.b.reshape_grad(x, like)  # which reads the shape of `like` alone


def _reshape_by_runs(n: Node, x: Variable, have: list[int], want: list[int]) -> Variable:
    """A reshape with several open sizes. Runs of axes with the same elements get the same number of axes, by axes of size 1, so that open
    axes outside of the one run that changes keep their positions."""
    wide: list[int] = []
    aimed: list[int] = []
    for one, other in _runs(have, want):
        many = max(len(one), len(other))
        wide += one + [0] * (many - len(one))  # 0: an axis that x does not have
        aimed += other + [0] * (many - len(other))
    shape = [1 if t == 0 else 0 if t == h else ANY if t >= _LEAST else t for h, t in zip(wide, aimed, strict=True)]
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


class SizeOperand(NamedTuple):
    """A size or a bound: its number, its form, and its least value. `exact`: equal numbers are equal sizes."""

    number: int
    form: SizeForm
    least: int
    exact: bool

    @property
    def is_open(self) -> bool:
        return is_open(self.number)

    def axis(self, n: Node) -> tuple[Variable, int]:
        """A variable and its axis of this size."""
        return axis_of(n, self.form, self.number if self.exact else None)


def size_operands(n: Node, k: int) -> list[SizeOperand]:
    """Operand k."""
    v = n.operands[k]
    found = n.importer.array(v)
    if isinstance(found, Variable):
        raise refusal(n, "it takes an open size together with a value that the program computes")
    exact, least = (v.exact, v.least) if isinstance(v, OpenSizes) else (True, found)
    return [SizeOperand(*one, exact) for one in zip(found.ravel().tolist(), forms_of(v).ravel(), least.ravel().tolist(), strict=True)]


@by_sizes("Expand", 1)
def _expand(n: Node) -> Variable:
    x, target = n.x(0), size_operands(n, 1)
    have, one = sizes_of(n, x), SizeOperand(1, form_of(1), 1, True)
    axes = max(len(have), len(target))
    have, target = [1] * (axes - len(have)) + have, [one] * (axes - len(target)) + target
    if any(is_open(h) and t.number not in (1, h) and not t.is_open for h, t in zip(have, target, strict=True)):
        raise refusal(n, "it would repeat along an open axis if that axis has one element")
    return _repeat(n, x, [one if t.number == h and t.exact else t for h, t in zip(have, target, strict=True)])


@by_sizes("Tile", 1)
def _tile(n: Node) -> Variable:
    x, times = n.x(0), size_operands(n, 1)
    if any(t.is_open and h != 1 for h, t in zip(sizes_of(n, x), times, strict=True)):
        raise refusal(n, "it repeats more than one element an open number of times")
    known = tuple(1 if t.is_open else t.number for t in times)
    one = SizeOperand(1, form_of(1), 1, True)
    return _repeat(n, n.b.expand(x, expand_times=known) if max(known) > 1 else x, [t if t.is_open else one for t in times])


def _repeat(n: Node, x: Variable, sizes: list[SizeOperand]) -> Variable:
    """x broadcast with ones of these sizes; x has the last axes of `sizes`."""
    known = tuple(1 if t.is_open else t.number for t in sizes)
    fills = [n.b.fill_constant(shape=known, dtype=x.dtype, value=1.0)] if prod(known) != 1 or len(known) > x.ndim else []
    fills += [_like(n, t, [1] * len(sizes), k, x.dtype, 1.0) for k, t in enumerate(sizes) if t.is_open]
    for ones in fills:
        x = n.b.logical_and(x, ones) if x.dtype == "bool" else n.b.elementwise_mul(x, ones)
    return x


@by_sizes("ConstantOfShape", 0)
def _constant_of_shape(n: Node) -> Variable:
    value, shape = n.attr("value", np.zeros(1, np.float32)), size_operands(n, 0)
    at = next(k for k, d in enumerate(shape) if d.is_open)
    first = _like(n, shape[at], [1 if d.is_open else d.number for d in shape], at, value.dtype.name, n.filler(value))
    one = SizeOperand(1, form_of(1), 1, True)
    return _repeat(n, first, [d if d.is_open and k != at else one for k, d in enumerate(shape)])


def _like(n: Node, size: SizeOperand, shape: list[int], axis: int, dtype: str, value: float) -> Variable:
    """A value filled with a number: `shape` with an open size along an axis."""
    v, source = size.axis(n)
    shape = [ANY if k == axis else d for k, d in enumerate(shape)]
    return n.b.fill_constant_batch_size_like(v, shape=tuple(shape), dtype=dtype, value=value, input_dim_idx=source, output_dim_idx=axis)


# -- ranges and slices ------------------------------------------------------------------------------------------------------------


@by_sizes("Range", 0, 1, 2)
def _range(n: Node) -> Variable:
    """Start, Start + Delta, ... before Limit. The number of elements is a size, and Start may be a number that the program computes."""
    (start,), (limit,), (step,) = (size_operands(n, k) for k in range(3))
    by = step.number
    if step.is_open or abs(by) != 1:
        raise refusal(n, "its step is not 1")
    dtype = next(v.dtype if isinstance(v, OpenSizes) else v.dtype.name for v in n.operands)
    count = limit.form - start.form if by > 0 else start.form - limit.form
    first = 0.0 if start.is_open else float(start.number)
    if count.terms:
        v, axis = axis_of(n, count, (limit.number - start.number) * by if start.exact and limit.exact else None)
        made = n.b.range_like(v, axis=axis, start=first, step=float(by), dtype=dtype)
    else:
        made = n.b.range(start=first, end=first + max(count.number, 0) * by, step=float(by), dtype=dtype)
    return n.b.elementwise_add(made, n.b.reshape(n.x(0), shape=(1,))) if start.is_open else made


class _Bounds(NamedTuple):
    """A slice of an axis that has `size` elements."""

    size: int
    start: SizeOperand
    end: SizeOperand

    def from_end(self, bound: SizeOperand) -> int | None:
        """A bound as a number of elements from the end of the axis, 0 or negative; None if it is no such number for every size."""
        back = bound.number - self.size
        return back if bound.exact and is_open(self.size) and -_LEAST < back <= 0 <= bound.least else None

    def known(self) -> tuple[int, int] | None:
        """The bounds as numbers that count from the start or from the end; None if they have none for every size."""
        start = self.from_end(self.start) if self.start.is_open else self.start.number
        end = self.from_end(self.end) if self.end.is_open else min(self.end.number, INT_MAX)
        if self.end.is_open and end is None and self.end.exact and is_open(self.size) and is_open(self.end.number - self.size):
            end = 0  # beyond the end
        if start is None or end is None or (self.start.is_open and start == 0):
            return None
        return start, INT_MAX if self.end.is_open and end == 0 else end


@by_sizes("Slice", 1, 2)
def _slice(n: Node) -> Variable:
    """A Slice to open bounds, in steps of 1: each is counted from the end, or the number of elements is a size."""
    x, rank = n.x(0), n.rank()
    axes, starts, ends = n.ints(3), size_operands(n, 1), size_operands(n, 2)
    axes = [a % rank for a in (range(len(starts)) if axes is None else axes)]
    if any(step != 1 for step in n.ints(4) or ()):
        raise refusal(n, "its steps are not 1")
    sizes, plain = sizes_of(n, x), list[tuple[int, int, int]]()
    for k, axis in enumerate(axes):
        bounds = _Bounds(sizes[axis], starts[k], ends[k])
        known = bounds.known()
        if known is not None:
            plain.append((axis, *known))
        else:
            x = _sliced_to_size(n, x, axis, bounds, k)
    if plain:
        some, froms, tos = zip(*plain, strict=True)
        x = n.b.slice(x, axes=some, starts=froms, ends=tos)
    return x


def _sliced_to_size(n: Node, x: Variable, axis: int, c: _Bounds, k: int) -> Variable:
    """The slice of one axis by an operator that takes its number of elements from another value."""
    start, end, size = c.start, c.end, c.size
    if not start.is_open and start.number != 0 or start.least < 0:
        raise refusal(n, "it cuts an axis at an open size")
    to_end = end.number == size and end.exact or not end.is_open and end.number >= INT_MAX
    inside = start.exact and end.exact and (to_end or is_open(size - end.number))
    if is_open(size) and not inside:
        raise refusal(n, "it cuts an axis at an open size, which may be beyond its end")
    last = forms_of(np.array(size)).item() if to_end else end.form
    exact, count = start.exact and end.exact, last - start.form
    if not count.terms and count.number <= 0:
        return n.b.slice(x, axes=(axis,), starts=(0,), ends=(0,))
    v, source = axis_of(n, count, (size if to_end else end.number) - start.number if exact else None)
    begin = None
    if start.is_open:
        begin = n.b.slice(n.x(1), axes=(0,), starts=(k,), ends=(k + 1,)) if n.shape(1)[0] > 1 else n.x(1)
    return n.b.slice_like(x, v, begin, axis=axis, like_axis=source)


@by_sizes("Trilu", 1)
def _trilu(n: Node) -> Variable:
    """A triangle whose diagonal is an open size: positions are compared."""
    b, x = n.b, n.x(0)
    rows, columns = (b.range_like(x, axis=axis, dtype="int64") for axis in (-2, -1))
    bound = b.elementwise_add(b.reshape(rows, shape=(-1, 1)), b.reshape(n.x(1), shape=(1,)))
    kept = (b.greater_equal if n.attr("upper", 1) else b.less_equal)(columns, bound)
    return b.logical_and(x, kept) if x.dtype == "bool" else b.elementwise_mul(x, b.cast(kept, dtype=x.dtype))
