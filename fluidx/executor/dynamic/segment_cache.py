"""A cache of bound plans and segmented runs, and RunBuilder, which makes them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar

from ...ir.types import TensorType
from ..context import RunContext
from ..feeds import check_sizes
from ..plan.planner import plan
from ..plan.records import Plan
from ..plan.segments import segments
from ..plan.selection import Outline
from ..plan.sizes import SizesChange
from ..run.bind import bind, prepare
from ..run.bound_plan import BoundPlan
from ..run.cache_growth import growth_of_caches
from ..run.patched_plans import GrowingSizes, Sizes
from ..scope import Scope
from .segmented_run import SegmentedRun

T = TypeVar("T")


class ScopedCache(OrderedDict[tuple, tuple[T, int, tuple]]):
    """A cache of limited size (least recently used goes first). An entry is valid for one version of its scope."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def find(self, key: tuple, scope: Scope) -> T | None:
        """The entry; None if there is none, or if arrays of the scope were replaced."""
        found = self.get(key)
        if found is None or found[1] != scope.version:
            return None
        self.move_to_end(key)
        return found[0]

    def keep(self, key: tuple, made: T, scope: Scope, source: Any) -> T:
        self[key] = made, scope.version, (source, scope)  # the references prevent that ids are reused
        if len(self) > self.most:
            self.popitem(last=False)
        return made


class RunBuilder:
    """Plans and binds outlines for runs in a scope. `kept` caches the segments of programs."""

    def __init__(self, scope: Scope, ctx: RunContext, xp: Any, fuse: bool, kept: ScopedCache[BoundPlan | SegmentedRun]):
        self.scope, self.ctx, self.xp, self.fuse, self.kept = scope, ctx, xp, fuse, kept

    def ready(self, outline: Outline, types: Mapping[str, Any]) -> BoundPlan | SegmentedRun:
        """The outline ready to run on feeds of these types: one bound plan if possible, else segments."""
        cut = outline.fact(segments)
        if not cut:
            try:
                return prepare(outline.program, types, outline.fetch, self.scope, self.ctx, self.xp, self.fuse, outline=outline)
            except SizesChange as e:
                cut = outline.fact(segments, e.op)
        return SegmentedRun(outline, cut, self)

    def growing(self, outline: Outline, types: Mapping[str, TensorType]) -> GrowingSizes:
        """Plans by patching for feeds of these types in all sizes."""
        program, fetch = outline.program, outline.fetch

        def planned(sizes: Sizes) -> Plan:
            fed = {n: TensorType(t.dtype, shape) for (n, t), shape in zip(types.items(), sizes, strict=True)}
            check_sizes(program.global_block().descs, fed)
            return plan(program, fed, fetch, self.scope.arrays, self.ctx, fuse=self.fuse, outline=outline)

        return GrowingSizes(planned, lambda made, room: bind(made, self.scope, self.ctx, room=room), outline.fact(growth_of_caches))

    def part(self, outline: Outline, types: Mapping[str, Any]) -> BoundPlan | SegmentedRun:
        """The same for a part of a program, cached."""
        key = (id(outline), id(self.scope), tuple(types.values()), self.fuse)
        found = self.kept.find(key, self.scope)
        return found or self.kept.keep(key, self.ready(outline, types), self.scope, outline)
