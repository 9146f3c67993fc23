"""Copies of operators in which every value has its own name: they compute an iteration of a loop without writing outer variables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..ir import flow
from ..ir.errors import ProgramError
from ..ir.opdef import opdef
from ..ir.operator import BlockRef, Operator, unary
from ..ir.program import Block, Program
from ..ir.sub_blocks import bodies, copy_op, runs_bodies
from ..ir.unique_name import unused


def copy_renamed(
    ops: Iterable[Operator], source: Block, target: Block, names: Mapping[str, str], suffix: str, same: Collection[str] = ()
) -> dict[str, str]:
    """Append copies of operators of `source` to `target`; return the name of each variable's last value.

    `names` maps outer variables to the names that the copies read; `same` are variables that the copies write under the same name. A loop
    starts from copies of its loop-carried values; a branch returns the outer variables that it writes. Raises ProgramError for a branch
    that writes a variable which its operator does not name as an output.
    """
    copies = _Copies(source.program, target, suffix, same)
    now = dict(names)
    for op in ops:
        copies.add(op, source, target, now)
    return now


class _Copies:
    def __init__(self, program: Program, target: Block, suffix: str, same: Collection[str]):
        self.program, self.target, self.suffix, self.same = program, target, suffix, same
        self.taken: set[str] = set()  # names in the other branch too, which `find` does not see

    def add(self, op: Operator, source: Block, block: Block, now: dict[str, str]) -> None:
        if not runs_bodies(op):
            fresh = {n: n if n in self.same else self._fresh(n, source, block) for n in op.output_arg_names}
            outputs = {slot: tuple(fresh[n] for n in names) for slot, names in op.outputs.items()}
            block.oplist.append(op.renamed(now).replace(outputs=outputs))
            now.update(fresh)
        elif opdef(op.type).control.repeats:
            for n in flow.writes(self.program, op):
                if n in self.same:
                    continue
                fresh_name = self._fresh(n, source, block)
                block.oplist.append(unary("assign", now.get(n, n), fresh_name, site=op.site).replace(role=op.role))
                now[n] = fresh_name
            block.oplist.append(copy_op(op, self.program, block, now, f"{self.suffix}.{len(block.oplist)}"))
        else:
            self._branches(op, source, block, now)

    def _branches(self, op: Operator, source: Block, block: Block, now: dict[str, str]) -> None:
        outs = op.output_arg_names
        if undeclared := [n for n in flow.writes(self.program, op) if n not in outs]:
            raise ProgramError(f"op {op.type} writes {undeclared[0]!r} in a branch, but does not name it as an output")
        attrs: dict[str, Any] = dict(op.attrs)
        for body in bodies(op):
            branch = self.program.blocks[body.idx]
            twin = self.target.program.create_block(block.idx)
            inside = dict(now)
            for inner in branch.oplist:
                self.add(inner, branch, twin, inside)
            attrs[body.attr] = BlockRef(twin.idx)
            attrs[body.results_attr] = tuple(inside.get(n, n) for n in body.results(op))
        fresh = {n: n if n in self.same else self._fresh(n, source, block) for n in outs}
        outputs = {slot: tuple(fresh[n] for n in names) for slot, names in op.outputs.items()}
        block.oplist.append(op.renamed(now).replace(outputs=outputs, attrs=attrs))
        now.update(fresh)

    def _fresh(self, name: str, source: Block, block: Block) -> str:
        """Declare another variable like `name` in `block`."""
        found = unused(name + self.suffix, lambda n: n in self.taken or block.find(n), ".{}".format)
        self.taken.add(found)
        block.descs[found] = source.desc(name).changed(name=found, persistable=False, is_parameter=False, is_data=False, attrs={})
        return found
