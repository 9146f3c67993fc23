"""Matrix products, Einsum and Det."""

from __future__ import annotations

from string import ascii_letters

import numpy as np

from ...ir import Variable
from ...ir.dtypes import FLOATS, np_dtype
from ..export_graph import Op
from ..node import Node
from ..table import EXPORT, entry, exports, imports
from .shape import known_sizes, reshaped

entry("Det", "det")
entry("MatMul", "bmm", way=EXPORT)
entry("Einsum", "einsum", way=EXPORT, equation="")


@imports("Einsum")
def einsum(n: Node) -> object:
    """fluidx's einsum has no ellipses, diagonals or broadcast sizes of 1, so they are expanded here."""
    terms, result = _without_ellipses(n)
    sizes: dict[str, int] = {}
    for k, term in enumerate(terms):
        for c, d in zip(term, n.shape(k), strict=True):
            sizes[c] = d if sizes.get(c, 1) == 1 else sizes[c]
    operands, letters = [], []
    for x, term in zip(n.xs(), terms, strict=True):
        x, term = _of_diagonals(n, x, term)
        single = [i for i, (c, d) in enumerate(zip(term, x.shape, strict=True)) if d == 1 != sizes[c]]
        operands.append(n.b.squeeze(x, axes=tuple(single)) if single else x)
        letters.append("".join(c for i, c in enumerate(term) if i not in single))
    return n.b.einsum(operands, equation=f"{','.join(letters)}->{result}")


def _without_ellipses(n: Node) -> tuple[list[str], str]:
    """(the letters of each operand, those of the result), with letters in place of ellipses."""
    equation = n.attr("equation", "").replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(n.operands):
        raise n.wrong(f"equation {equation!r} has {len(terms)} operands, found {len(n.operands)}")
    counts = [n.rank(k) - len(t) + 3 if "..." in t else 0 for k, t in enumerate(terms)]
    free = [c for c in ascii_letters if c not in equation][: max(counts)]
    ellipsis = "".join(free)
    terms = [t.replace("...", ellipsis[len(ellipsis) - m :]) for t, m in zip(terms, counts, strict=True)]
    if not arrow:
        joined = "".join(terms)
        result = "..." + "".join(sorted(c for c in {*joined} if joined.count(c) == 1 and c not in free))
    return terms, result.replace("...", ellipsis)


def _of_diagonals(n: Node, x: Variable, term: str) -> tuple[Variable, str]:
    """Replace two axes of one letter by their diagonal: the axes are flattened into one, and read in steps of size + 1."""
    while double := next((c for c in term if term.count(c) > 1), ""):
        i = term.index(double)
        j = term.index(double, i + 1)
        rest = [k for k in range(len(term)) if k not in (i, j)]
        size, _ = known_sizes(n, (x.shape[i], x.shape[j]))
        x = n.b.transpose(x, axis=(*rest, i, j))
        x = reshaped(n, x, (*x.shape[:-2], size * size))
        x = n.b.strided_slice(x, axes=(len(rest),), starts=(0,), ends=(size * size,), strides=(size + 1,))
        term = "".join(term[k] for k in rest) + double
    return x, term


@imports("MatMul")
def matmul(n: Node) -> object:
    return multiplied(n, n.x(0), n.x(1))


def multiplied(n: Node, x: Variable, y: Variable) -> Variable:
    """The product of vectors or matrices; that of two vectors has no axes."""
    found = n.b.matmul(x, y)
    return n.b.reshape(found, shape=()) if x.ndim == y.ndim == 1 else found


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


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("matmul")
def export_matmul(op: Op) -> str:
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


@exports("mul")
def mul(op: Op) -> str:
    x, y, nx, ny = op.type_of("X"), op.type_of("Y"), op.attrs["x_num_col_dims"], op.attrs["y_num_col_dims"]
    if nx == x.ndim - 1 and y.ndim == 2:
        return op.emit("MatMul", op["X"], op["Y"])
    rows = op["X"] if x.ndim == 2 else op.emit("Flatten", op["X"], axis=nx)
    columns = op["Y"] if y.ndim == 2 else op.emit("Flatten", op["Y"], axis=ny)
    out = op.emit("MatMul", rows, columns)
    return out if op.out_type("Out").ndim == 2 else op.shaped(out, "Out")
