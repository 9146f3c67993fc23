"""Columns made orthonormal."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir.errors import ProgramError
from ...ir.opdef import OpDef, Sample
from ..shared.samples import f32


class Orthonormalize(OpDef):
    """An orthonormal basis [a, r] of a space that holds the columns of X, one by one from the left: what a column adds, at length 1.

    The first column keeps its direction, the second what is left of it beside the first, and so on (modified Gram-Schmidt, twice, so that
    float32 columns are orthogonal to the last digits). A column that adds nothing but rounding, because it depends on those before or is
    shorter than the longest by a factor of sqrt(eps), has no direction that two computations of X agree on; the first axis takes its place
    of which enough is left. The result has r orthonormal columns whatever X is, zeros included.
    """

    name = "orthonormalize"
    inputs = ("X",)
    pattern = "a r -> a r | a! r!"
    flops = staticmethod(lambda ins, outs, attrs: 4 * abs(outs[0].numel) * outs[0].shape[1])

    @staticmethod
    def infer(x: Any) -> Any:
        if x.ndim != 2 or not x.is_float:
            raise ProgramError(f"op orthonormalize: X must be a matrix of floats, found {x}")
        if 0 <= x.shape[0] < x.shape[1]:
            raise ProgramError(f"op orthonormalize: X is {x}; {x.shape[0]} rows have no {x.shape[1]} orthonormal columns")
        return x

    @staticmethod
    def kernel(xp: Any, x: Any, *, out: Any) -> None:
        rows, noise = len(x), float(np.finfo(x.dtype).eps) ** 0.5
        lengths = [float(xp.linalg.norm(x[:, k])) for k in range(x.shape[1])]
        longest = max((n for n in lengths if n < np.inf), default=0.0)
        for k, length in enumerate(lengths):
            before, v = out[:, :k], x[:, k]
            known = noise * longest < length < np.inf
            if known:
                v = _beside(xp, v / length, before)
            if not known or float(xp.linalg.norm(v)) <= noise:  # the rest of a column that lies among those before is rounding
                # what is left of each axis: together rows - k, so 0.7 of the mean is there somewhere; an irrational share, which the rest
                # beside columns of small integers cannot equal but for rounding
                left = 1.0 - (before * before).sum(axis=1)
                v = xp.zeros(rows, x.dtype)
                v[int(xp.argmax(left >= 0.5**0.5 * (rows - k) / rows))] = 1.0
                v = _beside(xp, v, before)
            v = v / xp.linalg.norm(v)
            v = _beside(xp, v, before)
            out[:, k] = v / xp.linalg.norm(v)

    @staticmethod
    def samples():
        yield Sample.of(f32(7, 3), grad=(), why="it has no gradient")
        yield Sample.of(f32(3, 3, seed=1).astype("float64"), grad=(), why="it has no gradient")
        yield Sample.of(np.zeros((4, 2), "float32"), grad=(), why="it has no gradient")
        yield Sample.of(np.repeat(f32(5, 1, seed=2), 2, axis=1), grad=(), why="it has no gradient")


def _beside(xp: Any, v: Any, columns: Any) -> Any:
    """What is left of a vector beside orthonormal columns."""
    for k in range(columns.shape[1]):
        v = v - xp.dot(columns[:, k], v) * columns[:, k]
    return v
