"""Operators that run sub-blocks: which blocks they run, which values a block returns, and how to copy them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import ProgramError
from .opdef import OPS
from .operator import BlockRef, Operator

if TYPE_CHECKING:
    from .program import Block, Program


class SubBlock(NamedTuple):
    """A sub-block that an operator runs: the attribute that names it, and the one that lists the values which it returns ("" for none)."""

    attr: str
    idx: int
    results_attr: str = ""

    def results(self, op: Operator) -> tuple[str, ...]:
        """The values that the block returns: its own, or those of enclosing blocks."""
        return op.attrs[self.results_attr] if self.results_attr else ()


def runs_bodies(op: Operator) -> bool:
    """Whether an operator runs sub-blocks."""
    definition = OPS.get(op.type)
    return bool(op.sub_blocks() if definition is None else definition.control.bodies)


def bodies(op: Operator) -> Iterator[SubBlock]:
    """The sub-blocks of an operator. The op's declaration gives the meaning of their attributes (`Control.bodies`)."""
    definition = OPS.get(op.type)
    declared: Mapping[str, str] = {} if definition is None else definition.control.bodies
    for name, value in op.attrs.items():
        if isinstance(value, BlockRef):
            yield SubBlock(name, value.idx, declared.get(name, ""))


def runners(program: Program) -> dict[int, Operator]:
    """The operator that runs each sub-block.

    Raises ProgramError unless the blocks are a tree: each lies in an earlier one, and at most one operator of that one runs it.
    """
    found: dict[int, Operator] = {}
    for block in program.blocks:
        if block.idx and not 0 <= block.parent_idx < block.idx:
            raise ProgramError(f"block {block.idx} must be in an earlier block, found block {block.parent_idx}")
        for op in block.oplist:
            for idx in op.sub_blocks():
                check_body(op, block, idx, found)
                found[idx] = op
    return found


def check_body(op: Operator, block: Block, idx: int, run: Mapping[int, Operator]) -> None:
    """Raise ProgramError unless `op`, in `block`, may run block `idx`; `run` are the blocks that have an operator already."""
    blocks = block.program.blocks
    if not 0 <= idx < len(blocks):
        raise ProgramError(f"op {op.type} runs block {idx}; {block.program.label()} has {len(blocks)} blocks")
    parent = blocks[idx].parent_idx
    if parent != block.idx:
        lies = f"lies in block {parent}" if idx else "is the program itself"
        raise ProgramError(
            f"op {op.type} in block {block.idx} runs block {idx}, which {lies}; an operator may only run blocks "
            "inside its own"
        )
    if idx in run:
        raise ProgramError(f"op {op.type} runs block {idx}, which op {run[idx].type} runs already; a block has one operator that runs it")


def copy_op(op: Operator, source: Program, target: Block, names: Mapping[str, str], suffix: str = "") -> Operator:
    """`op` with its variables renamed. The blocks that it runs in `source` are copied too, into new ones below `target`."""
    attrs: dict[str, Any] = {}
    for body in bodies(op):
        twin = target.program.create_block(target.idx)
        inner = copy_body(source.blocks[body.idx], twin, names, suffix)
        attrs[body.attr] = BlockRef(twin.idx)
        if body.results_attr:
            attrs[body.results_attr] = tuple(inner.get(n, n) for n in body.results(op))
    renamed = op.renamed(names, outputs=True)
    return renamed.replace(attrs={**op.attrs, **attrs}) if attrs else renamed


def copy_body(source: Block, target: Block, names: Mapping[str, str] | None = None, suffix: str = "") -> dict[str, str]:
    """Put copies of a block's variables and operators behind what `target` holds; return old name -> new name.

    The block's own variables, and those of the blocks below it, get `suffix` behind their names; `names` renames others.
    """
    names = {**(names or {}), **{n: n + suffix for n in source.descs}}
    for n, desc in source.descs.items():
        target.descs[names[n]] = desc.changed(name=names[n]) if suffix else desc
    target.oplist += [copy_op(op, source.program, target, names, suffix) for op in source.oplist]
    return names
