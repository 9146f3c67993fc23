"""Orthonormalization of the columns of a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic
from ...ir.opdef import OpDef, Sample
from ..shared.samples import f32


class Orthonormalize(OpDef):
    """An orthonormal basis [a, r] of a space that contains the columns of X. Each column contributes its component orthogonal to those
    before it.

    The first column keeps its direction, the second keeps its component orthogonal to the first, and so on (modified Gram-Schmidt, applied
    twice, so that float32 columns are orthogonal to the last digits). A column may contribute only rounding errors, because it depends on
    those before it or is shorter than the longest by a factor of sqrt(eps). Two computations of X would then disagree on the direction. The
    first axis with a large enough orthogonal component replaces such a column. The result has r orthonormal columns for every X, even for
    zeros.
    """

    name = "orthonormalize"
    inputs = ("X",)
    pattern = "a r -> a r | a! r!"
    arithmetic = Arithmetic(flops=lambda ins, outs, attrs: 4 * abs(outs[0].numel) * outs[0].shape[1])

    @staticmethod
    def infer(x: Any) -> Any:
        if x.ndim != 2 or not x.is_float:
            raise ProgramError(f"op orthonormalize: X must be a matrix of floats, found {x}")
        if 0 <= x.shape[0] < x.shape[1]:
            raise ProgramError(f"op orthonormalize: X is {x}; there are no {x.shape[1]} orthonormal columns of {x.shape[0]} rows")
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
                v = _orthogonal_part(xp, v / length, before)
            if not known or float(xp.linalg.norm(v)) <= noise:  # the rest of a column that depends on those before it is rounding error
                # the squared length of the orthogonal component of each axis. Their sum is rows - k, so some axis has 0.7 of the mean. The
                # factor is irrational, so that columns of small integers never reach exactly this value.
                left = 1.0 - (before * before).sum(axis=1)
                v = xp.zeros(rows, x.dtype)
                v[int(xp.argmax(left >= 0.5**0.5 * (rows - k) / rows))] = 1.0
                v = _orthogonal_part(xp, v, before)
            v = v / xp.linalg.norm(v)
            v = _orthogonal_part(xp, v, before)
            out[:, k] = v / xp.linalg.norm(v)

    @staticmethod
    def samples():
        yield Sample.of(f32(7, 3), grad=(), why="it has no gradient")
        yield Sample.of(f32(3, 3, seed=1).astype("float64"), grad=(), why="it has no gradient")
        yield Sample.of(np.zeros((4, 2), "float32"), grad=(), why="it has no gradient")
        yield Sample.of(np.repeat(f32(5, 1, seed=2), 2, axis=1), grad=(), why="it has no gradient")


def _orthogonal_part(xp: Any, v: Any, columns: Any) -> Any:
    """The component of a vector orthogonal to orthonormal columns."""
    for k in range(columns.shape[1]):
        v = v - xp.dot(columns[:, k], v) * columns[:, k]
    return v
