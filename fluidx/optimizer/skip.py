"""Skipping of whole steps: if a variable is true, updates leave their outputs unchanged."""

from __future__ import annotations

from .._checks import wrong
from ..ir import Block, Builder, Role, Variable, flow
from ..ir.operator import rename_slots
from ..ir.unique_name import unused


def skip_updates(block: Block, start: int, skip: Variable, optimizer: str) -> None:
    """Change the operators of `block` from `start` on so that they leave all state variables unchanged if `skip`, a bool of one element, is
    true. `optimizer` is the class that wrote them.

    Each operator writes its result to a temporary variable, and a `where` selects the old or the new value. So a strategy may update a
    parameter in parts, at a root or elsewhere, and all ranks decide by one number.
    """
    tail = block.oplist[start:]
    del block.oplist[start:]
    b = Builder(block, role=Role.OPTIMIZE)
    for op in tail:
        inside = [n for k in op.sub_blocks() for n in flow.sub_writes(block.program, block.program.block(k))]
        if inside:
            raise wrong(
                f"a step cannot be skipped: {op.type} writes {inside[0]!r} in a sub-block; make the optimizer that skips steps the outer "
                f"one: {optimizer}(decorate(...))"
            )
        tried_names = {n: _declare_tried(block, n) for n in op.output_arg_names if block.desc(n).persistable}
        block.oplist.append(op.replace(outputs=rename_slots(op.outputs, tried_names)))
        b.site, b.device = op.site, op.device
        for n, tried in tried_names.items():
            b.where(skip, block.var(n), block.var(tried), out={"Out": n})


def _declare_tried(block: Block, name: str) -> str:
    found = unused(f"{name}.tried", block.find)
    block.declare(block.desc(name).changed(name=found, persistable=False, is_parameter=False, stop_gradient=True, attrs={}))
    return found
