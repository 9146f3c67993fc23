"""Arrays without memory of their own that stand for the values of a plan: operators are asked for views and kernels of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...ir.dtypes import np_dtype
from ...ir.types import TensorType
from ...ops.kernels import wide_type
from . import allocation


class Shadows:
    """Arrays that stand for values of these types and their views. Those that lie alike are one object."""

    def __init__(self, types: Iterable[TensorType]):
        self.types = types
        self.known: dict[tuple, np.ndarray] = {}

    @cached_property
    def dummy(self) -> np.ndarray:
        """What all shadows share, and nothing touches; float32 may stand for 16-bit floats."""
        distinct = {id(t): t for t in self.types}.values()
        # where operands will be: which kernels there are of what communicates may depend on that
        return allocation.new_bytes(max((wide_type(t).nbytes for t in distinct), default=1) or 1)

    def of(self, t: TensorType) -> np.ndarray:
        """The shadow of a value in storage of its own."""
        a = self.known.get((t.dtype, t.shape))
        if a is None:
            a = self.known[t.dtype, t.shape] = self.like(np.ndarray(t.shape, np_dtype(t.dtype), buffer=self.dummy))
        return a

    def like(self, a: np.ndarray) -> np.ndarray:
        """The one that lies as this one does."""
        return self.known.setdefault((a.dtype, a.shape, a.strides), a)


class LayoutKeys(NamedTuple):
    """Numbers for how a value lies: one to the size, and one that it shares with all that differ in sizes above 1 alone."""

    exact: int
    rough: int
