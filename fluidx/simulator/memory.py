"""The memory of a rank, and what the system shows of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..executor.plan.cost import communicates
from ..executor.plan.records import Plan
from ..hardware.records import Hardware
from ..ir.opdef import Effect, opdef
from ..ir.operator import Operator
from ..ops.comm.volume import share
from .rank_items import volume

_COPIED = 64 << 10  # bytes up to which the sender copies a message


class RankMemory(NamedTuple):
    """Bytes of a rank. `device`: state, feeds and arena of its plan. `host`: offloaded values. `threads`: what kernels keep for each
    thread. `read`: arrays of other ranks that it reads or writes where ranks share memory; the system counts them for both. `context`: the
    process itself: its context and the buffers of its communicator, or the interpreter with what it has loaded."""

    device: int
    host: int
    threads: int
    read: int
    context: int

    @property
    def system(self) -> int:
        """What the system shows for the rank: on a GPU what its device has allocated, on a CPU the resident size of its process."""
        return self.device + self.threads + self.read + self.context


def rank_memory(plan: Plan, hardware: Hardware, more: int = 0) -> RankMemory:
    """The memory of a run of a plan on a machine. `more`: bytes that its device needs beside the plan."""
    on_cpu = hardware.device.kind == "cpu"
    host = plan.host_bytes
    return RankMemory(
        plan.peak_bytes + more + (host if on_cpu else 0),  # memory of a CPU is one
        0 if on_cpu else host,
        plan.thread_bytes if on_cpu else 0,
        _read_of_others(plan) if on_cpu else 0,
        round(hardware.device.context.value),
    )


class _Touched(NamedTuple):
    """A place in the memory of other ranks: in the arena, or in a variable. `whose` is their group, or one rank; there are `ranks` of them.
    Their arrays are taken to be where those of this rank are."""

    whose: str | int
    ranks: int
    variable: str  # "" for the arena
    start: int
    stop: int


def _read_of_others(plan: Plan) -> int:
    """The bytes of other ranks' arrays that a rank reads or writes in shared memory, each place counted once."""
    found = [t for step in plan.all_steps() if communicates(step) for op in step.ops for t in _touched(op, plan)]
    total, reached = 0, 0
    before: tuple = ()
    for t in sorted(found, key=lambda t: (str(t.whose), t.variable, t.start)):
        if (t.whose, t.variable) != before:
            before, reached = (t.whose, t.variable), 0
        total += t.ranks * max(0, t.stop - max(t.start, reached))
        reached = max(reached, t.stop)
    return total


def _touched(op: Operator, plan: Plan) -> Iterator[_Touched]:
    """What an operator reads and writes of other ranks' arrays. A receiver reads the array of the sender. A member of an all_reduce adds
    its part of all arrays, and writes it to all results."""
    if opdef(op.type).effect is Effect.P2P:
        for name in op.output_arg_names:
            if name in plan.values and plan.values[name].type.nbytes > _COPIED:
                yield _place(plan, name, op.attrs["peer"], 1, 0, plan.values[name].type.nbytes)
        return
    members = plan.program.group_ranks(op.attrs["group"], plan.program.rank or 0)
    n = len(members)
    moved = volume(op, plan, n)
    if not moved.method or n == 1:
        return
    ins, outs = ([name for name in names if name in plan.values] for names in (op.input_arg_names, op.output_arg_names))
    both = moved.method == "all_reduce"
    part = round(share("reduce" if both else moved.method, n) * moved.nbytes / (n - 1))  # of each other rank
    mine = 0 if moved.method == "spread" else members.index(plan.program.rank or 0)
    for name in (*ins[:1], *(outs[:1] if both else ())):
        yield _place(plan, name, op.attrs["group"], n - 1, mine * part, part)


def _place(plan: Plan, name: str, whose: str | int, ranks: int, offset: int, nbytes: int) -> _Touched:
    buffer, strided = plan.buffers[plan.values[name].buffer], plan.values[name].strided
    start = buffer.offset + offset + (0 if strided is None else strided.offset)
    return _Touched(whose, ranks, "" if buffer.kind == "arena" else buffer.name, start, start + nbytes)
