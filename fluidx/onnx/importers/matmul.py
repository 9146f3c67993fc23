"""Import of MatMul and Gemm."""

from __future__ import annotations

from ...ir.dtypes import FLOATS
from ..import_tables import imports
from ..node import Node


@imports("MatMul")
def matmul(n: Node) -> object:
    y = n.b.matmul(n.x(0), n.x(1))
    return n.b.reshape(y, shape=()) if n.rank(0) == n.rank(1) == 1 else y


@imports("Gemm")
def gemm(n: Node) -> object:
    alpha, beta = n.attr("alpha", 1.0), n.attr("beta", 1.0)
    in_floats = n.dtype(0) in FLOATS
    y = n.b.matmul(n.x(0), n.x(1), transpose_x=bool(n.attr("transA", 0)), transpose_y=bool(n.attr("transB", 0)),
                   alpha=alpha if in_floats else 1.0)  # fmt: skip
    if not in_floats and alpha != 1.0:
        y = n.b.scale(y, scale=alpha)
    if not n.has(2) or beta == 0.0:
        return y
    c = n.x(2) if beta == 1.0 else n.b.scale(n.x(2), scale=beta)
    return n.b.elementwise_add(y, c)
