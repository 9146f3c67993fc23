"""Layers that add into, select from or combine slices of tensors: scatter_nd, scatter_nd_add, einsum, maxout, unbind."""

from __future__ import annotations

from collections.abc import Sequence

from .._checks import whole, wholes, wrong
from ..ir import Variable
from .helper import LayerWriter
from .layer_from_signature import row


def scatter_nd(index: Variable, updates: Variable, shape: Sequence[int], name: str | None = None) -> Variable:
    """`scatter_nd_add` into zeros of `shape`."""
    helper = LayerWriter("scatter_nd", name)
    index, updates = helper.variable(index, "index"), helper.variable(updates, "updates")
    zeros = helper.op("fill_constant", shape=wholes(helper.label, "shape", shape, least=0), dtype=updates.dtype, value=0.0)
    return helper.op("scatter_nd_add", zeros, index, updates)


def einsum(equation: str, *operands: Variable) -> Variable:
    """Products of the operands, summed over the letters that are not in the result: "ij,jk->ik" is a matrix product.

    Each letter names one axis, at most once in an operand, and the arrow is required. It is Paddle's einsum, which fluid does not have.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     q = fx.data("q", [-1, 7, 4], "float32")
    ...     fx.layers.einsum("bid,bjd->bij", q, q).shape
    (-1, 7, 7)
    """
    helper = LayerWriter("einsum")
    if not isinstance(equation, str):
        raise wrong(f"{helper.label}: equation must be a string such as 'ij,jk->ik', got {type(equation).__name__}")
    return helper.op("einsum", helper.variables(operands, "operands"), equation=equation.replace(" ", ""))


def maxout(x: Variable, groups: int, name: str | None = None, axis: int = 1) -> Variable:
    """The largest of each `groups` channels in turn: [n, c, h, w] gives [n, c / groups, h, w]; the channels are along axis 1 or -1."""
    helper = LayerWriter("maxout", name)
    x = helper.variable(x, "x")
    axis, groups = helper.axis(x, axis), whole(helper.label, "groups", groups, 2)
    channels = helper.known(x, "x", axis)
    if not axis or channels % groups:
        raise wrong(f"{helper.label}: axis {axis} of variable {x.name!r} with shape {list(x.shape)} has no channels that {groups} divides")
    rest = [helper.known(x, "x", k) for k in range(1, x.ndim) if k != axis]
    before, after = rest[: axis - 1], rest[axis - 1 :]
    parts = helper.op("reshape", x, shape=(0, *before, channels // groups, groups, *after))
    return helper.op("reduce_max", parts, dim=(axis + 1,))


def unbind(input: Variable, axis: int = 0) -> list[Variable]:
    """The slices of input along an axis of known size, each without that axis."""
    helper = LayerWriter("unbind")
    x = helper.variable(input, "input")
    axis = helper.axis(x, axis)
    count = helper.known(x, "input", axis)
    return list(helper.op("unstack", x, n_out=count, axis=axis, num=count))


# fmt: off
scatter_nd_add = row("scatter_nd_add(ref, index, updates, name=None)", """
    ref with `updates` added to the elements or slices at the positions in the last axis of `index`. Positions may repeat.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     ref, ids = fx.data("ref", [3, 5, 9], "float32"), fx.data("ids", [4, 2], "int64")
    ...     fx.layers.scatter_nd_add(ref, ids, fx.data("updates", [4, 9], "float32")).shape
    (3, 5, 9)
    """)
# fmt: on

__all__ = ["einsum", "maxout", "scatter_nd", "scatter_nd_add", "unbind"]
