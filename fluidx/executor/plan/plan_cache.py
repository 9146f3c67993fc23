"""Cache of plans: the key has all inputs of planning besides the operators, so ranks with equal keys share a plan."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ... import native
from ...ir.opdef import Effect, opdef
from ...ir.operator import attrs_key
from ...ir.types import TensorType
from ..context import RunContext
from .kernel_selection import PartChoice
from .liveness import nested
from .rank_view import LocalOp
from .records import Plan, Step
from .selection import Outline
from .sizes import RankSizes

_MOST = 8  # plans cached for one outline


class KeptPlan(NamedTuple):
    """A cached plan. `types` are kept alive because the key contains their ids."""

    plan: Plan
    types: Sequence[TensorType]
    of_parts: Sequence[PartChoice]

    def on(self, sizes: RankSizes, ctx: RunContext) -> Plan | None:
        """The plan for the rank with these sizes: its operators get this rank's part. None if a kernel cannot compute that part."""
        if not self.of_parts:
            return self.plan
        parts = {id(one.op): sizes.here[id(one.op)].part for one in self.of_parts}
        if not all(one.holds(ctx, parts[id(one.op)]) for one in self.of_parts):
            return None

        def moved(step: Step) -> Step:
            here = step.here
            return step if here is None or id(step.op) not in parts else step._replace(here=here._replace(part=parts[id(step.op)]))

        bodies = {b: tuple(map(moved, steps)) for b, steps in self.plan.bodies.items()}
        return self.plan._replace(steps=tuple(map(moved, self.plan.steps)), bodies=bodies)


def kept(outline: Outline, key: Hashable, sizes: RankSizes, ctx: RunContext) -> Plan | None:
    """The cached plan of an outline under a key, for the rank with these sizes; None if there is none."""
    known = outline.plans.get(key)
    return None if known is None else known.on(sizes, ctx)


def keep(outline: Outline, key: Hashable, plan: Plan, sizes: RankSizes, of_parts: Sequence[PartChoice]) -> None:
    """Cache a plan under a key."""
    if len(outline.plans) >= _MOST:
        outline.plans.clear()
    outline.plans[key] = KeptPlan(plan, [*sizes.types.values()], of_parts)


def plan_key(sizes: RankSizes, outline: Outline, ctx: RunContext, device: str, natively: bool, fuse: bool, overlap: int | None) -> Hashable:
    """The key of an outline's plan. Of the rank it has: the types of its local values, changed operators, the values that only other ranks
    hold, and its index in the groups whose parts are views. The offset of its part in the global value does not count."""
    types, local, comm = sizes.types, sizes.local, ctx.comm
    absent = frozenset(local.absent) if local is not None else frozenset()
    only_on_others = [n for n, t in types.items() if (n in absent or 0 in t.shape) and sizes.only_on_others(n)] if local is not None else []
    return (
        *types,
        *map(id, types.values()),
        *_changed(sizes.here),
        *[(sizes.whole(n).dtype, str(sizes.whole(n))) for n in outline.fetch],
        absent,
        *only_on_others,
        *map(ctx.seat, outline.fact(_groups)),
        *(type(comm), type(getattr(comm, "calls", None)), comm is not None and comm.asynchronous),
        *(device, natively, native.chosen() if natively or device != "cpu" and native.enabled() else (), fuse, overlap),
    )


def _changed(here: Mapping[int, LocalOp]) -> Iterator[tuple[int, Hashable]]:
    """The operators that run changed, by id, which the outline keeps alive."""
    known: dict[int, Hashable] = {}  # many operators have one change
    for op, local in here.items():
        if id(local) not in known:
            known[id(local)] = _instead(local)
        yield op, known[id(local)]


def _instead(here: LocalOp) -> Hashable:
    fills = tuple([(k, type(value), value) for k, value in here.fills])
    return attrs_key(here.attrs), here.part is None, tuple(here.ghosts.items()), here.skip, fills


def _groups(outline: Outline) -> tuple[str, ...]:
    """The groups in which a rank's index decides the layout of its part. Collectives do not count: all ranks choose the same kernel."""
    inside = [inner for op in outline.ops for _, inner in nested(outline.program, op)] if outline.runs_blocks else []
    ops = [op for op in (*outline.ops, *inside) if "group" in op.attrs and opdef(op.type).effect is Effect.PURE]
    return tuple(dict.fromkeys(op.attrs["group"] for op in ops))
