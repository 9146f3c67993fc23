"""Programs as SVG drawings: operators as boxes in layers from top to bottom, communication in colour, one column for each rank.

No drawing program is needed. Layers come from the longest path over the data dependences; within a layer boxes are ordered by the
barycentre of their neighbours and placed by isotonic regression, so that lines stay short and boxes never overlap. Columns of
several ranks share their layers: the boxes of one collective stand on one line and are joined across the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from ..ir.errors import ProgramError
from ..ir.flow import reads, writes
from ..ir.operator import Operator, Role
from ..ir.parts import coords_of, holds
from ..ir.program import Program, ProgramPair
from ..ir.records import Var
from ..ir.text import type_text, var_name, word
from ..ir.types import Pieces
from .diff import ProgramDiff, communicates, show_bytes

_COMM, _DATA, _PARAM, _STATE = "communication", "data", "parameter", "state"
# kind -> (fill, outline)
COLOURS = {
    Role.FORWARD.value: ("#e6f0fb", "#5d8fc4"),
    Role.LOSS.value: ("#fdebec", "#cb6f74"),
    Role.BACKWARD.value: ("#efeafb", "#8873c2"),
    Role.LR_SCHED.value: ("#f1f2e4", "#9a9c63"),
    Role.OPTIMIZE.value: ("#e4f5e9", "#58a26c"),
    Role.DIST.value: ("#eceff2", "#7d8894"),
    _COMM: ("#ffdfb8", "#d9791a"),
    _DATA: ("#ffffff", "#5d8fc4"),
    _PARAM: ("#fffbe3", "#c4a530"),
    _STATE: ("#ffffff", "#9aa3ad"),
}
_HIGHLIGHT = "#d81b60"
_BOX, _PILL, _ROW, _GAP, _PAD = 38, 24, 72, 22, 22  # heights of boxes, the distance of layers, gaps between boxes, padding of panels
_WIDEST = 272


def draw(
    program: Program | ProgramPair | Sequence[Program | ProgramPair],
    highlight: Iterable[int | str | Operator] | ProgramDiff | None = None,
    max_ops: int = 200,
) -> str:
    """An SVG drawing of a program or of a pair (startup above main); of a list of rank programs, one column for each rank.

    `highlight` outlines operators: indices in the main program, operator types, names of outputs, operators, or what a diff added.
    A program of more than `max_ops` operators is shortened: runs of computing operators become one box, such as
    "12 forward operators".
    """
    programs = [program] if isinstance(program, (Program, ProgramPair)) else list(program)
    return _svg([_column_group(programs, _selector(highlight), max_ops)])


def draw_before_after(
    before: Program | ProgramPair, afters: Sequence[Program | ProgramPair], highlight: Any = None, max_ops: int = 200
) -> str:
    """An SVG drawing of the program for one device beside the programs that its ranks run."""
    select = _selector(highlight)
    return _svg([_column_group([before], select, max_ops, "before: one device"), _column_group(list(afters), select, max_ops)])


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


# -- nodes ----------------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Node:
    title: str = ""
    sub: str = ""
    kind: str = ""
    pill: bool = False
    hint: str = ""  # shown when the pointer rests on the box
    reads: dict[str, None] = field(default_factory=dict)
    writes: dict[str, None] = field(default_factory=dict)
    ops: list[Operator] = field(default_factory=list)
    marked: bool = False
    sync: Any = None  # equal for the boxes of one collective on all ranks
    after: Any = None  # the `sync` of the send that this recv waits for
    above: list[_Node] = field(default_factory=list)  # drawn edges
    held: list[_Node] = field(default_factory=list)  # further nodes that must stand higher
    layer: int = 0
    width: float = 0.0
    x: float = 0.0  # centre
    y: float = 0.0  # top

    @property
    def height(self) -> float:
        return _PILL if self.pill else _BOX

    def measure(self) -> None:
        self.title, self.sub = _clip(self.title, 32), _clip(self.sub, 38)
        wide = len(self.title) * (6.6 if self.pill else 8.1)
        self.width = min(_WIDEST, max(46.0, max(wide, len(self.sub) * 6.05) + 20))


def _clip(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return text[: limit // 2] + "…" + text[len(text) - (limit - limit // 2 - 1) :]


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _nodes(program: Program, select: Callable[[Operator, int], bool], max_ops: int) -> list[_Node]:
    """The boxes of a program in order, with what they read and write."""
    block = program.blocks[0]
    nodes: list[_Node] = []
    calls: Counter = Counter()
    for k, op in enumerate(block.oplist):
        ins, outs = dict.fromkeys(reads(program, op)), dict.fromkeys(writes(program, op))
        moves = communicates(op)
        node = _Node(word(op.type), "", _COMM if moves else op.role.value, ops=[op], marked=select(op, k))
        node.reads, node.writes = ins, outs
        if moves:
            _synchronise(node, op, program, calls)
        node.sub = _subtitle(op, block.find, moves)
        node.hint = f"{op.type}: {', '.join(map(var_name, ins))} → {', '.join(map(var_name, outs))}"
        nodes.append(node)
    if len(nodes) > max_ops:
        nodes = list(_shortened(nodes, lambda a, b: a.kind == b.kind != _COMM and a.marked == b.marked))
    if len(nodes) > max_ops:  # communication between every two operators: keep the order, give up the single boxes
        per_box = -(-len(nodes) // max(1, max_ops))
        nodes = [_merged(nodes[i : i + per_box]) for i in range(0, len(nodes), per_box)]
    return nodes


def _subtitle(op: Operator, find: Callable[[str], Var | None], moves: bool) -> str:
    names = op.output_arg_names or (op.input_arg_names if moves else ())
    if not names:
        return str(op.attrs.get("group", "")) if moves else ""
    text = var_name(names[0])
    d = find(names[0])
    if moves:
        records = [r for n in names if (r := find(n)) is not None]
        text += f" +{len(names) - 1}" if len(names) > 1 else ""
        return " · ".join(
            [text] + [show_bytes(sum(r.type.nbytes for r in records))] * bool(records) + [str(op.attrs["group"])] * ("group" in op.attrs)
        )
    if len(names) > 1:
        return f"{text} +{len(names) - 1}"
    return _typed(d, 38) if d is not None else text


def _typed(d: Var, room: int) -> str:
    """Name and type of a value, and its placement where there is room for it."""
    text = f"{var_name(d.name)} {type_text(d.type.dtype, d.type.shape)}"
    entries = ("pieces" if isinstance(e, Pieces) else str(e).partition(" over ")[0] for e in d.placement)
    long = " ".join([text, *(f"{short} {e.group}".rstrip() for short, e in zip(entries, d.placement, strict=True))])
    return long if len(long) <= room else text


def _synchronise(node: _Node, op: Operator, program: Program, calls: Counter) -> None:
    rank, group = program.rank, str(op.attrs.get("group", ""))
    peer = op.attrs.get("peer")
    if op.type in ("send", "recv") and isinstance(peer, int):
        if rank is None:
            return
        way = (rank, peer) if op.type == "send" else (peer, rank)
        calls[op.type, way] += 1
        end = ("send", way, calls[op.type, way])
        node.sync, node.after = (end, None) if op.type == "send" else (("recv", *end[1:]), end)
        return
    members: tuple[int, ...] = ()
    if rank is not None and group in program.groups:
        members = next((s for s in program.groups[group] if rank in s), ())
    calls[op.type, group] += 1
    node.sync = (op.type, group, members, calls[op.type, group])


def _shortened(nodes: Sequence[_Node], alike: Callable[[_Node, _Node], bool]) -> Iterator[_Node]:
    run: list[_Node] = []
    for n in nodes:
        if run and not alike(run[-1], n):
            yield _merged(run)
            run = []
        run.append(n)
    if run:
        yield _merged(run)


def _merged(run: Sequence[_Node]) -> _Node:
    """One box for several in a row."""
    if len(run) == 1:
        return run[0]
    node = _Node(ops=[op for n in run for op in n.ops], marked=any(n.marked for n in run))
    kinds = Counter(n.kind for n in run for _ in n.ops)
    types = Counter(op.type for op in node.ops).most_common()
    node.kind = kinds.most_common(1)[0][0]
    node.title = _count(len(node.ops), f"{node.kind} operator" if len(kinds) == 1 else "operator")
    listed = [f"{n} {word(t)}" for t, n in types]
    fits = next((k for k in range(len(listed), 1, -1) if len(", ".join(listed[:k])) <= 36), 1)
    node.sub = ", ".join(listed[:fits]) + (" …" if len(listed) > fits else "")
    node.hint = ", ".join(f"{n} {t}" for t, n in types)
    for n in run:
        node.reads.update({r: None for r in n.reads if r not in node.writes})
        node.writes.update(n.writes)
    return node


def _link(nodes: list[_Node], program: Program) -> list[_Node]:
    """Fill in who stands above whom, and add pills for values that come from outside. The result is in drawing order."""
    find = program.blocks[0].find
    here = {} if program.rank is None else coords_of(program.groups, program.rank)
    writer: dict[str, _Node] = {}
    readers: dict[str, list[_Node]] = {}
    opened: dict[str, _Node] = {}  # nccl_init by group
    pills: dict[tuple[str, str], _Node] = {}
    out: list[_Node] = []
    for node in nodes:
        outside: dict[str, list[str]] = {}
        for n in node.reads:
            if n in writer:
                if writer[n] not in node.above:
                    node.above.append(writer[n])
            else:
                d = find(n)
                if d is not None and not holds(d.placement, here):
                    continue  # another rank brings it
                kind = _STATE if d is None else _DATA if d.is_data else _PARAM if d.is_parameter else _STATE
                outside.setdefault(kind, []).append(n)
            readers.setdefault(n, []).append(node)
        for kind, names in outside.items():
            bundles = [names] if len(names) > 3 else [[n] for n in names]
            for bundle in bundles:
                section = node.ops[0].role.value  # a pill near each section that reads: no line from end to end
                key = (section, "\0".join(bundle))
                if key not in pills:
                    known = [d for n in bundle if (d := find(n)) is not None]
                    title = f"{_count(len(bundle), {_STATE: 'value', _DATA: 'input'}.get(kind, kind))}" if len(bundle) > 1 else ""
                    if not title:
                        title = _typed(known[0], 32) if known else var_name(bundle[0])
                    elif known:
                        title += f", {show_bytes(sum(d.type.nbytes for d in known))}"
                    pills[key] = _Node(title, "", kind, pill=True, hint=", ".join(map(var_name, bundle)))
                    out.append(pills[key])
                node.above.append(pills[key])
        for n in node.writes:
            node.held += [r for r in readers.pop(n, ()) if r is not node]
            if n in writer and writer[n] is not node:
                node.held.append(writer[n])
            writer[n] = node
        op = node.ops[0]
        if node.kind == _COMM and len(node.ops) == 1:
            group = str(op.attrs.get("group", ""))
            if op.type == "nccl_init":
                opened[group] = node
            elif group in opened:
                node.held.append(opened[group])
                if not node.above or all(a.pill for a in node.above):
                    node.above.append(opened[group])
        out.append(node)
    for node in out:
        node.measure()
    return out


# -- layers ---------------------------------------------------------------------------------------------------------------------------


def _assign_layers(ranks: Sequence[list[_Node]]) -> None:
    """Longest path from the top; the boxes of one collective get one layer on all ranks, a recv stands under its send."""
    total = sum(map(len, ranks))
    if not _settle(ranks, total, synchronised=True):
        _settle(ranks, total, synchronised=False)  # ranks that disagree on an order cannot be lined up, only shown
    for nodes in ranks:
        below: dict[_Node, list[_Node]] = {}
        for n in nodes:
            for a in n.above:
                below.setdefault(a, []).append(n)
        for n in reversed(nodes):  # what depends on nothing stands just above its first use
            if n.pill or (not n.above and not n.held and n.sync is None):
                if n in below:
                    n.layer = max(n.layer, min(b.layer for b in below[n]) - 1) if not n.pill else min(b.layer for b in below[n]) - 1
    lowest = min((n.layer for nodes in ranks for n in nodes), default=0)
    for nodes in ranks:
        for n in nodes:
            n.layer -= lowest


def _settle(ranks: Sequence[list[_Node]], total: int, synchronised: bool) -> bool:
    for nodes in ranks:
        for n in nodes:
            n.layer = 0
    bound: dict[Any, int] = {}
    while True:
        moved = False
        for nodes in ranks:
            for n in nodes:
                if n.pill:
                    continue
                layer = max((a.layer + 1 for a in (*n.above, *n.held) if not a.pill), default=0)
                if synchronised and n.sync is not None:
                    layer = max(layer, bound.get(n.sync, 0), bound.get(n.after, -1) + 1)
                    if layer > bound.get(n.sync, -1):
                        bound[n.sync] = layer
                        moved = True
                n.layer = layer
        if not moved:
            return True
        if max(bound.values()) > total:
            return False


@dataclass(eq=False)
class _Point:
    """A place in a layer: of a node, or of a line that passes through."""

    layer: int
    node: _Node | None = None
    up: list[_Point] = field(default_factory=list)
    down: list[_Point] = field(default_factory=list)
    x: float = 0.0

    @property
    def width(self) -> float:
        return self.node.width + _GAP if self.node is not None else 14.0


def _place(nodes: list[_Node]) -> tuple[float, list[list[_Point]]]:
    """Set `x` of all nodes; returns the width of the drawing and the lines as lists of points from top to bottom."""
    points = {n: _Point(n.layer, n) for n in nodes}
    layers: list[list[_Point]] = [[] for _ in range(1 + max((n.layer for n in nodes), default=0))]
    for n in nodes:
        layers[n.layer].append(points[n])
    below: dict[_Node, list[_Node]] = {}
    for n in nodes:
        for a in n.above:
            below.setdefault(a, []).append(n)
    lines: list[list[_Point]] = []
    for a, users in below.items():
        trunk = [points[a]]  # lines from one node share their way down
        for n in sorted(users, key=lambda u: u.layer):
            while trunk[-1].layer < n.layer - 1:
                p = _Point(trunk[-1].layer + 1, None, [trunk[-1]])
                trunk[-1].down.append(p)
                layers[p.layer].append(p)
                trunk.append(p)
            start = trunk[n.layer - 1 - a.layer]
            start.down.append(points[n])
            points[n].up.append(start)
            lines.append([*trunk[: n.layer - a.layer], points[n]])
    for layer in layers:
        _spread(layer, [float(k) for k in range(len(layer))])
    for sweep in range(12):
        forwards = sweep % 2 == 0
        for layer in layers if forwards else layers[::-1]:
            wanted = {p: _mean(p.up if forwards else p.down, p.x) for p in layer}
            if sweep < 8:
                layer.sort(key=lambda p: wanted[p])
            _spread(layer, [wanted[p] for p in layer])
    for sweep in range(24):  # both ways, with the order fixed: lines straighten
        for layer in layers if sweep % 2 else layers[::-1]:
            _spread(layer, [_mean(_along(p), p.x) for p in layer])
    left = min((p.x - p.width / 2 for layer in layers for p in layer), default=0.0)
    right = max((p.x + p.width / 2 for layer in layers for p in layer), default=0.0)
    for layer in layers:
        for p in layer:
            p.x -= left
            if p.node is not None:
                p.node.x = p.x
    return right - left, lines


def _along(p: _Point) -> list[_Point]:
    """The neighbours that a point lines up with: for one of a long line the rest of that line."""
    beside = p.up + p.down
    return [q for q in beside if q.node is None] or beside if p.node is None else beside


def _mean(points: list[_Point], otherwise: float) -> float:
    return sum(p.x for p in points) / len(points) if points else otherwise


def _spread(layer: list[_Point], wanted: list[float]) -> None:
    """Positions nearest to the wanted ones that keep the order and the widths (pool adjacent violators)."""
    offsets, at = [], 0.0
    for k, p in enumerate(layer):
        at += (layer[k - 1].width + p.width) / 2 if k else 0.0
        offsets.append(at)
    pools: list[tuple[float, float, int]] = []  # (weighted sum, weight, count)
    for p, want, offset in zip(layer, wanted, offsets):
        weight = 1.0 if p.node is not None else 4.0  # a line that passes through should go straight on; a box gives way
        total, count = weight * (want - offset), 1
        while pools and pools[-1][0] / pools[-1][1] > total / weight:
            before = pools.pop()
            total, weight, count = before[0] + total, before[1] + weight, before[2] + count
        pools.append((total, weight, count))
    k = 0
    for total, weight, count in pools:
        for _ in range(count):
            layer[k].x = total / weight + offsets[k]
            k += 1


# -- panels ---------------------------------------------------------------------------------------------------------------------------


@dataclass
class _Part:
    """One program of a column."""

    title: str
    nodes: list[_Node]
    lines: list[list[_Point]]
    width: float
    top: float = 0.0
    height: float = 0.0


@dataclass
class _Column:
    title: str
    parts: list[_Part]
    width: float = 0.0
    left: float = 0.0


def _column_group(
    programs: list[Program | ProgramPair], select: Callable[[Operator, int], bool], max_ops: int, title: str = ""
) -> list[_Column]:
    """Columns that share their layers."""
    if not programs:
        raise ProgramError("there is nothing to draw: the list of programs is empty")
    pairs = [isinstance(p, ProgramPair) for p in programs]
    if any(pairs) and not all(pairs):
        raise ProgramError("draw takes programs or pairs, not a mixture; give the main programs of the pairs")
    mains = [p.main if isinstance(p, ProgramPair) else p for p in programs]
    columns = [_Column(title or _title(m), []) for m in mains]
    if all(pairs):
        _add_parts(columns, "startup", [p.startup for p in programs if isinstance(p, ProgramPair)], lambda op, k: select(op, -1), max_ops)
        _add_parts(columns, "main", mains, select, max_ops)
    else:
        _add_parts(columns, "", mains, select, max_ops)
    return columns


def _title(program: Program) -> str:
    return program.name if program.rank is None else f"rank {program.rank}"


def _add_parts(columns: list[_Column], title: str, programs: list[Program], select: Callable[[Operator, int], bool], max_ops: int) -> None:
    ranks = [_link(_nodes(p, select, max_ops), p) for p in programs]
    _assign_layers(ranks)
    depth = max((n.layer for nodes in ranks for n in nodes), default=-1) + 1
    top = max((sum(p.height for p in c.parts) for c in columns), default=0.0)
    for column, nodes in zip(columns, ranks):
        width, lines = _place(nodes)
        part = _Part(title, nodes, lines, width, top, (26 if title else 8) + depth * _ROW)
        for n in nodes:
            n.y = (26 if title else 8) + n.layer * _ROW + (_BOX - n.height) / 2 + 6
        column.parts.append(part)


# -- SVG --------------------------------------------------------------------------------------------------------------------------------

_STYLE = """
text { font-family: "DejaVu Sans", "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2730; }
.t { font-size: 12px; font-weight: 600; text-anchor: middle; }
.s { font-size: 10px; text-anchor: middle; fill: #4d5863; font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; }
.p { font-size: 10.5px; text-anchor: middle; font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; }
.h { font-size: 14px; font-weight: 600; }
.k { font-size: 11px; fill: #66717c; }
.e { fill: none; stroke: #98a4b0; stroke-width: 1.2; }
.far { stroke: #c6ced6; }
.c { fill: none; stroke: #d9791a; stroke-width: 1.6; stroke-dasharray: 5 4; }
""".strip()


def _xml(text: str) -> str:
    """Text for SVG; XML has no place for control characters, not even escaped."""
    return escape("".join(c if c.isprintable() else "\ufffd" for c in text))


def _num(x: float) -> str:
    return f"{x:.1f}".rstrip("0").rstrip(".")


def _svg(groups: list[list[_Column]]) -> str:
    margin, between, arrow, head = 24.0, 26.0, 84.0, 34.0
    x = margin
    for g, columns in enumerate(groups):
        x += arrow if g else 0.0
        for k, c in enumerate(columns):
            x += between if k else 0.0
            c.width = max([p.width for p in c.parts] + [len(c.title) * 8.6]) + 2 * _PAD
            c.left = x
            x += c.width
    every = [c for columns in groups for c in columns]
    tall = max(sum(p.height for p in c.parts) for c in every) + head + 10
    back: list[str] = []
    links: list[str] = []
    body: list[str] = []
    for columns in groups:
        _panels(columns, margin, tall, head, back, body)
        _links(columns, margin + head, links)
    for columns in groups[1:]:
        y = margin + tall / 2
        left = columns[0].left - arrow + 16
        back.append(f'<path d="M{_num(left)} {_num(y)} h{_num(arrow - 44)}" stroke="#66717c" stroke-width="3" marker-end="url(#big)"/>')
        back.append(f'<text class="k" x="{_num(left + (arrow - 36) / 2)}" y="{_num(y - 12)}" text-anchor="middle">transpile</text>')
    legend, needed = _legend(every, margin, margin + tall + 28)
    width, height = max(x, needed) + margin, margin + tall + 52
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_num(width)}" height="{_num(height)}" '
            f'viewBox="0 0 {_num(width)} {_num(height)}" role="img">',
            f"<title>{_xml(', '.join(c.title for c in every[:8]))}</title>",
            f"<style>{_STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7.2" refY="4" markerWidth="6.5" markerHeight="6.5" orient="auto">'
            '<path d="M0 0.8 L8 4 L0 7.2 z" fill="#8a96a3"/></marker>'
            '<marker id="big" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="4.5" markerHeight="4.5" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z" fill="#66717c"/></marker></defs>',
            f'<rect width="{_num(width)}" height="{_num(height)}" fill="#f6f8fa"/>',
            *back,
            *links,
            *body,
            *legend,
            "</svg>",
            "",
        ]
    )


def _panels(columns: list[_Column], top: float, tall: float, head: float, back: list[str], body: list[str]) -> None:
    for c in columns:
        place = f'x="{_num(c.left)}" y="{_num(top)}" width="{_num(c.width)}" height="{_num(tall)}"'
        back.append(f'<rect {place} rx="10" fill="#ffffff" stroke="#d5dbe1"/>')
        back.append(f'<text class="h" x="{_num(c.left + c.width / 2)}" y="{_num(top + 23)}" text-anchor="middle">{_xml(c.title)}</text>')
        for part in c.parts:
            y0 = top + head + part.top
            x0 = c.left + (c.width - part.width) / 2
            if part.title:
                back.append(
                    f'<path d="M{_num(c.left + 12)} {_num(y0)} H{_num(c.left + c.width - 12)}" stroke="#e3e8ed"/>'
                    f'<text class="k" x="{_num(c.left + 14)}" y="{_num(y0 + 16)}">{part.title}</text>'
                )
            for n in part.nodes:
                n.x, n.y = n.x + x0, n.y + y0
            body += [_line(points, part, x0) for points in part.lines]
            body += [_box(n) for n in part.nodes]


def _line(points: list[_Point], part: _Part, x0: float) -> str:
    first, last = points[0].node, points[-1].node
    if first is None or last is None:
        return ""
    x, y = first.x, first.y + first.height
    base = first.y - (_BOX - first.height) / 2
    path = [f"M{_num(x)} {_num(y)}"]
    for p in points[1:]:
        px = p.node.x if p.node is not None else p.x + x0
        py = p.node.y - 1 if p.node is not None else base + (p.layer - points[0].layer) * _ROW - (_ROW - _BOX) / 2 + 2
        bend = (py - y) / 2
        path.append(f"C{_num(x)} {_num(y + bend)} {_num(px)} {_num(py - bend)} {_num(px)} {_num(py)}")
        x, y = px, py
        if p.node is None:
            y = py + _BOX + 6
            path.append(f"V{_num(y)}")
    far = " far" if len(points) > 3 else ""
    return f'<path class="e{far}" d="{" ".join(path)}" marker-end="url(#tip)"/>'


def _box(n: _Node) -> str:
    fill, outline = COLOURS[n.kind]
    stroke = f'stroke="{_HIGHLIGHT}" stroke-width="2.6"' if n.marked else f'stroke="{outline}" stroke-width="1.2"'
    left, centre = _num(n.x - n.width / 2), _num(n.x)
    parts = [f"<g><title>{_xml(n.hint)}</title>"]
    parts.append(
        f'<rect x="{left}" y="{_num(n.y)}" width="{_num(n.width)}" height="{_num(n.height)}" '
        f'rx="{12 if n.pill else 4}" fill="{fill}" {stroke}/>'
    )
    if n.pill:
        parts.append(f'<text class="p" x="{centre}" y="{_num(n.y + 16)}">{_xml(n.title)}</text>')
    elif n.sub:
        parts.append(f'<text class="t" x="{centre}" y="{_num(n.y + 16)}">{_xml(n.title)}</text>')
        parts.append(f'<text class="s" x="{centre}" y="{_num(n.y + 30)}">{_xml(n.sub)}</text>')
    else:
        parts.append(f'<text class="t" x="{centre}" y="{_num(n.y + 23)}">{_xml(n.title)}</text>')
    return "".join([*parts, "</g>"])


def _links(columns: list[_Column], top: float, out: list[str]) -> None:
    """Dashed lines between the boxes of one collective, and from a send to its recv. They lie behind the boxes."""
    if len(columns) < 2:
        return
    boxes: dict[Any, list[_Node]] = {}
    for c in columns:
        for part in c.parts:
            for n in part.nodes:
                if n.sync is not None and len(n.ops) == 1:
                    boxes.setdefault((part.title, n.sync), []).append(n)
    for c in columns:
        for part in c.parts:
            for n in part.nodes:
                for sender in boxes.get((part.title, n.after), ()) if n.after is not None else ():
                    right = sender.x < n.x
                    x1 = sender.x + sender.width / 2 * (1 if right else -1)
                    x2 = n.x - n.width / 2 * (1 if right else -1)
                    y1, y2, mid = sender.y + _BOX / 2, n.y + _BOX / 2, (x1 + x2) / 2
                    out.append(
                        f'<path class="c" d="M{_num(x1)} {_num(y1)} C{_num(mid)} {_num(y1)} {_num(mid)} {_num(y2)} {_num(x2)} {_num(y2)}" '
                        'marker-end="url(#tip)"/>'
                    )
    lanes: Counter = Counter()  # each collective has a lane of its own under its row
    for members in boxes.values():
        if len(members) < 2:
            continue
        low = max(n.y + n.height for n in members)
        lane = low + 5 + 4 * (lanes[low] % 4)
        lanes[low] += 1
        drops = [(n.x + n.width / 2 - 10 - 4 * ((lanes[low] - 1) % 4), n.y + n.height) for n in members]
        path = f"M{_num(drops[0][0])} {_num(drops[0][1])} V{_num(lane)} H{_num(drops[-1][0])} V{_num(drops[-1][1])}"
        path += "".join(f" M{_num(x)} {_num(y)} V{_num(lane)}" for x, y in drops[1:-1])
        out.append(f'<path class="c" d="{path}"/>')


def _legend(columns: list[_Column], x: float, y: float) -> tuple[list[str], float]:
    nodes = [n for c in columns for part in c.parts for n in part.nodes]
    used = {n.kind for n in nodes}
    out: list[str] = []
    entries = [(k, *COLOURS[k], 4 if k in _ROLES or k == _COMM else 7) for k in COLOURS if k in used]
    if any(n.marked for n in nodes):
        entries.append(("highlighted", "#ffffff", _HIGHLIGHT, 4))
    for label, fill, outline, radius in entries:
        out.append(
            f'<rect x="{_num(x)}" y="{_num(y - 11)}" width="22" height="14" rx="{radius}" fill="{fill}" stroke="{outline}"/>'
            f'<text class="k" x="{_num(x + 28)}" y="{_num(y)}">{label}</text>'
        )
        x += 28 + len(label) * 6.8 + 20
    return out, x


_ROLES = frozenset(r.value for r in Role)
