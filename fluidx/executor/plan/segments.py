"""The segments of a program, one plan each: it is cut at operators whose results have sizes that values decide, or that take or give values
which only the host has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...ir import flow
from ...ir.data_dependent_ops import Cuts
from ...ir.errors import ProgramError
from ...ir.operator import Operator
from ...ir.program import Program
from ...ir.valuetypes import on_host
from ..error_text import where
from .selection import Outline


class Segment(NamedTuple):
    """Operators that are one plan, None where there are none, and the one behind them that runs on values, None at the end. `keeps` are the
    values that something behind it needs."""

    planned: Outline | None
    host: Operator | None
    keeps: frozenset[str]


def segments(outline: Outline, apart: Operator | None = None) -> tuple[Segment, ...]:
    """The segments of an outline in their order; none where it is one plan. `apart`: one more operator to stand between plans."""
    program = outline.program
    cuts = Cuts(program.global_block(), outline.ops)
    runs: list[tuple[list[Operator], Operator | None]] = [([], None)]
    for op in outline.ops if cuts else ():
        if op is apart or cuts.why(op):
            runs[-1] = runs[-1][0], op
            runs.append(([], None))
        else:
            runs[-1][0].append(op)
    descs = program.global_block().descs
    if len(runs) == 1 and not any(n in descs and on_host(descs[n].type) for n in outline.fetch):
        return ()
    return tuple(_segments(outline, runs))


def check_whole(outline: Outline) -> None:
    """Raise ProgramError for an outline that is not one plan."""
    for segment in outline.fact(segments):
        if (op := segment.host) is not None and (why := Cuts(outline.program.global_block(), [op]).why(op)) is not None:
            raise ProgramError(
                f"op {op.type} {why.does}, so {outline.program.label()} is no single plan; "
                f"Executor.run plans it segment by segment{where(op)}"
            )


def _segments(outline: Outline, runs: Sequence[tuple[list[Operator], Operator | None]]) -> Iterator[Segment]:
    """Each segment fetches what those behind it need of it, and is fed what it needs of those before it. State lies in the scope."""
    program, given = outline.program, set(outline.given)
    descs = program.global_block().descs

    def carried(name: str) -> bool:
        return name in given or (d := descs.get(name)) is None or not d.persistable

    behind: list[tuple[set[str], frozenset[str]]] = []
    needed = set(outline.fetch)
    for ops, host in reversed(runs):
        keeps = frozenset(needed)
        if host is not None:
            needed.update(_needs(program, host))
        behind.append((set(needed), keeps))
        needed.update(n for op in ops for n in _needs(program, op))
    for (ops, host), (wanted, keeps) in zip(runs, reversed(behind), strict=True):
        writes = dict.fromkeys(n for op in ops for n in flow.writes(program, op))
        fetch = [n for n in writes if n in wanted and carried(n)]
        if host is None:  # the end, where state has the values that are fetched
            fetch += [n for n in dict.fromkeys(outline.fetch) if not carried(n)]
        reads = dict.fromkeys(n for op in ops for n in _needs(program, op))
        planned = Outline(program, ops, tuple([n for n in reads if n in given]), tuple(fetch)) if ops or fetch else None
        yield Segment(planned, host, keeps)
        given.update(n for n in (*writes, *(flow.writes(program, host) if host is not None else ())) if carried(n))


def _needs(program: Program, op: Operator) -> tuple[str, ...]:
    """What an operator reads, and what its bodies may leave as it was."""
    reads, writes = flow.touches(program, op)
    return reads if reads is op.input_arg_names else (*reads, *writes)
