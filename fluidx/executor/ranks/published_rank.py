"""PublishedRank: the rank of a process that shares memory with other processes. They read its fetches and variables there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import native
from ...comm.base import World
from ...ir.dtypes import dtype_name, np_dtype
from ...ir.program import Program
from ...ir.types import TensorType
from ...native.shared import Memory
from ..plan import allocation
from ..plan.allocation import fetched
from ..run import observers
from ..run.bound_plan import BoundPlan
from .local_rank import LocalRank

ArrayAddress = tuple[int, str, list[int]]  # address in shared memory, dtype and shape


class PublishedPlan(NamedTuple):
    """A bound plan, and the arrays in which other processes read its fetches."""

    bound: BoundPlan
    places: list[np.ndarray]

    def said(self) -> dict[str, Any]:
        """The fetches, as data for a message."""
        return {
            "types": [(t.dtype, list(t.shape)) for t in self.bound.fetch_types],
            "fetches": [address_of(a) for a in self.places],
        }


class PublishedRank:
    """A rank of this process whose values other processes read in `memory`; None if they get copies in messages."""

    def __init__(self, local: LocalRank, world: World, memory: Memory | None):
        self.local, self.world, self.memory = local, world, memory

    def _shared(self, a: Any) -> bool:
        """Can other processes read an array in place? Not if it is on a GPU."""
        return type(a) is np.ndarray and a.flags.c_contiguous and (self.memory is None or self.memory.holds(a))

    def bind(
        self, program: Program, feeds: Mapping[str, TensorType], fetch: Sequence[str], fuse: bool, overlap: int | None
    ) -> PublishedPlan:
        """Plan and bind a program. A fetch is read in place if it is in shared memory, else from a copy."""
        bound = self.local.compile(program, feeds, fetch, fuse, overlap)
        return PublishedPlan(bound, [a if self._shared(a) else allocation.zeros(a.shape, a.dtype) for a in bound.fetches])

    def walk(self, bound: BoundPlan, step: int, asked: observers.ObserverSettings, times: observers.Times | None) -> None:
        """Run one step; the feeds are in place, and the world has begun a run. Step times are appended to `times`, if they are wanted."""
        self.local.current, bound.ctx.step = bound, step
        after = observers.after_step(bound, asked, self.local.rank, times)
        if bound.overlapped is None:
            bound.walk(after)
        else:
            _both(lambda: bound.walk(after), lambda: bound.run_overlapped(after), self.world)
        self.local.finish()

    def publish(self, plan: PublishedPlan) -> None:
        """Copy the fetches that others do not read in place."""
        for a, place in zip(plan.bound.fetches, plan.places, strict=True):
            if type(a) is not np.ndarray:
                fetched(a, place)
            elif place is not a:
                np.copyto(place, a)

    def visible(self, name: str) -> np.ndarray:
        """A variable in shared memory: moved there, or copied from a GPU."""
        scope = self.local.scope
        a = scope.arrays[name]
        if type(a) is not np.ndarray:
            return fetched(a, allocation.zeros(a.shape, a.dtype))
        if not self._shared(a):
            scope.bind(name, allocation.copied(a))
        return scope.arrays[name]


def types_of(said: Sequence[Sequence[Any]]) -> list[TensorType]:
    """Types from the data of a message."""
    return [TensorType(dtype, tuple(shape)) for dtype, shape in said]


def address_of(a: np.ndarray) -> ArrayAddress:
    return native.address(a), dtype_name(a.dtype), list(a.shape)


def array_at(view: Callable[[int, Sequence[int], np.dtype], np.ndarray], address: Sequence[Any]) -> np.ndarray:
    """The array at an address; `view` makes it."""
    at, dtype, shape = address
    return view(at, shape, np_dtype(dtype))


def _both(compute: Callable[[], None], beside: Callable[[], None], world: World) -> None:
    """Run two jobs on two threads. The first failure stops both and is raised."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as e:
            errors.append(e)
            world.abort(e)

    other = threading.Thread(target=guarded, args=(beside,), name="fluidx-beside")
    other.start()
    guarded(compute)
    other.join()
    if errors:
        raise errors[0]
