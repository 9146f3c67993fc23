"""The operators of a step that belong to one parameter: readers of its value, its gradient, communication, update."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.flow import touches
from ...ir.operator import Operator, Role
from ...ir.program import Program
from ..diff import communicates

VALUE, GRADIENT, COMMUNICATION, UPDATE = "value", "gradient", "communication", "update"
STAGES = (VALUE, GRADIENT, COMMUNICATION, UPDATE)


class ParameterOperators:
    """Finds the operators of each parameter of a program."""

    def __init__(self, program: Program):
        self.block = program.blocks[0]
        self.ops: Sequence[Operator] = self.block.oplist
        self.touched = [touches(program, op) for op in self.ops]
        self.communicates = [communicates(op) or op.role is Role.DIST for op in self.ops]
        self.readers: dict[str, list[int]] = {}
        self.writers: dict[str, list[int]] = {}
        for k, (reads, writes) in enumerate(self.touched):
            for n in dict.fromkeys(reads):
                self.readers.setdefault(n, []).append(k)
            for n in dict.fromkeys(writes):
                self.writers.setdefault(n, []).append(k)

        self.written_for: dict[str, list[str]] = {}  # by parameter: its gradients and optimizer state that operators write
        for n in self.writers:
            d = self.block.find(n)
            owner = d.attrs.get("state_of") if d is not None and "state_of" in d.attrs else n.partition("@GRAD")[0]
            if owner and owner != n:
                self.written_for.setdefault(owner, []).append(n)

    def of(self, parameter: str) -> dict[str, list[int]]:
        """Indices of operators by stage. Gathers of the value and sums of the gradient are listed as communication."""
        stages: dict[str, set[int]] = {stage: set() for stage in STAGES}
        seen: set[str] = set()
        for n in [parameter, *self.written_for.get(parameter, ())]:
            self._add_makers(n, parameter, stages, seen)
        self._add_readers(parameter, parameter, stages)
        stages[VALUE] -= stages[GRADIENT]  # some gradient operators read the parameter for its shape
        return {stage: sorted(stages[stage]) for stage in STAGES if stages[stage]}

    def _add_makers(self, name: str, parameter: str, stages: dict[str, set[int]], seen: set[str]) -> None:
        """Add the operators that made a value: from updates back through communication to the operators that compute the gradient."""
        if name in seen:
            return
        seen.add(name)
        for k in self.writers.get(name, ()):
            op = self.ops[k]
            if op.role in (Role.OPTIMIZE, Role.LR_SCHED) and not self.communicates[k]:
                stages[UPDATE].add(k)
            elif self.communicates[k]:
                stages[COMMUNICATION].add(k)
            else:
                stages[GRADIENT].add(k)
                continue
            reads = [n for n in self.touched[k][0] if not self._is_stored(n)]
            for n in [n for n in reads if _of(n, parameter)] or self._sources(op, name, reads):
                self._add_makers(n, parameter, stages, seen)

    def _sources(self, op: Operator, name: str, reads: list[str]) -> list[str]:
        """The operands that a value may come from: the operand at its position if the operator has as many operands as results."""
        outs = op.output_arg_names
        return [reads[outs.index(name)]] if len(outs) == len(reads) > 1 and name in outs else reads

    def _is_stored(self, name: str) -> bool:
        d = self.block.find(name)
        return d is not None and (d.persistable or d.is_data)

    def _add_readers(self, name: str, parameter: str, stages: dict[str, set[int]]) -> None:
        """Add the operators that read the value, directly or after a gather."""
        for k in self.readers.get(name, ()):
            op = self.ops[k]
            if op.role is Role.OPTIMIZE and not self.communicates[k]:
                stages[UPDATE].update([k] if k in self.writers.get(parameter, ()) else [])
            elif not self.communicates[k]:
                stages[VALUE].add(k)
            elif k not in stages[COMMUNICATION]:
                stages[COMMUNICATION].add(k)
                writes = self.touched[k][1]
                for n in [n for n in writes if _of(n, parameter)] or list(writes):
                    self._add_readers(n, parameter, stages)


def _of(name: str, parameter: str) -> bool:
    """True if a name is the parameter, a copy of it, or its gradient, by the naming rule."""
    return name == parameter or name.startswith((f"{parameter}.", f"{parameter}@GRAD"))
