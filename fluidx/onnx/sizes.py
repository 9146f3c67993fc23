"""Open sizes: what Shape says of a variable with open axes, carried along by arithmetic on the host until an operator takes a shape.

A number stands for each open size, as in ir/sizes.py: equal numbers are equal sizes. Only operators on integers that hold for every size
that may be fed carry them along; what they come to is the shape of a result. Where that is not enough the program computes the sizes, or
the model is refused.
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

if TYPE_CHECKING:
    from .node import Node

_LEAST, _MOST = 1 << 32, 1 << 62  # between them a number stands for an open size, or a multiple or a part of one


class Open:
    """An array of sizes, some of them open. `write` writes the operators that compute it; where it is not `exact`, a division may have
    left a remainder, which the numbers do not know."""

    def __init__(self, array: np.ndarray, write: Callable[[], Variable], exact: bool = True):
        self.array, self.write, self.exact = array, write, exact


def is_open(number: int) -> bool:
    return _LEAST <= number < _MOST


def with_open(n: Node) -> Any:
    """What a node makes where sizes are open; None where none of its operands has to do with them."""
    if n.op_type in ("Shape", "Size"):
        v = n.operands[0]
        return _shape(n, v) if isinstance(v, Variable) and ANY in v.shape else None
    at = [k for k, v in enumerate(n.operands) if isinstance(v, Open)]
    if not at:
        return None
    taker = _TAKERS.get((n.op_type, at[0])) if len(at) == 1 else None
    try:
        if taker is None:
            return _carried(n)
        if taker is not _reshape and not n.operands[at[0]].exact:  # a reshape counts elements
            raise _refused(n, "it takes a size that is open, divided, perhaps with a remainder")
        return taker(n)
    except OnnxError as refused:
        try:
            return computed(n)
        except FluidxError:
            raise refused from None


def computed(n: Node) -> Any:
    """What a node makes where the program computes the sizes."""
    operands = [n.importer.variable(v) if isinstance(v, Open) else v for v in n.operands]
    return n.importer.outputs_of(type(n)(n.importer, n.proto, operands))


def _refused(n: Node, why: str) -> Exception:
    inputs = {v.name: v.shape for v in n.importer.inputs if ANY in v.shape}
    name, shape = next(iter(inputs.items()), ("x", (ANY,)))
    fixed = ", ".join("8" if d == ANY else str(d) for d in shape)
    return n.wrong(f'{why}; give the sizes that will be fed: load(shapes={{"{name}": [{fixed}]}})')


# -- makers and carriers ------------------------------------------------------------------------------------------------------


def _shape(n: Node, v: Variable) -> Any:
    found = n.b.sizes.shape(v.name)
    for axis, number in enumerate(found):
        if is_open(number):
            n.importer.opened.setdefault(number, (v, axis))
    axes = range(len(found))[slice(n.attr("start"), n.attr("end"))]

    def write() -> Variable:
        b = n.importer.b
        whole = b.shape(v, dtype="int64")
        if n.op_type == "Size":
            return b.squeeze(b.reduce_prod(whole, dim=(0,), keep_dim=True), axes=(0,))
        return whole if len(axes) == len(found) else b.slice(whole, axes=(0,), starts=(axes.start,), ends=(axes.stop,))

    if n.op_type == "Shape":
        return _wrapped(np.array([found[k] for k in axes], np.int64), write)
    return write() if sum(map(is_open, found)) > 1 else Open(np.array(prod(found), np.int64), write)


# What moves sizes, and sums and products of them.
_MOVES = frozenset({
    "Concat", "Expand", "Flatten", "Gather", "GatherElements", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose",
    "Unsqueeze",
})  # fmt: skip
_INTEGER = (6, 7)  # the codes of int32 and int64


def _carried(n: Node) -> Any:
    from .importer import Outputs, several

    values = [n.importer.array(v) for v in n.operands]
    if any(isinstance(v, Variable) for v in values):
        raise _refused(n, "it takes a size that is open together with what the program computes")
    cast = n.op_type == "Cast" and n.attr("to") in _INTEGER
    if not (cast or n.op_type in _MOVES or n.op_type in _RULES):
        raise _refused(n, f"operand {next(k for k, v in enumerate(n.operands) if isinstance(v, Open))} depends on a size that is open")
    exact = all(v.exact for v in n.operands if isinstance(v, Open))
    if n.op_type == "Equal" and not exact:
        raise _refused(n, "it compares a size that is open, divided, perhaps with a remainder")
    values = [v.astype(np.int64) if isinstance(v, np.ndarray) and v.dtype.kind in "iu" else v for v in values]
    if cast:
        made = values[0]
    elif n.op_type in _RULES:
        made = _RULES[n.op_type](n, *values)
    else:
        made = n.importer.outputs_of(type(n)(n.importer, n.proto, values))
    exact = exact and n.op_type != "Div"

    def wrapped(k: int, value: Any) -> Any:
        return _wrapped(value, lambda: n.importer.variable(several(computed(n))[k]), exact)

    if isinstance(made, (tuple, Outputs)):
        return Outputs(wrapped(k, v) for k, v in enumerate(made))
    return wrapped(0, made)


def _wrapped(value: Any, write: Callable[[], Variable], exact: bool = True) -> Any:
    sizes = isinstance(value, (np.ndarray, np.generic)) and value.dtype == np.int64
    return Open(np.asarray(value), write, exact) if sizes and any(map(is_open, value.ravel().tolist())) else value


def _sum(n: Node, x: Any, y: Any) -> Any:
    return _numbers(n, x + y, x, y)


def _difference(n: Node, x: Any, y: Any) -> Any:
    """A number less another one stands for nothing, unless it is a multiple of it."""
    if any(isinstance(v, Open) and not v.exact for v in n.operands) or (x % np.where(_opened(y), y, 1)).any():
        raise _refused(n, "it subtracts a size that is open")
    return _numbers(n, x - y, x, y)


def _product(n: Node, x: Any, y: Any) -> Any:
    if _opened(x).any() and _opened(y).any():
        raise _refused(n, "it multiplies sizes that are both open")
    return _numbers(n, x * y, x, y)


def _quotient(n: Node, x: Any, y: Any) -> Any:
    if _opened(y).any() or not y.all() or (x % y).any():
        raise _refused(n, "it divides a size that is open, perhaps with a remainder")
    return _numbers(n, x // y, x, y)


def _numbers(n: Node, made: Any, x: Any, y: Any) -> Any:
    """What is made of open sizes, if numbers stand for it: not where it is below 0, or too small or large a part."""
    if not (_opened(made) | (made == 0) | ~(_opened(x) | _opened(y))).all():
        raise _refused(n, "it computes with a size that is open")
    return made


def _product_of_all(n: Node, x: Any, axes: Any = None) -> Any:
    if sum(map(is_open, x.ravel().tolist())) > 1:
        raise _refused(n, "it multiplies sizes of which more than one is open")
    keep = bool(n.attr("keepdims", 1))
    if axes is None or not axes.size:
        return x if n.attr("noop_with_empty_axes", 0) else np.prod(x, keepdims=keep)
    return np.prod(x, axis=tuple(axes.tolist()), keepdims=keep)


def _equal(n: Node, x: Any, y: Any) -> Any:
    """What is fed has sizes above 0, which values that decide a size may not give; whether it equals some other number is not known."""
    x, y = np.broadcast_arrays(x, y)
    fed = [s for v in n.importer.inputs for s in n.b.sizes.shape(v.name) if is_open(s)]
    for a, b in zip(x.ravel().tolist(), y.ravel().tolist(), strict=True):
        least = 0 if any(max(a, b) % s == 0 for s in fed) else -1
        if a != b and max(a, b) >= _LEAST and min(a, b) > least:
            raise _refused(n, "it compares a size that is open")
    return x == y


def _opened(x: Any) -> Any:
    return (x >= _LEAST) & (x < _MOST)


_RULES: dict[str, Callable[..., Any]] = {
    "Add": _sum, "Sub": _difference, "Mul": _product, "Div": _quotient, "ReduceProd": _product_of_all, "Equal": _equal,
    "Where": lambda n, c, x, y: np.where(c, x, y),
}  # fmt: skip


# -- takers -------------------------------------------------------------------------------------------------------------------


def _wanted(n: Node, k: int) -> list[int]:
    return [int(v) for v in n.importer.array(n.operands[k]).ravel()]


def _reshape(n: Node) -> Variable:
    """An open size is that of the same axis, written 0, or what the others leave, written -1."""
    x, target = n.x(0), _wanted(n, 1)
    have = n.b.sizes.shape(x.name)
    sizes = [have[k] if t == 0 and not n.attr("allowzero", 0) and k < len(have) else t for k, t in enumerate(target)]
    rest = prod(d for d in sizes if d != ANY)
    if ANY in sizes and rest and prod(have) % rest == 0:
        sizes[sizes.index(ANY)] = prod(have) // rest
    shape = [(0 if k < len(have) and have[k] == d else ANY) if is_open(d) else d for k, d in enumerate(sizes)]
    if shape.count(ANY) > 1:
        raise _refused(n, "more than one size of its result is open")
    return n.b.reshape(x, shape=tuple(shape))


def _expand(n: Node) -> Variable:
    x, target = n.x(0), _wanted(n, 1)
    have = n.b.sizes.shape(x.name)
    axes = max(len(have), len(target))
    have, target = (1,) * (axes - len(have)) + have, [1] * (axes - len(target)) + target
    return _repeated(n, x, [t if h == 1 else 1 for h, t in zip(have, target, strict=True)])


def _repeated(n: Node, x: Variable, times: list[int]) -> Variable:
    """x, whose axes are those at the end of `times`, repeated so often along each of them."""
    known = tuple(1 if is_open(t) else t for t in times)
    fills = [n.b.fill_constant(shape=known, dtype=x.dtype, value=1.0)] if prod(known) != 1 or len(known) > x.ndim else []
    fills += [_like(n, t, [1] * k + [ANY] + [1] * (len(times) - k - 1), k, x.dtype, 1.0) for k, t in enumerate(times) if is_open(t)]
    for ones in fills:
        x = n.b.logical_and(x, ones) if x.dtype == "bool" else n.b.elementwise_mul(x, ones)
    return x


def _filled(n: Node) -> Variable:
    value, shape = n.attr("value", np.zeros(1, np.float32)), _wanted(n, 0)
    at = next(k for k, d in enumerate(shape) if is_open(d))
    known = [d if not is_open(d) or k == at else 1 for k, d in enumerate(shape)]
    first = _like(n, shape[at], known, at, value.dtype.name, n.filler(value))
    return _repeated(n, first, [d if is_open(d) and k != at else 1 for k, d in enumerate(shape)])


def _like(n: Node, number: int, shape: list[int], axis: int, dtype: str, value: float) -> Variable:
    if number not in n.importer.opened:
        raise _refused(n, f"axis {axis} of its result is computed of a size that is open")
    v, source = n.importer.opened[number]
    shape = [ANY if k == axis else d for k, d in enumerate(shape)]
    return n.b.fill_constant_batch_size_like(v, shape=tuple(shape), dtype=dtype, value=value, input_dim_idx=source, output_dim_idx=axis)


_TAKERS: dict[tuple[str, int], Callable[[Node], Variable]] = {
    ("Reshape", 1): _reshape, ("Expand", 1): _expand, ("ConstantOfShape", 0): _filled,
}  # fmt: skip
