"""SVG text of columns of boxes whose positions are set."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from typing import Any

from ...ir.operator import Role
from .layout import Point
from .nodes import BOX, COMM, DATA, PARAM, STATE, DrawnNode

ROW = 72  # from layer to layer
_PAD = 22  # padding of panels
# kind -> (fill, outline)
COLOURS = {
    Role.FORWARD.value: ("#e6f0fb", "#5d8fc4"),
    Role.LOSS.value: ("#fdebec", "#cb6f74"),
    Role.BACKWARD.value: ("#efeafb", "#8873c2"),
    Role.LR_SCHED.value: ("#f1f2e4", "#9a9c63"),
    Role.OPTIMIZE.value: ("#e4f5e9", "#58a26c"),
    Role.DIST.value: ("#eceff2", "#7d8894"),
    COMM: ("#ffdfb8", "#d9791a"),
    DATA: ("#ffffff", "#5d8fc4"),
    PARAM: ("#fffbe3", "#c4a530"),
    STATE: ("#ffffff", "#9aa3ad"),
}
MORE = "; fluidx show FILE --html PAGE, or fx.view.html, shows every operator"
_HIGHLIGHT = "#d81b60"
_ROLES = frozenset(r.value for r in Role)
STYLE = """
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


@dataclass
class Panel:
    """One program of a column."""

    title: str
    nodes: list[DrawnNode]
    lines: list[list[Point]]
    width: float
    top: float = 0.0
    height: float = 0.0


@dataclass
class Column:
    title: str
    parts: list[Panel]
    width: float = 0.0
    left: float = 0.0


def svg(groups: list[list[Column]], note: str = "") -> str:
    """The drawing as text. `note` says what is left out; the number of merged boxes is added to it here."""
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
    note = "; ".join(filter(None, [_shortened(every), note]))
    foot = f'<text class="k" x="{_num(margin)}" y="{_num(margin + tall + 52)}">{_xml(note + MORE)}</text>' if note else ""
    width, height = max(x, needed, len(note + MORE) * 6.4 * bool(note)) + margin, margin + tall + (76 if note else 52)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_num(width)}" height="{_num(height)}" '
            f'viewBox="0 0 {_num(width)} {_num(height)}" role="img">',
            f"<title>{_xml(', '.join(c.title for c in every[:8]))}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7.2" refY="4" markerWidth="6.5" markerHeight="6.5" orient="auto">'
            '<path d="M0 0.8 L8 4 L0 7.2 z" fill="#8a96a3"/></marker>'
            '<marker id="big" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="4.5" markerHeight="4.5" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z" fill="#66717c"/></marker></defs>',
            f'<rect width="{_num(width)}" height="{_num(height)}" fill="#f6f8fa"/>',
            *back,
            *links,
            *body,
            *legend,
            *([foot] if foot else []),
            "</svg>",
            "",
        ]
    )


def _shortened(columns: list[Column]) -> str:
    """A note on boxes that have several operators."""
    boxes = [n for c in columns for part in c.parts for n in part.nodes]
    inside, count = sum(len(n.ops) for n in boxes if len(n.ops) > 1), sum(len(n.ops) > 1 for n in boxes)
    return f"shortened: {inside} operators are in {count} box{'es' * (count > 1)}" if inside else ""


def _panels(columns: list[Column], top: float, tall: float, head: float, back: list[str], body: list[str]) -> None:
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


def _line(points: list[Point], part: Panel, x0: float) -> str:
    first, last = points[0].node, points[-1].node
    if first is None or last is None:
        return ""
    x, y = first.x, first.y + first.height
    base = first.y - (BOX - first.height) / 2
    path = [f"M{_num(x)} {_num(y)}"]
    for p in points[1:]:
        px = p.node.x if p.node is not None else p.x + x0
        py = p.node.y - 1 if p.node is not None else base + (p.layer - points[0].layer) * ROW - (ROW - BOX) / 2 + 2
        bend = (py - y) / 2
        path.append(f"C{_num(x)} {_num(y + bend)} {_num(px)} {_num(py - bend)} {_num(px)} {_num(py)}")
        x, y = px, py
        if p.node is None:
            y = py + BOX + 6
            path.append(f"V{_num(y)}")
    far = " far" if len(points) > 3 else ""
    return f'<path class="e{far}" d="{" ".join(path)}" marker-end="url(#tip)"/>'


def _box(n: DrawnNode) -> str:
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


def _links(columns: list[Column], top: float, out: list[str]) -> None:
    """Dashed lines between the boxes of one collective, and from a send to its recv. They are drawn behind the boxes."""
    if len(columns) < 2:
        return
    boxes: dict[Any, list[DrawnNode]] = {}
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
                    y1, y2, mid = sender.y + BOX / 2, n.y + BOX / 2, (x1 + x2) / 2
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


def _legend(columns: list[Column], x: float, y: float) -> tuple[list[str], float]:
    nodes = [n for c in columns for part in c.parts for n in part.nodes]
    used = {n.kind for n in nodes}
    out: list[str] = []
    entries = [(k, *COLOURS[k], 4 if k in _ROLES or k == COMM else 7) for k in COLOURS if k in used]
    if any(n.marked for n in nodes):
        entries.append(("highlighted", "#ffffff", _HIGHLIGHT, 4))
    for label, fill, outline, radius in entries:
        out.append(
            f'<rect x="{_num(x)}" y="{_num(y - 11)}" width="22" height="14" rx="{radius}" fill="{fill}" stroke="{outline}"/>'
            f'<text class="k" x="{_num(x + 28)}" y="{_num(y)}">{label}</text>'
        )
        x += 28 + len(label) * 6.8 + 20
    return out, x


def _xml(text: str) -> str:
    """Text for SVG. XML does not allow control characters, even escaped, so they are replaced."""
    return escape("".join(c if c.isprintable() else "\ufffd" for c in text))


def _num(x: float) -> str:
    return f"{x:.1f}".rstrip("0").rstrip(".")
