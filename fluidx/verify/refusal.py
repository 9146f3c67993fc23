"""How the proof says no: `Refused` inside of it, and the VerifyError that points into the program."""

from __future__ import annotations

from ..ir.errors import VerifyError
from ..ir.program import Program
from ..ir.text import excerpt


class Refusal(Exception):
    """Something does not hold; the message says what. Whoever walks over operators adds where."""


class NotHere(Refusal):
    """A value is read where it is not: on another rank than its root, or where only some branch defines it."""


class NotYet(Refusal):
    """A value of another rank is spoken of, which that rank has not been seen to make."""


def fail(program: Program, index: int, message: str, hint: str = "", block: int = 0, rank: int | None = None) -> VerifyError:
    """A VerifyError that points at operator `index` of a block."""
    who = f"rank {rank}: " if rank is not None else ""
    ops = program.blocks[block].oplist
    if not 0 <= index < len(ops):
        return VerifyError(f"{who}{message}\n  in {program.label()}" + (f"\n  {hint}" if hint else ""))
    site = f"\n  written at {ops[index].site}" if ops[index].site else ""
    return VerifyError(f"{who}{message}\n{excerpt(program, index, block=block)}{site}" + (f"\n  {hint}" if hint else ""))
