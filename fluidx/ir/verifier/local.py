"""Checks of one program by itself: known operators, definitions before uses, types as the rules infer them."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from ..errors import ProgramError, VerifyError
from ..opdef import opdef
from ..operator import Operator
from ..program import Block, Program


def fail(program: Program, index: int, message: str, hint: str = "", block: int = 0) -> VerifyError:
    """A VerifyError that points into the program."""
    from ..text import excerpt

    who = f"rank {program.rank}: " if program.rank is not None else ""
    op = program.blocks[block].oplist[index] if index < len(program.blocks[block].oplist) else None
    site = f"\n  written at {op.site}" if op is not None and op.site else ""
    shown = excerpt(program, index, block=block) if op is not None else f"  in {program.label()}"
    return VerifyError(f"{who}{message}\n{shown}{site}" + (f"\n  {hint}" if hint else ""))


def check_program(program: Program, known: Container[int] = (), dirty: Container[str] = ()) -> int:
    """Verify one program; return the number of operators checked.

    `known` holds ids of operators that were checked in a program that shares them; they are skipped unless they touch a `dirty` variable.
    """
    return _check_block(program, program.global_block(), known, dirty, set())


def _check_block(program: Program, block: Block, known: Container[int], dirty: Any, defined: set[str]) -> int:
    checked = 0
    for i, op in enumerate(block.oplist):
        reads = op.input_arg_names
        for n in reads:
            if n in defined:
                continue
            d = block.find(n)
            if d is None:
                raise fail(program, i, f"op {op.type} reads %{n}, which is not declared", block=block.idx)
            source = d.attrs.get("window_of") if d.attrs else None
            if source is not None and block.find(source) is None:
                raise fail(program, i, f"%{n} is a window of %{source}, which is not declared", block=block.idx)
            if not (d.is_data or d.persistable):
                raise fail(program, i, f"op {op.type} reads %{n} before any operator defines it", block=block.idx)
            defined.add(n)
        for b in op.sub_blocks():
            checked += _check_block(program, program.blocks[b], (), (), set(defined))
        defined.update(op.output_arg_names)
        if id(op) in known and not (dirty and any(n in dirty for n in (*reads, *op.output_arg_names))):
            continue
        _check_types(program, block, i, op)
        checked += 1
    return checked


def _check_types(program: Program, block: Block, i: int, op: Operator) -> None:
    try:
        definition = opdef(op.type)
        definition.check_slots(op)
        if op.sub_blocks():
            return
        types = {slot: [block.desc(n).type for n in names] for slot, names in op.inputs.items()}
        results = definition.infer_outputs(types, op.attrs)
    except ProgramError as e:
        text = str(e) if str(e).startswith(f"op {op.type}") else f"op {op.type}: {e}"
        raise fail(program, i, text, block=block.idx) from None
    except (KeyError, TypeError) as e:
        raise fail(program, i, f"op {op.type}: attributes do not fit: {e}", block=block.idx) from None
    for slot, result in zip(definition.out_slots, results, strict=True):
        for n, t in zip(op.outputs.get(slot.name, ()), result if slot.many else [result], strict=False):
            d = block.find(n)
            if d is None:
                raise fail(program, i, f"op {op.type} writes %{n}, which is not declared", block=block.idx)
            if not d.type.accepts(t):
                raise fail(program, i, f"op {op.type} makes {t}, but %{n} is declared {d.type}", block=block.idx)
