"""Products of matrices, sums and other reductions, softmax, attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...ir.dtypes import np_dtype
from . import nodes

if TYPE_CHECKING:
    from ..export import Op


@nodes("matmul")
def matmul(op: Op) -> str:
    x, y, tx, ty, alpha = op.type_of("X"), op.type_of("Y"), op.attrs["transpose_x"], op.attrs["transpose_y"], op.attrs["alpha"]
    if x.ndim == y.ndim == 2 and (tx or ty or alpha != 1.0):
        return op.emit("Gemm", op["X"], op["Y"], transA=int(tx), transB=int(ty), alpha=alpha)
    if (tx and x.ndim == 1) or (ty and y.ndim == 1):
        raise op.wrong("a vector is transposed in it; reshape it to a matrix")
    a, b = (op.emit("Transpose", op[s], perm=_swapped(op.type_of(s).ndim)) if t else op[s] for s, t in (("X", tx), ("Y", ty)))
    if (tx and y.ndim == 1) or (ty and x.ndim == 1):  # ONNX Runtime 1.31 goes wrong with a vector behind what is transposed
        axis = -1 if tx else -2
        matrix = op.emit("Unsqueeze", b if tx else a, op.ints([-1 if tx else 0]))
        out = op.emit("Squeeze", op.emit("MatMul", a, matrix) if tx else op.emit("MatMul", matrix, b), op.ints([axis]))
    elif x.ndim == y.ndim == 1:
        out = op.emit("MatMul", op.emit("Unsqueeze", a, op.ints([0])), b)
    else:
        out = op.emit("MatMul", a, b)
    return op.emit("Mul", out, op.const(np.array(alpha, np_dtype(x.dtype)))) if alpha != 1.0 else out


def _swapped(ndim: int) -> list[int]:
    return [*range(ndim - 2), ndim - 1, ndim - 2]


@nodes("bmm")
def bmm(op: Op) -> str:
    return op.emit("MatMul", op["X"], op["Y"])


@nodes("mul")
def mul(op: Op) -> str:
    x, y, nx, ny = op.type_of("X"), op.type_of("Y"), op.attrs["x_num_col_dims"], op.attrs["y_num_col_dims"]
    if nx == x.ndim - 1 and y.ndim == 2:
        return op.emit("MatMul", op["X"], op["Y"])
    rows = op["X"] if x.ndim == 2 else op.emit("Flatten", op["X"], axis=nx)
    columns = op["Y"] if y.ndim == 2 else op.emit("Flatten", op["Y"], axis=ny)
    out = op.emit("MatMul", rows, columns)
    return out if op.out_type("Out").ndim == 2 else op.shaped(out, "Out")


@nodes("einsum")
def einsum(op: Op) -> str:
    return op.emit("Einsum", *op.many("X"), equation=op.attrs["equation"])


# -- reductions ---------------------------------------------------------------------------------------------------------------

_REDUCE = {
    "reduce_sum": "ReduceSum", "reduce_mean": "ReduceMean", "reduce_max": "ReduceMax", "reduce_min": "ReduceMin",
    "reduce_prod": "ReduceProd", "logsumexp": "ReduceLogSumExp",
}  # fmt: skip


@nodes(*_REDUCE)
def reduce(op: Op) -> str:
    dims, keep = op.attrs["dim"], op.attrs["keep_dim"]
    whole = len(dims or range(op.type_of("X").ndim)) == op.type_of("X").ndim
    if whole and not keep:
        return _single(op, _REDUCE[op.type], op["X"])
    return op.reduced(_REDUCE[op.type], op["X"], () if whole else dims, keep)


def _single(op: Op, op_type: str, x: str) -> str:
    """A reduction of all axes, to a vector of one element."""
    out = op.emit(op_type, x, keepdims=1)
    return out if op.type_of("X").ndim == 1 else op.emit("Reshape", out, op.ints([1]))


@nodes("mean")
def mean(op: Op) -> str:
    return _single(op, "ReduceMean", op["X"])


@nodes("squared_l2_norm")
def squared_l2_norm(op: Op) -> str:
    wide = op.out_type("Out").dtype
    x = op["X"] if op.dtype("X") == wide else op.emit("Cast", op["X"], to=op.code(wide))
    return _single(op, "ReduceSumSquare", x)


# -- softmax, attention -------------------------------------------------------------------------------------------------------


@nodes("softmax", "log_softmax")
def softmax(op: Op) -> str:
    return op.emit({"softmax": "Softmax", "log_softmax": "LogSoftmax"}[op.type], op["X"], axis=op.attrs["axis"])


@nodes("scaled_dot_product_attention")
def attention(op: Op) -> str:
    """Written out: runtimes know this form of it since long before the operator."""
    q, k, v = (op.type_of(s) for s in "QKV")
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        raise op.wrong("several heads of Q share one of K and V; repeat K and V")
    dtype = np_dtype(q.dtype)
    scores = op.emit("MatMul", op["Q"], op.emit("Transpose", op["K"], perm=_swapped(k.ndim)))
    scores = op.emit("Mul", scores, op.const(np.array(op.attrs["scale"], dtype)))
    by_bools = op.has("Mask") and op.dtype("Mask") == "bool"
    if op.has("Mask") and not by_bools:
        scores = op.emit("Add", scores, op["Mask"])
    seen = [*([op["Mask"]] if by_bools else []), *([_causal(op)] if op.attrs["causal"] else [])]
    for places in seen:
        scores = op.emit("Where", places, scores, op.const(np.array(np.finfo(dtype).min, dtype)))
    weights = op.emit("Softmax", scores, axis=-1)
    for places in seen:  # a row that looks nowhere gives zeros
        weights = op.emit("Where", places, weights, op.const(np.array(0, dtype)))
    return op.emit("MatMul", weights, op["V"])


def _causal(op: Op) -> str:
    """Row i of Q looks at the first i + 1 rows of K."""
    places = []
    for slot, axis in (("Q", 1), ("K", 0)):
        count = op.emit("Squeeze", op.sizes(op[slot], -2, -1), op.ints([0]))
        zero, one = (op.const(np.array(n, np.int64)) for n in (0, 1))
        places.append(op.emit("Unsqueeze", op.emit("Range", zero, count, one), op.ints([axis])))
    return op.emit("GreaterOrEqual", *places)
