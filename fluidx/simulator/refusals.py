"""Why a planner takes no candidate: the nearest one, by how much it misses, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.errors import TranspileError
from .memory_limit import MemoryLimit, show_size
from .planned import Considered

SAME = "it is the same program as"  # so begins the reason of a candidate that is refused as another one is there


def too_much(memory: int, over: int) -> str:
    """Why a candidate does not fit.

    >>> too_much(2_000_000_000, 500_000_000)
    'it needs 2.0 GB a device, 500.0 MB more than there are for a plan'
    """
    return f"it needs {show_size(memory)} a device, {show_size(over)} more than there are for a plan"


def nothing_fits(refused: Sequence[Considered], limit: MemoryLimit, recompute: bool) -> TranspileError:
    """The error if all candidates are refused, or were not simulated as they are too much work. `recompute`: was recomputation tried?"""
    large = [c for c in refused if c.form is not None and not c.refused.startswith(SAME)]
    if not refused:
        return TranspileError(
            "plan: these strategies give no candidate: rails needs several hosts, and pipeline a program with stages, "
            'with fx.device_guard("stage:1"): ...; name others, or leave strategies out'
        )
    if not large:
        listed = "".join(f"\n  {c.candidate}: {c.refused or c.note}" for c in refused[:10])
        return TranspileError(f"plan: none of {len(refused)} candidates can be taken:{listed}")
    near = min(large, key=lambda c: (_memory(c), c.candidate.order))
    form, needs = near.form, _memory(near)
    assert form is not None
    if needs <= limit.usable:
        return TranspileError(f"plan: nothing can be taken; the nearest, {near.candidate}: {near.refused or near.note}")
    values = needs - form.state
    return TranspileError(
        f"plan: none of {len(refused)} candidates fits into {limit}\n"
        f"  nearest: {near.candidate} needs {show_size(needs)}, {show_size(needs - limit.usable)} too much: "
        f"{show_size(form.state)} of parameters and optimizer state, {show_size(values)} of gradients, gathered parameters and "
        f"activations\n  {_advice(near, values, recompute)}"
    )


def _memory(c: Considered) -> int:
    assert c.form is not None
    return c.predicted.memory if c.predicted is not None else c.form.memory


def _advice(near: Considered, values: int, recompute: bool) -> str:
    assert near.form is not None
    if near.form.state > values:
        found = ["more ranks, which divide parameters and optimizer state"]
        if not near.form.host_memory:
            found.insert(1, "cpu_offload=True, which has optimizer state in host memory")
    else:
        way = "recomputation in backward (recompute=True, or fx.optimizer.RecomputeOptimizer)"
        again = [] if recompute or near.candidate.recomputes else [way]
        found = ["a smaller batch", *again, "more ranks with the same batch"]
    return f"what would help: {'; '.join(found)}"
