"""Strategies that cut the batch into micro-batches: gradient accumulation (`micro_batches`) and pipeline parallelism (`pipeline`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from ...ir.errors import TranspileError, nearest
from ...ir.time_axes import MAX_TURNS
from ..passes.schedule import Schedule
from ..passes.time_axis import Turns
from ..passes.unroll import Unroll
from ..placement.parameter_homes import Everywhere
from ..scheduling.pipeline_schedules import SCHEDULES
from .base import Common, Strategy, strategy
from .search_space import searched


@searched(order=8, within=True, count=(4, 2, 8, 16))
def micro_batches(count: int = 4, of: Strategy | None = None, **common: Unpack[Common]) -> Strategy:
    """Compute a batch in `count` micro-batches, one after the other, and add up their gradients: 1/count of the memory for activations.

    `of` is the strategy for the ranks, which cut the batch first; the default is data_parallel with the other options. The results are
    those of one device, as the results of `of` are. What `of` sends for a step is sent once, after the last micro-batch.
    """
    return _in_turns("micro_batches", {"count": count}, of, common)


@searched(order=9, needs="stages", within=True, micro_batches=(4, 8, 16), schedule=("1f1b", "gpipe"))
def pipeline(micro_batches: int = 4, schedule: str = "1f1b", of: Strategy | None = None, **common: Unpack[Common]) -> Strategy:
    """Operators under `device_guard("stage:1")` run on rank 1 of the mesh axis `pp`; the stages work on different micro-batches at the same
    time.

    `schedule`: "1f1b" keeps the activations of at most as many micro-batches as there are stages, "gpipe" those of all micro-batches. Both
    leave (p - 1)/(m + p - 1) of the time of p stages unused, with m micro-batches. `of` is the strategy over the other axes; the default is
    data_parallel with the other options. The results are those of one device.
    Source: Huang et al., "GPipe" (2019); Narayanan et al., "PipeDream" (2019).
    """
    if schedule not in tuple(SCHEDULES):  # a tuple: the option may be unhashable
        raise TranspileError(f"pipeline: unknown schedule={schedule!r}; {nearest(str(schedule), SCHEDULES, 'there are')}")
    cut = _in_turns("pipeline", {"micro_batches": micro_batches, "schedule": schedule}, of, common)
    if cut.servers:
        raise TranspileError(f"pipeline: of={of!r} has servers, and these exclude an axis of stages; take micro_batches(of=...) without")
    return cut.after("unroll", Schedule(schedule), "schedule").as_made()


def _in_turns(name: str, options: dict[str, Any], of: Strategy | None, common: Common) -> Strategy:
    """A strategy that cuts the batch into micro-batches; their number is the first of its options."""
    option, count = next(iter(options.items()))
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_TURNS:
        raise TranspileError(f"{name}: {option} must be an integer from 1 to {MAX_TURNS}, got {count!r}")
    if of is not None and not isinstance(of, Strategy):
        raise TranspileError(f"{name}: of must be a strategy such as strategies.zero1(), got {of!r}")
    if of is not None and common:
        raise TranspileError(f"{name}: {', '.join(common)} beside of={of!r}; give these options to {of.name}")
    if of is not None and any(isinstance(p, Turns) for p in of.passes):
        within = "".join(f", of={s!r}" for given, s in of.options if given == "of")
        raise TranspileError(
            f"{name}: of={of!r} already has micro-batches; use it alone, or {name}({option}={count}{within})"
        )
    if of is None:
        inner = strategy(name, Everywhere(), options, **common)
    else:
        inner = replace(of, name=name, options=(*options.items(), ("of", of)), first=0, called=("", (), 0))
    return inner.after("groups", Turns(count), "turns").after("lower", Unroll(), "unroll").as_made()
