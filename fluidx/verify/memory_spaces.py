"""Checks of memory spaces: an operator reads and writes values on the host or on the device, and only copies use both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from ..ir.memory_spaces import elements_read
from ..ir.opdef import opdef
from ..ir.operator import Operator
from ..ir.program import Block, Program
from ..ir.sub_blocks import bodies
from ..ir.var import Var
from .operator_check import COMMUNICATES
from .refusal import fail

_HINT = "memcpy_d2h copies a value to the host, memcpy_h2d to the device"


def check_memories(declared: Iterable[Var], programs: Sequence[Program]) -> None:
    """Raise VerifyError for an operator that works on values of both memories. `declared`: the variables of block 0 of all ranks."""
    inner = (d for p in programs for block in p.blocks[1:] for d in block.descs.values())
    if not any(d.on_host for d in chain(declared, inner)):
        return
    seen: set[int] = set()  # ranks share operators
    for p in programs:
        for block in p.blocks:
            for k, op in enumerate(block.oplist):
                if id(op) not in seen:
                    seen.add(id(op))
                    if why := mixed(op, block):
                        raise fail(p, k, why, _HINT, block=block.idx)


def mixed(op: Operator, block: Block) -> str:
    """Why the memories of an operator's values are wrong; "" if they are right."""
    definition = opdef(op.type)
    if definition.control.bodies:
        return _result_mismatch(op, block)
    writes, to = op.output_arg_names, definition.storage.copies_to
    if not to and not any(_on_host(block, n) for n in (*op.input_arg_names, *writes)):
        return ""
    reads = elements_read(op, block)
    if to:
        why, from_host, to_host = f"copies to the {to}", to == "device", to == "host"
    elif definition.effect in COMMUNICATES:
        why, from_host, to_host = "communicates, which needs values on the device", False, False
    else:
        first = next(iter((*writes, *reads)))
        from_host = to_host = _on_host(block, first)
        why = f"works in the memory of %{first}, which is on the {_memory(to_host)}"
    for names, wanted in ((reads, from_host), (writes, to_host)):
        for n in names:
            if _on_host(block, n) is not wanted:
                return f"op {op.type} {why}, and %{n} is on the {_memory(not wanted)}"
    return ""


def _result_mismatch(op: Operator, block: Block) -> str:
    """Why the results of an operator's blocks are in other memories than its outputs; "" if they are not."""
    for body in bodies(op):
        inner = block.program.blocks[body.idx]
        for n, out in zip(body.results(op), op.output_arg_names, strict=False):
            found, wanted = _on_host(inner, n), _on_host(block, out)
            if found is not wanted:
                where = f"%{n} of block {body.idx} is on the {_memory(found)}"
                return f"op {op.type} has the output %{out} on the {_memory(wanted)}, and {where}"
    return ""


def _on_host(block: Block, name: str) -> bool:
    return (d := block.find(name)) is not None and d.on_host


def _memory(on_host: bool) -> str:
    return "host" if on_host else "device"
