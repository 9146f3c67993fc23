"""RaiseUpdates: each parameter is updated as soon as its gradient is finished, so that gradients are not kept until the end of a step."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import flow
from ..ir.operator import Operator, Role
from ..ir.pass_base import ONE_DEVICE, Job, Pass, named
from ..ir.program import Program

_RAISED = (Role.OPTIMIZE, Role.LR_SCHED)


@named
@dataclass(frozen=True, repr=False)
class RaiseUpdates(Pass):
    """Operators of the optimizer run as early as what they read allows, and behind the last reader of what they write.

    The memory of a gradient is free after its update: a step of large layers needs one gradient at a time, where it needed all of them.
    Results are equal bit by bit. Where an update needs all gradients, as with clipping by the global norm, nothing moves. Collectives of
    gradients are smaller and more, because a bucket ends at an update.

    >>> import fluidx as fx
    >>> main, startup = fx.Program("two"), fx.Program("two_startup")
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     h = fx.layers.fc(fx.layers.fc(fx.data("x", [-1, 8], "float32"), 8, bias_attr=False), 8, bias_attr=False)
    ...     _ = fx.optimizer.SGD(0.1).minimize(fx.layers.mean(h))
    >>> [op.type for op in main.ops][-5:]
    ['matmul', 'matmul', 'matmul', 'sgd', 'sgd']
    >>> [op.type for op in RaiseUpdates().run(main).ops][-5:]
    ['matmul', 'matmul', 'sgd', 'matmul', 'sgd']
    """

    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        made = program.copy()
        block = made.global_block()
        ends = _ends(made, block.oplist)
        block.oplist = [block.oplist[k] for k in sorted(range(len(ends)), key=ends.__getitem__)]
        return made


def _ends(program: Program, ops: list[Operator]) -> list[int]:
    """For each operator the number of the operator behind which it runs; its own number if it is not raised."""
    written: dict[str, int] = {}
    touched: dict[str, int] = {}
    ends = []
    for k, op in enumerate(ops):
        reads, writes = flow.touches(program, op)
        after = max((found.get(n, -1) for found, names in ((written, reads), (touched, writes)) for n in names), default=-1)
        end = after if op.role in _RAISED else max(k, after)
        ends.append(end)
        written.update(dict.fromkeys(writes, end))
        for n in (*reads, *writes):
            touched[n] = max(end, touched.get(n, -1))
    return ends
