"""Choose the final gradient: the 16-bit result of the backward pass, or its float32 copy."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Block, Operator, Parameter, Role, Variable, flow
from ..ir.dtypes import HALVES
from ..ir.opdef import opdef


def finish_in_16_bits(block: Block, params_grads: Sequence[tuple[Parameter, Variable]]) -> None:
    """If a gradient is a widened copy of a 16-bit value, make the 16-bit value the final gradient, and widen it in the optimizer's section.

    A strategy communicates the final gradient, so 16 bits travel, and 16 bits are kept until the update. A gradient is left as it is if
    another operator reads it, if it has float32 terms, or if it is finished elsewhere (merged over several runs).
    """
    ops = block.oplist
    writer = {n: k for k, op in enumerate(ops) for n in op.output_arg_names}
    read = {n for op in ops for n in flow.reads(block.program, op)}
    late: set[int] = set()
    for p, g in params_grads:
        at = writer.get(g.name)
        if at is None or g.name in read or ops[at].role_var != (p.name, g.name) or not _widens(block, ops[at]):
            continue
        (x,) = ops[at].input_arg_names
        if x in writer:
            made = ops[writer[x]]
            ops[writer[x]] = made.replace(role_var=(*made.role_var, p.name, x))
            late.add(at)
    moved = [ops[k].replace(role=Role.OPTIMIZE, role_var=()) for k in sorted(late)]
    block.oplist[:] = [op for k, op in enumerate(ops) if k not in late] + moved


def _widens(block: Block, op: Operator) -> bool:
    """Does an operator only convert 16-bit floats to a wider float dtype?"""
    types = [block.desc(n).type for n in (*op.input_arg_names, *op.output_arg_names)]
    return opdef(op.type).moves() and len(types) == 2 and types[0].dtype in HALVES and types[1].dtype not in HALVES and types[1].is_float
