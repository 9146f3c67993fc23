"""Descriptions of a plan's calls for profilers. A rank in another process sends descriptions of its calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ... import native
from ...ir.jsonform import op_from_json, op_to_json
from ...ir.operator import Operator
from ...ir.program import Program
from ...ir.source_location import Site
from ...ir.types import TensorType
from ..context import RunContext
from ..plan.cost import Cost, communicates
from ..plan.records import Value
from .bound_plan import BoundPlan


@dataclass(eq=False)
class CallDescription:
    """One call of a run: a step of the plan, or a wait for an overlapped step (kernel "wait")."""

    op: Operator
    ops: str  # the types of its operators
    kernel: str
    communicates: bool
    cost: Cost
    overlapped: bool = False  # it overlaps with compute

    @property
    def waits(self) -> bool:
        return self.kernel == "wait"


def calls_of(bound: BoundPlan | RemotePlan) -> list[CallDescription]:
    """The calls of a bound plan, in the order of the numbers that observers get."""
    return bound.calls if isinstance(bound, RemotePlan) else list(_calls(bound))


def _calls(bound: BoundPlan) -> Iterator[CallDescription]:
    plan = bound.plan
    costs: dict[int, Cost] = {}
    for track in bound.call_lists:
        for (op, _), k in zip(track.steps, track.numbers, strict=True):
            if k < 0:
                yield CallDescription(op, op.type, "wait", True, Cost())
                continue
            step = plan.steps[k]
            if k not in costs:
                costs[k] = plan.cost(step)
            types = dict.fromkeys(o.type for o in step.ops)
            yield CallDescription(op, " + ".join(types), step.kernel, communicates(step), costs[k], track is bound.overlapped)


class RemotePlanValues(NamedTuple):
    """The known part of another process's plan: this process's copy of the program, and the values that the calls read and write."""

    program: Program
    values: Mapping[str, Value]


class RemotePlan:
    """A bound plan of a rank in another process, from that process's description (`describe_plan`)."""

    def __init__(self, said: Mapping[str, Any], program: Program, rank: int, world_size: int):
        self.plan = RemotePlanValues(
            program, {n: Value(TensorType(dtype, tuple(shape)), 0) for n, (dtype, shape) in said["values"].items()}
        )
        self.ctx = RunContext(rank, world_size)
        self.threads: int = said["threads"]
        sites = _sites(program)
        self.calls = [
            CallDescription(_operator(op, sites), ops, kernel, communicates, Cost(*cost), overlapped)
            for op, ops, kernel, communicates, cost, overlapped in said["calls"]
        ]


def describe_plan(bound: BoundPlan) -> dict[str, Any]:
    """The description of a plan, as plain data, from which `RemotePlan` is made."""
    calls, values = calls_of(bound), bound.plan.values
    names = {n for c in calls for n in (*c.op.input_arg_names, *c.op.output_arg_names) if n in values}
    return {
        "threads": native.num_threads(),
        "values": {n: (values[n].type.dtype, values[n].type.shape) for n in sorted(names)},
        "calls": [(op_to_json(c.op.replace(attrs={})), c.ops, c.kernel, c.communicates, c.cost, c.overlapped) for c in calls],
    }


def _operator(data: Mapping[str, Any], sites: Mapping[tuple, Site | None]) -> Operator:
    """The operator from another process's description, with the user's line, which program texts do not have."""
    op = op_from_json(data)
    return op.replace(site=sites.get(_key(op)))


def _sites(program: Program) -> dict[tuple, Site | None]:
    found: dict[tuple, Site | None] = {}
    for block in program.blocks:
        for op in block.oplist:
            found.setdefault(_key(op), op.site)
    return found


def _key(op: Operator) -> tuple:
    return op.type, op.output_arg_names or op.input_arg_names
