"""Sub-blocks of a segmented run as separate programs: values from outside the block are feeds, its results are fetches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ...ir import flow
from ...ir.opdef import opdef
from ...ir.operator import Operator
from ...ir.program import Block, Program
from ...ir.sub_blocks import SubBlock, runs_bodies
from ...ops.renamed_copies import copy_renamed
from ...rewrite.live import live_ops
from ..plan.selection import Outline


class BodyProgram(NamedTuple):
    """The program of a sub-block. `gives` maps a name outside the block to the name in this program, for each result."""

    outline: Outline
    gives: Mapping[str, str]


def body_program(program: Program, op: Operator, body: SubBlock) -> BodyProgram:
    """The program of a sub-block that `op` runs.

    Every written value gets a new name, so that a value that changes its size between iterations is two values. State that the block only
    reads stays state.
    """
    source, made = program.blocks[body.idx], Program(program.name)
    made.groups, made.turns = program.groups, program.turns
    block = made.global_block()
    writes = flow.sub_writes(program, source)
    ops = [flow.listed(program, o) if runs_bodies(o) else o for o in source.oplist]
    read = [n for n in flow.needs(program, ops) if n not in source.descs]
    given = [n for n in read if n in writes or not source.desc(n).persistable]
    for n in read:
        d = source.desc(n)
        if n in given:  # only a data variable of the program has a batch axis
            d = d.changed(persistable=False, is_parameter=False, is_data=True, attrs={} if d.is_data else {"resized": True})
        block.descs[n] = d
    now = copy_renamed(source.oplist, source, block, {}, "@round", set(_kept_in_place(program, source)))
    results = [n for n in body.results(op) if n in source.descs]
    gives = {n: now.get(n, n) for n in dict.fromkeys([*writes, *results])}
    fetch = tuple(gives.values())
    return BodyProgram(Outline(made, live_ops(made, given, fetch), tuple(given), fetch), gives)


def _kept_in_place(program: Program, block: Block) -> Iterator[str]:
    """The values that operators of a block, and of its sub-blocks, update in place under one name."""
    for op in block.oplist:
        if opdef(op.type).storage.same_variable:
            yield from op.output_arg_names
        for idx in op.sub_blocks():
            yield from _kept_in_place(program, program.blocks[idx])
