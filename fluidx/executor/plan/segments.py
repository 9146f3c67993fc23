"""Segments of a program, with one plan each. A program is cut at operators whose result sizes depend on values, and at operators on values
that only the host has (sequences, maps, strings)."""

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
    """`planned`: operators that are one plan (None if there are none). `host`: the operator behind them, which runs without a plan (None at
    the end). `keeps`: the values that later segments need."""

    planned: Outline | None
    host: Operator | None
    keeps: frozenset[str]


def segments(outline: Outline, apart: Operator | None = None) -> tuple[Segment, ...]:
    """The segments of an outline in order; () if it is one plan. `apart`: one more operator that must stand between plans."""
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
    """Raise ProgramError if an outline is not one plan."""
    for segment in outline.fact(segments):
        if (op := segment.host) is not None and (why := Cuts(outline.program.global_block(), [op]).why(op)) is not None:
            raise ProgramError(
                f"op {op.type} {why.does}, so {outline.program.label()} is no single plan; "
                f"Executor.run plans it segment by segment{where(op)}"
            )


def _segments(outline: Outline, runs: Sequence[tuple[list[Operator], Operator | None]]) -> Iterator[Segment]:
    """Make the segments. Inputs: values of earlier segments. Outputs: values that later ones read. State stays in the scope."""
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
        if host is None:  # the last segment: state has its final values, so it can be fetched
            fetch += [n for n in dict.fromkeys(outline.fetch) if not carried(n)]
        reads = dict.fromkeys(n for op in ops for n in _needs(program, op))
        planned = Outline(program, ops, tuple([n for n in reads if n in given]), tuple(fetch)) if ops or fetch else None
        yield Segment(planned, host, keeps)
        given.update(n for n in (*writes, *(flow.writes(program, host) if host is not None else ())) if carried(n))


def _needs(program: Program, op: Operator) -> tuple[str, ...]:
    """The values that an operator reads, and those that its sub-blocks may leave unchanged."""
    reads, writes = flow.touches(program, op)
    return reads if reads is op.input_arg_names else (*reads, *writes)
