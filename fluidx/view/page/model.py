"""The data of a page, for JSON: operators, values, links, groups, the operators of each parameter, and ranks with equal programs."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...ir.errors import ProgramError
from ...ir.flow import touches
from ...ir.operator import Operator, Role
from ...ir.program import Block, Program, ProgramPair
from ...ir.source_location import Site
from ...ir.sub_blocks import bodies
from ...ir.text import show_block, show_entries, show_op, var_name
from ...ir.valuetypes import known_bytes
from ...ir.var import Var
from ..diff import communicates, show_bytes
from .groups import tree_of
from .operator_group import REPEAT, Item, OperatorGroup
from .parameter_operators import ParameterOperators

COMPARED = 64  # the most ranks that are compared
SHOWN = 8  # the most different rank programs on a page
COMMUNICATION, PACKING = "communication", "packing"
_LONGEST = 2000  # characters of an operator's text


class Transpiled(Protocol):
    """The methods of a transpiler that a page uses."""

    source: ProgramPair

    @property
    def world_size(self) -> int: ...

    def get_trainer_program(self, rank: int | None = None) -> Program: ...

    def get_startup_program(self, rank: int | None = None) -> Program: ...


@dataclass
class View:
    """A program on a page: for one device, or for ranks that run the same operators."""

    title: str
    program: Program | ProgramPair
    ranks: list[int] = field(default_factory=list)
    note: str = ""


def page_model(shown: Any) -> dict[str, Any]:
    """The data of a page about a program, a pair, a list of rank programs, or a transpiler."""
    views, note = views_of(shown)
    first = views[0].program
    main = first.main if isinstance(first, ProgramPair) else first
    return {"name": main.name, "note": note, "views": [_view(v) for v in views]}


def views_of(shown: Any) -> tuple[list[View], str]:
    """(the programs to show side by side, a note on what was left out): the program for one device, and each different rank program."""
    if isinstance(shown, (Program, ProgramPair)):
        main = shown.main if isinstance(shown, ProgramPair) else shown
        return [View(main.name if main.rank is None else f"rank {main.rank}", shown)], ""
    if hasattr(shown, "get_trainer_program"):
        t: Transpiled = shown
        world = t.world_size
        ranked = [ProgramPair(t.get_trainer_program(r), t.get_startup_program(r)) for r in range(min(world, COMPARED))]
        views, note = _kinds_of_ranks(ranked)
        more = f"; ranks {COMPARED} to {world - 1} were not compared" if world > COMPARED else ""
        return [View("before: one device", t.source), *views], (note + more).removeprefix("; ")
    programs = list(shown) if isinstance(shown, Iterable) else []
    if not programs or not all(isinstance(p, (Program, ProgramPair)) for p in programs):
        raise ProgramError(
            f"html takes a Program, a ProgramPair, a list of rank programs or a transpiler, not {type(shown).__name__}; "
            "after transpile(), give the transpiler itself"
        )
    views, note = _kinds_of_ranks(programs[:COMPARED])
    return views, note


def _kinds_of_ranks(programs: Sequence[Program | ProgramPair]) -> tuple[list[View], str]:
    kinds: dict[Any, list[int]] = {}
    for k, p in enumerate(programs):
        kinds.setdefault(_structure(p), []).append(k)
    views = []
    for members in list(kinds.values())[:SHOWN]:
        first = programs[members[0]]
        ranks = [_rank(programs[k], k) for k in members]
        beside = f" (rank{'s' * (len(ranks) > 2)} {_ranges(ranks[1:])} alike)" if len(ranks) > 1 else ""
        differ = sorted({a for k in members[1:] for a in _differing(first, programs[k])})
        note = f"alike up to {', '.join(differ)}" if differ else ""
        views.append(View(f"rank {ranks[0]}{beside}", first, ranks, note))
    out = [_rank(programs[k], k) for members in list(kinds.values())[SHOWN:] for k in members]
    return views, f"left out: rank{'s' * (len(out) > 1)} {_ranges(sorted(out))}, of other kinds" if out else ""


def _mains(p: Program | ProgramPair) -> list[Program]:
    return [p.main, p.startup] if isinstance(p, ProgramPair) else [p]


def _rank(p: Program | ProgramPair, otherwise: int) -> int:
    rank = _mains(p)[0].rank
    return otherwise if rank is None else rank


def _structure(p: Program | ProgramPair) -> tuple:
    """Equal for ranks that run the same operators on the same names. Values of attributes, such as a peer, may differ."""
    return tuple(
        (op.type, tuple(op.inputs.items()), tuple(op.outputs.items()), op.role) for b in _mains(p)[0].blocks for op in b.oplist
    )


def _differing(a: Program | ProgramPair, b: Program | ProgramPair) -> set[str]:
    """Names of the attributes that differ between two programs of one structure."""
    return {
        name
        for x, y in zip(_mains(a)[0].blocks, _mains(b)[0].blocks)
        for op, twin in zip(x.oplist, y.oplist)
        for name in op.attrs
        if op.attrs != twin.attrs and op.attrs[name] != twin.attrs.get(name)
    }


def _ranges(ranks: Sequence[int]) -> str:
    """
    >>> _ranges([1, 2, 3, 5])
    '1-3, 5'
    """
    runs: list[list[int]] = []
    for r in ranks:
        if runs and r == runs[-1][-1] + 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


# -- one program ------------------------------------------------------------------------------------------------------------------------


def _view(v: View) -> dict[str, Any]:
    parts = [("main", _mains(v.program)[0])]
    if isinstance(v.program, ProgramPair):
        parts.append(("startup", v.program.startup))
    return {"title": v.title, "ranks": v.ranks, "note": v.note, "parts": [program_model(p, title) for title, p in parts]}


def program_model(program: Program, title: str = "main") -> dict[str, Any]:
    """The operators of block 0, their values, links and groups, and the operators of each parameter.

    Values and source lines are indices into `vars` and `sites`. A link starts at the operator that wrote the value last.
    """
    block = program.blocks[0]
    tree = tree_of(program)
    names: dict[str, int] = {}
    sites: dict[Site, int] = {}
    ops, links = [], []
    writer: dict[str, int] = {}
    for k, op in enumerate(block.oplist):
        reads, writes = touches(program, op)
        ops.append(
            {
                "type": op.type,
                "kind": _kind(op),
                "section": tree.sections[k],
                "text": _text(op, block),
                "in": [names.setdefault(n, len(names)) for n in dict.fromkeys(reads)],
                "out": [names.setdefault(n, len(names)) for n in dict.fromkeys(writes)],
                **({"site": sites.setdefault(op.site, len(sites))} if op.site else {}),
                **({"bytes": size} if (size := _moved(op, block)) else {}),
                **({"body": _bodies(program, op)} if bodies(op) else {}),
            }
        )
        links += [[writer[n], k, names[n]] for n in dict.fromkeys(reads) if n in writer and writer[n] != k]
        writer.update(dict.fromkeys(writes, k))
    found = ParameterOperators(program)
    parameters = [n for n in names if (d := block.find(n)) is not None and d.is_parameter]
    return {
        "title": title,
        "summary": repr(program).strip("<>").removeprefix("Program "),
        "ops": ops,
        "vars": [_value(n, block.find(n)) for n in names],
        "sites": [[_file(s.filename), s.lineno, s.function, linecache.getline(s.filename, s.lineno).strip()] for s in sites],
        "links": links,
        "tree": [_node(i, block) for i in tree.children],
        "lives": {n: found.of(n) for n in parameters},
    }


def _file(name: str) -> str:
    """The name of a file, relative to the working directory if it is below it, because pages are passed on to others."""
    here = os.getcwd() + os.sep
    return name.removeprefix(here)


def _kind(op: Operator) -> str:
    if communicates(op):
        return COMMUNICATION
    return {Role.LR_SCHED: "optimize", Role.DIST: PACKING}.get(op.role, op.role.value)


def _text(op: Operator, block: Block) -> str:
    text = show_op(op, {n: d for n in op.output_arg_names if (d := block.find(n)) is not None})
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _bodies(program: Program, op: Operator) -> str:
    return "\n\n".join(show_block(program.blocks[ref.idx]) for ref in bodies(op))[: 4 * _LONGEST]


def _moved(op: Operator, block: Block) -> int:
    """Bytes that an operator sends or receives, as far as sizes are known."""
    if not communicates(op):
        return 0
    sides = op.input_arg_names, op.output_arg_names
    return max(sum(known_bytes(d.type) for n in side if (d := block.find(n)) is not None) for side in sides)


def _value(name: str, d: Var | None) -> dict[str, Any]:
    if d is None:
        return {"name": name, "shown": var_name(name), "kind": "value"}
    size = known_bytes(d.type)
    kind = (
        "data" if d.is_data else "parameter" if d.is_parameter else "gradient" if "@GRAD" in name else "state" if d.persistable else "value"
    )
    return {
        "name": name, "shown": var_name(name), "type": str(d.type), "kind": kind,
        **({"placement": show_entries(d.placement)} if d.placement else {}),
        **({"size": show_bytes(size)} if size else {}),
    }  # fmt: skip


def _node(item: Item, block: Block) -> Any:
    """A group with the texts of its box; an operator as its index."""
    if isinstance(item, int):
        return item
    node = {"title": item.title, "kind": item.kind, "children": [_node(c, block) for c in item.children]}
    return {**node, "alike": _alike(item, block)} if item.kind == REPEAT else node


def _alike(group: OperatorGroup, block: Block) -> str:
    """A sentence that says what the copies of a repeat have in common."""
    copies = [[block.oplist[k] for k in (c.ops() if isinstance(c, OperatorGroup) else [c])] for c in group.children]
    if _same([op.type for op in c] for c in copies):
        return "the copies are alike; sizes may differ"
    if _same(own for c in copies if (own := [op.type for op in c if _kind(op) not in (COMMUNICATION, PACKING)])):
        return "the copies compute alike; their communication differs"
    return "the copies have the same kinds of operators, not the same number"


def _same(copies: Iterable[list[str]]) -> bool:
    every = list(copies)
    return all(c == every[0] for c in every)
