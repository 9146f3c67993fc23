"""Pipeline stages: which operators a device mark pins to one rank of the axis `pp`, and where their variables are stored."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

from ...ir import flow
from ...ir.errors import TranspileError
from ...ir.operator import Operator
from ...ir.program import Program
from ...ir.types import At, Placement
from .placement_walk import where

STAGES = "pp"  # the axis of ranks that are stages
_STAGE = re.compile(r"(?:stage|gpu):([0-9]+)")


def stage_of(device: str) -> int | None:
    """The stage that a device string marks; None if it marks none.

    >>> stage_of("stage:2"), stage_of("gpu:1"), stage_of("cpu")
    (2, 1, None)
    """
    found = _STAGE.fullmatch(device)
    return None if found is None else int(found[1])


def pins(main: Program, axes: Mapping[str, int]) -> dict[str, At]:
    """{device: the rank of the axis `pp` that runs its operators}; empty if the ranks have no such axis. Raises TranspileError for a stage
    that does not exist, and for a stage without operators.
    """
    n = axes.get(STAGES, 1)
    if n == 1:
        return {}
    first: dict[str, Operator] = {}
    for block in main.blocks:
        for op in block.oplist:
            if op.device and op.device not in first:
                first[op.device] = op
    found = {device: At(stage, STAGES) for device in first if (stage := stage_of(device)) is not None}
    for device, at in found.items():
        if at.root >= n:
            raise TranspileError(
                f"op {first[device].type} is marked {device}, and the ranks have {n} stages, 0 to {n - 1}; "
                f"mark it with one of them, or give trainers=fx.Mesh({STAGES}={at.root + 1}, ...){where(first[device])}"
            )
    idle = sorted(set(range(n)) - {at.root for at in found.values()})
    if idle:
        raise TranspileError(
            f"{main.label()} has no operators for stage{'s' * (len(idle) > 1)} {', '.join(map(str, idle))} of the {n} that "
            f"{STAGES}={n} asks for; mark them while the program is written: with fx.device_guard(\"stage:{idle[0]}\"): ..."
        )
    return found


def rest_at_stages(main: Program, pinned: Mapping[str, At], floating: Container[str]) -> dict[str, At]:
    """The stage that stores each fed or persistable variable: the one that writes it last, or else the only one that reads it. A variable
    in `floating` is stored where its first operator needs it."""
    block = main.global_block()
    lasting = {n for n, d in block.descs.items() if (d.persistable or d.is_data) and n not in floating}
    readers: dict[str, set[At | None]] = {}
    writer: dict[str, At | None] = {}
    for op in block.oplist:
        ins, outs = flow.touches(main, op)
        at = pinned.get(op.device)
        for n in lasting.intersection(ins):
            readers.setdefault(n, set()).add(at)
        for n in lasting.intersection(outs):
            writer[n] = at
    only = {n: next(iter(found)) for n, found in readers.items() if n not in writer and len(found) == 1}
    return {n: at for n, at in {**only, **writer}.items() if at is not None}


def between_stages(old: Placement, new: Placement) -> bool:
    """Does a value move from one stage to another, with the same placement over all other groups?"""
    stages = [[e for e in q if e.root is not None and e.group == STAGES] for q in (old, new)]
    return all(stages) and [e for e in old if e not in stages[0]] == [e for e in new if e not in stages[1]]
