"""Decompose an operator that has a reduction inside, such as a normalization, so that the reduction can be placed by itself."""

from __future__ import annotations

from collections.abc import Container, Sequence

from ...ir.decomposition import decomposed, result_types
from ...ir.operator import Operator
from ...ir.program import Block
from ...ir.unique_name import unused
from ...ir.var import Var
from .choose_row import nominal_bytes


def written_out(block: Block, op: Operator) -> list[Operator] | None:
    """The operators that replace one operator, with their new values declared; None if it is not decomposed."""

    def fresh(name: str) -> str:
        found = unused(name, block.find)
        block.descs[found] = block.desc(op.output_arg_names[0]).changed(name=found)  # the type follows below
        return found

    parts = decomposed(op, fresh, lambda n: block.desc(n).type)
    old = set(op.output_arg_names)
    for part in parts or ():
        types = result_types(part, lambda n: block.desc(n).type)
        block.descs.update((n, Var(n, t, stop_gradient=True)) for n, t in types.items() if n not in old)
    return parts


def not_again(
    block: Block, op: Operator, parts: list[Operator], before: Sequence[Operator], there: Container[str | None]
) -> list[Operator]:
    """The parts of a recomputed operator, without the reductions whose small results are still `there` from the first time, so that their
    communication is not repeated. `before` are the parts of the first time. An operator that is computed for the first time keeps all
    parts."""
    if [(p.type, p.attrs) for p in before] != [(p.type, p.attrs) for p in parts]:
        return parts
    most = nominal_bytes(block.desc(op.output_arg_names[0]).type)
    left: list[Operator] = []
    names: dict[str, str] = {}
    for part, first in zip(parts, before, strict=True):
        made = part.output_arg_names
        few = all(nominal_bytes(block.desc(n).type) < most and n not in op.output_arg_names for n in made)
        if few and all(n in there for n in first.output_arg_names):
            names.update(zip(made, first.output_arg_names, strict=True))
            for n in made:
                del block.descs[n]
        else:
            left.append(part.renamed(names))
    return left
