"""Layers that read or write elements by index, and that sort: gather, scatter, where, argmax, topk."""

from __future__ import annotations

from typing import Any

from .._checks import whole, wrong
from ..ir import Variable
from .helper import LayerWriter
from .layer_from_signature import axis_of, row


def where(condition: Variable, x: Variable | None = None, y: Variable | None = None, name: str | None = None) -> Variable:
    """x where `condition` (bool) is true, y elsewhere. With only the condition, the int64 positions of true elements, one row for each.

    >>> import numpy as np
    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()):
    ...     at = fx.layers.where(fx.data("go", [-1, 2], "bool"))
    >>> fx.Executor().run(main, feed={"go": np.array([[True, False], [False, True]])}, fetch_list=[at])[0].tolist()
    [[0, 0], [1, 1]]
    """
    helper = LayerWriter("where", name)
    if x is None and y is None:
        return helper.op("where_index", helper.variable(condition, "condition"))
    if x is None or y is None:
        raise wrong(f"{helper.label}: give both x and y, or neither of them for the positions of true elements")
    return helper.op("where", helper.variable(condition, "condition"), helper.variable(x, "x"), helper.variable(y, "y"))


def topk(input: Variable, k: Any, name: str | None = None) -> tuple[Variable, Variable]:
    """The k largest elements of the last axis, largest first, and their int64 indices.

    k may be a Variable with one number; a run raises ExecutionError if it is negative or above the number of elements.

    Shapes: [..., c] gives two of [..., k].

    Types: the elements have input's dtype, the indices are int64.

    Raises ProgramError when k is above the size of the last axis.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.topk(fx.data("x", [-1, 10], "float32"), 5)
    (<Variable top_k_0.tmp_0: f32[-1,5]>, <Variable top_k_0.tmp_1: i64[-1,5]>)
    """
    helper = LayerWriter("top_k", name)
    x = helper.variable(input, "input")
    if (computed := helper.sizes([k], "k")) is not None:
        return helper.op("top_k_by", x, computed)
    k = whole(helper.label, "k", k, 1)
    if x.ndim and 0 <= x.shape[-1] < k:
        raise wrong(f"{helper.label}: k is {k}, the last axis of variable {x.name!r} has {x.shape[-1]} elements")
    return helper.op("top_k", x, k=k)


# fmt: off
gather_nd = row("gather_nd(input, index, name=None)", "The elements or slices of input at the positions in the last axis of `index`.")
scatter = row(
    "scatter(input, index, updates, name=None, overwrite=True)",
    "input with the rows at `index` replaced by those of `updates`; overwrite=False sets them to 0 and adds the updates.",
)
argmin = row(
    "argmin(x, axis=0)",
    "The index of the smallest element along an axis, as int64; the first of equal ones.", "arg_min", kind="arg_min", axis=axis_of,
)
argsort = row(
    "argsort(input, axis=-1, descending=False, name=None) -> tuple[Variable, Variable]",
    "The elements sorted along an axis, and their int64 indices in input.", axis=axis_of,
)

gather = row("gather(input, index, overwrite=True)", """
    The rows of input at the integers in `index`, [n] or [n, 1]. `overwrite` has no effect: gradients of repeated rows are added.

    Shapes: input [rows, ...] and n indices give [n, ...].

    Types: index is int64 or int32; the result has input's dtype.

    Raises ProgramError for an index of another dtype, and ExecutionError in a run with an index that is not a row.

    >>> fx.layers.gather(fx.data("x", [100, 8], "float32"), fx.data("index", [-1], "int64"))
    <Variable gather_0.tmp_0: f32[-1,8]>
    """, unused=["overwrite"])

argmax = row("argmax(x, axis=0)", """
    The index of the largest element along an axis, as int64; the first of equal ones.

    Shapes: [n, c] gives [n] with axis=1.

    Raises ProgramError when x has no such axis.

    >>> fx.layers.argmax(fx.data("x", [-1, 10], "float32"), axis=1)
    <Variable arg_max_0.tmp_0: i64[-1]>
    """, "arg_max", kind="arg_max", axis=axis_of)
# fmt: on

__all__ = ["argmax", "argmin", "argsort", "gather", "gather_nd", "scatter", "topk", "where"]
