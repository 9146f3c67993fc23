"""ExpandFused: operators that mix a reduction with what follows from it become their parts."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.opdef import opdef
from ...ir.operator import Operator, op_types
from ...ir.program import Block, Program, ProgramPair, Var
from ..pass_ import Job, Pass


@dataclass(frozen=True)
class ExpandFused(Pass):
    """Write the operators out whose declaration has an `expand`: a training batch_norm becomes two reductions over the whole batch, between
    which the ranks can talk, and what is computed from them."""

    ensures = ("expanded",)

    def run(self, pair: ProgramPair, job: Job) -> ProgramPair:
        if job.mesh.world_size == 1 or not any(opdef(t).expand for b in pair.main.blocks for t in op_types(b.oplist)):
            return pair
        main = pair.main.copy()
        for block in main.blocks:
            block.oplist = [made for op in block.oplist for made in expanded(main, block, op)]
        return ProgramPair(main, pair.startup)


def expanded(program: Program, block: Block, op: Operator) -> list[Operator]:
    """The operators that stand for one, whose new values are declared; the one itself when nothing is to be written out."""
    definition = opdef(op.type)
    if definition.expand is None:
        return [op]

    def fresh(name: str) -> str:
        k, found = 0, name
        while block.find(found) is not None:
            k += 1
            found = f"{name}{k}"
        block.descs[found] = block.desc(op.output_arg_names[0]).changed(name=found)  # the type follows below
        return found

    parts = definition.expand(op, fresh)
    if parts is None:
        return [op]
    old = set(op.output_arg_names)
    for part in parts:
        made = opdef(part.type)
        types = made.infer_outputs({s: [block.desc(n).type for n in names] for s, names in part.inputs.items()}, part.attrs)
        for slot, t in zip(made.out_slots, types, strict=True):
            for n in part.outputs.get(slot.name, ()):
                if n not in old:
                    block.descs[n] = Var(n, t, stop_gradient=True)
    return parts
