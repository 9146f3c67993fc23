"""Python operators on Variables: the program operators that `x + y`, `x < 0.5` and `x[1:]` write. A number next to a float Variable becomes
part of a scale operator if possible, otherwise a [1] constant of the Variable's dtype.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..ir.builder import Builder
from ..ir.dtypes import INTS
from ..ir.source_location import wrong
from ..ir.variable import OPERATORS, Variable


def _builder(x: Variable) -> Builder:
    return Builder(x.block.program.current_block())


# fluid 1.8 divides integers as C does: the quotient is rounded towards zero, and the remainder has the sign of the dividend
_OF_WHOLE_NUMBERS = {"elementwise_mod": "elementwise_fmod", "elementwise_floordiv": "elementwise_div"}


def of_dtype(op_type: str, dtype: str) -> str:
    """The op that computes, for a dtype, the op that fluid calls `op_type`.

    >>> of_dtype("elementwise_mod", "int64"), of_dtype("elementwise_mod", "float32")
    ('elementwise_fmod', 'elementwise_mod')
    """
    return _OF_WHOLE_NUMBERS.get(op_type, op_type) if dtype in INTS else op_type


def _joined(op_type: str, x: Any, y: Any) -> Variable:
    """The op on two operands, of which one may be a number."""
    like = x if isinstance(x, Variable) else y
    b = _builder(like)
    return b.emit(of_dtype(op_type, like.dtype), _lifted(b, x, like), _lifted(b, y, like))


def _lifted(b: Builder, value: Any, like: Variable) -> Variable:
    if isinstance(value, Variable):
        return value
    if isinstance(value, (bool, int, float, np.generic)):
        return b.fill_constant(shape=(1,), dtype=like.dtype, value=float(value))
    raise wrong(f"cannot combine variable {like.name!r} with {type(value).__name__}: {value!r}")


def _affine(x: Any, number: Any) -> bool:
    """Can `x` and a number become one scale operator?"""
    return isinstance(number, (int, float)) and not isinstance(number, bool) and x.desc.type.is_float


def _scaled(x: Variable, scale: float, bias: float = 0.0) -> Variable:
    return _builder(x).scale(x, scale=float(scale), bias=float(bias))


def _add(x: Variable, y: Any) -> Variable:
    return _scaled(x, 1.0, y) if _affine(x, y) else _joined("elementwise_add", x, y)


def _sub(x: Any, y: Any) -> Variable:
    if isinstance(x, Variable):
        return _scaled(x, 1.0, -y) if _affine(x, y) else _joined("elementwise_sub", x, y)
    return _scaled(y, -1.0, x) if _affine(y, x) else _joined("elementwise_sub", x, y)


def _mul(x: Variable, y: Any) -> Variable:
    return _scaled(x, y) if _affine(x, y) else _joined("elementwise_mul", x, y)


def _astype(x: Variable, dtype: Any) -> Variable:
    return _builder(x).cast(x, dtype=dtype if isinstance(dtype, str) else np.dtype(dtype).name)


def _getitem(x: Variable, index: Any) -> Variable:
    """`x[index]` from slice, strided_slice, squeeze and unsqueeze operators."""
    index = index if isinstance(index, tuple) else (index,)
    real = sum(1 for i in index if i is not None and i is not Ellipsis)
    if real > x.ndim:
        raise wrong(f"variable {x.name!r} has {x.ndim} axes, {real} indices were given")
    if Ellipsis in [i if i is Ellipsis else 0 for i in index]:
        at = next(k for k, i in enumerate(index) if i is Ellipsis)
        index = index[:at] + (slice(None),) * (x.ndim - real) + index[at + 1 :]
    b, y = _builder(x), x
    ranges, drop, new = _read_index(x, index)
    if ranges:
        axes, starts, ends, steps = (list(column) for column in zip(*ranges, strict=True))
        if all(s == 1 for s in steps):
            y = b.slice(y, axes=axes, starts=starts, ends=ends)
        else:
            y = b.strided_slice(y, axes=axes, starts=starts, ends=ends, strides=steps)
    if drop:
        y = b.squeeze(y, axes=drop)
    if new:
        y = b.unsqueeze(y, axes=new)
    return y


_END = 2**31 - 1  # as the end of a slice: no bound


def _read_index(x: Variable, index: tuple[Any, ...]) -> tuple[list[tuple[int, int, int, int]], list[int], list[int]]:
    """The (axis, start, end, step) of each sliced axis, the axes to remove afterwards, and the axes to insert after that."""
    ranges, drop, new = [], list[int](), list[int]()
    axis = position = 0
    for i in index:
        if i is None:
            new.append(position)
            position += 1
            continue
        if isinstance(i, slice):
            if (i.start, i.stop, i.step) != (None, None, None):
                ranges.append(_slice_range(axis, i))
            position += 1
        elif isinstance(i, int) and not isinstance(i, bool):
            size = x.shape[axis]
            if size >= 0 and not -size <= i < size:
                raise wrong(f"index {i} is out of range for axis {axis} of variable {x.name!r} with shape {list(x.shape)}")
            ranges.append((axis, i, i + 1 if i != -1 else _END, 1))
            drop.append(axis)
        else:
            raise wrong(f"variable {x.name!r} can be indexed with integers, slices, None and ...; got {type(i).__name__}")
        axis += 1
    return ranges, drop, new


def _slice_range(axis: int, i: slice) -> tuple[int, int, int, int]:
    step = i.step or 1
    first, last = (0, _END) if step > 0 else (_END, -_END - 1)
    return axis, first if i.start is None else i.start, last if i.stop is None else i.stop, step


_JOINED = {
    "/": "elementwise_div", "**": "elementwise_pow", "%": "elementwise_mod", "//": "elementwise_floordiv", "@": "matmul",
    "<": "less_than", "<=": "less_equal", ">": "greater_than", ">=": "greater_equal", "==": "equal", "!=": "not_equal",
}  # fmt: skip
OPERATORS.update({symbol: partial(_joined, op_type) for symbol, op_type in _JOINED.items()})
OPERATORS.update({"+": _add, "-": _sub, "*": _mul, "neg": lambda x, _: _scaled(x, -1.0), "astype": _astype, "[]": _getitem})
