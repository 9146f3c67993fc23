"""Rows multiplied with, or compared with, the rows at given ids: scatter_fold and its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir.errors import ProgramError
from ...ir.opdef import OpDef, Required, Sample
from ..shared.arrays import add_rows
from ..shared.samples import apart, i64, positive
from ..shared.types import check_range, merge_size, need_dtype, need_ids, need_ndim

_UFUNCS = {"prod": "multiply", "max": "maximum", "min": "minimum"}


def _fold(xp: Any, out: Any, ids: Any, rows: Any, ufunc: Any) -> None:
    """`out[ids[k]] = ufunc(out[ids[k]], rows[k])` for each k in order: each pass handles at most one row per id."""
    order = xp.argsort(ids, kind="stable")
    ordered = ids[order]
    turn = xp.arange(len(ids)) - xp.searchsorted(ordered, ordered)
    for k in range(int(turn.max()) + 1 if len(ids) else 0):
        now = order[turn == k]
        out[ids[now]] = ufunc(out[ids[now]], rows[now])


class ScatterFold(OpDef):
    """X with the rows at Ids combined with the rows of Updates, by product, maximum or minimum; ids may repeat.

    `op` is prod, max or min. Raises ExecutionError if an id is out of range. For max or min, all equal elements get the gradient.
    """

    name = "scatter_fold"
    inputs = ("X", "Ids", "Updates")
    attrs = {"op": Required(str)}

    @staticmethod
    def pattern(ins, outs, attrs):
        op = attrs[
            "op"
        ]  # the maximum of the results for parts of the updates is the result for all; a product would include X several times
        return f". *, n, n * -> . * | {'n! L(0)' if op == 'prod' else f'n:{op} U(0>{op})'}"

    @staticmethod
    def infer(x, ids, updates, *, op):
        if op not in _UFUNCS:
            raise ProgramError(f"op scatter_fold: op must be one of {', '.join(_UFUNCS)}, found {op!r}")
        need_ids("scatter_fold", "Ids", ids)
        need_ndim("scatter_fold", "Ids", ids, 1)
        need_dtype("scatter_fold", "Updates", updates, x, "X")
        need_ndim("scatter_fold", "Updates", updates, x.ndim)
        merge_size("scatter_fold", "the numbers of Ids and of rows of Updates", ids.shape[0], updates.shape[0])
        for i in range(1, x.ndim):
            merge_size("scatter_fold", f"axis {i} of X and Updates", x.shape[i], updates.shape[i])
        return x

    @staticmethod
    def grad(b, op, g):
        dx, du = b.scatter_fold_grad(op["X"], op["Ids"], op["Updates"], op["Out"], g, op=op.attrs["op"])
        return dx, None, du

    @staticmethod
    def kernel(xp, x, ids, updates, *, out, op):
        check_range(xp, "scatter_fold", xp.ascontiguousarray(ids), x.shape[0], "X")
        out[...] = x
        _fold(xp, out, ids, updates, getattr(xp, _UFUNCS[op]))

    @staticmethod
    def samples():
        yield Sample.of(positive(4, 3), i64(2, 0, 2), positive(3, 3, seed=1), op="prod")
        # the steps of differences must not change which one is the maximum: all values are apart
        both = apart(7, 3)
        yield Sample.of(both[:4], i64(3, 1, 3), both[4:], op="max")
        yield Sample.of(both[:4], np.array([3, 1, 3], "int32"), both[4:], op="min")
        yield Sample.of(positive(5), i64(4), positive(1, seed=1), op="prod")
        yield Sample.of(np.arange(8).reshape(4, 2), i64(1, 1), np.full((2, 2), 3), op="prod")


class ScatterFoldGrad(OpDef):
    """The gradients of scatter_fold: for the maximum or minimum, or times the product of all other factors, exact with zeros among them."""

    name = "scatter_fold_grad"
    inputs, outputs = ("X", "Ids", "Updates", "Out", "Out@GRAD"), ("X@GRAD", "Updates@GRAD")
    attrs = {"op": Required(str)}
    pattern = ". *, n, n *, . *, . * -> . *, n * | n! L(4)"

    @staticmethod
    def infer(x, ids, updates, out, g, *, op):
        return x, updates

    @staticmethod
    def kernel(xp, x, ids, updates, y, g, *, out, op):
        shares = _shares_of_product(xp, x, ids, updates) if op == "prod" else (x == y, updates == y[ids])
        for made, share, back in zip(out, shares, (g, g[ids]), strict=True):
            if made is not None:
                made[...] = back * share

    @staticmethod
    def samples():
        x, u = positive(4, 3), positive(3, 3, seed=1)
        x[2, 0] = u[1, 1] = u[2, 2] = 0
        ids = i64(2, 0, 2)
        y = x.copy()
        np.multiply.at(y, ids, u)
        yield Sample.of(x, ids, u, y, positive(4, 3, seed=2), op="prod", grad=(), why="a gradient op")
        yield Sample.of(x, ids, u, np.maximum(x, 0.75), positive(4, 3, seed=2), op="max", grad=(), why="a gradient op")


def _shares_of_product(xp: Any, x: Any, ids: Any, updates: Any) -> tuple[Any, Any]:
    """The factor of the gradient of each element of X and of Updates: the product of all other elements at its position."""
    zero_x, zero_u = x == 0, updates == 0
    zeros = zero_x.astype(x.dtype)
    add_rows(xp, zeros.reshape(len(x), -1), ids, zero_u.astype(x.dtype).reshape(len(ids), -1))
    filled_x, filled_u = xp.where(zero_x, xp.ones_like(x), x), xp.where(zero_u, xp.ones_like(updates), updates)
    product = filled_x.copy()
    _fold(xp, product, ids, filled_u, xp.multiply)

    def share(zero: Any, filled: Any, zeros: Any, product: Any) -> Any:
        others = xp.where(zero & (zeros == 1), product, xp.zeros_like(product))
        return xp.where(zeros == 0, product / filled, others)

    return share(zero_x, filled_x, zeros, product), share(zero_u, filled_u, zeros[ids], product[ids])
