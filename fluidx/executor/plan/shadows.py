"""Shadow arrays: they stand for the values of a plan, with shapes and strides but shared memory. Views and kernels are tried on them."""

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
    """Shadow arrays for values of these types and for their views. Equal layouts are one object."""

    def __init__(self, types: Iterable[TensorType]):
        self.types = types
        self.known: dict[tuple, np.ndarray] = {}

    @cached_property
    def dummy(self) -> np.ndarray:
        """The memory that all shadows share; nothing accesses it. It is large enough for float32 in place of 16-bit floats."""
        distinct = {id(t): t for t in self.types}.values()
        # of the same kind of memory as operands: the kernels of communication operators may depend on it
        return allocation.new_bytes(max((wide_type(t).nbytes for t in distinct), default=1) or 1)

    def of(self, t: TensorType) -> np.ndarray:
        """The shadow of a value in its own storage."""
        a = self.known.get((t.dtype, t.shape))
        if a is None:
            a = self.known[t.dtype, t.shape] = self.like(np.ndarray(t.shape, np_dtype(t.dtype), buffer=self.dummy))
        return a

    def like(self, a: np.ndarray) -> np.ndarray:
        """The shadow with the same layout."""
        return self.known.setdefault((a.dtype, a.shape, a.strides), a)


class LayoutKeys(NamedTuple):
    """Numbers for the layout of a value: `exact` with all sizes; `rough` is equal for layouts that differ only in sizes above 1."""

    exact: int
    rough: int
