"""Schedule: order the operators of a pipeline's stages by micro-batch, as GPipe or 1F1B (one forward, one backward)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from ...ir import flow
from ...ir.errors import TranspileError, nearest
from ...ir.operator import Operator, Role
from ...ir.pass_base import Job, Pass
from ...ir.program import Program
from ...ir.time_axes import turn_groups
from ...verify.transfer_messages import TRANSFER
from ..placement.pipeline_stages import STAGES, stage_of
from ..placement.placement_walk import where
from ..scheduling.pipeline_schedules import SCHEDULES, Action, slots

_FORWARD, _BACKWARD = (Role.FORWARD, Role.LOSS), (Role.BACKWARD,)


@dataclass(frozen=True)
class Schedule(Pass):
    """Put every operator into the slot of its stage, micro-batch and direction; the transfers between two slots start together.

    All ranks have their operators in the same order, so there is no deadlock. An operator never moves before operators that it depends on:
    it gets a later slot instead, and `explain()` says so.
    """

    by: str = "1f1b"
    axis: str = "mb"

    requires = ("unrolled",)

    def rewrite(self, program: Program, job: Job) -> Program:
        if self.by not in SCHEDULES:
            raise TranspileError(f"unknown schedule {self.by!r}; {nearest(str(self.by), SCHEDULES, 'there are')}")
        marked = next((op for op in program.ops if stage_of(op.device) is not None), None)
        if STAGES not in job.mesh.axes and marked is not None:
            raise TranspileError(
                f"{program.label()} has stages, and {job.mesh!r} has no axis {STAGES!r} for them; give trainers=fx.Mesh({STAGES}=2, dp=...)"
                f", or take strategies.micro_batches{where(marked)}"
            )
        if STAGES not in job.mesh.axes and job.mesh.world_size > 1:
            raise TranspileError(
                f"pipeline runs stages on the ranks of an axis {STAGES!r}, and all {job.mesh.world_size} ranks are in dp; give "
                f'trainers=fx.Mesh({STAGES}={job.mesh.world_size}) and mark the stages: with fx.device_guard("stage:0"): ...; or take '
                "strategies.micro_batches"
            )
        if self.axis not in program.turns:
            return program
        new = program.copy()
        ordered = _Ordering(new, self.by, self.axis, job.mesh.axes.get(STAGES, 1))
        new.global_block().oplist = ordered.run()
        job.log += ordered.waits
        return new


class _Ordering:
    """Assigns a time to each operator: even times are slots, odd times are between two slots."""

    def __init__(self, program: Program, by: str, axis: str, stages: int):
        self.program, self.stages = program, stages
        self.slots = slots(by, stages, program.turns[axis])
        self.turn = {name: turn.last for name, turn in turn_groups(program.turns) if turn.axis == axis}
        self.descs = program.global_block().descs
        self.made: dict[str, int] = {}  # the time of the last write of a name
        self.read: dict[str, int] = {}  # the time of its last read
        self.backward: dict[str, bool] = {}  # the direction of its writer
        self.waits: list[str] = []
        self._said: set[tuple[int, bool]] = set()

    def run(self) -> list[Operator]:
        ops = self.program.global_block().oplist
        times = [self._time(op) for op in ops]
        return list(self._batched([ops[k] for k in sorted(range(len(ops)), key=times.__getitem__)]))

    def _time(self, op: Operator) -> int:
        ins, outs = flow.touches(self.program, op)
        after = max((self.made[n] for n in ins if n in self.made), default=-1)
        after = max([after, *(when[n] for when in (self.made, self.read) for n in outs if n in when)])
        backward = op.role in _BACKWARD or (op.role not in _FORWARD and any(self.backward.get(n, False) for n in ins))
        own = self._slot((*ins, *outs), backward, op)
        time = after
        if op.type == TRANSFER:
            time = after | 1  # after the slot in which its input was made
        elif own is not None:
            time = max(own, after)
            self._say(op, own, after, backward)
        for n in ins:
            self.read[n] = max(time, self.read.get(n, time))
        for n in outs:
            self.made[n], self.backward[n] = time, backward
        return time

    def _slot(self, names: Iterable[str], backward: bool, op: Operator) -> int | None:
        """The slot of an operator's stage, micro-batch and direction; None for an operator without a micro-batch."""
        places = [d.placement for n in names if (d := self.descs.get(n)) is not None]
        turns = [self.turn[e.group] for q in places for e in q if e.group in self.turn]
        if not turns:
            return None
        stages = [e.root for q in places for e in q if e.root is not None and e.group == STAGES]
        first = self.stages - 1 if backward else 0  # an operator of all stages runs with the first of them
        return 2 * self.slots[stages[0] if stages else first][Action(backward, max(turns))]

    def _say(self, op: Operator, own: int, after: int, backward: bool) -> None:
        """Report once for each slot that its operators run later: the stages are not used in order, or an operator needs all
        micro-batches."""
        key = own, backward
        if after > own and key not in self._said:
            self._said.add(key)
            self.waits.append(f"{op.to_string()} has slot {own // 2} of the schedule, but its inputs are ready in slot {-(-after // 2)}")

    @staticmethod
    def _batched(ops: Iterable[Operator]) -> Iterator[Operator]:
        """The operators, with neighbouring transfers marked to start together; a transfer that sends what another one receives starts a new
        batch."""
        count = 0
        for moves, run in groupby(ops, key=lambda op: op.type == TRANSFER):
            brought: set[str] = set()
            for op in run:
                if moves:
                    if not brought or not brought.isdisjoint(op.input_arg_names):
                        count, brought = count + 1, set()
                    brought.update(op.output_arg_names)
                    op = op.replace(attrs={**op.attrs, "batch": f"crossing{count}"})
                yield op
