"""PlanMemory: memory in which plans for several sizes are bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ...ir.dtypes import np_dtype
from ...ir.types import TensorType
from ..plan.allocation import ALIGN, aligned_bytes, carve
from ..plan.records import Plan, Scratch


class PlanMemory(NamedTuple):
    """An arena, and the bytes of each feed and of each fetched value that lies apart, behind the `own_bytes` of the arena. Runs of the
    plans that are bound in it must not overlap."""

    arena: np.ndarray
    own_bytes: int
    fetched: Mapping[str, np.ndarray]
    feeds: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, largest: Plan, own_bytes: int | None = None) -> PlanMemory:
        """Memory that is large enough for a plan. Fetched values may lie behind the `own_bytes` of its arena."""
        fed = [(n, v.type) for n, v in largest.values.items() if largest.buffers[v.buffer].kind == "feed" and not v.view_of]
        arena, own = aligned_bytes(largest.arena_bytes), largest.arena_bytes if own_bytes is None else own_bytes
        apart = [(n, largest.buffers[number]) for n, number in fetched_buffers(largest).items()]
        fetched = {n: arena[b.offset : b.offset + b.nbytes] for n, b in apart if b.offset >= own}
        return cls(arena, own, fetched, {n: aligned_bytes(t.nbytes) for n, t in fed})

    def feed(self, name: str, t: TensorType) -> np.ndarray:
        """The array of a feed."""
        return carve(self.feeds[name], 0, t.shape, np_dtype(t.dtype))

    def scratch(self, one: Scratch) -> np.ndarray:
        """The array of scratch of a step."""
        return carve(self.arena, one.offset, one.type.shape, np_dtype(one.type.dtype))


def fetched_buffers(plan: Plan) -> dict[str, int]:
    """The fetched values that have all of a buffer of the arena, one for a buffer, and the numbers of the buffers."""
    found: dict[int, str] = {}
    for n in plan.fetches:
        v = plan.values[n]
        b = plan.buffers[v.buffer]
        if b.kind == "arena" and not b.on_host and v.strided is None and 0 < b.nbytes == v.type.nbytes:
            found.setdefault(v.buffer, n)
    return {n: number for number, n in found.items()}


def with_fetches_apart(plan: Plan) -> Plan:
    """The plan with its fetched values behind all that it has in the arena: a run may write them elsewhere."""
    buffers, top = [*plan.buffers], plan.arena_bytes
    for number in fetched_buffers(plan).values():
        buffers[number] = buffers[number]._replace(offset=top)
        top += -(-buffers[number].nbytes // ALIGN) * ALIGN
    return plan._replace(buffers=tuple(buffers), arena_bytes=top)
