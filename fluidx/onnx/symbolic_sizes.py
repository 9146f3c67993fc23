"""Arithmetic on open sizes: the result of Shape on a variable with open axes, computed on the host until an operator takes a shape.

A number stands for each open size, as in ir/sizes.py: equal numbers are equal sizes. Only integer operators that are right for every size
can compute with them, and the result is a shape. Otherwise the program computes the sizes, or the model is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir import Variable
from ..ir.errors import FluidxError
from ..ir.types import ANY
from .errors import OnnxError
from .values import Outputs, as_outputs

if TYPE_CHECKING:
    from .node import Node

_LEAST, _MOST = 1 << 32, 1 << 62  # numbers between these stand for an open size, or for a multiple or a fraction of one


class OpenSizes:
    """An array of sizes, some of them open.

    `least` has the least value of each: an axis may be empty. `write` writes the operators that compute the array. It is not `exact` after
    a division that may have left a remainder, which the numbers do not show.
    """

    def __init__(self, array: np.ndarray, write: Callable[[], Variable], exact: bool, least: np.ndarray):
        self.array, self.write, self.exact, self.least = array, write, exact, least


def is_open(number: int) -> bool:
    return _LEAST <= number < _MOST


def _are_open(x: Any) -> Any:
    return (x >= _LEAST) & (x < _MOST)


def open_size_outputs(n: Node) -> Any:
    """The outputs of a node that computes with open sizes; None if no operand is open."""
    if n.op_type in ("Shape", "Size"):
        v = n.operands[0]
        return _shape(n, v) if isinstance(v, Variable) and ANY in v.shape else None
    at = [k for k, v in enumerate(n.operands) if isinstance(v, OpenSizes)]
    if not at:
        return None
    use = _SHAPE_USERS.get((n.op_type, at[0])) if len(at) == 1 else None
    try:
        if use is None:
            return _computed_on_host(n)
        if use is not _reshape and not n.operands[at[0]].exact:  # a reshape compares numbers of elements
            raise _refusal(n, "it takes an open size that was divided, perhaps with a remainder")
        return use(n)
    except OnnxError as refused:
        try:
            return computed(n)
        except FluidxError:
            raise refused from None


def computed(n: Node) -> Any:
    """The outputs of a node if the program computes the sizes."""
    operands = [n.importer.variable(v) if isinstance(v, OpenSizes) else v for v in n.operands]
    return n.importer.outputs_of(type(n)(n.importer, n.proto, operands))


def _refusal(n: Node, why: str) -> Exception:
    inputs = {v.name: v.shape for v in n.importer.inputs if ANY in v.shape}
    name, shape = next(iter(inputs.items()), ("x", (ANY,)))
    fixed = ", ".join("8" if d == ANY else str(d) for d in shape)
    return n.wrong(f'{why}; give the sizes of the feeds: load(shapes={{"{name}": [{fixed}]}})')


# -- arithmetic on open sizes -----------------------------------------------------------------------------------------------------


def _shape(n: Node, v: Variable) -> Any:
    found = _sizes(n, v)
    for axis, number in enumerate(found):
        if is_open(number):
            n.importer.open_axes.setdefault(number, (v, axis))
    axes = range(len(found))[slice(n.attr("start"), n.attr("end"))]

    def write() -> Variable:
        b = n.importer.b
        whole = b.shape(v, dtype="int64")
        if n.op_type == "Size":
            return b.squeeze(b.reduce_prod(whole, dim=(0,), keep_dim=True), axes=(0,))
        return whole if len(axes) == len(found) else b.slice(whole, axes=(0,), starts=(axes.start,), ends=(axes.stop,))

    if n.op_type == "Size" and sum(map(is_open, found)) > 1:
        return write()
    made = np.array([found[k] for k in axes] if n.op_type == "Shape" else prod(found), np.int64)
    return _open_or_known(made, write, True, np.where(_are_open(made), 0, made))


def _sizes(n: Node, v: Variable) -> list[int]:
    """The shape of a variable, with numbers for its open sizes. An axis is open too if its size depends on one, such as a slice up to 8."""
    opened, found = n.importer.open_axes, list(n.b.sizes.shape(v.name))
    for axis, (declared, size) in enumerate(zip(v.shape, found, strict=True)):
        if declared == ANY and not is_open(size):
            known = (number for number, (w, k) in opened.items() if (w.name, k) == (v.name, axis))
            found[axis] = next(known, None) or n.b.sizes.another()
    return found


# Operators that rearrange sizes. They also work on sums and products of sizes.
_MOVES = frozenset({
    "Concat", "Expand", "Flatten", "Gather", "GatherElements", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose",
    "Unsqueeze",
})  # fmt: skip
_INTEGER = (6, 7)  # ONNX's codes of int32 and int64


def _computed_on_host(n: Node) -> Any:
    values = [n.importer.array(v) for v in n.operands]
    if any(isinstance(v, Variable) for v in values):
        raise _refusal(n, "it takes an open size together with a value that the program computes")
    cast = n.op_type == "Cast" and n.attr("to") in _INTEGER
    moved = len(n.operands) if n.op_type == "Concat" else int(n.op_type in _MOVES)  # the first operands, which are only rearranged
    uses_values = [k for k, v in enumerate(n.operands) if isinstance(v, OpenSizes) and k >= moved]
    if uses_values and not (cast or n.op_type in _RULES):
        raise _refusal(n, f"operand {uses_values[0]} depends on an open size")
    exact = all(v.exact for v in n.operands if isinstance(v, OpenSizes))
    if n.op_type == "Equal" and not exact:
        raise _refusal(n, "it compares an open size that was divided, perhaps with a remainder")

    def result(values: list[Any]) -> Any:
        values = [v.astype(np.int64) if isinstance(v, np.ndarray) and v.dtype.kind in "iu" else v for v in values]
        if cast:
            return values[0]
        return _RULES[n.op_type](n, *values) if n.op_type in _RULES else n.importer.outputs_of(type(n)(n.importer, n.proto, values))

    made, exact = result(values), exact and n.op_type != "Div"
    # sums, products and rearranged sizes are least where the sizes are least
    least = result([v.least if isinstance(v, OpenSizes) else w for v, w in zip(n.operands, values, strict=True)]) if exact else made

    def wrapped(k: int, value: Any, least: Any) -> Any:
        return _open_or_known(value, lambda: n.importer.variable(as_outputs(computed(n))[k]), exact, least)

    if isinstance(made, (tuple, Outputs)):
        return Outputs(wrapped(k, v, w) for k, (v, w) in enumerate(zip(made, least, strict=True)))
    return wrapped(0, made, least)


def _open_or_known(value: Any, write: Callable[[], Variable], exact: bool, least: Any) -> Any:
    sizes = isinstance(value, (np.ndarray, np.generic)) and value.dtype == np.int64
    return OpenSizes(np.asarray(value), write, exact, np.asarray(least)) if sizes and _are_open(value).any() else value


def _sum(n: Node, x: Any, y: Any) -> Any:
    return _numbers(n, x + y, x, y)


def _difference(n: Node, x: Any, y: Any) -> Any:
    """The difference of sizes. It has no number if an open size is subtracted, except from a multiple of itself, or if it may be
    negative."""
    unsure = _are_open(y) & ((x % np.where(_are_open(y), y, 1) != 0) | (_least(n, 0) < 0) | (_least(n, 1) < 0))
    if any(isinstance(v, OpenSizes) and not v.exact for v in n.operands) or unsure.any():
        raise _refusal(n, "it subtracts an open size")
    return _numbers(n, x - y, x, y)


def _product(n: Node, x: Any, y: Any) -> Any:
    if _are_open(x).any() and _are_open(y).any():
        raise _refusal(n, "it multiplies two open sizes")
    return _numbers(n, x * y, x, y)


def _quotient(n: Node, x: Any, y: Any) -> Any:
    if _are_open(y).any() or not y.all() or (x % y).any():
        raise _refusal(n, "it divides an open size, perhaps with a remainder")
    return _numbers(n, x // y, x, y)


def _numbers(n: Node, made: Any, x: Any, y: Any) -> Any:
    """The result `made`, if its numbers can stand for sizes: they are not negative, and no fraction or multiple is out of range."""
    if not (_are_open(made) | (made == 0) | ~(_are_open(x) | _are_open(y))).all():
        raise _refusal(n, "it computes with an open size")
    return made


def _product_of_all(n: Node, x: Any, axes: Any = None) -> Any:
    if sum(map(is_open, x.ravel().tolist())) > 1:
        raise _refusal(n, "it multiplies more than one open size")
    axis = None if axes is None or not axes.size else tuple(axes.tolist())
    if axis is None and n.attr("noop_with_empty_axes", 0):
        return x
    return _numbers(n, np.prod(x, axis=axis, keepdims=bool(n.attr("keepdims", 1))), x.max(), 0)


def _equal(n: Node, x: Any, y: Any) -> Any:
    """Equality of sizes. Equal numbers are equal sizes, and a size differs from a number below its least value; otherwise the result is
    unknown."""
    a, b, least_a, least_b = np.broadcast_arrays(x, y, _least(n, 0), _least(n, 1))
    alike = (a == b) & (least_a >= 0) & (least_b >= 0)
    apart = _are_open(a) & ~_are_open(b) & (b < least_a) | _are_open(b) & ~_are_open(a) & (a < least_b)
    if not (alike | apart | ~_are_open(a) & ~_are_open(b)).all():
        raise _refusal(n, "it compares an open size")
    return x == y


def _least(n: Node, k: int) -> Any:
    v = n.operands[k]
    return v.least if isinstance(v, OpenSizes) else n.importer.array(v)


_RULES: dict[str, Callable[..., Any]] = {
    "Add": _sum, "Sub": _difference, "Mul": _product, "Div": _quotient, "ReduceProd": _product_of_all, "Equal": _equal,
    "Where": lambda n, c, x, y: np.where(c, x, y),
}  # fmt: skip


# -- operators that take a shape --------------------------------------------------------------------------------------------------


def _target(n: Node, k: int) -> list[int]:
    return [int(v) for v in n.importer.array(n.operands[k]).ravel()]


def _reshape(n: Node) -> Variable:
    """A Reshape to open sizes. An open size is that of the same axis, written 0, or the rest of the elements, written -1."""
    x, target = n.x(0), _target(n, 1)
    have = _sizes(n, x)
    sizes = [have[k] if t == 0 and not n.attr("allowzero", 0) and k < len(have) else t for k, t in enumerate(target)]
    rest = prod(d for d in sizes if d != ANY)
    if ANY in sizes and rest and prod(have) % rest == 0:
        sizes[sizes.index(ANY)] = prod(have) // rest
    shape = [(0 if k < len(have) and have[k] == d else ANY) if is_open(d) else d for k, d in enumerate(sizes)]
    if shape.count(ANY) > 1:
        raise _refusal(n, "more than one size of its result is open")
    return n.b.reshape(x, shape=tuple(shape))


def _expand(n: Node) -> Variable:
    x, target = n.x(0), _target(n, 1)
    have = _sizes(n, x)
    axes = max(len(have), len(target))
    have, target = [1] * (axes - len(have)) + have, [1] * (axes - len(target)) + target
    if any(is_open(h) and t not in (1, h) for h, t in zip(have, target, strict=True)):
        raise _refusal(n, "it would repeat along an open axis if that axis has one element")
    return _repeat(n, x, [t if h == 1 else 1 for h, t in zip(have, target, strict=True)])


def _repeat(n: Node, x: Variable, times: list[int]) -> Variable:
    """x repeated `times` along each axis; x has the last axes of `times`."""
    known = tuple(1 if is_open(t) else t for t in times)
    fills = [n.b.fill_constant(shape=known, dtype=x.dtype, value=1.0)] if prod(known) != 1 or len(known) > x.ndim else []
    fills += [_like(n, t, [1] * k + [ANY] + [1] * (len(times) - k - 1), k, x.dtype, 1.0) for k, t in enumerate(times) if is_open(t)]
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
    if number not in n.importer.open_axes:
        raise _refusal(n, f"axis {axis} of its result is computed from an open size")
    v, source = n.importer.open_axes[number]
    shape = [ANY if k == axis else d for k, d in enumerate(shape)]
    return n.b.fill_constant_batch_size_like(v, shape=tuple(shape), dtype=dtype, value=value, input_dim_idx=source, output_dim_idx=axis)


_SHAPE_USERS: dict[tuple[str, int], Callable[[Node], Variable]] = {
    ("Reshape", 1): _reshape, ("Expand", 1): _expand, ("ConstantOfShape", 0): _constant_of_shape,
}  # fmt: skip
