"""Errors of the verifier: `Refusal` inside it, and the VerifyError that shows the place in the program."""

from __future__ import annotations

from ..ir.errors import VerifyError
from ..ir.program import Program
from ..ir.text import excerpt


class Refusal(Exception):
    """A check failed; the message says why. The code that runs over the operators adds the place."""


class NotHere(Refusal):
    """A value is read where it is not defined: on another rank than its root, or after branches of which only some define it."""


class NotYet(Refusal):
    """A value of another rank is needed, whose operators have not been run yet."""


def fail(program: Program, index: int, message: str, hint: str = "", block: int = 0, rank: int | None = None) -> VerifyError:
    """A VerifyError that points at operator `index` of a block."""
    who = f"rank {rank}: " if rank is not None else ""
    ops = program.blocks[block].oplist
    if not 0 <= index < len(ops):
        return VerifyError(f"{who}{message}\n  in {program.label()}" + (f"\n  {hint}" if hint else ""))
    site = f"\n  written at {ops[index].site}" if ops[index].site else ""
    return VerifyError(f"{who}{message}\n{excerpt(program, index, block=block)}{site}" + (f"\n  {hint}" if hint else ""))
