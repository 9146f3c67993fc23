"""Broadcasting: the common shape of operands, fluid's `axis`, and the sum over broadcast axes in a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ...ir.errors import ProgramError
from ...ir.types import ANY, common_size
from ...ir.valuetypes import is_ranked


def broadcast_size(p: int, q: int) -> int | None:
    """The size that two axes broadcast to; None if they do not. An open axis and n > 1 give n; an open axis and 1 or an open axis give an
    open one.
    """
    if p == q:
        return common_size(p, q)  # one of two named axes may be 1
    if q == 1:
        return p
    if p == 1 or p == ANY:
        return q
    return p if q == ANY else None


def broadcast_sizes(op: str, *shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that right-aligned shapes broadcast to. Raises ProgramError if they do not.

    >>> broadcast_sizes("add", (-1, 1, 4), (3, 1))
    (-1, 3, 4)
    """

    out: list[int] = []
    for shape in shapes:
        out[:0] = [1] * (len(shape) - len(out))
        for k, q in enumerate(shape, len(out) - len(shape)):
            if out[k] is not q:
                size = broadcast_size(out[k], q)
                if size is None:
                    listed = " and ".join(str(list(s)) for s in shapes)
                    raise ProgramError(f"op {op}: shapes {listed} do not broadcast: {out[k]} against {q}")
                out[k] = size
    return tuple(out)


def aligned(op: str, x: Sequence[int], y: Sequence[int], axis: int) -> tuple[int, ...]:
    """The shape of Y, aligned with X: with `axis` k the axis 0 of Y meets axis k of X (fluid), with -1 the last axes meet (NumPy).

    >>> aligned("add", (2, 3, 4, 5), (3, 4), 1)
    (3, 4, 1)
    """
    if axis == -1 or len(x) == len(y):
        return tuple(y)
    trailing = len(x) - axis - len(y)
    while trailing < 0 and y and y[-1] == 1:  # fluid drops trailing sizes of 1
        y, trailing = y[:-1], trailing + 1
    if axis < -1 or trailing < 0:
        raise ProgramError(f"op {op}: with axis {axis}, Y of shape {list(y)} does not fit into X of shape {list(x)}")
    return (*y, *(1,) * trailing)


def aligned_shape(shape: Sequence[int], ndim: int, axis: int) -> tuple[int, ...]:
    """The shape with which an operand broadcasts against `ndim` axes from axis `axis` on.

    A flat part has one axis; a value of one element beside it may have more axes.
    """
    if len(shape) == ndim or axis == -1 and prod(shape) != 1:
        return tuple(shape)
    return (1,) * ndim if prod(shape) == 1 else aligned("align", (1,) * ndim, shape, axis)


def reduced(b: Any, g: Any, like: Any, out: Any, *others: Any, axis: int = -1, stop: int | None = None) -> Any:
    """The gradient `g` of a broadcast result `out`, summed to the shape of the operand `like`; `g` itself if nothing was broadcast.

    `others` are the other operands, `stop` is the end of the axes that broadcast.
    """
    if not is_ranked(like.desc.type, out.desc.type):
        return b.reduce_to(g, like, axis=axis)
    alike = like.shape[:stop] == out.shape[:stop]
    # an open axis may have been broadcast to a larger one
    if alike and (ANY not in like.shape or all(ANY not in y.shape for y in others) or b.sizes.equal(like, out, stop)):
        return g
    return b.reduce_to(g, like, axis=axis)
