"""Reductions and running sums."""

from __future__ import annotations

from math import prod

import numpy as np

from ...ir import Variable
from ...ir.dtypes import FLOATS, np_dtype
from ..export_graph import Op
from ..node import Node
from ..table import exports, imports
from .shape import axes_of, known_sizes, reshaped


@imports("CumSum", "CumProd")
def running(n: Node) -> object:
    (axis,) = n.ints(1) or [0]
    op = {"CumSum": "cumsum", "CumProd": "cumprod"}[n.op_type]
    return n.b.emit(op, n.x(), axis=axis % n.rank(), exclusive=bool(n.attr("exclusive", 0)), reverse=bool(n.attr("reverse", 0)))


_REDUCE = {
    "reduce_sum": "ReduceSum", "reduce_mean": "ReduceMean", "reduce_max": "ReduceMax", "reduce_min": "ReduceMin",
    "reduce_prod": "ReduceProd", "logsumexp": "ReduceLogSumExp",
}  # fmt: skip
_REDUCTIONS = {theirs: ours for ours, theirs in _REDUCE.items()}
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


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("cumsum")
def cumsum(op: Op) -> str:
    a, x = op.attrs, op["X"]
    x = op.emit("Reshape", x, op.ints([-1])) if a["flatten"] else x
    axis = op.const(np.array(0 if a["flatten"] else a["axis"], np.int64))
    return op.emit("CumSum", x, axis, exclusive=int(a["exclusive"]), reverse=int(a["reverse"]))


@exports(*_REDUCE)
def export_reduction(op: Op) -> str:
    dims, keep = op.attrs["dim"], op.attrs["keep_dim"]
    whole = len(dims or range(op.type_of("X").ndim)) == op.type_of("X").ndim
    if whole and not keep:
        return single(op, _REDUCE[op.type], op["X"])
    return op.reduced(_REDUCE[op.type], op["X"], () if whole else dims, keep)


def single(op: Op, op_type: str, x: str) -> str:
    """A reduction over all axes, to a vector of one element."""
    out = op.emit(op_type, x, keepdims=1)
    return out if op.type_of("X").ndim == 1 else op.emit("Reshape", out, op.ints([1]))


@exports("reduce_all", "reduce_any")
def of_bools(op: Op) -> str:
    """The smallest or largest of 0 and 1: ONNX does not reduce bools before opset 20."""
    dims, ndim = op.attrs["dim"], op.type_of("X").ndim
    kind, x = {"reduce_all": "ReduceMin", "reduce_any": "ReduceMax"}[op.type], op.emit("Cast", op["X"], to=op.code("int32"))
    whole = len(dims or range(ndim)) == ndim
    found = single(op, kind, x) if whole and not op.attrs["keep_dim"] else op.reduced(kind, x, () if whole else dims, op.attrs["keep_dim"])
    return op.emit("Cast", found, to=op.code("bool"))


@exports("mean")
def mean(op: Op) -> str:
    return single(op, "ReduceMean", op["X"])


@exports("squared_l2_norm")
def squared_l2_norm(op: Op) -> str:
    wide = op.out_type("Out").dtype
    x = op.cast("X", wide)
    return single(op, "ReduceSumSquare", x)
