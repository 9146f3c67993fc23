"""Draws what becomes of one weight: a column for each rank, and from top to bottom what it holds, what it computes and what it sends."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

import fluidx as fx
from fluidx.ir import Operator, Own, Partial, Role, opdef
from fluidx.ir.opdef import Effect
from fluidx.ir.parts import coords_of, flat_range, holds, intervals
from fluidx.transpiler.cluster import SERVERS
from fluidx.transpiler.specialize import Specializer
from fluidx.view.draw.nodes import PARAM
from fluidx.view.draw.svg import COLOURS, STYLE

os.environ.setdefault("FLUIDX_SEED", "0")  # the programs on the pages are the same in every build

LABELS, BAR, GAP, TALL, ROW = 124, 60, 12, 13, 21
GRADIENT, STATE, VALUE = Role.BACKWARD.value, Role.OPTIMIZE.value, Role.FORWARD.value
LOOKS = f"""{STYLE}
.l {{ font-size: 10.5px; font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; }}
.w {{ font-size: 9px; text-anchor: middle; }}
.own {{ font-size: 10px; font-weight: 600; text-anchor: middle; fill: #ffffff; }}
.n {{ font-size: 9.5px; fill: #66717c; }}
.o {{ font-size: 10.5px; font-weight: 600; fill: #b5620f; }}
.m {{ fill: none; stroke: #d9791a; stroke-width: 1.6; }}
.f {{ fill: none; stroke: #c3ccd5; stroke-dasharray: 2 2; }}
"""
DEFS = (
    '<defs><pattern id="term" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0 V5" stroke="#ffffff" stroke-width="4.4"/></pattern>'
    '<marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5.5" markerHeight="5.5" orient="auto">'
    '<path d="M0 0.6 L8 4 L0 7.4 z" fill="#d9791a"/></marker></defs>'
)


class Sheet:
    """SVG that is written from top to bottom; `y` is how far it has come."""

    def __init__(self, title: str, columns: Sequence[str]):
        self.width = LABELS + max(4, len(columns)) * (BAR + GAP) + 4
        self.out = [f'<text class="h" x="8" y="20">{escape(title)}</text>']
        self.y = 46.0 if columns else 36.0
        for k, column in enumerate(columns):
            self.out.append(f'<text class="k" x="{middle(k):g}" y="40" text-anchor="middle">{column}</text>')

    def text(self, kind: str, x: float, down: float, text: str) -> None:
        self.out.append(f'<text class="{kind}" x="{x:g}" y="{self.y + down:g}">{escape(text)}</text>')

    def frame(self, x: float, width: float, height: float) -> None:
        """The place of a value: what of it is not filled, the rank has not."""
        self.out.append(f'<rect class="f" x="{x:g}" y="{self.y:g}" width="{width:g}" height="{height:g}"/>')

    def held(self, x: float, width: float, height: float, colour: str, look: str = "") -> None:
        """What a rank has: of a value, of the terms of a sum (look "term"), or a value of its own (its number)."""
        line = COLOURS[colour][1]
        box = f'x="{x:g}" y="{self.y:g}" width="{width:g}" height="{height:g}"'
        self.out.append(f'<rect {box} fill="{line}" fill-opacity="{1 if look else 0.45:g}" stroke="{line}"/>')
        if look == "term":
            self.out.append(f'<rect {box} fill="url(#term)"/>')
        elif look:
            self.text("own", x + width / 2, 10, look)

    def work(self, k: int, colour: str, text: str) -> None:
        fill, line = COLOURS[colour]
        left = middle(k) - BAR / 2 - 4
        self.out.append(f'<rect x="{left:g}" y="{self.y:g}" width="{BAR + 8}" height="{TALL}" rx="6" fill="{fill}" stroke="{line}"/>')
        self.text("w", middle(k), 10, text)

    def line(self, path: str, arrow: bool = False) -> None:
        self.out.append(f'<path class="m" d="{path}"{" marker-end=" + chr(34) + "url(#to)" + chr(34) if arrow else ""}/>')

    def note(self, text: str) -> None:
        self.text("k", 8, 11, text)
        self.out.append(f'<path class="f" d="M{LABELS + 20} {self.y + 8:g} H{self.width - 8}"/>')
        self.y += ROW

    def svg(self) -> str:
        size = f'viewBox="0 0 {self.width} {self.y + 4:g}" width="{self.width}" height="{self.y + 4:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
        paper = '<rect width="100%" height="100%" fill="#ffffff"/>'
        return "\n".join([head, f"<style>{LOOKS}</style>", DEFS, paper, *self.out, "</svg>", ""])


def middle(k: int) -> float:
    """The middle of a column."""
    return LABELS + k * (BAR + GAP) + BAR / 2


class OneWeight:
    """The picture of a weight, read off the program that speaks for all ranks.

    `names` are what to call values, `also` are further ones to show, `captions` explain the rows, from the top.
    """

    def __init__(
        self,
        t: fx.DistributeTranspiler,
        title: str,
        weight: str,
        names: dict[str, str],
        also: Sequence[str] = (),
        captions: Sequence[str] = (),
    ):
        self.program, self.weight, self.names, self.also = t.main, weight, names, also
        self.captions = list(captions)
        self.ranks = range(self.program.world_size)
        self.coords = [coords_of(self.program.groups, r, self.program.turns) for r in self.ranks]
        self.descs = {n: d for block in self.program.blocks for n, d in block.descs.items()}
        self.sheet = Sheet(title, [self._called(r) for r in self.ranks])

    def svg(self) -> str:
        steps = list(self._steps())
        shown = self._shown([op for op in steps if isinstance(op, Operator)])
        for n, d in self.descs.items():
            if n == self.weight or d.attrs.get("state_of") == self.weight:
                self._row(n)
        works: list[Operator] = []
        for op in steps:
            if isinstance(op, str):
                self._work(works)
                works = []
                self.sheet.note(op)
                continue
            found = [n for n in op.output_arg_names if n in shown]
            if not _moves(op) and op.inputs and (found or op.role not in (Role.OPTIMIZE, Role.DIST)):
                works.append(op)
            if found:
                self._work(works)
                works = []
                if _moves(op):
                    self._move(op)
                self._row(found[0])
        self._work(works)
        return self.sheet.svg()

    def _caption(self, down: float) -> None:
        if self.captions:
            self.sheet.text("k", middle(len(self.ranks)) - BAR / 2, down, self.captions.pop(0))

    def _called(self, rank: int) -> str:
        at = self.coords[rank]
        if SERVERS in at:
            return f"trainer {rank}" if "dp" in at else f"server {rank - sum('dp' in c for c in self.coords)}"
        if "node" in at:
            return f"{rank}, host {at['rail'][0]}"
        return f"rank {rank}" if list(at) == ["dp"] or self.program.turns else ", ".join(f"{g} {k}" for g, (k, _) in at.items())

    def _steps(self) -> Iterator[Operator | str]:
        """The operators of a step; in place of a branch its own, behind a line of text."""
        for op in self.program.global_block().oplist:
            if op.type != "cond":
                yield op
                continue
            yield "in every k-th run"
            yield from self.program.blocks[op.attrs["true_block"].idx].oplist

    def _shown(self, ops: list[Operator]) -> set[str]:
        """The gradient; what is sent of the weight and what arrives; what its update reads and writes."""
        ours = {n for n in self.descs if n == self.weight or n.startswith((f"{self.weight}.", f"{self.weight}@", f"{self.weight}_"))}
        shown = {n for n in ours if re.fullmatch(rf"{self.weight}(@GRAD(\.mb\d+)?)?", n)} | set(self.also)
        for op in ops:
            reads = [n for n in op.input_arg_names if n in ours]
            if not reads or op.role not in (Role.OPTIMIZE, Role.DIST):
                continue
            ours.update(op.output_arg_names)
            if _moves(op) or not shown.isdisjoint(op.output_arg_names) or f"{self.weight}.new" in op.output_arg_names:
                shown.update(n for n in (*reads, *op.output_arg_names) if not n.endswith(".part"))
        return {n for n in shown if self.descs[n].type.numel != 1 and not self.descs[n].attrs.get("state_of")}

    def _held(self, name: str, rank: int) -> tuple[float, float, float, float] | None:
        """Where in the frame of a value that of the rank lies: from left to right and from top to bottom, 0 to 1."""
        d, at = self.descs[name], self.coords[rank]
        served = any(e.group == SERVERS for e in d.placement)
        if not holds(d.placement, at) or (SERVERS in at and "dp" not in at and not served):
            return None
        flat = flat_range(d.placement, at)
        if flat is not None:
            return (flat[0] / d.type.numel, flat[1] / d.type.numel, 0, 1) if flat[0] < flat[1] else None
        shape = [840 if n < 0 else n for n in d.type.shape]  # rows that 2 to 8 ranks cut evenly
        box = [(start / n, stop / n) for (start, stop), n in zip(intervals(shape, d.placement, at), shape)]
        (left, right), (top, bottom) = (*box, (0, 1))[:2]
        return left, right, top, bottom

    def _row(self, name: str) -> None:
        """A value: a frame as large as all of it, filled where the rank has it."""
        d, sheet, whole = self.descs[name], self.sheet, self.descs[self.weight].type
        sheet.text("l", 8, 10, self.names.get(name) or _short(name))
        self._caption(10)
        known = d.type.numel > 0
        width = BAR * min(1, max(0.1, d.type.numel / whole.numel)) if known else BAR
        tall = TALL * d.type.nbytes / d.type.numel / 4 if known else TALL
        kinds = {type(e) for e in d.placement if e.group not in self.program.turns and not e.group.startswith("mb.")}
        for r in self.ranks:
            x = middle(r) - BAR / 2
            sheet.frame(x, width, tall)
            at = self._held(name, r)
            if at is not None:
                left, right, top, bottom = at
                look = "term" if Partial in kinds else str(r) if Own in kinds else ""
                sheet.held(x + left * width, (right - left) * width, (bottom - top) * tall, self._colour(name), look)
        sheet.y += ROW

    def _colour(self, name: str) -> str:
        if self.descs[name].attrs.get("state_of"):
            return STATE
        if name in self.also:
            return VALUE
        return PARAM if re.match(rf"{self.weight}\b(?!@)", self.names.get(name, name)) else GRADIENT

    def _work(self, ops: list[Operator]) -> None:
        """What the ranks that hold the results compute: runs of forward, of backward, and operators of the update by their names."""
        for (colour, turn), run in groupby(ops, _kind):
            these = list(run)
            layers = sorted({op.device[-1] for op in these if op.device})
            layer = "" if turn or not layers or (colour == VALUE and len(layers) > 1) else f" {'vw'[int(layers[0])]}"
            text = f"{colour}{layer}{turn}" if colour in (VALUE, GRADIENT) else these[-1].type.removeprefix("elementwise_")
            self._caption(10)
            for r in self.ranks:
                if any(self._held(op.output_arg_names[0], r) for op in these):
                    self.sheet.work(r, colour, text)
            self.sheet.y += ROW

    def _move(self, op: Operator) -> None:
        """A collective joins its ranks; messages go from one rank to another."""
        sheet, sends = self.sheet, self._sends(op)
        hops = len({batch for batch, _, _ in sends})
        sheet.text("o", 8, 12, op.type)
        how = f"{op.attrs.get('algorithm', 'messages')}, {hops} hop{'s' * (hops > 1)}" if sends else f"over {op.attrs['group']}"
        sheet.text("n", 8, 23, how)
        self._caption(18)
        for a, b in dict.fromkeys((a, b) for _, a, b in sends):
            self._arrow(a, b)
        for g, members in enumerate(() if sends else self.program.groups[op.attrs["group"]]):
            between = members[-1] - members[0] >= len(members)  # other sets have ranks between these
            y = sheet.y + 14 - 5 * g * between
            sheet.line(f"M{middle(members[0]) - 4:g} {y:g} H{middle(members[-1]) + 4:g}")
            for k, r in enumerate(members):
                if op.type != "broadcast" or k == op.attrs["root"]:
                    sheet.line(f"M{middle(r) - 4:g} {sheet.y + 2:g} V{y:g}")
                if op.type != "reduce" or k == op.attrs["root"]:
                    sheet.line(f"M{middle(r) + 4:g} {y:g} V{sheet.y + 26:g}", arrow=True)
        sheet.y += 31

    def _sends(self, op: Operator) -> list[tuple[str, int, int]]:
        """(hop, from, to) of the messages that an operator becomes; none of one that the communicator carries out."""
        alone = self.program.copy()
        alone.global_block().oplist = [op]
        special = Specializer(alone)
        return [(s.attrs["batch"], r, s.attrs["peer"]) for r in self.ranks for s in special.rank_program(r).ops if s.type == "send"]

    def _arrow(self, a: int, b: int) -> None:
        """Straight between neighbours; to the right in an arc above the others, to the left below them."""
        side = 1 if b > a else -1
        y, start, stop = self.sheet.y + 14 - 4 * side, middle(a) + 6 * side, middle(b) - 6 * side
        bend = -7 * side * (abs(a - b) > 1) * abs(a - b)
        self.sheet.line(f"M{start:g} {y:g} Q{(start + stop) / 2:g} {y + bend:g} {stop:g} {y:g}", arrow=True)


def _moves(op: Operator) -> bool:
    return opdef(op.type).effect in (Effect.COLLECTIVE, Effect.P2P)


def _kind(op: Operator) -> tuple[str, str]:
    """The role of an operator, and the micro-batch that it works on."""
    turn = re.search(r"\.mb(\d+)", op.output_arg_names[0])
    return (Role.FORWARD if op.role is Role.LOSS else op.role).value, f" {turn[1]}" if turn else ""


def _short(name: str) -> str:
    """What of a name fits in front of the bars."""
    name = re.sub(r"_0$", "", name)
    return name if len(name) <= 17 else name.rpartition(".")[2]


def legend() -> str:
    """What the signs mean."""
    sheet = Sheet("How to read them", ())
    held = (("", 1.0, "the rank has all"), ("", 0.25, "a part of it"), ("term", 1.0, "a term of a sum"), ("2", 1.0, "one of its own"))
    for look, share, text in held:
        sheet.frame(10, BAR, TALL)
        sheet.held(10, share * BAR, TALL, GRADIENT, look)
        sheet.text("k", 80, 11, text)
        sheet.y += ROW
    sheet.y = 36
    for colour, text in ((PARAM, "weight"), (GRADIENT, "gradient"), (STATE, "the optimizer's state"), (VALUE, "activations")):
        sheet.held(222, 22, TALL, colour)
        sheet.text("k", 252, 11, text)
        sheet.y += ROW
    return sheet.svg()
