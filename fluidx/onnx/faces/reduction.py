"""Operators that put many elements into one."""

from __future__ import annotations

from math import prod

import numpy as np

from ...ir import Variable
from ...ir.dtypes import FLOATS, np_dtype
from ..node import Node
from . import face
from .shape import axes_of, reshaped

_REDUCTIONS = {
    "ReduceSum": "reduce_sum", "ReduceMean": "reduce_mean", "ReduceMax": "reduce_max", "ReduceMin": "reduce_min",
    "ReduceProd": "reduce_prod", "ReduceLogSumExp": "logsumexp",
}  # fmt: skip
_OF_BOOLS = {"ReduceMax": "reduce_any", "ReduceMin": "reduce_all"}


@face(*_REDUCTIONS)
def reduction(n: Node) -> object:
    x, axes = n.x(), n.ints(1) or []
    if not axes and n.attr("noop_with_empty_axes", 0) or n.rank() == 0:
        return x
    gone, keep = axes_of(axes or range(n.rank()), n.rank()), bool(n.attr("keepdims", 1))
    shape = [1 if k in gone else d for k, d in enumerate(n.shape()) if keep or k not in gone]
    if 0 in shape:
        return n.b.fill_constant(shape=tuple(shape), dtype=x.dtype, value=0.0)
    if any(n.shape()[k] == 0 for k in gone):
        return n.b.fill_constant(shape=tuple(shape), dtype=x.dtype, value=_of_nothing(n))
    if n.op_type == "ReduceMean" and x.dtype not in FLOATS:
        return reshaped(n, _whole_mean(n, x, gone), shape)
    op = _OF_BOOLS[n.op_type] if x.dtype == "bool" else _REDUCTIONS[n.op_type]
    return reshaped(n, n.b.emit(op, x, dim=tuple(gone), keep_dim=keep), shape)


def _of_nothing(n: Node) -> float:
    """What an empty set is reduced to: what adds nothing to another one."""
    dtype = np_dtype(n.dtype())
    if n.op_type in ("ReduceMax", "ReduceMin"):
        low, high = (False, True) if dtype.kind == "b" else (-np.inf, np.inf) if n.dtype() in FLOATS else _ends(dtype)
        return float(low if n.op_type == "ReduceMax" else high)
    return {"ReduceSum": 0.0, "ReduceProd": 1.0, "ReduceMean": np.nan, "ReduceLogSumExp": -np.inf}[n.op_type]


def _ends(dtype: np.dtype) -> tuple[int, int]:
    return np.iinfo(dtype).min, np.iinfo(dtype).max


def _whole_mean(n: Node, x: Variable, gone: list[int]) -> Variable:
    """The mean of whole numbers, rounded towards zero."""
    total = n.b.reduce_sum(x, dim=tuple(gone), keep_dim=True)
    count = n.const(np.full((1,) * n.rank(), prod(n.shape()[k] for k in gone)), np_dtype(x.dtype))
    if x.dtype.startswith("u"):
        return n.b.elementwise_floordiv(total, count)
    return n.b.elementwise_mul(n.b.sign(total), n.b.elementwise_floordiv(n.b.abs(total), count))
