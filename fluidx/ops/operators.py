"""What Python's operators on Variables write: `x + y`, `x < 0.5`, `x[1:]`. A number beside a float Variable becomes part of a scale
operator where it can, else a [1] constant of the Variable's dtype.
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


# fluid 1.8 divides whole numbers as C does: the quotient is cut towards zero, and the remainder has the sign of the dividend
_OF_WHOLE_NUMBERS = {"elementwise_mod": "elementwise_fmod", "elementwise_floordiv": "elementwise_div"}


def of_dtype(op_type: str, dtype: str) -> str:
    """The op that computes for a dtype what fluid calls by the name of an op.

    >>> of_dtype("elementwise_mod", "int64"), of_dtype("elementwise_mod", "float32")
    ('elementwise_fmod', 'elementwise_mod')
    """
    return _OF_WHOLE_NUMBERS.get(op_type, op_type) if dtype in INTS else op_type


def _joined(op_type: str, x: Any, y: Any) -> Variable:
    """The op on two operands, one of which may be a number."""
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
    """Whether `x` and a number can be one scale operator."""
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
    axes: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    steps: list[int] = []
    drop: list[int] = []
    new: list[int] = []
    axis = position = 0
    for i in index:
        if i is None:
            new.append(position)
            position += 1
            continue
        if isinstance(i, slice):
            if (i.start, i.stop, i.step) != (None, None, None):
                step = i.step or 1
                axes.append(axis)
                starts.append(i.start if i.start is not None else (0 if step > 0 else 2**31 - 1))
                ends.append(i.stop if i.stop is not None else (2**31 - 1 if step > 0 else -(2**31)))
                steps.append(step)
            position += 1
        elif isinstance(i, int) and not isinstance(i, bool):
            size = x.shape[axis]
            if size >= 0 and not -size <= i < size:
                raise wrong(f"index {i} is out of range for axis {axis} of variable {x.name!r} with shape {list(x.shape)}")
            axes.append(axis)
            starts.append(i)
            ends.append(i + 1 if i != -1 else 2**31 - 1)
            steps.append(1)
            drop.append(axis)
        else:
            raise wrong(f"variable {x.name!r} can be indexed with integers, slices, None and ...; got {type(i).__name__}")
        axis += 1
    b = _builder(x)
    y = x
    if axes:
        if all(s == 1 for s in steps):
            y = b.slice(y, axes=axes, starts=starts, ends=ends)
        else:
            y = b.strided_slice(y, axes=axes, starts=starts, ends=ends, strides=steps)
    if drop:
        y = b.squeeze(y, axes=drop)
    if new:
        y = b.unsqueeze(y, axes=new)
    return y


_JOINED = {
    "/": "elementwise_div", "**": "elementwise_pow", "%": "elementwise_mod", "//": "elementwise_floordiv", "@": "matmul",
    "<": "less_than", "<=": "less_equal", ">": "greater_than", ">=": "greater_equal", "==": "equal", "!=": "not_equal",
}  # fmt: skip
OPERATORS.update({symbol: partial(_joined, op_type) for symbol, op_type in _JOINED.items()})
OPERATORS.update({"+": _add, "-": _sub, "*": _mul, "neg": lambda x, _: _scaled(x, -1.0), "astype": _astype, "[]": _getitem})
