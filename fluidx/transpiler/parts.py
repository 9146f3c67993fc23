"""Operators that mix a reduction with what follows from it, as the operators that they stand for."""

from __future__ import annotations

from ..ir.opdef import opdef
from ..ir.operator import Operator
from ..ir.program import Block, Var


def written_out(block: Block, op: Operator) -> list[Operator] | None:
    """The operators that stand for one, whose new values are declared; None when it stays in one piece."""
    definition = opdef(op.type)
    assert definition.expand is not None

    def fresh(name: str) -> str:
        k, found = 0, name
        while block.find(found) is not None:
            k += 1
            found = f"{name}{k}"
        block.descs[found] = block.desc(op.output_arg_names[0]).changed(name=found)  # the type follows below
        return found

    parts = definition.expand(op, fresh)
    old = set(op.output_arg_names)
    for part in parts or ():
        made = opdef(part.type)
        types = made.infer_outputs({s: [block.desc(n).type for n in names] for s, names in part.inputs.items()}, part.attrs)
        for slot, t in zip(made.out_slots, types, strict=True):
            for n in part.outputs.get(slot.name, ()):
                if n not in old:
                    block.descs[n] = Var(n, t, stop_gradient=True)
    return parts
