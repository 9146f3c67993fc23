"""Which of a rank's two memories an operator works in: all that it reads and writes lies in one, and copies alone cross."""

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
    """Raise VerifyError for an operator of the programs of all ranks, which declare these variables in block 0, that works on values of
    both memories."""
    inner = (d for p in programs for block in p.blocks[1:] for d in block.descs.values())
    if not any(d.on_host for d in chain(declared, inner)):
        return
    seen: set[int] = set()  # ranks share their operators
    for p in programs:
        for block in p.blocks:
            for k, op in enumerate(block.oplist):
                if id(op) not in seen:
                    seen.add(id(op))
                    if why := mixed(op, block):
                        raise fail(p, k, why, _HINT, block=block.idx)


def mixed(op: Operator, block: Block) -> str:
    """Why an operator may not work on the values that it names, by the memories in which they lie; "" where it may."""
    definition = opdef(op.type)
    if definition.bodies:
        return _left_apart(op, block)
    writes, to = op.output_arg_names, definition.copies_to
    if not to and not any(_hosted(block, n) for n in (*op.input_arg_names, *writes)):
        return ""
    reads = elements_read(op, block)
    if to:
        why, at_first, behind = f"copies to the {to}", to == "device", to == "host"
    elif definition.effect in COMMUNICATES:
        why, at_first, behind = "communicates, which the device does", False, False
    else:
        first = next(iter((*writes, *reads)))
        at_first = behind = _hosted(block, first)
        why = f"works in the memory of %{first}, which lies on the {_memory(behind)}"
    for names, wanted in ((reads, at_first), (writes, behind)):
        for n in names:
            if _hosted(block, n) is not wanted:
                return f"op {op.type} {why}, and %{n} lies on the {_memory(not wanted)}"
    return ""


def _left_apart(op: Operator, block: Block) -> str:
    """Why the results of an operator's blocks are not where its own are."""
    for body in bodies(op):
        inner = block.program.blocks[body.idx]
        for n, out in zip(body.results(op), op.output_arg_names, strict=False):
            lies, wanted = _hosted(inner, n), _hosted(block, out)
            if lies is not wanted:
                return f"op {op.type} leaves %{out} on the {_memory(wanted)}, and %{n} of block {body.idx} lies on the {_memory(lies)}"
    return ""


def _hosted(block: Block, name: str) -> bool:
    return (d := block.find(name)) is not None and d.on_host


def _memory(on_host: bool) -> str:
    return "host" if on_host else "device"
