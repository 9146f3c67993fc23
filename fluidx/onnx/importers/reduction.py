"""Import of reductions."""

from __future__ import annotations

from math import prod

import numpy as np

from ...ir import Variable
from ...ir.dtypes import FLOATS, np_dtype
from ..import_tables import imports
from ..node import Node
from .shape import axes_of, known_sizes, reshaped

_REDUCTIONS = {
    "ReduceSum": "reduce_sum", "ReduceMean": "reduce_mean", "ReduceMax": "reduce_max", "ReduceMin": "reduce_min",
    "ReduceProd": "reduce_prod", "ReduceLogSumExp": "logsumexp",
}  # fmt: skip
_OF_BOOLS = {"ReduceMax": "reduce_any", "ReduceMin": "reduce_all"}
# operator -> (before the sum, after it). The function bodies of their schemas compute in float32 for every dtype
_AROUND_SUMS = {
    "ReduceL1": ("abs", ""), "ReduceL2": ("square", "sqrt"), "ReduceLogSum": ("", "log"), "ReduceSumSquare": ("square", ""),
}  # fmt: skip


@imports(*_REDUCTIONS)
def reduction(n: Node) -> object:
    return _reduced(n, n.x())


@imports(*_AROUND_SUMS)
def around_a_sum(n: Node) -> object:
    before, after = _AROUND_SUMS[n.op_type]
    x = n.x() if n.dtype() in FLOATS else n.b.cast(n.x(), dtype="float64")
    total = _reduced(n, n.b.emit(before, x) if before else x)
    total = n.b.emit(after, total) if after else total
    return n.cast(total, n.dtype())


def _reduced(n: Node, x: Variable) -> Variable:
    """`x`, which has the shape of operand 0, reduced over the axes of the node."""
    axes = n.ints(1) or []
    if not axes and n.attr("noop_with_empty_axes", 0) or n.rank() == 0:
        return x
    gone, keep = axes_of(axes or range(n.rank()), n.rank()), bool(n.attr("keepdims", 1))
    shape = [1 if k in gone else d for k, d in enumerate(n.shape()) if keep or k not in gone]
    if 0 in n.shape():
        return n.b.fill_constant(shape=tuple(shape), dtype=x.dtype, value=_reduction_of_nothing(n))
    if n.op_type == "ReduceMean" and x.dtype not in FLOATS:
        return reshaped(n, _integer_mean(n, x, gone), shape)
    op = _OF_BOOLS[n.op_type] if x.dtype == "bool" else _REDUCTIONS.get(n.op_type, "reduce_sum")
    return reshaped(n, n.b.emit(op, x, dim=tuple(gone), keep_dim=keep), shape)


def _reduction_of_nothing(n: Node) -> float:
    """The reduction of no elements: the neutral element."""
    if n.op_type in ("ReduceMax", "ReduceMin"):
        low, high = _limits(n.dtype())
        return float(low if n.op_type == "ReduceMax" else high)
    return {"ReduceProd": 1.0, "ReduceMean": np.nan, "ReduceLogSumExp": -np.inf}.get(n.op_type, 0.0)


def _limits(dtype: str) -> tuple[float, float]:
    if dtype == "bool":
        return False, True
    return (-np.inf, np.inf) if dtype in FLOATS else (np.iinfo(np_dtype(dtype)).min, np.iinfo(np_dtype(dtype)).max)


def _integer_mean(n: Node, x: Variable, gone: list[int]) -> Variable:
    """The mean of integers, rounded towards zero."""
    total = n.b.reduce_sum(x, dim=tuple(gone), keep_dim=True)
    count = n.const(np.full((1,) * n.rank(), prod(known_sizes(n, [n.shape()[k] for k in gone]))), np_dtype(x.dtype))
    if x.dtype.startswith("u"):
        return n.b.elementwise_floordiv(total, count)
    return n.b.elementwise_mul(n.b.sign(total), n.b.elementwise_floordiv(n.b.abs(total), count))
