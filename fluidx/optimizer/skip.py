"""Steps that are skipped as a whole: updates leave what they write as it was, where a variable says so."""

from __future__ import annotations

from .._checks import wrong
from ..ir import Block, Builder, Role, Variable, flow
from ..ir.operator import rename_slots
from ..ir.unique_name import unused


def skip_updates(block: Block, start: int, skip: Variable, optimizer: str) -> None:
    """Make the operators of `block` from `start` on leave every persistable variable as it is where `skip`, a bool of one element, is
    true. `optimizer` is the class that wrote them.

    Each of them writes its result aside, and a `where` chooses between old and new: so a strategy may update a parameter in parts, at a
    root or anywhere else, and what decides is one number that all ranks have.
    """
    tail = block.oplist[start:]
    del block.oplist[start:]
    b = Builder(block, role=Role.OPTIMIZE)
    for op in tail:
        inside = [n for k in op.sub_blocks() for n in flow.sub_writes(block.program, block.program.block(k))]
        if inside:
            raise wrong(
                f"a step cannot be skipped: {op.type} writes {inside[0]!r} in a block; let the optimizer that asks for it be the outer "
                f"one: {optimizer}(decorate(...))"
            )
        aside = {n: _declare_aside(block, n) for n in op.output_arg_names if block.desc(n).persistable}
        block.oplist.append(op.replace(outputs=rename_slots(op.outputs, aside)))
        b.site, b.device = op.site, op.device
        for n, tried in aside.items():
            b.where(skip, block.var(n), block.var(tried), out={"Out": n})


def _declare_aside(block: Block, name: str) -> str:
    found = unused(f"{name}.tried", block.find)
    block.declare(block.desc(name).changed(name=found, persistable=False, is_parameter=False, stop_gradient=True, attrs={}))
    return found
