"""What becomes of one parameter in a step: its value, its gradient, communication, update."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.flow import touches
from ...ir.operator import Operator, Role
from ...ir.program import Program
from ..diff import communicates

VALUE, GRADIENT, COMMUNICATION, UPDATE = "value", "gradient", "communication", "update"
STAGES = (VALUE, GRADIENT, COMMUNICATION, UPDATE)


class ParameterLives:
    """The lives of the parameters of a program."""

    def __init__(self, program: Program):
        self.block = program.blocks[0]
        self.ops: Sequence[Operator] = self.block.oplist
        self.touched = [touches(program, op) for op in self.ops]
        self.carries = [communicates(op) or op.role is Role.DIST for op in self.ops]
        self.readers: dict[str, list[int]] = {}
        self.writers: dict[str, list[int]] = {}
        for k, (reads, writes) in enumerate(self.touched):
            for n in dict.fromkeys(reads):
                self.readers.setdefault(n, []).append(k)
            for n in dict.fromkeys(writes):
                self.writers.setdefault(n, []).append(k)

        self.made_for: dict[str, list[str]] = {}  # of a parameter: names of gradients and states that operators write
        for n in self.writers:
            d = self.block.find(n)
            owner = d.attrs.get("state_of") if d is not None and "state_of" in d.attrs else n.partition("@GRAD")[0]
            if owner and owner != n:
                self.made_for.setdefault(owner, []).append(n)

    def of(self, parameter: str) -> dict[str, list[int]]:
        """Indices of operators by stage. Those that carry are listed as communication: gathers of the value, sums of the gradient."""
        stages: dict[str, set[int]] = {stage: set() for stage in STAGES}
        seen: set[str] = set()
        for n in [parameter, *self.made_for.get(parameter, ())]:
            self._back(n, parameter, stages, seen)
        self._forth(parameter, parameter, stages)
        stages[VALUE] -= stages[GRADIENT]  # some gradients are told the parameter's shape
        return {stage: sorted(stages[stage]) for stage in STAGES if stages[stage]}

    def _back(self, name: str, parameter: str, stages: dict[str, set[int]], seen: set[str]) -> None:
        """What made a value: over updates and over what carries, back to the operators that make the gradient."""
        if name in seen:
            return
        seen.add(name)
        for k in self.writers.get(name, ()):
            op = self.ops[k]
            if op.role in (Role.OPTIMIZE, Role.LR_SCHED) and not self.carries[k]:
                stages[UPDATE].add(k)
            elif self.carries[k]:
                stages[COMMUNICATION].add(k)
            else:
                stages[GRADIENT].add(k)
                continue
            reads = [n for n in self.touched[k][0] if not self._rests(n)]
            for n in [n for n in reads if _of(n, parameter)] or self._passed(op, name, reads):
                self._back(n, parameter, stages, seen)

    def _passed(self, op: Operator, name: str, reads: list[str]) -> list[str]:
        """What a value may come from: of operands in a row, the one at its place."""
        outs = op.output_arg_names
        return [reads[outs.index(name)]] if len(outs) == len(reads) > 1 and name in outs else reads

    def _rests(self, name: str) -> bool:
        d = self.block.find(name)
        return d is not None and (d.persistable or d.is_data)

    def _forth(self, name: str, parameter: str, stages: dict[str, set[int]]) -> None:
        """Who reads the value, also behind what gathers it."""
        for k in self.readers.get(name, ()):
            op = self.ops[k]
            if op.role is Role.OPTIMIZE and not self.carries[k]:
                stages[UPDATE].update([k] if k in self.writers.get(parameter, ()) else [])
            elif not self.carries[k]:
                stages[VALUE].add(k)
            elif k not in stages[COMMUNICATION]:
                stages[COMMUNICATION].add(k)
                writes = self.touched[k][1]
                for n in [n for n in writes if _of(n, parameter)] or list(writes):
                    self._forth(n, parameter, stages)


def _of(name: str, parameter: str) -> bool:
    """Whether a value is the parameter, or was made of it or of its gradient, by the rule of names."""
    return name == parameter or name.startswith((f"{parameter}.", f"{parameter}@GRAD"))
