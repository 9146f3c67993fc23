"""Matrix products: mul (flattened 2-D product, fluid's fc), matmul (batched, broadcasting), bmm, and their gradients.

On NumPy `bind` hands 2-D products to np.dot with everything bound, transposed operands as `.T` views, which BLAS reads in place.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np

from ...ir import ANY, OpDef, Partial, ProgramError, Sample, Shard, TensorType
from ...ir.placement import PlaceError, by_group, place_matmul

HALVES = ("float16", "bfloat16")


def _rng(k):
    return np.random.default_rng(k)


def _f32(k, *shape):
    return _rng(k).standard_normal(shape).astype("float32")


def is_half(dtype: Any) -> bool:
    """True for the 16-bit floats, whose sums are kept in float32."""
    return np.dtype(dtype).name in HALVES


def widen(*arrays: Any) -> list[Any]:
    """16-bit floats as float32; other arrays, and None, as they are."""
    return [a.astype("float32") if a is not None and is_half(a.dtype) else a for a in arrays]


def same_dtype(op: str, **types: TensorType | None) -> str:
    """The dtype that all given operands share, or ProgramError naming the ones that differ."""
    given = {slot: t.dtype for slot, t in types.items() if t is not None}
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{slot} is {dtype}" for slot, dtype in given.items())
        raise ProgramError(f"op {op} needs operands of one dtype, but {listed}; use cast")
    return next(iter(given.values()))


def product_of(sizes: tuple[int, ...]) -> int:
    """The number of elements of an axis group; open when one of its axes is open."""
    return ANY if ANY in sizes else prod(sizes)


def meet(a: int, b: int) -> bool:
    """True when two sizes can be the same, an open one with any."""
    return a == b or ANY in (a, b)


def product(xp: Any, a: Any, b: Any, out: Any) -> None:
    """out = a @ b over the last two axes, batch axes broadcast. 16-bit floats are summed in float32."""
    if is_half(out.dtype) and (xp is np or out.ndim != 2):
        # NumPy has no BLAS for them, and CuPy none beyond two axes
        out[...] = xp.matmul(a.astype("float32"), b.astype("float32"))
    else:
        xp.matmul(a, b, out=out)


def bind_product(xp: Any, a: Any, b: Any, out: Any) -> Any:
    """A call without arguments that does `product` on these very arrays: one GEMM with nothing left to look up where that is possible."""
    if xp is not np or is_half(out.dtype):
        return partial(product, xp, a, b, out)
    if a.ndim > 2 and b.ndim == 2 and a.flags.c_contiguous and out.flags.c_contiguous:
        a, out = _flat(a, a.ndim - 1), _flat(out, out.ndim - 1)
    if a.ndim == b.ndim == out.ndim == 2 and out.flags.c_contiguous:
        return partial(np.dot, a, b, out)
    return partial(np.matmul, a, b, out)


def _then_scale(xp: Any, run: Any, out: Any, alpha: float) -> Any:
    if alpha == 1.0:
        return run
    factor = out.dtype.type(alpha)

    def scaled():
        run()
        xp.multiply(out, factor, out=out)

    return scaled


# -- mul ---------------------------------------------------------------------------------------------------------------------


def _flat(a: Any, num_col_dims: int) -> Any:
    """The array as a matrix: the first `num_col_dims` axes are its rows."""
    return a.reshape(prod(a.shape[:num_col_dims]), prod(a.shape[num_col_dims:]))


def _flattens(*arrays: Any) -> bool:
    return all(a.ndim == 2 or a.flags.c_contiguous for a in arrays)


def _check_col_dims(name: str, t: TensorType, n: int, slot: str) -> None:
    if not 0 < n < t.ndim:
        raise ProgramError(f"op mul: {name} must be between 1 and {t.ndim - 1} for {slot} {t}, got {n}")


class Mul(OpDef):
    """Product of two arrays flattened to matrices, the core of a fully connected layer.

    X is read as [prod of the first `x_num_col_dims` sizes, rest], Y likewise with `y_num_col_dims`; the result has X's leading and Y's
    trailing axes. Source: fluid 1.8 `mul`.
    """

    name = "mul"
    inputs = ("X", "Y")
    attrs = {"x_num_col_dims": 1, "y_num_col_dims": 1}
    onnx = "MatMul"

    @staticmethod
    def infer(x, y, *, x_num_col_dims, y_num_col_dims):
        dtype = same_dtype("mul", X=x, Y=y)
        _check_col_dims("x_num_col_dims", x, x_num_col_dims, "X")
        _check_col_dims("y_num_col_dims", y, y_num_col_dims, "Y")
        columns, rows = product_of(x.shape[x_num_col_dims:]), product_of(y.shape[:y_num_col_dims])
        if not meet(columns, rows):
            raise ProgramError(f"op mul: X {x} has {columns} columns when flattened at axis {x_num_col_dims}, Y {y} has {rows} rows")
        return TensorType(dtype, x.shape[:x_num_col_dims] + y.shape[y_num_col_dims:])

    @staticmethod
    def place(x, y, *, x_num_col_dims, y_num_col_dims):
        @by_group
        def rule(group, x, y):
            ex, ey = x.on(group), y.on(group)
            if not isinstance(ex, (Shard, type(None))) or not isinstance(ey, (Shard, type(None))):
                terms = [e for e in (ex, ey) if e is not None]
                if len(terms) == 1 and isinstance(terms[0], Partial) and terms[0].op in ("sum", "avg"):
                    return terms[0]
                raise PlaceError(f"op mul cannot combine %{x.name} and %{y.name}, which are {ex} and {ey} over {group}")
            # inside a flattened run of axes only the first may be split: the slices then stay whole rows or columns
            if ey is None and ex is not None and ex.axis < x_num_col_dims:
                return ex
            if ex is None and ey is not None and ey.axis >= y_num_col_dims:
                return Shard(ey.axis - y_num_col_dims + x_num_col_dims, group)
            if ex is not None and ey is not None and ex.axis == x_num_col_dims and ey.axis == 0:
                return Partial("sum", group)
            raise PlaceError(f"op mul cannot combine %{x.name} and %{y.name}, which are {ex} and {ey} over {group}")

        return rule(x, y)

    @staticmethod
    def grad(b, op, g):
        x, y, nx, ny = op["X"], op["Y"], op.attrs["x_num_col_dims"], op.attrs["y_num_col_dims"]
        if nx == x.ndim - 1 and y.ndim == 2:
            dx = b.matmul(g, y, transpose_y=True)
        else:
            dx = b.mul_grad_x(g, y, x, x_num_col_dims=nx, y_num_col_dims=ny)
        if x.ndim == 2 and y.ndim == 2:
            return dx, b.matmul(x, g, transpose_x=True)
        return dx, b.mul_grad_y(x, g, y, x_num_col_dims=nx)

    @staticmethod
    def kernel(xp, x, y, *, out, x_num_col_dims, y_num_col_dims):
        x2, y2 = _flat(x, x_num_col_dims), _flat(y, y_num_col_dims)
        product(xp, x2, y2, out.reshape(x2.shape[0], y2.shape[1]))

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (x, y), out = ins, outs[0]
        if not _flattens(x, y, out):
            return partial(Mul.kernel, xp, x, y, out=out, **attrs)
        x2, y2 = _flat(x, attrs["x_num_col_dims"]), _flat(y, attrs["y_num_col_dims"])
        return bind_product(xp, x2, y2, out.reshape(x2.shape[0], y2.shape[1]))

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 4, 6), _f32(1, 6, 3))
        yield Sample.of(_f32(2, 1, 5), _f32(3, 5, 1))
        yield Sample.of(_f32(4, 2, 3, 4), _f32(5, 12, 5))
        yield Sample.of(_f32(4, 2, 3, 4), _f32(5, 4, 5), x_num_col_dims=2)
        yield Sample.of(_f32(6, 2, 3, 4), _f32(7, 3, 4, 2, 2), y_num_col_dims=2)


class MulGradX(OpDef):
    """Gradient of mul with respect to X, in X's shape: the flattened gradient times the transpose of the flattened Y."""

    name = "mul_grad_x"
    inputs, outputs = ("OutGrad", "Y", "X"), ("XGrad",)
    attrs = {"x_num_col_dims": 1, "y_num_col_dims": 1}

    @staticmethod
    def infer(g, y, x, **attrs):
        return x

    @staticmethod
    def place(g, y, x, *, x_num_col_dims, y_num_col_dims):
        @by_group
        def rule(group, g, y, x):
            eg, ey, ex = g.on(group), y.on(group), x.on(group)
            if ey is None and isinstance(eg, Shard) and eg.axis < x_num_col_dims and ex in (eg, None):
                return eg
            if ey is None and isinstance(eg, Partial) and ex is None:
                return eg
            if isinstance(ey, Shard) and ey.axis == y_num_col_dims and eg == Shard(x_num_col_dims, group) and ex is None:
                return Partial("sum", group)
            raise PlaceError(f"op mul_grad_x cannot combine %{g.name}, %{y.name} and %{x.name}, which are {eg}, {ey} and {ex} over {group}")

        return rule(g, y, x)

    @staticmethod
    def kernel(xp, g, y, x, *, out, x_num_col_dims, y_num_col_dims):
        product(xp, _flat(g, x_num_col_dims), _flat(y, y_num_col_dims).T, _flat(out, x_num_col_dims))

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (g, y, x), out, nx = ins, outs[0], attrs["x_num_col_dims"]
        if not _flattens(g, y, out):
            return partial(MulGradX.kernel, xp, g, y, x, out=out, **attrs)
        return bind_product(xp, _flat(g, nx), _flat(y, attrs["y_num_col_dims"]).T, _flat(out, nx))

    @staticmethod
    def samples():
        why = "a gradient itself"
        yield Sample.of(_f32(0, 2, 5), _f32(1, 12, 5), _f32(2, 2, 3, 4), grad=(), why=why)
        yield Sample.of(_f32(0, 2, 2, 2), _f32(1, 3, 4, 2, 2), _f32(2, 2, 3, 4), y_num_col_dims=2, grad=(), why=why)


class MulGradY(OpDef):
    """Gradient of mul with respect to Y, in Y's shape: the transpose of the flattened X times the flattened gradient.

    matmul uses it too where an X of several leading axes meets one weight matrix: the sum over all rows is one product.
    """

    name = "mul_grad_y"
    inputs, outputs = ("X", "OutGrad", "Y"), ("YGrad",)
    attrs = {"x_num_col_dims": 1}

    @staticmethod
    def infer(x, g, y, *, x_num_col_dims):
        rows_x, rows_g = product_of(x.shape[:x_num_col_dims]), product_of(g.shape[:x_num_col_dims])
        if not meet(rows_x, rows_g):
            raise ProgramError(f"op mul_grad_y: X {x} has {rows_x} rows, OutGrad {g} has {rows_g}")
        return y

    @staticmethod
    def place(x, g, y, *, x_num_col_dims):
        @by_group
        def rule(group, x, g, y):
            ex, eg, ey = x.on(group), g.on(group), y.on(group)
            if isinstance(ex, Shard) and ex == eg and ex.axis < x_num_col_dims and ey is None:
                return Partial("sum", group)
            if ex is None and ey is None and isinstance(eg, Partial):
                return eg
            if isinstance(ey, Shard):  # column parallel: the gradient's columns; row parallel: X's columns
                if ex is None and isinstance(eg, Shard) and eg.axis == g.type.ndim - 1 and ey.axis == y.type.ndim - 1:
                    return ey
                if eg is None and isinstance(ex, Shard) and ex.axis == x_num_col_dims and ey.axis == 0:
                    return ey
            raise PlaceError(f"op mul_grad_y cannot combine %{x.name}, %{g.name} and %{y.name}, which are {ex}, {eg} and {ey} over {group}")

        return rule(x, g, y)

    @staticmethod
    def kernel(xp, x, g, y, *, out, x_num_col_dims):
        x2, g2 = _flat(x, x_num_col_dims), _flat(g, x_num_col_dims)
        product(xp, x2.T, g2, out.reshape(x2.shape[1], g2.shape[1]))

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (x, g, y), out, n = ins, outs[0], attrs["x_num_col_dims"]
        if not _flattens(x, g, out):
            return partial(MulGradY.kernel, xp, x, g, y, out=out, **attrs)
        x2, g2 = _flat(x, n), _flat(g, n)
        return bind_product(xp, x2.T, g2, out.reshape(x2.shape[1], g2.shape[1]))

    @staticmethod
    def samples():
        why = "a gradient itself"
        yield Sample.of(_f32(0, 2, 3, 4), _f32(1, 2, 3, 5), _f32(2, 4, 5), x_num_col_dims=2, grad=(), why=why)
        yield Sample.of(_f32(0, 2, 3, 4), _f32(1, 2, 2, 2), _f32(2, 3, 4, 2, 2), grad=(), why=why)


# -- matmul ------------------------------------------------------------------------------------------------------------------


def _as_matrices(x: Any, y: Any, transpose_x: bool, transpose_y: bool) -> tuple[Any, Any]:
    """Both operands as stacks of matrices ready to be multiplied; a vector is a row of X or a column of Y (the other way transposed)."""
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


def _batch(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """Batch axes broadcast together, or None when they do not."""
    n = max(len(a), len(b))
    out = []
    for i, j in zip((1,) * (n - len(a)) + a, (1,) * (n - len(b)) + b):
        if i == 1 or j == 1:
            out.append(j if i == 1 else i)
        elif meet(i, j):
            out.append(max(i, j))
        else:
            return None
    return tuple(out)


def _matmul_type(x: TensorType, y: TensorType, transpose_x: bool, transpose_y: bool) -> TensorType:
    dtype = same_dtype("matmul", X=x, Y=y)
    if x.ndim == 0 or y.ndim == 0:
        raise ProgramError(f"op matmul needs operands with at least one axis, got X {x} and Y {y}")
    sx, sy = _matrix_shape(x.shape, transpose_x, True), _matrix_shape(y.shape, transpose_y, False)
    if not meet(sx[-1], sy[-2]):
        turned = " after transposing" if transpose_x or transpose_y else ""
        raise ProgramError(f"op matmul: X {x} has {sx[-1]} columns and Y {y} has {sy[-2]} rows{turned}; they must be equal")
    batch = _batch(sx[:-2], sy[:-2])
    if batch is None:
        raise ProgramError(f"op matmul: the leading axes of X {x} and Y {y} do not broadcast")
    rows = () if x.ndim == 1 and not transpose_x else (sx[-2],)
    columns = () if y.ndim == 1 and not transpose_y else (sy[-1],)
    return TensorType(dtype, (*batch, *rows, *columns) or (1,))


class MatMul(OpDef):
    """Matrix product over the last two axes, leading axes broadcast, times `alpha`.

    A 1-D X is one row and a 1-D Y one column, and the axis added for that is dropped again; two vectors give their dot product with
    shape [1]. Transposed, a 1-D X is a column and a 1-D Y a row: `matmul(x, y, transpose_x=True, transpose_y=True)` is the outer
    product. Integers and bool are multiplied as NumPy does; 16-bit floats are summed in float32. Source: fluid 1.8 `matmul`.
    """

    name = "matmul"
    inputs = ("X", "Y")
    attrs = {"transpose_x": False, "transpose_y": False, "alpha": 1.0}
    onnx = "MatMul"
    place = staticmethod(place_matmul)

    @staticmethod
    def infer(x, y, *, transpose_x, transpose_y, alpha):
        if alpha != 1.0 and not x.is_float:
            raise ProgramError(f"op matmul: alpha must be 1.0 for {x.dtype} operands, got {alpha}")
        return _matmul_type(x, y, transpose_x, transpose_y)

    @staticmethod
    def grad(b, op, g):
        x, y, alpha = op["X"], op["Y"], op.attrs["alpha"]
        tx, ty = op.attrs["transpose_x"], op.attrs["transpose_y"]
        if x.ndim == 1 or y.ndim == 1:
            return b.matmul_vector_grad(x, y, g, **op.attrs)
        if y.ndim == 2 and x.ndim > 2 and not tx:
            # one weight for all rows: its gradient is one product over all of them
            dx = b.matmul(g, y, transpose_y=not ty, alpha=alpha)
            dy = b.mul_grad_y(g, x, y, x_num_col_dims=x.ndim - 1) if ty else b.mul_grad_y(x, g, y, x_num_col_dims=x.ndim - 1)
            return dx, dy if alpha == 1.0 else b.scale(dy, scale=alpha)
        dx = b.matmul(y, g, transpose_x=ty, transpose_y=True, alpha=alpha) if tx else b.matmul(g, y, transpose_y=not ty, alpha=alpha)
        dy = b.matmul(g, x, transpose_x=True, transpose_y=tx, alpha=alpha) if ty else b.matmul(x, g, transpose_x=not tx, alpha=alpha)
        if x.shape[:-2] != g.shape[:-2]:
            dx = b.reduce_to(dx, x)
        if y.shape[:-2] != g.shape[:-2]:
            dy = b.reduce_to(dy, y)
        return dx, dy

    @staticmethod
    def kernel(xp, x, y, *, out, transpose_x, transpose_y, alpha):
        MatMul.bind(xp, (x, y), (out,), {"transpose_x": transpose_x, "transpose_y": transpose_y, "alpha": alpha}, None)()

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (x, y), out = ins, outs[0]
        a, b = _as_matrices(x, y, attrs["transpose_x"], attrs["transpose_y"])
        shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        # the axis of a vector comes back as a view: inserting a size-1 axis never copies
        target = out if out.shape == shape else out.reshape(shape)
        return _then_scale(xp, bind_product(xp, a, b, target), out, attrs["alpha"])

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 3, 4), _f32(1, 4, 5))
        yield Sample.of(_f32(2, 4, 3), _f32(3, 5, 4), transpose_x=True, transpose_y=True, alpha=0.5)
        yield Sample.of(_f32(4, 4, 3), _f32(5, 4, 2), transpose_x=True)
        yield Sample.of(_f32(6, 2, 3, 4), _f32(7, 2, 5, 4), transpose_y=True, alpha=0.25)
        yield Sample.of(_f32(8, 2, 3, 4), _f32(9, 4, 5))
        yield Sample.of(_f32(8, 2, 3, 4), _f32(9, 5, 4), transpose_y=True, alpha=2.0)
        yield Sample.of(_f32(10, 3, 4), _f32(11, 2, 4, 2))
        yield Sample.of(_f32(12, 2, 1, 3, 2), _f32(13, 3, 2, 3))
        yield Sample.of(_f32(12, 2, 1, 2, 3), _f32(13, 3, 4, 2), transpose_x=True, transpose_y=True)
        yield Sample.of(_f32(14, 4), _f32(15, 4))
        yield Sample.of(_f32(14, 4), _f32(15, 3), transpose_x=True, transpose_y=True)
        yield Sample.of(_f32(16, 2, 3, 4), _f32(17, 4), alpha=3.0)
        yield Sample.of(_f32(18, 4), _f32(19, 2, 4, 3))
        yield Sample.of(_f32(18, 2, 4, 3), _f32(19, 4), transpose_x=True)
        yield Sample.of(_rng(20).integers(-9, 9, (3, 4)), _rng(21).integers(-9, 9, (4, 2)), grad=(), why="integers")
        yield Sample.of(_rng(22).random((3, 4)) < 0.4, _rng(23).random((4, 2)) < 0.4, grad=(), why="bool")
        half = _rng(24).integers(-4, 5, (2, 3, 4)).astype("float16")
        yield Sample.of(half, half, transpose_y=True, grad=(), why="central differences drown in float16")


class MatMulVectorGrad(OpDef):
    """Gradients of matmul with a 1-D operand, in the operands' shapes."""

    name = "matmul_vector_grad"
    inputs, outputs = ("X", "Y", "OutGrad"), ("XGrad", "YGrad")
    attrs = {"transpose_x": False, "transpose_y": False, "alpha": 1.0}

    @staticmethod
    def infer(x, y, g, **attrs):
        return x, y

    @staticmethod
    def kernel(xp, x, y, g, *, out, transpose_x, transpose_y, alpha):
        dx, dy = out
        wide = "float32" if is_half(x.dtype) else x.dtype
        a, b = _as_matrices(x.astype(wide), y.astype(wide), transpose_x, transpose_y)
        g = g.reshape(*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]).astype(wide) * alpha
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
        yield Sample.of(_f32(16, 2, 3, 4), _f32(17, 4), _f32(18, 2, 3), grad=(), why="a gradient itself")
        yield Sample.of(_f32(16, 4), _f32(17, 2, 4, 3), _f32(18, 2, 3), alpha=0.5, grad=(), why="a gradient itself")


class Bmm(OpDef):
    """Product of two stacks of matrices: [B, M, K] and [B, K, N] give [B, M, N]. Source: fluid 1.8 `bmm`."""

    name = "bmm"
    inputs = ("X", "Y")
    onnx = "MatMul"
    place = staticmethod(place_matmul)

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
        return b.matmul(g, op["Y"], transpose_y=True), b.matmul(op["X"], g, transpose_x=True)

    @staticmethod
    def kernel(xp, x, y, *, out):
        product(xp, x, y, out)

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        return bind_product(xp, ins[0], ins[1], outs[0])

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 2, 3, 4), _f32(1, 2, 4, 5))
        yield Sample.of(_f32(2, 1, 1, 3), _f32(3, 1, 3, 1))
