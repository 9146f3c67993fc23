"""The two memories of a rank, device memory and host memory: which variables are where, and where operators run."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from .opdef import opdef
from .operator import Operator
from .pattern import Pattern

if TYPE_CHECKING:
    from .program import Block, Program


def on_host(program: Program) -> frozenset[str]:
    """The variables of a program that are in host memory."""
    return frozenset([n for block in program.blocks for n, d in block.descs.items() if d.on_host])


def runs_on_host(op: Operator, hosted: Container[str]) -> bool:
    """Does an operator run on the host? It does if its results are in host memory; copies between the memories run on the device.

    `hosted` are the names of the variables in host memory.
    """
    if opdef(op.type).storage.copies_to:
        return False
    return any(n in hosted for n in op.output_arg_names or op.input_arg_names)


def elements_read(op: Operator, block: Block) -> dict[str, None]:
    """The operands whose elements an operator reads, in order; not those of which it reads the shape only, nor what its blocks read."""
    definition = opdef(op.type)
    if definition.control.bodies:
        return {}
    # patterns describe tensors; of a sequence, optional or map everything is read
    shape_only = () if definition.control.beyond_tensors and definition.pattern is None else pattern_in(op, block).shape_only
    return {n: None for k, n in enumerate(definition.flat_slots(op.inputs, definition.in_slots)) if n is not None and k not in shape_only}


def pattern_in(op: Operator, block: Block) -> Pattern:
    """The access pattern of an operator, by the types that its block declares."""
    definition = opdef(op.type)
    sides = definition.flat_slots(op.inputs, definition.in_slots), definition.flat_slots(op.outputs, definition.out_slots)
    ins, outs = ([None if n is None else block.desc(n).type for n in names] for names in sides)
    return definition.pattern_of(ins, outs, op.attrs)
