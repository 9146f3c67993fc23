"""Prefetch: gather the parameters of the next unit while the current unit computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...ir import flow
from ...ir.opdef import Effect, opdef
from ...ir.operator import Operator, Role
from ...ir.pass_base import Job, Pass
from ...ir.program import Program


@dataclass
class _GatherRun:
    """Neighbouring operators, from number `start` on, that gather stored values for use in one section."""

    start: int
    ops: list[Operator] = field(default_factory=list)
    made: set[str] = field(default_factory=set)
    section: Role = Role.DIST  # the role of the operator that follows

    def sends(self) -> list[Operator]:
        """The communication operators and the operators that they need. Operators that use the results are not moved, since they wait for
        them."""
        needed: set[str] = set()
        found = []
        for op in reversed(self.ops):
            if opdef(op.type).effect in (Effect.COLLECTIVE, Effect.P2P) or not needed.isdisjoint(op.output_arg_names):
                needed.update(op.input_arg_names)
                found.append(op)
        return found[::-1]


@dataclass(frozen=True)
class Prefetch(Pass):
    """Move the gathers of each unit before the first reader of the unit that is `ahead` units earlier, within forward and within backward.
    Neighbouring gathers belong to one unit. At most `ahead` + 1 units are gathered at once. A gather is moved only if no operator has
    written its inputs before; all other operators keep their order.
    Source: the prefetch of PyTorch's FSDP.
    """

    ahead: int = 1
    requires = ("lowered",)

    def rewrite(self, program: Program, job: Job) -> Program:
        new = program.copy()
        block = new.global_block()
        begins: dict[int, list[Operator]] = {}  # the operators that are moved before an operator, by its number
        sections: dict[Role, list[_GatherRun]] = {}
        moved: set[int] = set()
        for r in _runs(new):
            together = sections.setdefault(r.section, [])
            together.append(r)
            sends = r.sends()
            begins.setdefault(together[max(0, len(together) - 1 - self.ahead)].start, []).extend(sends)
            moved.update(map(id, sends))
        out: list[Operator] = []
        for k, op in enumerate(block.oplist):
            out += begins.get(k, ())
            if id(op) not in moved:
                out.append(op)
        block.oplist = out
        return new


def _runs(main: Program) -> list[_GatherRun]:
    """The runs of block 0 that read stored values which the program has not written yet, in order. Values that are still gathered when
    backward begins count as one run without operators, before their first reader there."""
    block = main.global_block()
    resting = {n for n, d in block.descs.items() if d.persistable}
    found: list[_GatherRun] = []
    run: _GatherRun | None = None
    for k, op in enumerate(block.oplist):
        reads, writes = flow.touches(main, op)
        made = () if run is None else run.made
        if op.role is Role.DIST and reads and all(n in resting or n in made for n in reads) and resting.isdisjoint(writes):
            if run is None:
                found.append(run := _GatherRun(k))
            run.ops.append(op)
            run.made.update(writes)
            continue
        if run is not None and op.role is not Role.DIST:
            run.section = _SECTIONS.get(op.role, op.role)
        run = None
        resting.difference_update(writes)
    whole = {n for r in found if r.section is Role.FORWARD for n in r.made}
    for k, op in enumerate(block.oplist):
        if op.role is Role.BACKWARD and not whole.isdisjoint(op.input_arg_names):
            found.append(_GatherRun(k, section=Role.BACKWARD))
            break
    return sorted(found, key=lambda r: r.start)


_SECTIONS = {Role.LOSS: Role.FORWARD}
