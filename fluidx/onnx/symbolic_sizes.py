"""Arithmetic on open sizes: the result of Shape on a variable with open axes, computed on the host until an operator takes a size.

A number stands for each open size, as in ir/sizes.py: equal numbers are equal sizes. Only integer operators that are right for every size
can compute with them. Operators that take such a size are in open_sized_nodes.py; otherwise the program computes the sizes, or the model is
refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir import Variable
from ..ir.types import ANY
from ..ops.data.slicing import INT_MAX
from .size_forms import Quotient, SizeForm
from .values import Outputs, as_outputs

if TYPE_CHECKING:
    from .node import Node

_LEAST, _MOST = 1 << 32, 1 << 62  # numbers between these stand for an open size, or for a multiple or a fraction of one


class OpenSizes:
    """An array of sizes, some of them open.

    `least` has the least value of each: an axis may be empty. `forms` has the sums that they are. `write` writes the operators that compute
    the array. It is not `exact` after a division that may have left a remainder, which the numbers do not show. The array is int64; the
    model may compute in another `dtype`.
    """

    def __init__(
        self, array: np.ndarray, forms: np.ndarray, write: Callable[[], Variable], exact: bool, least: np.ndarray, dtype: str = "int64"
    ):
        self.array, self.forms, self.write, self.exact, self.least, self.dtype = array, forms, write, exact, least, dtype
        self.of: Variable | None = None  # the value whose whole shape it is


def is_open(number: int) -> bool:
    return _LEAST <= number < _MOST


def _are_open(x: Any) -> Any:
    return (x >= _LEAST) & (x < _MOST)


def computed(n: Node) -> Any:
    """The outputs of a node if the program computes the sizes."""
    operands = [n.importer.variable(v) if isinstance(v, OpenSizes) else v for v in n.operands]
    return n.importer.outputs_of(type(n)(n.importer, n.proto, operands))


def refusal(n: Node, why: str) -> Exception:
    inputs = {v.name: v.shape for v in n.importer.inputs if ANY in v.shape}
    name, shape = next(iter(inputs.items()), ("x", (ANY,)))
    fixed = ", ".join("8" if d == ANY else str(d) for d in shape)
    return n.wrong(f'{why}; give the sizes of the feeds: load(shapes={{"{name}": [{fixed}]}})')


# -- arithmetic on open sizes -----------------------------------------------------------------------------------------------------


def shape_outputs(n: Node, v: Variable) -> Any:
    found = sizes_of(n, v)
    for axis, number in enumerate(found):
        if is_open(number):
            n.importer.open_axes.setdefault(number, _fed_axis(n, number) or (v, axis))
    axes = range(len(found))[slice(n.attr("start"), n.attr("end"))]

    def write() -> Variable:
        b = n.importer.b
        if len(axes) == 1 and n.op_type == "Shape":
            return b.reshape(b.axis_size(v, axis=axes[0]), shape=(1,))
        whole = b.shape(v, dtype="int64")
        if n.op_type == "Size":
            return b.squeeze(b.reduce_prod(whole, dim=(0,), keep_dim=True), axes=(0,))
        return whole if len(axes) == len(found) else b.slice(whole, axes=(0,), starts=(axes.start,), ends=(axes.stop,))

    if n.op_type == "Size" and sum(map(is_open, found)) > 1:
        return write()
    made = np.array([found[k] for k in axes] if n.op_type == "Shape" else prod(found), np.int64)
    least = np.array([_least_size(n, number) for number in made.ravel().tolist()], np.int64).reshape(made.shape)
    sizes = _open_or_known(made, forms_of(made), write, True, least)
    if isinstance(sizes, OpenSizes) and n.op_type == "Shape" and len(axes) == len(found):
        sizes.of = v
    return sizes


def _least_size(n: Node, number: int) -> int:
    """The least size that a number can stand for. The sum of an axis of an input and known sizes is at least these."""
    if not is_open(number):
        return number
    sizes = n.b.sizes
    fed = {sizes.shape(v.name)[axis] for v in n.importer.inputs for axis, d in enumerate(v.shape) if d == ANY}
    return max((number - axis for axis in fed if 0 < number - axis < _MOST_ADDED), default=0)


def forms_of(value: Any) -> np.ndarray:
    """The forms of an operand: open sizes, known numbers, or numbers that stand for axes."""
    if isinstance(value, OpenSizes):
        return value.forms
    made = np.empty(np.shape(value), object)
    for k, number in enumerate(np.ravel(value).tolist()):
        made.reshape(-1)[k] = SizeForm.axis(number) if is_open(number) else SizeForm(int(number))
    return made


def _fed_axis(n: Node, number: int) -> tuple[Variable, int] | None:
    """An input and its axis whose size a number stands for."""
    sizes = n.b.sizes
    found = ((v, axis) for v in n.importer.inputs for axis, d in enumerate(v.shape) if d == ANY and sizes.shape(v.name)[axis] == number)
    return next(found, None)


def sizes_of(n: Node, v: Variable) -> list[int]:
    """The shape of a variable, with numbers for its open sizes. An axis is open too if its size depends on one, such as a slice up to 8."""
    opened, found = n.importer.open_axes, list(n.b.sizes.shape(v.name))
    for axis, (declared, size) in enumerate(zip(v.shape, found, strict=True)):
        if declared == ANY and not is_open(size):
            known = (number for number, (w, k) in opened.items() if isinstance(number, int) and (w.name, k) == (v.name, axis))
            found[axis] = next(known, None) or n.b.sizes.another()
    return found


# Operators that rearrange sizes. They also work on sums and products of sizes.
_MOVES = frozenset({
    "Concat", "Expand", "Flatten", "Gather", "GatherElements", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose",
    "Unsqueeze",
})  # fmt: skip
_MOST_ADDED = 1 << 20  # numbers that stand for axes of inputs are far from each other
_INTEGER = (6, 7)  # ONNX's codes of int32 and int64


def computed_on_host(n: Node) -> Any:
    values = [n.importer.array(v) for v in n.operands]
    if any(isinstance(v, Variable) for v in values):
        raise refusal(n, "it takes an open size together with a value that the program computes")
    cast = n.op_type == "Cast" and n.attr("to") in _INTEGER
    moves = n.op_type in _MOVES
    uses_values = [k for k, v in enumerate(n.operands) if isinstance(v, OpenSizes) and not (moves and _is_moved(n, k))]
    if uses_values and not (cast or n.op_type in _RULES):
        raise refusal(n, f"operand {uses_values[0]} depends on an open size")
    exact = all(v.exact for v in n.operands if isinstance(v, OpenSizes))
    if n.op_type == "Equal" and not exact:
        raise refusal(n, "it compares an open size that was divided, perhaps with a remainder")

    def result(values: list[Any]) -> Any:
        values = [v.astype(np.int64) if isinstance(v, np.ndarray) and v.dtype.kind in "iu" else v for v in values]
        if cast:
            return values[0]
        return _RULES[n.op_type](n, *values) if n.op_type in _RULES else n.importer.outputs_of(type(n)(n.importer, n.proto, values))

    made, exact = result(values), exact and n.op_type != "Div"
    dtype = ("int32" if n.attr("to") == 6 else "int64") if cast else next(v.dtype for v in n.operands if isinstance(v, OpenSizes))
    # sums, products and rearranged sizes are least where the sizes are least
    least = result([v.least if isinstance(v, OpenSizes) else w for v, w in zip(n.operands, values, strict=True)]) if exact else made

    forms = _computed_forms(n, values, result)

    def written(k: int, value: np.ndarray) -> Variable:
        number = int(value.reshape(-1)[0]) if value.size == 1 and dtype == "int64" and exact else 0
        if number not in n.importer.open_axes:
            return n.importer.variable(as_outputs(computed(n))[k])
        (v, axis), b = axis_of(n, SizeForm.axis(number), number), n.importer.b
        size = b.axis_size(v, axis=axis)
        return b.reshape(size, shape=value.shape) if value.ndim else size

    def wrapped(k: int, value: Any, form: Any, least: Any) -> Any:
        return _open_or_known(value, form, lambda: written(k, np.asarray(value)), exact, least, dtype)

    if isinstance(made, (tuple, Outputs)):
        return Outputs(wrapped(k, *found) for k, found in enumerate(zip(made, forms, least, strict=True)))
    return wrapped(0, made, forms, least)


def _computed_forms(n: Node, values: list[Any], result: Callable[[list[Any]], Any]) -> Any:
    """The forms of the results of a node: by arithmetic, or moved as the numbers are."""
    forms: list[Any] = [None if v is None else forms_of(v) for v in n.operands]
    if n.op_type in _ARITHMETIC:
        return _ARITHMETIC[n.op_type](*forms)
    if n.op_type == "ReduceProd":
        axes = tuple(values[1].tolist()) if len(values) > 1 and values[1].size else None
        reduce: Any = np.multiply.reduce
        return reduce(forms[0], axis=axes, keepdims=bool(n.attr("keepdims", 1)))
    if n.op_type == "Equal":
        return None
    known, mine = list[Any](), list[Any]()
    for k, value in enumerate(values):
        if not _is_moved(n, k):
            mine.append(value)
            continue
        mine.append(np.arange(len(known), len(known) + forms[k].size).reshape(forms[k].shape))
        known += forms[k].ravel().tolist()
    table = np.empty(len(known), object)
    for k, form in enumerate(known):
        table[k] = form
    found = result(mine)
    return Outputs(table[v] for v in found) if isinstance(found, (tuple, Outputs)) else table[found]


def _is_moved(n: Node, k: int) -> bool:
    """Does a node only choose among the elements of operand k?"""
    return n.op_type == "Concat" or k in ((1, 2) if n.op_type == "Where" else (0,))


def _open_or_known(value: Any, forms: Any, write: Callable[[], Variable], exact: bool, least: Any, dtype: str = "int64") -> Any:
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype != np.int64:
        return value
    if not _are_open(value).any():
        return np.asarray(value, dtype)
    made = np.empty(np.shape(value), object)
    made[...] = forms
    return OpenSizes(np.asarray(value), made, write, exact, np.asarray(least), dtype)


def _sum(n: Node, x: Any, y: Any) -> Any:
    return _numbers(n, x + y, x, y)


def _difference(n: Node, x: Any, y: Any) -> Any:
    """The difference of sizes. It has no number if an open size is subtracted, except from a multiple of itself, or if it may be
    negative."""
    unsure = _are_open(y) & ((x % np.where(_are_open(y), y, 1) != 0) | (_least(n, 0) < 0) | (_least(n, 1) < 0))
    if any(isinstance(v, OpenSizes) and not v.exact for v in n.operands) or unsure.any():
        raise refusal(n, "it subtracts an open size")
    return _numbers(n, x - y, x, y)


def _product(n: Node, x: Any, y: Any) -> Any:
    if _are_open(x).any() and _are_open(y).any():
        raise refusal(n, "it multiplies two open sizes")
    return _numbers(n, x * y, x, y)


def _quotient(n: Node, x: Any, y: Any) -> Any:
    if _are_open(y).any() or (y < 1).any() or (x < 0).any():
        raise refusal(n, "it divides an open size, perhaps with a remainder")
    return _numbers(n, x // y, x, y)


def _numbers(n: Node, made: Any, x: Any, y: Any) -> Any:
    """The result `made`, if its numbers can stand for sizes: they are not negative, and no fraction or multiple is out of range."""
    if not (_are_open(made) | (made == 0) | ~(_are_open(x) | _are_open(y))).all():
        raise refusal(n, "it computes with an open size")
    return made


def _product_of_all(n: Node, x: Any, axes: Any = None) -> Any:
    if sum(map(is_open, x.ravel().tolist())) > 1:
        raise refusal(n, "it multiplies more than one open size")
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
        raise refusal(n, "it compares an open size")
    return x == y


def _least(n: Node, k: int) -> Any:
    v = n.operands[k]
    return v.least if isinstance(v, OpenSizes) else n.importer.array(v)


_ARITHMETIC = {"Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": operator.floordiv}
_RULES: dict[str, Callable[..., Any]] = {
    "Add": _sum, "Sub": _difference, "Mul": _product, "Div": _quotient, "ReduceProd": _product_of_all, "Equal": _equal,
    "Where": lambda n, c, x, y: np.where(c, x, y),
}  # fmt: skip


# -- axes of computed sizes -------------------------------------------------------------------------------------------------------


def axis_of(n: Node, form: SizeForm, number: int | None = None) -> tuple[Variable, int]:
    """A variable and its axis that has a computed size. `number` stands for the size, if it is exact. If there is no such axis, it is a
    vector that is made of others."""
    importer = n.importer
    alone = form.terms[0][0] if form.number == 0 and len(form.terms) == 1 and form.terms[0][1] == 1 else None
    for known in (number, alone, form):
        if known in importer.open_axes and n.b.block.find(importer.open_axes[known][0].name) is not None:  # sub-blocks have their own
            return importer.open_axes[known]
    made = _vector(n, form)
    importer.keep_names([made])
    importer.open_axes[form] = made, 0
    return made, 0


def _vector(n: Node, form: SizeForm) -> Variable:
    """A vector of the length of a sum; a sum below 0 counts as 0."""
    b, parts = n.b, []
    if not form.terms:
        return b.fill_constant(shape=(max(form.number, 0),), dtype="bool", value=1.0)
    for term, times in form.terms:
        if times < 0:
            raise refusal(n, "it takes a difference of open sizes")
        ones = _ones(n, term)
        parts.append(b.expand(ones, expand_times=(times,)) if times > 1 else ones)
    if form.number > 0:
        parts.append(b.fill_constant(shape=(form.number,), dtype="bool", value=1.0))
    whole = b.concat(parts, axis=0) if len(parts) > 1 else parts[0]
    return b.slice(whole, axes=(0,), starts=(0,), ends=(form.number,)) if form.number < 0 else whole


def _ones(n: Node, term: int | Quotient) -> Variable:
    if isinstance(term, Quotient):
        whole = _like_axis(n, *axis_of(n, term.whole))
        return n.b.strided_slice(whole, axes=(0,), starts=(term.by - 1,), ends=(INT_MAX,), strides=(term.by,))
    if term not in n.importer.open_axes:
        raise refusal(n, "no value has an axis of the open size that it computes")
    return _like_axis(n, *n.importer.open_axes[term])


def _like_axis(n: Node, v: Variable, axis: int) -> Variable:
    return n.b.fill_constant_batch_size_like(v, shape=(ANY,), dtype="bool", value=1.0, input_dim_idx=axis)
