"""Errors of ranks that are processes: as plain data for a message, and rebuilt in the user's process."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ...comm import base
from ...ir import errors
from ...ir.errors import ExecutionError, FluidxError
from ...ir.operator import Operator
from ...ir.program import Program, ProgramPair
from ..error_text import describe_error, site, where
from .thread_workers import Outcome, root_cause


class ErrorRecord(dict[str, Any]):
    """An error as plain data: its type, text and rank, those of its cause, and the operator that failed."""

    @classmethod
    def of(cls, error: BaseException, running: Operator | None) -> ErrorRecord:
        op, first = getattr(error, "operator", None), root_cause(error)
        text = describe_error(error)
        if not isinstance(error, Exception):  # not caused by the operator, but it was the current one
            text, op = text + where(running), running
        shown = None if op is None else _shown(op)
        own, cause = ([type(e).__name__, str(e), getattr(e, "rank", None)] for e in (error, first))
        return cls(own=own, cause=cause, text=text, op=shown)


def _shown(op: Operator) -> list[Any]:
    return [op.type, list(op.output_arg_names), op.attrs.get("group")]


def shown(op: Operator) -> str:
    """An operator as text; `operator_of` finds it in another process's program."""
    return json.dumps(_shown(op))


def operator_of(program: Program, text: str) -> Operator | None:
    return _find(program, *json.loads(text)) if text else None


def rebuilt(fault: dict[str, Any], program: Program) -> Exception:
    """The error, with the user's line from `program`: program texts do not have it."""
    op = None if fault["op"] is None else _find(program, *fault["op"])
    own = _made(*fault["own"])
    if isinstance(own, base.CommError) or (isinstance(own, FluidxError) and not isinstance(own, ExecutionError)):
        return own
    told = ExecutionError(fault["text"] + ("" if op is None else site(op)))
    told.operator, told.__cause__ = op, _made(*fault["cause"])
    return told


def waiting_text(rank: int, pair: ProgramPair, said: str, outcomes: Mapping[int, Outcome], named: bool) -> str:
    """Text about a rank that did not report an operator itself: its current operator, as it `said`, and the operator in which another rank
    waited for it, unless that rank's error has `named` it already."""
    error = outcomes[rank].error if rank in outcomes else None
    op, text = getattr(error, "operator", None), ""
    if op is None:
        op = operator_of(pair.main, said) or operator_of(pair.startup, said)
        text = where(op)
    if named or (op is not None and op.attrs.get("group") is not None):
        return text
    for other, outcome in sorted(outcomes.items()):
        waits = getattr(outcome.error, "operator", None)
        if other != rank and waits is not None and isinstance(root_cause(outcome.error), base.CommError):  # type: ignore[arg-type]
            return f"{text}\n  rank {other} waited{where(waits)}"
    return text


def _made(kind: str, text: str, rank: int | None) -> Exception:
    for found in (*(getattr(module, kind, None) for module in (base, errors, builtins)), _declared(FluidxError, kind)):
        if isinstance(found, type) and issubclass(found, Exception):
            try:
                return found(text, rank) if issubclass(found, base.CommError) else found(text)
            except TypeError:  # its constructor takes other arguments
                break
    return RuntimeError(f"{kind}: {text}")


def _declared(kind: type[Exception], name: str) -> type[Exception] | None:
    """The subclass of `kind` with this name, from any module; None if there is none."""
    if kind.__name__ == name:
        return kind
    return next((found for sub in kind.__subclasses__() if (found := _declared(sub, name)) is not None), None)


def _find(program: Program, kind: str, outputs: list[str], group: str | None) -> Operator | None:
    """The operator of a program with this type, outputs and group."""
    for op in _operators(program):
        if op.type == kind and list(op.output_arg_names) == outputs and op.attrs.get("group") == group:
            return op
    return None


def _operators(program: Program) -> Iterator[Operator]:
    for block in program.blocks:
        yield from block.oplist
