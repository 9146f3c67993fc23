"""The memory of a rank, and what the system shows of it."""

from __future__ import annotations

from typing import NamedTuple

from ..executor.plan.cost import communicates
from ..executor.plan.records import Plan
from ..hardware.records import Hardware
from ..ir.opdef import Effect, opdef
from ..ops.comm.volume import share
from .rank_items import volume


class RankMemory(NamedTuple):
    """Bytes of a rank. `device`: state, feeds and arena of its plan. `host`: offloaded values. `threads`: what kernels keep for each
    thread. `read`: arrays of other ranks that it reads where ranks share memory; the system counts them for both. `context`: the process
    itself: its context and the buffers of its communicator, or the interpreter."""

    device: int
    host: int
    threads: int
    read: int
    context: int

    @property
    def system(self) -> int:
        """What the system shows for the rank: on a GPU what its device has allocated, on a CPU the resident size of its process."""
        return self.device + self.threads + self.read + self.context


def rank_memory(plan: Plan, hardware: Hardware) -> RankMemory:
    """The memory of a run of a plan on a machine."""
    on_cpu = hardware.device.kind == "cpu"
    host = plan.host_bytes
    return RankMemory(
        plan.peak_bytes + (host if on_cpu else 0),  # memory of a CPU is one
        0 if on_cpu else host,
        plan.thread_bytes if on_cpu else 0,
        _read_of_others(plan) if on_cpu else 0,
        round(hardware.device.context.value),
    )


def _read_of_others(plan: Plan) -> int:
    """The bytes of other ranks' arrays that a rank reads in shared memory: of each buffer once, as much as it would receive."""
    most: dict[int, float] = {}
    for step in plan.all_steps():
        if not communicates(step) or opdef(step.op.type).effect is Effect.P2P:
            continue
        for op in step.ops:
            n = len(plan.program.group_ranks(op.attrs["group"], plan.program.rank or 0))
            moved = volume(op, plan, n)
            operand = next((name for name in op.input_arg_names if name in plan.values), None)
            if moved.method and operand is not None and n > 1:
                buffer = plan.values[operand].buffer
                most[buffer] = max(most.get(buffer, 0.0), share(moved.method, n) * moved.nbytes)
    return round(sum(most.values()))
