"""PlanMemory: memory in which plans for several sizes are bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ...ir.dtypes import np_dtype
from ...ir.types import TensorType
from ..plan.allocation import aligned_bytes, carve
from ..plan.records import Plan, Scratch


class PlanMemory(NamedTuple):
    """An arena, and the bytes of each feed. Runs of the plans that are bound in it must not overlap."""

    arena: np.ndarray
    feeds: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, largest: Plan) -> PlanMemory:
        """Memory that is large enough for a plan."""
        fed = [(n, v.type) for n, v in largest.values.items() if largest.buffers[v.buffer].kind == "feed" and not v.view_of]
        return cls(aligned_bytes(largest.arena_bytes), {n: aligned_bytes(t.nbytes) for n, t in fed})

    def feed(self, name: str, t: TensorType) -> np.ndarray:
        """The array of a feed."""
        return carve(self.feeds[name], 0, t.shape, np_dtype(t.dtype))

    def scratch(self, one: Scratch) -> np.ndarray:
        """The array of scratch of a step."""
        return carve(self.arena, one.offset, one.type.shape, np_dtype(one.type.dtype))
