"""Texts of errors in a run: they name the operator and the user's line that wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ..comm.base import CommError
from ..ir.errors import ExecutionError, FluidxError
from ..ir.operator import Operator
from ..ir.program import Program
from ..ir.types import TensorType


def explain(op: Operator | None, error: Exception) -> NoReturn:
    """Raise `error` as an ExecutionError that names the operator and the user's line."""
    if op is None or (isinstance(error, ExecutionError) and error.operator is not None):
        raise error
    text = describe_error(error)
    what = text if isinstance(error, ExecutionError) and text.startswith(f"op {op.type}") else f"op {op.type} failed: {text}"
    explained = ExecutionError(f"{what}{where(op)}")
    explained.operator = op
    raise explained from error


def no_memory(program: Program, types: Mapping[str, Any]) -> ExecutionError:
    """The error for a run that does not fit into memory. It names the largest of the values, and the operator that computes it."""
    sized = {n: t for n, t in types.items() if t.__class__ is TensorType}
    name = max(sized, key=lambda n: sized[n].nbytes)
    op = next((op for b in program.blocks for op in b.oplist if name in op.output_arg_names), None)
    size = f"{sized[name]}, {sized[name].nbytes / 2**30:,.1f} GiB"
    whose = f"no memory for the run: {name!r}" if op is None else f"op {op.type}: no memory for the run: its result {name!r}"
    error = ExecutionError(f"{whose} is the largest value, {size}{where(op)}")
    error.operator = op
    return error


def describe_error(error: BaseException) -> str:
    """The text of an error; the name of its type comes first if the error is not fluidx's own."""
    if isinstance(error, (FluidxError, CommError)):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def where(op: Operator | None) -> str:
    """Lines that show an operator and the user's line; "" for None."""
    return "" if op is None else f"\n  in {op.to_string()}{site(op)}"


def site(op: Operator) -> str:
    """A line with the user's line that wrote the operator; "" if it is unknown."""
    return f"\n  written at {op.site}" if op.site else ""
