"""Export of matrix products, reductions and softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...ir.dtypes import np_dtype
from . import exports

if TYPE_CHECKING:
    from ..export_graph import Op


@exports("matmul")
def matmul(op: Op) -> str:
    x, y, tx, ty, alpha = op.type_of("X"), op.type_of("Y"), op.attrs["transpose_x"], op.attrs["transpose_y"], op.attrs["alpha"]
    if x.ndim == y.ndim == 2 and (tx or ty or alpha != 1.0):
        return op.emit("Gemm", op["X"], op["Y"], transA=int(tx), transB=int(ty), alpha=alpha)
    if (tx and x.ndim == 1) or (ty and y.ndim == 1):
        raise op.wrong("it transposes a vector; reshape it to a matrix")
    a, b = (op.emit("Transpose", op[s], perm=swapped(op.type_of(s).ndim)) if t else op[s] for s, t in (("X", tx), ("Y", ty)))
    if (tx and y.ndim == 1) or (ty and x.ndim == 1):  # ONNX Runtime 1.31 computes a wrong product of a transposed operand and a vector
        axis = -1 if tx else -2
        matrix = op.emit("Unsqueeze", b if tx else a, op.ints([-1 if tx else 0]))
        out = op.emit("Squeeze", op.emit("MatMul", a, matrix) if tx else op.emit("MatMul", matrix, b), op.ints([axis]))
    elif x.ndim == y.ndim == 1:
        out = op.emit("MatMul", op.emit("Unsqueeze", a, op.ints([0])), b)
    else:
        out = op.emit("MatMul", a, b)
    return op.emit("Mul", out, op.const(np.array(alpha, np_dtype(x.dtype)))) if alpha != 1.0 else out


def swapped(ndim: int) -> list[int]:
    return [*range(ndim - 2), ndim - 1, ndim - 2]


@exports("bmm")
def bmm(op: Op) -> str:
    return op.emit("MatMul", op["X"], op["Y"])


@exports("mul")
def mul(op: Op) -> str:
    x, y, nx, ny = op.type_of("X"), op.type_of("Y"), op.attrs["x_num_col_dims"], op.attrs["y_num_col_dims"]
    if nx == x.ndim - 1 and y.ndim == 2:
        return op.emit("MatMul", op["X"], op["Y"])
    rows = op["X"] if x.ndim == 2 else op.emit("Flatten", op["X"], axis=nx)
    columns = op["Y"] if y.ndim == 2 else op.emit("Flatten", op["Y"], axis=ny)
    out = op.emit("MatMul", rows, columns)
    return out if op.out_type("Out").ndim == 2 else op.shaped(out, "Out")


@exports("einsum")
def einsum(op: Op) -> str:
    return op.emit("Einsum", *op.many("X"), equation=op.attrs["equation"])


# -- reductions ---------------------------------------------------------------------------------------------------------------

_REDUCE = {
    "reduce_sum": "ReduceSum", "reduce_mean": "ReduceMean", "reduce_max": "ReduceMax", "reduce_min": "ReduceMin",
    "reduce_prod": "ReduceProd", "logsumexp": "ReduceLogSumExp",
}  # fmt: skip


@exports(*_REDUCE)
def reduce(op: Op) -> str:
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


@exports("det")
def det(op: Op) -> str:
    return op.emit("Det", op["X"])


@exports("mean")
def mean(op: Op) -> str:
    return single(op, "ReduceMean", op["X"])


@exports("squared_l2_norm")
def squared_l2_norm(op: Op) -> str:
    wide = op.out_type("Out").dtype
    x = op.cast("X", wide)
    return single(op, "ReduceSumSquare", x)


# -- softmax ------------------------------------------------------------------------------------------------------------------


@exports("softmax", "log_softmax")
def softmax(op: Op) -> str:
    return op.emit({"softmax": "Softmax", "log_softmax": "LogSoftmax"}[op.type], op["X"], axis=op.attrs["axis"])
