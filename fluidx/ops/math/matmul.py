"""Matrix products and their gradients: mul (a flattened 2-D product, fluid's fc), matmul (batched, broadcasting), bmm.

With NumPy, `bind` passes 2-D products directly to np.dot, transposed operands as `.T` views, which BLAS reads in place.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, ClassVar

import numpy as np

from ... import native
from ...ir import Arithmetic, Autocast, Native, OpDef, ProgramError, Sample, TensorType
from ...ir.axis_letters import letters, match_axes
from ..shared.broadcast import broadcast_sizes, reduced
from ..shared.samples import bits, f32, ints
from ..shared.types import meet, mul_sizes, same_dtype


def native_product(a: Any, b: Any, out: Any, alpha: float = 1.0) -> list[native.NativeCall] | None:
    """Calls of C kernels for out = alpha * (a @ b) with broadcast batch axes: one call for all matrices of two batch axes."""
    if a.ndim > 2 and b.ndim == 2 and out.flags.c_contiguous and (rows := _rows(a)) is not None:
        a, out = rows, _flat(out, out.ndim - 1)
    if out.ndim > 4:
        parts = [native_product(_item(a, k, out.ndim), _item(b, k, out.ndim), out[k], alpha) for k in range(out.shape[0])]
        return None if any(p is None for p in parts) else [call._replace(tail=False) for p in parts if p is not None for call in p]
    call = native.gemm(a, b, out, alpha=alpha)
    return None if call is None else [call]


def _rows(a: Any) -> Any:
    """All rows of a stack of matrices as one matrix, which may be transposed; None if that is no view."""
    try:
        found = a.reshape((prod(a.shape[:-1]), a.shape[-1]), copy=False)
    except ValueError:
        return None
    return found if a.itemsize in found.strides else None


def _item(x: Any, k: int, ndim: int) -> Any:
    """Item k of the first of `ndim` axes, for an array that may lack this axis or have size 1 there."""
    return x if x.ndim < ndim else x[k if x.shape[0] > 1 else 0]


class Product(OpDef):
    """Base of ops that are one matrix product; `matrices` gives its arrays."""

    # on a GPU, BLAS multiplies two matrices of 16-bit floats and adds in float32
    autocast = Autocast(takes_16_bit=lambda device, outs: device == "cuda" and outs[0].ndim == 2, mixed="half")
    arithmetic = Arithmetic(sums_products="matrix")
    # (ins, out, **attrs) -> (a, b, out), views of the operands with out = a @ b over the last two axes; None if a view would need a copy
    matrices: ClassVar[Callable[..., Any]]

    @classmethod
    def _calls(cls, ins, outs, attrs, dry=False):
        found = cls.matrices(ins, outs[0], **attrs)
        if found is None:
            return None
        a, b, out = found
        return native_product(a, b, out, attrs.get("alpha", 1.0))

    native = Native(calls=_calls, halves=True, any_size=True, tail=True, rounds=2)


def _linear(x: TensorType, *operands: int) -> str:
    """The linear groups of a product: each operand is one of its own; a product of bools has none."""
    return "" if x.dtype == "bool" else " ".join(f"L({k})" for k in operands)


def _summed(x: TensorType, *factors: str) -> str:
    """How a product reduces the axes that its result lacks: numbers are added, bools are or-ed."""
    return " ".join(f"{f}:{'max' if x.dtype == 'bool' else '+'}" for f in factors)


# -- mul ---------------------------------------------------------------------------------------------------------------------


def _flat(a: Any, num_col_dims: int) -> Any:
    """The array as a matrix: the first `num_col_dims` axes are its rows."""
    return a.reshape(prod(a.shape[:num_col_dims]), prod(a.shape[num_col_dims:]))


def _flattens(*arrays: Any) -> bool:
    return all(a.ndim == 2 or a.flags.c_contiguous for a in arrays)


def _check_col_dims(name: str, t: TensorType, n: int, slot: str) -> None:
    if not 0 < n < t.ndim:
        raise ProgramError(f"op mul: {name} must be between 1 and {t.ndim - 1} for {slot} {t}, got {n}")


class Mul(Product):
    """Product of two arrays flattened to matrices, the core of a fully connected layer.

    X is read as [prod of the first `x_num_col_dims` sizes, rest], Y likewise with `y_num_col_dims`; the result has X's leading and Y's
    trailing axes. Source: fluid 1.8 `mul`.
    """

    name = "mul"
    inputs = ("X", "Y")
    attrs = {"x_num_col_dims": 1, "y_num_col_dims": 1}

    @staticmethod
    def infer(x, y, *, x_num_col_dims, y_num_col_dims):
        dtype = same_dtype("mul", X=x, Y=y)
        _check_col_dims("x_num_col_dims", x, x_num_col_dims, "X")
        _check_col_dims("y_num_col_dims", y, y_num_col_dims, "Y")
        columns, rows = mul_sizes(x.shape[x_num_col_dims:]), mul_sizes(y.shape[:y_num_col_dims])
        if not meet(columns, rows):
            raise ProgramError(f"op mul: X {x} has {columns} columns when flattened at axis {x_num_col_dims}, Y {y} has {rows} rows")
        return TensorType(dtype, x.shape[:x_num_col_dims] + y.shape[y_num_col_dims:])

    @staticmethod
    def pattern(ins, outs, attrs):
        (x, y), nx, ny = ins, attrs["x_num_col_dims"], attrs["y_num_col_dims"]
        a, m = letters(nx, "a"), letters(y.ndim - ny, "m")
        kx, ky, sizes, whole = match_axes(x.shape[nx:], y.shape[:ny], "k")
        return f"{a} {kx}, {ky} {m} -> {a} {m} | {_summed(x, 'k?')} {whole} {_linear(x, 0, 1)}", sizes

    @staticmethod
    def grad(b, op, g):
        x, y, nx, ny = op["X"], op["Y"], op.attrs["x_num_col_dims"], op.attrs["y_num_col_dims"]
        # the gradient of the weight first: other ranks wait for it, while only the next operator needs the other one
        if x.ndim == 2 and y.ndim == 2:
            dy = b.matmul(x, g, transpose_x=True)
        else:
            dy = b.mul_grad_y(x, g, y, x_num_col_dims=nx)
        if nx == x.ndim - 1 and y.ndim == 2:
            return b.matmul(g, y, transpose_y=True), dy
        return b.mul_grad_x(g, y, x, x_num_col_dims=nx, y_num_col_dims=ny), dy

    @staticmethod
    def kernel(xp, x, y, *, out, x_num_col_dims, y_num_col_dims):
        x2, y2 = _flat(x, x_num_col_dims), _flat(y, y_num_col_dims)
        xp.matmul(x2, y2, out=out.reshape(x2.shape[0], y2.shape[1]))

    @staticmethod
    def matrices(ins, out, *, x_num_col_dims, y_num_col_dims):
        if not _flattens(*ins, out):
            return None
        x2, y2 = _flat(ins[0], x_num_col_dims), _flat(ins[1], y_num_col_dims)
        return x2, y2, out.reshape(x2.shape[0], y2.shape[1])

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 6), f32(6, 3, seed=1))
        yield Sample.of(f32(1, 5, seed=2), f32(5, 1, seed=3))
        yield Sample.of(f32(2, 3, 4, seed=4), f32(12, 5, seed=5))
        yield Sample.of(f32(2, 3, 4, seed=4), f32(4, 5, seed=5), x_num_col_dims=2)
        yield Sample.of(f32(2, 3, 4, seed=6), f32(3, 4, 2, 5, seed=7), y_num_col_dims=2)
        yield Sample.of(f32(2, 6, 4, seed=6), f32(8, 3, 5, seed=7), y_num_col_dims=2)


class MulGradX(Product):
    """Gradient of mul with respect to X, in X's shape: the flattened gradient times the transpose of the flattened Y."""

    name = "mul_grad_x"
    inputs, outputs = ("Out@GRAD", "Y", "X"), ("X@GRAD",)
    attrs = {"x_num_col_dims": 1, "y_num_col_dims": 1}

    @staticmethod
    def infer(g, y, x, *, x_num_col_dims, y_num_col_dims):
        _check_col_dims("x_num_col_dims", x, x_num_col_dims, "X")
        _check_col_dims("y_num_col_dims", y, y_num_col_dims, "Y")
        return x

    @staticmethod
    def pattern(ins, outs, attrs):
        (_, y, x), nx, ny = ins, attrs["x_num_col_dims"], attrs["y_num_col_dims"]
        a, m = letters(nx, "a"), letters(y.ndim - ny, "m")
        kx, ky, sizes, whole = match_axes(x.shape[nx:], y.shape[:ny], "k")
        return f"{a} {m}, {ky} {m}, ~{a} {kx} -> {a} {kx} | {_summed(x, 'm?')} {whole} {_linear(x, 0, 1)}", sizes

    @staticmethod
    def kernel(xp, g, y, x, *, out, x_num_col_dims, y_num_col_dims):
        xp.matmul(_flat(g, x_num_col_dims), _flat(y, y_num_col_dims).T, out=_flat(out, x_num_col_dims))

    @staticmethod
    def matrices(ins, out, *, x_num_col_dims, y_num_col_dims):
        g, y, _ = ins
        if not _flattens(g, y, out):
            return None
        return _flat(g, x_num_col_dims), _flat(y, y_num_col_dims).T, _flat(out, x_num_col_dims)

    @staticmethod
    def samples():
        why = "a gradient itself"
        yield Sample.of(f32(2, 5), f32(12, 5, seed=1), f32(2, 3, 4, seed=2), grad=(), why=why)
        yield Sample.of(f32(2, 5, 6), f32(3, 4, 5, 6, seed=1), f32(2, 3, 4, seed=2), y_num_col_dims=2, grad=(), why=why)
        yield Sample.of(f32(2, 5), f32(8, 3, 5, seed=1), f32(2, 6, 4, seed=2), y_num_col_dims=2, grad=(), why=why)


class MulGradY(Product):
    """Gradient of mul with respect to Y, in Y's shape: the transpose of the flattened X times the flattened gradient.

    matmul also uses it for an X with several leading axes and one weight matrix: the sum over all rows is one product.
    """

    name = "mul_grad_y"
    inputs, outputs = ("X", "Out@GRAD", "Y"), ("Y@GRAD",)
    attrs = {"x_num_col_dims": 1}

    @staticmethod
    def infer(x, g, y, *, x_num_col_dims):
        _check_col_dims("x_num_col_dims", x, x_num_col_dims, "X")
        rows_x, rows_g = mul_sizes(x.shape[:x_num_col_dims]), mul_sizes(g.shape[:x_num_col_dims])
        if not meet(rows_x, rows_g):
            raise ProgramError(f"op mul_grad_y: X {x} has {rows_x} rows, Out@GRAD {g} has {rows_g}")
        return y

    @staticmethod
    def pattern(ins, outs, attrs):
        (x, g, y), n = ins, attrs["x_num_col_dims"]
        m = g.ndim - n
        ax, ag, rows, uneven = match_axes(x.shape[:n], g.shape[:n], "a")
        kx, ky, sizes, whole = match_axes(x.shape[n:], y.shape[: y.ndim - m], "k")
        y_words, m_words = f"{ky} {letters(m, 'm')}", letters(m, "m")
        exceptions_text = f"{_summed(x, 'a?')} {uneven} {whole} {_linear(x, 0, 1)}"
        return f"{ax} {kx}, {ag} {m_words}, ~{y_words} -> {y_words} | {exceptions_text}", {**rows, **sizes}

    @staticmethod
    def kernel(xp, x, g, y, *, out, x_num_col_dims):
        x2, g2 = _flat(x, x_num_col_dims), _flat(g, x_num_col_dims)
        xp.matmul(x2.T, g2, out=out.reshape(x2.shape[1], g2.shape[1]))

    @staticmethod
    def matrices(ins, out, *, x_num_col_dims):
        x, g, _ = ins
        if not _flattens(x, g, out):
            return None
        x2, g2 = _flat(x, x_num_col_dims), _flat(g, x_num_col_dims)
        return x2.T, g2, out.reshape(x2.shape[1], g2.shape[1])

    @staticmethod
    def samples():
        why = "a gradient itself"
        yield Sample.of(f32(2, 3, 4), f32(2, 3, 5, seed=1), f32(4, 5, seed=2), x_num_col_dims=2, grad=(), why=why)
        yield Sample.of(f32(2, 3, 4), f32(2, 5, 6, seed=1), f32(3, 4, 5, 6, seed=2), grad=(), why=why)
        yield Sample.of(f32(2, 3, 4), f32(2, 5, seed=1), f32(12, 5, seed=2), grad=(), why=why)
        yield Sample.of(f32(2, 6, 4), f32(2, 5, seed=1), f32(8, 3, 5, seed=2), grad=(), why=why)


# -- matmul ------------------------------------------------------------------------------------------------------------------


def _as_matrices(x: Any, y: Any, transpose_x: bool, transpose_y: bool) -> tuple[Any, Any]:
    """Both operands as stacks of matrices; a vector is a row of X or a column of Y (the reverse if transposed)."""
    if x.ndim == 1:
        x = x[:, None] if transpose_x else x[None, :]
    elif transpose_x:
        x = x.swapaxes(-1, -2)
    if y.ndim == 1:
        y = y[None, :] if transpose_y else y[:, None]
    elif transpose_y:
        y = y.swapaxes(-1, -2)
    return x, y


def _matrix_shape(shape: tuple[int, ...], transpose: bool, vector_is_row: bool) -> tuple[int, ...]:
    if len(shape) == 1:
        return (1, shape[0]) if vector_is_row != transpose else (shape[0], 1)
    return (*shape[:-2], shape[-1], shape[-2]) if transpose else shape


def _matmul_type(x: TensorType, y: TensorType, transpose_x: bool, transpose_y: bool) -> TensorType:
    dtype = same_dtype("matmul", X=x, Y=y)
    if x.ndim == 0 or y.ndim == 0:
        raise ProgramError(f"op matmul needs operands with at least one axis, got X {x} and Y {y}")
    sx, sy = _matrix_shape(x.shape, transpose_x, True), _matrix_shape(y.shape, transpose_y, False)
    if not meet(sx[-1], sy[-2]):
        turned = " after transposing" if transpose_x or transpose_y else ""
        raise ProgramError(f"op matmul: X {x} has {sx[-1]} columns and Y {y} has {sy[-2]} rows{turned}; they must be equal")
    try:
        batch = broadcast_sizes("matmul", sx[:-2], sy[:-2])
    except ProgramError:
        raise ProgramError(f"op matmul: the leading axes of X {x} and Y {y} do not broadcast") from None
    rows = () if x.ndim == 1 and not transpose_x else (sx[-2],)
    columns = () if y.ndim == 1 and not transpose_y else (sy[-1],)
    return TensorType(dtype, (*batch, *rows, *columns) or (1,))


def _matmul_words(x: TensorType, y: TensorType, transpose_x: bool, transpose_y: bool) -> tuple[str, str, str]:
    """The axis words of X, Y and the product. A vector is a row of X or a column of Y; the reverse if it is transposed."""
    column, row = x.ndim == 1 and transpose_x, y.ndim == 1 and transpose_y
    inner = "." if column or row else "k"  # a column has one column, a row one row: nothing is summed
    left = ("i" if column else inner) if x.ndim == 1 else f"* {inner} i" if transpose_x else f"* i {inner}"
    right = ("j" if row else inner) if y.ndim == 1 else f"* j {inner}" if transpose_y else f"* {inner} j"
    made = ["i"] * (x.ndim > 1 or column) + ["j"] * (y.ndim > 1 or row)
    batch = ["*"] * (max(x.ndim, y.ndim) > 2)
    return left, right, " ".join(batch + made) or "."


class MatMul(Product):
    """Matrix product over the last two axes, times `alpha`; leading axes broadcast.

    A 1-D X is one row and a 1-D Y one column, and the result lacks the added axis; two vectors give their dot product with shape [1].
    Transposed, a 1-D X is a column and a 1-D Y a row: `matmul(x, y, transpose_x=True, transpose_y=True)` is the outer product. Integers and
    bool are multiplied as NumPy does; 16-bit floats are summed in float32. Source: fluid 1.8 `matmul`.
    """

    name = "matmul"
    inputs = ("X", "Y")
    attrs = {"transpose_x": False, "transpose_y": False, "alpha": 1.0}

    @staticmethod
    def infer(x, y, *, transpose_x, transpose_y, alpha):
        if alpha != 1.0 and not x.is_float:
            raise ProgramError(f"op matmul: alpha must be 1.0 for {x.dtype} operands, got {alpha}")
        return _matmul_type(x, y, transpose_x, transpose_y)

    @staticmethod
    def pattern(ins, outs, attrs):
        x, y, out = _matmul_words(ins[0], ins[1], attrs["transpose_x"], attrs["transpose_y"])
        summed = _summed(ins[0], "k") if "k" in x.split() else ""
        return f"{x}, {y} -> {out} | {summed} {_linear(ins[0], 0, 1)}"

    @staticmethod
    def grad(b, op, g):
        x, y, alpha = op["X"], op["Y"], op.attrs["alpha"]
        tx, ty = op.attrs["transpose_x"], op.attrs["transpose_y"]
        if x.ndim == 1 or y.ndim == 1:
            return b.matmul_vector_grad(x, y, g, **op.attrs)
        if y.ndim == 2 and x.ndim > 2 and not tx:
            # one weight for all rows: its gradient is one product over all of them; computed first, as in mul
            dy = b.mul_grad_y(g, x, y, x_num_col_dims=x.ndim - 1) if ty else b.mul_grad_y(x, g, y, x_num_col_dims=x.ndim - 1)
            dy = dy if alpha == 1.0 else b.scale(dy, scale=alpha)
            return b.matmul(g, y, transpose_y=not ty, alpha=alpha), dy
        dy = b.matmul(g, x, transpose_x=True, transpose_y=tx, alpha=alpha) if ty else b.matmul(x, g, transpose_x=not tx, alpha=alpha)
        dx = b.matmul(y, g, transpose_x=ty, transpose_y=True, alpha=alpha) if tx else b.matmul(g, y, transpose_y=not ty, alpha=alpha)
        return reduced(b, dx, x, op["Out"], y, stop=-2), reduced(b, dy, y, op["Out"], x, stop=-2)

    @staticmethod
    def kernel(xp, x, y, *, out, transpose_x, transpose_y, alpha):
        a, b, product = MatMul.matrices((x, y), out, transpose_x=transpose_x, transpose_y=transpose_y, alpha=alpha)
        xp.matmul(a, b, out=product)
        if alpha != 1.0:
            xp.multiply(out, out.dtype.type(alpha), out=out)

    @staticmethod
    def matrices(ins, out, *, transpose_x, transpose_y, alpha):
        x, y = ins
        a, b = _as_matrices(x, y, transpose_x, transpose_y)
        batch = a.shape[:-2] if a.shape[:-2] == b.shape[:-2] else np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        shape = (*batch, a.shape[-2], b.shape[-1])
        # the axis of a vector is restored as a view: inserting an axis of size 1 never copies
        return a, b, out if out.shape == shape else out.reshape(shape)

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 4), f32(4, 5, seed=1))
        yield Sample.of(f32(4, 3, seed=2), f32(5, 4, seed=3), transpose_x=True, transpose_y=True, alpha=0.5)
        yield Sample.of(f32(4, 3, seed=4), f32(4, 2, seed=5), transpose_x=True)
        yield Sample.of(f32(2, 3, 4, seed=6), f32(2, 5, 4, seed=7), transpose_y=True, alpha=0.25)
        yield Sample.of(f32(2, 3, 4, seed=8), f32(4, 5, seed=9))
        yield Sample.of(f32(2, 3, 4, seed=8), f32(5, 4, seed=9), transpose_y=True, alpha=2.0)
        yield Sample.of(f32(3, 4, seed=10), f32(2, 4, 5, seed=11))
        yield Sample.of(f32(2, 1, 4, 5, seed=12), f32(3, 5, 6, seed=13))
        yield Sample.of(f32(2, 1, 5, 4, seed=12), f32(3, 6, 5, seed=13), transpose_x=True, transpose_y=True)
        yield Sample.of(f32(4, seed=14), f32(4, seed=15))
        yield Sample.of(f32(4, seed=14), f32(3, seed=15), transpose_x=True, transpose_y=True)
        yield Sample.of(f32(2, 3, 4, seed=16), f32(4, seed=17), alpha=3.0)
        yield Sample.of(f32(4, seed=18), f32(2, 4, 3, seed=19))
        yield Sample.of(f32(2, 4, 3, seed=18), f32(4, seed=19), transpose_x=True)
        yield Sample.of(f32(4, seed=18), f32(2, 1, 3, seed=19), transpose_x=True)
        yield Sample.of(f32(2, 3, 1, seed=18), f32(4, seed=19), transpose_y=True)
        yield Sample.of(ints(3, 4, low=-9, high=9, seed=20), ints(4, 2, low=-9, high=9, seed=21), grad=(), why="integers")
        yield Sample.of(bits(3, 4, seed=22) > 0, bits(4, 2, seed=23) > 0, grad=(), why="bool")
        half = ints(2, 3, 4, low=-4, high=5, seed=24).astype("float16")
        yield Sample.of(half, half, transpose_y=True, grad=(), why="central differences are not accurate in float16")


class MatMulVectorGrad(OpDef):
    """Gradients of matmul with a 1-D operand, in the operands' shapes."""

    name = "matmul_vector_grad"
    arithmetic = Arithmetic(sums_products="matrix")
    inputs, outputs = ("X", "Y", "Out@GRAD"), ("X@GRAD", "Y@GRAD")
    attrs = {"transpose_x": False, "transpose_y": False, "alpha": 1.0}

    @staticmethod
    def infer(x, y, g, **attrs):
        return x, y

    @staticmethod
    def pattern(ins, outs, attrs):
        x, y, out = _matmul_words(ins[0], ins[1], attrs["transpose_x"], attrs["transpose_y"])
        summed = _summed(ins[0], *(f for f in ("*", "i", "j") if f in out.split()))
        return f"{x}, {y}, {out} -> {x}, {y} | {summed} L(0>1) L(1>0) L(2)"

    @staticmethod
    def kernel(xp, x, y, g, *, out, transpose_x, transpose_y, alpha):
        dx, dy = out
        a, b = _as_matrices(x, y, transpose_x, transpose_y)
        g = g.reshape(*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]) * alpha
        da, db = xp.matmul(g, b.swapaxes(-1, -2)), xp.matmul(a.swapaxes(-1, -2), g)
        if x.ndim > 1 and transpose_x:
            da = da.swapaxes(-1, -2)
        if y.ndim > 1 and transpose_y:
            db = db.swapaxes(-1, -2)
        for part, whole in ((da, dx), (db, dy)):
            extra = part.ndim - max(2, whole.ndim)
            part = part.sum(axis=tuple(range(extra))) if extra else part
            if whole.ndim > 2:
                axes = tuple(k for k in range(whole.ndim - 2) if whole.shape[k] == 1 and part.shape[k] != 1)
                part = part.sum(axis=axes, keepdims=True) if axes else part
            whole[...] = part.reshape(whole.shape)

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3, 4, seed=16), f32(4, seed=17), f32(2, 3, seed=18), grad=(), why="a gradient itself")
        yield Sample.of(f32(4, seed=16), f32(2, 4, 3, seed=17), f32(2, 3, seed=18), alpha=0.5, grad=(), why="a gradient itself")
        yield Sample.of(f32(4, 3, seed=16), f32(4, seed=17), f32(3, seed=18), transpose_x=True, grad=(), why="a gradient itself")
        for turned, g in ((False, (1,)), (True, (4, 3))):
            x, y = f32(4, seed=16), f32(g[-1] if turned else 4, seed=17)
            yield Sample.of(x, y, f32(*g, seed=18), transpose_x=turned, transpose_y=turned, grad=(), why="a gradient itself")


class Bmm(Product):
    """Product of two stacks of matrices: [B, M, K] and [B, K, N] give [B, M, N]. Source: fluid 1.8 `bmm`."""

    name = "bmm"
    inputs = ("X", "Y")

    @staticmethod
    def infer(x, y):
        dtype = same_dtype("bmm", X=x, Y=y)
        if x.ndim != 3 or y.ndim != 3:
            raise ProgramError(f"op bmm needs two operands of 3 axes, got X {x} and Y {y}")
        (b, m, k), (b2, k2, n) = x.shape, y.shape
        if not meet(b, b2) or not meet(k, k2):
            raise ProgramError(f"op bmm: X {x} and Y {y} do not fit; expected [B, M, K] and [B, K, N]")
        return TensorType(dtype, (max(b, b2), m, n))

    @staticmethod
    def grad(b, op, g):
        dy = b.matmul(op["X"], g, transpose_x=True)
        return b.matmul(g, op["Y"], transpose_y=True), dy

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"b m k, b k n -> b m n | {_summed(ins[0], 'k')} {_linear(ins[0], 0, 1)}"

    @staticmethod
    def kernel(xp, x, y, *, out):
        xp.matmul(x, y, out=out)

    @staticmethod
    def matrices(ins, out):
        return *ins, out

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3, 4), f32(2, 4, 5, seed=1))
        yield Sample.of(f32(1, 1, 3, seed=2), f32(1, 3, 1, seed=3))
