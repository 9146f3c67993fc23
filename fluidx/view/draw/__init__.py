"""SVG drawings of programs: operators are boxes in layers from top to bottom, communication is coloured, each rank has a column.

No drawing program is needed. The layer of a box is the longest path of data dependences above it. Within a layer, boxes are ordered by the
barycentre of their neighbours and placed by isotonic regression, so that lines are short and boxes never overlap. Columns of several
ranks share their layers: the boxes of one collective have one height and are joined across the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...ir.errors import ProgramError
from ...ir.operator import Operator
from ...ir.program import Program, ProgramPair
from ..diff import ProgramDiff
from .layout import assign_layers, place
from .nodes import BOX, link, nodes_of
from .svg import ROW, Column, Panel, svg

COLUMNS = 16  # the most programs in one drawing


def draw(
    program: Program | ProgramPair | Sequence[Program | ProgramPair],
    highlight: Iterable[int | str | Operator] | ProgramDiff | None = None,
    max_ops: int = 200,
) -> str:
    """An SVG drawing of a program or of a pair (startup above main); of a list of rank programs, one column for each rank.

    `highlight` outlines operators: indices in the main program, operator types, names of outputs, operators, or a diff for the operators
    that it added. A program of more than `max_ops` operators is shortened: consecutive computing operators become one box, such as
    "12 forward operators". At most 16 programs are drawn. The drawing says what it leaves out; the page that `html` makes has everything.
    """
    if not isinstance(program, (Program, ProgramPair, Iterable)):
        raise ProgramError(f"draw takes a Program, a ProgramPair, or a list of rank programs, got {type(program).__name__}: {program!r}")
    programs = [program] if isinstance(program, (Program, ProgramPair)) else list(program)
    shown, left_out = programs[:COLUMNS], len(programs) - COLUMNS
    return svg([_column_group(shown, _selector(highlight), max_ops)], _ranks_note(left_out))


def draw_before_after(
    before: Program | ProgramPair, afters: Sequence[Program | ProgramPair], highlight: Any = None, max_ops: int = 200
) -> str:
    """An SVG drawing of the program for one device, with the rank programs to its right."""
    select = _selector(highlight)
    shown, left_out = list(afters)[:COLUMNS], len(afters) - COLUMNS
    columns = [_column_group([before], select, max_ops, "before: one device"), _column_group(shown, select, max_ops)]
    return svg(columns, _ranks_note(left_out))


def _ranks_note(left_out: int) -> str:
    return f"{left_out} more rank{'s' * (left_out > 1)} not drawn" if left_out > 0 else ""


def _selector(highlight: Any) -> Callable[[Operator, int], bool]:
    if highlight is None:
        return lambda op, k: False
    wanted = list(highlight.added if isinstance(highlight, ProgramDiff) else highlight)
    plain = {w for w in wanted if isinstance(w, (int, str))}
    operators: dict[tuple, list[Operator]] = {}
    for w in wanted:
        if isinstance(w, Operator):
            operators.setdefault((w.type, w.output_arg_names), []).append(w)
        elif not isinstance(w, (int, str)):
            raise ProgramError(f"highlight takes operator indices, types, output names, operators or a diff, not {type(w).__name__}")

    def selected(op: Operator, k: int) -> bool:
        named = k in plain or op.type in plain or any(n in plain for n in op.output_arg_names)
        return named or op in operators.get((op.type, op.output_arg_names), ())

    return selected


def _column_group(
    programs: list[Program | ProgramPair], select: Callable[[Operator, int], bool], max_ops: int, title: str = ""
) -> list[Column]:
    """The columns of programs that share their layers."""
    if not programs:
        raise ProgramError("draw needs at least one program, got an empty list")
    pairs = [isinstance(p, ProgramPair) for p in programs]
    if any(pairs) and not all(pairs):
        raise ProgramError("draw takes programs or pairs, not a mixture; give the main programs of the pairs")
    mains = [p.main if isinstance(p, ProgramPair) else p for p in programs]
    columns = [Column(title or _title(m), []) for m in mains]
    if all(pairs):
        _add_parts(columns, "startup", [p.startup for p in programs if isinstance(p, ProgramPair)], lambda op, k: select(op, -1), max_ops)
        _add_parts(columns, "main", mains, select, max_ops)
    else:
        _add_parts(columns, "", mains, select, max_ops)
    return columns


def _title(program: Program) -> str:
    return program.name if program.rank is None else f"rank {program.rank}"


def _add_parts(columns: list[Column], title: str, programs: list[Program], select: Callable[[Operator, int], bool], max_ops: int) -> None:
    ranks = [link(nodes_of(p, select, max_ops), p) for p in programs]
    assign_layers(ranks)
    depth = max((n.layer for nodes in ranks for n in nodes), default=-1) + 1
    top = max((sum(p.height for p in c.parts) for c in columns), default=0.0)
    for column, nodes in zip(columns, ranks):
        width, lines = place(nodes)
        part = Panel(title, nodes, lines, width, top, (26 if title else 8) + depth * ROW)
        for n in nodes:
            n.y = (26 if title else 8) + n.layer * ROW + (BOX - n.height) / 2 + 6
        column.parts.append(part)
